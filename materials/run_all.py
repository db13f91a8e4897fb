"""The main job, behind `make run`: a first table, real text, every notebook, and what it buys.

python materials/run_all.py [--text PATH ...]
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from course.authoring.build import NOTEBOOKS, execute
from course.lesson import ROOT
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from results import render

from npydata.dataset.prepare import prepare
from npydata.errors import NpyDataError

BUILD = Path(os.path.relpath(ROOT / "build"))
TOKENS = BUILD / "tokens.npy"
CELL_TIMEOUT_S = 300
LEAST_TOKENS = 5_000  # the notebooks and the bench cut windows of up to 1,025
VOCABULARY = 2048  # small, so that a step of the lessons' tiny models takes no time to speak of
MEASURED = {  # what the front page's table quotes of each benchmark
    "dataset": ["--tokens", str(TOKENS), "--only", "warm", "cold"],
    "loader": ["--tokens", str(TOKENS), "--only", "warm"],
    "reader": ["--only", "legacy", "safetensors"],
    "checkpoint": ["--only", "saves"],
}
LEGEND = (
    "Mtok/s: million tokens a second, in batches of 32 random windows of 1,024 tokens\n"
    "naive: a DataLoader of single windows\n"
    "memory copy: of as many bytes to new memory; reusing memory that is in the cache can beat it\n"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", nargs="+", metavar="PATH", help="default: Python's own source")
    text = parser.parse_args().text
    begin = time.monotonic()
    BUILD.mkdir(exist_ok=True)
    try:
        step(1, "a first look: how fast can tokens be read? (made ones, in memory)")
        print(bench("dataset", "--only", "warm", "--size-mb", "64"), LEGEND, sep="\n")
        step(2, "real text as a token file (a minute or two)")
        count = token_file(text)
        step(3, "the notebooks, on these tokens (some minutes)")
        for notebook in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            run_notebook(notebook, count)
        step(4, "reading tokens and checkpoints, saving (a rough, quick run)")
        for name, arguments in MEASURED.items():
            (BUILD / f"{name}.txt").write_text(bench(name, *arguments), encoding="utf-8")
    except (NpyDataError, OSError) as error:
        print(f"\nmake run stopped: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmake run stopped: interrupted", file=sys.stderr)
        return 130
    print(f"\n{render.summary('short', BUILD)}\n\n{LEGEND}checkpoints of 128 MiB\n")
    print(f"notebooks, executed: {BUILD}/*.html   tables: {BUILD}/*.txt   pictures: {BUILD}/*.png")
    print(f"It took {time.monotonic() - begin:.0f} s. Next: `make lab` opens the notebooks.")
    return 0


def step(number: int, what: str) -> None:
    print(f"\n[{number}/4] {what}", flush=True)


def bench(name: str, *arguments: str) -> str:
    """Run a benchmark in a process of its own; return its tables. Its JSON is left in BUILD."""
    begin = time.monotonic()
    command = [sys.executable, ROOT / "materials" / "bench" / f"{name}.py", *arguments, "--quick"]
    command += ["--repeats", "2", "--dir", BUILD]
    command += ["--json", BUILD / f"{name}.json", "--plot", BUILD / f"{name}.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise NpyDataError(f"bench/{name}.py ended with {done.returncode}: {last[0]}")
    print(f"  bench {name:<26}{time.monotonic() - begin:>5.0f} s", flush=True)
    return done.stdout


def token_file(text: list[str] | None) -> int:
    """Tokenise a text, or Python's own source; return how many tokens it has."""
    report = prepare(text or [], TOKENS, python_text=not text, vocab_size=VOCABULARY, progress=True)
    print(report.summary)
    if report.num_tokens < LEAST_TOKENS:
        raise NpyDataError(
            f"{TOKENS}: {report.num_tokens:,} tokens, expected {LEAST_TOKENS:,} or more; "
            "give a longer text (TEXT=...)"
        )
    return report.num_tokens


def run_notebook(path: Path, count: int) -> None:
    """Execute one notebook; leave it and its HTML in BUILD."""
    print(f"  {path.stem:<32}", end="", flush=True)
    begin, notebook = time.monotonic(), nbformat.read(path, as_version=4)
    banner = (
        f"> Executed on `{TOKENS}`: {count:,} tokens. Where the text quotes numbers, it describes "
        "the small file that comes with the course."
    )
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(banner))
    try:
        execute(notebook, {"NPYDATA_TOKENS": str(TOKENS.resolve())}, CELL_TIMEOUT_S)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NpyDataError(f"{path.name}: {error}") from None
    finally:
        nbformat.write(notebook, BUILD / path.name)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    (BUILD / f"{path.stem}.html").write_text(html, encoding="utf-8")
    print(f"{time.monotonic() - begin:>5.0f} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
