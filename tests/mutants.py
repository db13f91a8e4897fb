"""Proves that tests notice: breaks one line of the library at a time, in a copy, and runs a few.

``--list``, ``--run`` and ``--unbroken`` take how names begin, such as ``reader/``; the last runs
the same tests with nothing broken. All of ``mutants.txt`` takes some 20 minutes of one core.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
COPIED = ("npydata", "tests", "materials", "notebooks", "examples", "pyproject.toml", "README.md")
SECONDS = 60  # for the tests of one mutant; half of them for one test
OUTCOMES = {0: "survived", 1: "killed", 2: "killed"}  # 2: by an interrupt that was not caught


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line that keeps a promise, and the line that breaks it; ``tests`` are for pytest."""

    name: str
    promise: str
    module: str
    line: str
    instead: str
    tests: str

    def broken(self, source: str) -> str:
        """Return the module's source with the line replaced; it must occur exactly once."""
        lines = source.split("\n")
        if lines.count(self.line) != 1:
            found = f"{lines.count(self.line)} lines of {self.module} are {self.line!r}"
            raise ValueError(f"{self.name}: {found}, expected one")
        return "\n".join(self.instead if line == self.line else line for line in lines)


def read_table() -> list[Mutant]:
    """Return the mutants that the table lists, in its order."""
    mutants = list[Mutant]()
    module = tests = own = name = promise = line = ""
    for text in TABLE.read_text().split("\n"):
        kind, rest = text[:1], text[1:]
        if text.startswith("== "):
            module, tests = text[3:].split(" | ")
        elif module and kind == "@":
            (name, promise), own = rest.split(": ", 1), tests
        elif module and kind == "|":
            own = rest.strip()
        elif module and kind == "-":
            line = rest
        elif module and kind == "+":
            short = module.removeprefix("npydata/").removesuffix(".py")
            mutants.append(Mutant(f"{short}:{name}", promise, module, line, rest, own))
        elif module and text:
            raise ValueError(f"{TABLE.name}: {text!r}")
    return mutants


def copy_tree(to: Path) -> Path:
    """Copy what tests need, as it is in the working tree; return where it is."""
    to.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, to / name)
    return to


def outcome_of(mutant: Mutant, copy: Path, log: Path) -> str:
    """Break the line in the copy, run the tests there, put the line back."""
    path = copy / mutant.module
    source = path.read_text()
    path.write_text(mutant.broken(source))
    os.utime(path, (0, time.time_ns() % 10**9))  # or bytecode of the same second would be taken
    try:
        return run_tests(mutant.tests, copy, log)
    finally:
        path.write_text(source)


def run_tests(tests: str, copy: Path, log: Path) -> str:
    """Run tests in a child that has torch but nothing of npydata; end what they leave behind."""
    if (child := os.fork()) == 0:
        os.setsid()
        os.chdir(copy)
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= {"PYTHONPATH": str(copy), "NPYDATA_UNDER_TEST": str(copy),
                       "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take two seconds  # fmt: skip
        sys.path[:] = [str(copy), *(one for one in sys.path if Path(one) != ROOT)]
        import pytest

        options = f"-x -q -p no:cacheprovider -p pytest_timeout --timeout={SECONDS // 2}"
        named = [f"tests/{one}" if ".py" in one else one for one in shlex.split(tests)]
        code = pytest.main([*options.split(), *named])
        sys.stdout.flush()
        os._exit(int(code))
    end, done, status = time.monotonic() + SECONDS, 0, 0
    while not done and time.monotonic() < end:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return "timeout"
    if " during collection" in log.read_text():
        return "no import"
    code = os.waitstatus_to_exitcode(status)
    return "killed" if code < 0 else OUTCOMES.get(code, f"pytest: {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--list", "--run", "--unbroken"):
        parser.add_argument(option, metavar="NAME", nargs="*")
    parser.add_argument("--all", action="store_true", help="run every mutant")
    args = parser.parse_args()
    parts = tuple(args.list or args.run or args.unbroken or [""])
    mutants = [one for one in read_table() if one.name.startswith(parts)]
    breaks, expected = args.unbroken is None, "survived" if args.unbroken is not None else "killed"
    if not (args.all or args.run or not breaks):
        print(*(f"{one.name}: {one.promise}" for one in mutants), len(mutants), sep="\n")
        return 0
    __import__("hypothesis"), __import__("pytest"), __import__("torch")  # once for all children
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="npydata-mutants-") as folder:
        copy, log = copy_tree(Path(folder) / "copy"), Path(folder) / "log"
        for one in mutants if breaks else {each.tests: each for each in mutants}.values():
            began = time.monotonic()
            outcome = outcome_of(one, copy, log) if breaks else run_tests(one.tests, copy, log)
            seconds, last = time.monotonic() - began, log.read_text().strip().split("\n")[-1]
            print(f"{outcome:9}{seconds:5.1f} s  {one.name}: {one.promise}\n    {last}", flush=True)
            counts[outcome] += 1
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return 0 if counts.keys() <= {expected} else 1


if __name__ == "__main__":
    sys.exit(main())
