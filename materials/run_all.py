"""The main job, behind `make run`: a first table, real text, every notebook, figures, a table.

python materials/run_all.py [--text PATH ...] [--build FOLDER]
"""

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import nbformat
from course.authoring.build import NOTEBOOKS, execute, figures_of
from course.lesson import ROOT
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from tqdm import tqdm

BENCH = Path(__file__).resolve().parent / "bench"
sys.path.insert(0, str(BENCH))

from harness import best, ours  # noqa: E402
from tokens import Task, naive_items, random_windows, warm_rate  # noqa: E402

from npydata.dataset.prepare import list_sources, prepare  # noqa: E402
from npydata.errors import NpyDataError  # noqa: E402

CELL_TIMEOUT_S = 300
LEAST_TOKENS = 5_000  # the notebooks and the bench cut windows of up to 1,025
FIRST_BYTES = 4_000_000  # of the text, for a first table within a minute
VOCABULARY = 2048  # small, so that a step of the lessons' tiny models takes no time to speak of
STANDARD_LIBRARY = str(Path(os.__file__).parent / "*.py")
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")

LINES = {  # of the last table: bench, and patterns of group, name and setting; the best row counts
    "naive, file in memory": ("dataset", "warm | naive DataLoader | *"),
    "ours, file in memory": ("dataset", "warm | ours | random*"),
    "plain mmap, file on disk": ("dataset", "cold | plain mmap | readahead*"),
    "ours, file on disk": ("dataset", "cold | ours | hints 4*"),
    "ours, through loader": ("loader", "warm | ours | [!i]*"),
    "torch.load, one tensor": ("reader", "legacy warm | torch.load | *"),
    "ours, one tensor": ("reader", "legacy warm | ours | *"),
    "torch.save, stall": ("checkpoint", "stall | torch.save* | *"),
    "ours, stall": ("checkpoint", "stall | ours | *"),
}
SECTIONS = {  # what is measured of each
    "dataset": ("warm", "cold"),
    "loader": ("warm",),
    "reader": ("legacy",),
    "checkpoint": ("saves",),
}
BATCH, WINDOW = 32, 1024  # those of the bench
LEGEND = f"""\
Mtok/s: million tokens a second, in batches of {BATCH} random windows of {WINDOW:,} tokens
naive: a DataLoader of single windows, with as many workers as serve it best, on
  the whole text; in the first table it has none, and only the beginning of the text
plain mmap: whole batches from a np.memmap, and the kernel reads ahead as it likes"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", nargs="+", metavar="PATH", help="default: Python's own source")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where results go")
    options = parser.parse_args(argv)
    begin, tokens = time.monotonic(), options.build / "tokens.npy"
    (options.build / "figures").mkdir(parents=True, exist_ok=True)
    try:
        step(1, "a first look: how fast can tokens be read?")
        print(first_table(options.build, options.text), flush=True)
        step(2, "the whole text as a token file (a minute or two)")
        count = token_file(tokens, options.text or [], progress=True)
        step(3, "the notebooks, on these tokens (some minutes)")
        for notebook in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            run_notebook(notebook, options.build, tokens, count)
        step(4, "figures: reading tokens and checkpoints, saving (a rough, quick run)")
        reports = {name: bench(name, options.build, tokens) for name in SECTIONS}
    except (NpyDataError, OSError) as error:
        print(f"\nmake run stopped: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmake run stopped: interrupted", file=sys.stderr)
        return 130
    print(f"\n{summary(reports, tokens, count, options.build, time.monotonic() - begin)}")
    return 0


def step(number: int, what: str) -> None:
    print(f"\n[{number}/4] {what}", flush=True)


# 1. A first table


def first_table(build: Path, text: list[str] | None) -> str:
    """Tokenise the beginning of the text, and read it in a common way and in ours, in turn."""
    sample, tokens = build / "first.txt", build / "first.npy"
    sample.write_bytes(beginning_of(text or [STANDARD_LIBRARY]))
    count = token_file(tokens, [str(sample)], progress=False)
    whose = "your text" if text else "Python's source"
    size = f"{sample.stat().st_size / 1e6:.1f} MB of {whose}"
    lines = [
        f"{count:,} tokens from the first {size}; tokens a second, in batches of {BATCH} "
        f"random windows of {WINDOW:,}:"
    ]
    medians = first_speeds(tokens)
    for name, speed in medians.items():
        times = "" if name == "naive" else f", {speed / medians['naive']:.0f} times as many"
        lines.append(f"  {name:<18}{speed:>7.1f} million{times}")
    lines.append("naive: a DataLoader of single windows, without workers")
    return "\n".join(lines)


def beginning_of(text: list[str]) -> bytes:
    """The first bytes of a text, from as many of its files as that takes."""
    found = bytearray()
    for source in list_sources(text):
        with open(source.path, "rb") as file:
            found += file.read(FIRST_BYTES - len(found))
        if len(found) >= FIRST_BYTES:
            break
    return bytes(found)


def first_speeds(tokens: Path) -> dict[str, float]:
    """Million tokens per second of the naive DataLoader and of ours, both in this process."""
    task = Task(path=tokens, dtype=None, seq_len=WINDOW, batch_size=BATCH, warm_s=0.2)
    rows = [ours("first", "naive", "", naive_items), ours("first", "ours", "", random_windows)]
    rounds = [[warm_rate(row, task) for row in rows] for _ in range(5)]
    return {row.name: median(rates[k] for rates in rounds) for k, row in enumerate(rows)}


# 2. Tokens


def token_file(path: Path, text: list[str], progress: bool) -> int:
    """Tokenise a text, or Python's own source; return how many tokens it has."""
    report = prepare(text, path, python_text=not text, vocab_size=VOCABULARY, progress=progress)
    if progress:
        print(str(report).replace(str(path), shown(path)))
    if report.num_tokens < LEAST_TOKENS:
        raise NpyDataError(
            f"{shown(path)}: {report.num_tokens:,} tokens, expected {LEAST_TOKENS:,} or more; "
            "give a longer text (TEXT=...)"
        )
    return report.num_tokens


# 3. Notebooks


def run_notebook(path: Path, build: Path, tokens: Path, count: int) -> None:
    """Execute one notebook; leave it, its HTML and its figures in the build folder."""
    notebook = nbformat.read(path, as_version=4)
    banner = (
        f"> Executed on `{shown(tokens)}`: {count:,} tokens. Where the text quotes numbers, it "
        "describes the small file that comes with the course."
    )
    try:
        execute_with_bar(notebook, path.stem, tokens)
    finally:
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell(banner))
        nbformat.write(notebook, build / path.name)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    (build / f"{path.stem}.html").write_text(html, encoding="utf-8")
    save_figures(notebook, build / "figures", path.stem)


def execute_with_bar(notebook: nbformat.NotebookNode, name: str, tokens: Path) -> None:
    """Run every cell where the notebook lives: a bar in a terminal, and one line at the end."""
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    begin, started = time.monotonic(), []
    with tqdm(total=total, desc=name, unit="cell", file=sys.stdout, leave=False, disable=None,
              dynamic_ncols=True) as bar:  # fmt: skip

        def advance(cell: nbformat.NotebookNode, **_: Any) -> None:
            started.append(cell)
            bar.update()

        try:
            env = {"NPYDATA_TOKENS": str(tokens.resolve())}
            execute(notebook, env, timeout=CELL_TIMEOUT_S, on_cell_execute=advance)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            why = f"took more than {CELL_TIMEOUT_S} s, or its kernel was killed (out of memory?)"
            if isinstance(error, CellExecutionError):
                why = TERMINAL_CODES.sub("", f"raised {error.ename}: {error.evalue}")
            where = started[-1].source if started else "before its first cell"
            raise NpyDataError(f"{name} {why}\n\n{where}") from None
    print(f"  {name:<26}{total:>4} cells {time.monotonic() - begin:>5.0f} s", flush=True)


def save_figures(notebook: nbformat.NotebookNode, folder: Path, name: str) -> None:
    """Write each picture that the notebook drew."""
    for number, output in enumerate(chain(*map(figures_of, notebook.cells)), start=1):
        (folder / f"{name}-{number}.png").write_bytes(base64.b64decode(output.data["image/png"]))


# 4. Figures


def bench(name: str, build: Path, tokens: Path) -> dict[str, Any]:
    """Measure one part in a process of its own: on the real tokens, if it is about tokens.

    Its tables go into a file beside its JSON.
    """
    begin, out = time.monotonic(), build / f"bench_{name}.json"
    command = [sys.executable, BENCH / f"{name}.py", "--quick", "--repeats", "2"]
    outputs = ["--json", out, "--plot", build / "figures" / f"bench_{name}.png", "--dir", build]
    data = ["--tokens", tokens] if name in ("dataset", "loader") else []
    command += [*data, *outputs, "--only", *SECTIONS[name]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise NpyDataError(f"bench/{name}.py ended with {done.returncode}: {last[0]}")
    out.with_suffix(".txt").write_text(done.stdout, encoding="utf-8")
    print(f"  bench {name:<20}          {time.monotonic() - begin:>5.0f} s", flush=True)
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


# What came out


def summary(
    reports: dict[str, dict[str, Any]], tokens: Path, count: int, build: Path, seconds: float
) -> str:
    """The table at the end, and what to do next."""
    lines = [
        f"{'tokens':<26}{count:>14,}   {shown(tokens)}",
        *(f"{what:<26}{figure(reports, line):>14}" for what, line in LINES.items()),
        f"{'pictures':<26}{'':>14}   {shown(build / 'figures')}/",
        f"{'tables':<26}{'':>14}   {shown(build)}/bench_*.txt",
        f"{'notebooks, executed':<26}{'':>14}   {shown(build)}/*.html",
        "",
        LEGEND,
        "",
        f"It took {seconds:.0f} s. Next: `make lab` opens the notebooks for you to work through.",
    ]
    return "\n".join(lines)


def figure(reports: dict[str, dict[str, Any]], line: tuple[str, ...]) -> str:
    """The best median of the rows that a line of the last table is about."""
    row = best(reports[line[0]]["rows"], line[1])
    return f"{row['median']:,.1f} {row['unit']}" if row else "not measured"


def shown(path: Path) -> str:
    """A path as a reader types it."""
    return os.path.relpath(path)


if __name__ == "__main__":
    raise SystemExit(main())
