"""The main job, behind `make run`: real text, a token file, every notebook, figures and a table.

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
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from tqdm import tqdm
from tutorial.sync import NOTEBOOKS, ROOT, execute

from npydata.bench.savers import OURS as OURS_SAVED
from npydata.bench.savers import TORCH_SAVE
from npydata.bench.targets import (
    AHEAD,
    NAIVE,
    OURS,
    PLAIN,
    RANDOM_IN_PROCESS,
    TORCH_LOAD,
    ahead_text,
)
from npydata.errors import NpyDataError
from npydata.prepare import prepare
from npydata.text import list_sources

CELL_TIMEOUT_S = 300
LEAST_TOKENS = 5_000  # the notebooks and the bench cut windows of up to 1,025
COMPARED = {  # lines of the last table: group, name and setting of a row; no setting: the best one
    "naive, warm": ("warm", NAIVE),
    "ours, warm": ("warm", OURS, RANDOM_IN_PROCESS),
    "naive, cold": ("cold", PLAIN, "readahead as it is"),
    "ours, cold": ("cold", OURS, ahead_text(AHEAD)),
}
STALL = "stall"
READ_GROUP = "legacy warm"  # what the last table says of checkpoints
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", nargs="+", metavar="PATH", help="default: Python's own source")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where results go")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    figures = options.build / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    try:
        step(1, "a token file from real text")
        tokens = token_file(options.build, options.text)
        require_tokens(tokens)
        step(2, "the notebooks, on these tokens")
        for notebook in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            run_notebook(notebook, options.build, tokens)
        step(
            3,
            "how fast tokens and checkpoints are read, what a save costs (a rough, quick run)",
        )
        reports = {name: bench(name, options.build, tokens) for name in ("dataset", "loader")}
        reports |= {name: bench(name, options.build) for name in ("reader", "checkpoint")}
    except (NpyDataError, OSError, NotebookError, subprocess.CalledProcessError) as error:
        print(f"\nmake run stopped: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmake run stopped: interrupted", file=sys.stderr)
        return 130
    step(4, "done")
    print(summary(reports, tokens, options.build, time.monotonic() - begin))
    return 0


def step(number: int, what: str) -> None:
    print(f"\n[{number}/4] {what}", flush=True)


# 1. Tokens


def token_file(build: Path, text: list[str] | None) -> Path:
    """Tokenise the text, unless the very same text was tokenised before."""
    tokens, receipt = build / "tokens.npy", build / "tokens.json"
    wanted = source_of(text)
    if tokens.exists() and receipt.exists():
        made = json.loads(receipt.read_text(encoding="utf-8"))
        if made["source"] == wanted and "vocabulary" in made:
            print(f"{shown(tokens)} is up to date: {made['tokens']:,} tokens")
            return tokens
    receipt.unlink(missing_ok=True)
    report = prepare(text or [], tokens, python_text=not text, progress=True)
    print(str(report).replace(str(tokens), shown(tokens)))
    facts = {"source": wanted, "tokens": report.num_tokens, "vocabulary": report.vocab_size}
    receipt.write_text(json.dumps(facts))
    return tokens


def facts_of(tokens: Path) -> dict[str, Any]:
    """What the receipt beside a token file says about it."""
    facts: dict[str, Any] = json.loads(tokens.with_suffix(".json").read_text(encoding="utf-8"))
    return facts


def require_tokens(tokens: Path) -> None:
    """Raise if there is too little text for what follows."""
    if (count := facts_of(tokens)["tokens"]) < LEAST_TOKENS:
        raise NpyDataError(
            f"{shown(tokens)}: {count:,} tokens, expected {LEAST_TOKENS:,} or more; "
            "give a longer text (TEXT=...)"
        )


def source_of(text: list[str] | None) -> Any:
    """What tells one text from another without reading it: names, sizes, times of change."""
    if not text:
        return f"source text of Python {sys.version} and its torch package"
    files = [source.path for source in list_sources(text).files]
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


# 2. Notebooks


class NotebookError(Exception):
    """A notebook did not run to its end."""


def run_notebook(path: Path, build: Path, tokens: Path) -> None:
    """Execute one notebook; leave it, its HTML and its figures in the build folder."""
    notebook = nbformat.read(path, as_version=4)
    try:
        execute_with_bar(notebook, path.stem, tokens)
    finally:
        notebook.cells.insert(0, banner(tokens))
        nbformat.write(notebook, build / path.name)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    (build / f"{path.stem}.html").write_text(html, encoding="utf-8")
    save_figures(notebook, build / "figures", path.stem)


def banner(tokens: Path) -> nbformat.NotebookNode:
    """A first cell that says which tokens the outputs come from."""
    facts = facts_of(tokens)
    return nbformat.v4.new_markdown_cell(
        f"> Executed on `{shown(tokens)}`: {facts['tokens']:,} tokens, vocabulary "
        f"{facts['vocabulary']:,}. Where the text quotes numbers, it describes the small file that "
        "comes with the tutorial."
    )


def execute_with_bar(notebook: nbformat.NotebookNode, name: str, tokens: Path) -> None:
    """Run every cell where the notebook lives, with a bar that counts them."""
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    with tqdm(total=total, desc=name, unit="cell", file=sys.stdout) as bar:
        try:
            env = {"NPYDATA_TOKENS": str(tokens.resolve())}
            execute(notebook, NOTEBOOKS, timeout=CELL_TIMEOUT_S, env=env, on_cell=bar.update)
        except CellExecutionError as error:
            raise NotebookError(what_failed(notebook, name, error)) from None
        except CellTimeoutError:
            why = f"took more than {CELL_TIMEOUT_S} s"
            raise NotebookError(where_it_stopped(notebook, name, bar.n, why)) from None
        except DeadKernelError:  # nbclient ends the kernel itself on Ctrl-C
            why = "its kernel was interrupted or killed (out of memory?)"
            raise NotebookError(where_it_stopped(notebook, name, bar.n, why)) from None
        except KeyboardInterrupt:
            why = "interrupted"
            raise NotebookError(where_it_stopped(notebook, name, bar.n, why)) from None


def what_failed(notebook: nbformat.NotebookNode, name: str, error: CellExecutionError) -> str:
    """Say which cell failed, on which line, and where in the library that led."""
    failed, traceback = next(
        (cell, [TERMINAL_CODES.sub("", frame) for frame in output.traceback])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    )
    line = re.search(r"Cell In\[\d+\], line (\d+)", "\n".join(traceback))
    where = f"cell [{failed.execution_count}]" + (f", line {line[1]}," if line else "")
    inside = [frame for frame in traceback if frame.startswith("File ")][-1:]
    what = f"{name}, {where} raised {error.ename}: {TERMINAL_CODES.sub('', error.evalue)}"
    return "\n\n".join([what, failed.source, *inside])


def where_it_stopped(notebook: nbformat.NotebookNode, name: str, done: int, why: str) -> str:
    """Say in which cell a notebook stopped that raised nothing."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    running = min(done, len(code) - 1)
    return f"{name}, cell [{running + 1}]: {why}\n\n{code[running].source}"


def save_figures(notebook: nbformat.NotebookNode, folder: Path, name: str) -> None:
    """Write each picture that the notebook drew."""
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    for number, picture in enumerate(pictures, start=1):
        (folder / f"{name}-{number}.png").write_bytes(base64.b64decode(picture))


# 3. Throughput


def bench(name: str, build: Path, tokens: Path | None = None) -> dict[str, Any]:
    """Measure one part in a process of its own: on the real tokens, if it is about tokens."""
    out = build / f"bench_{name}.json"
    command = [sys.executable, "-m", "npydata", "bench", name, "--quick"]
    outputs = ["--json", out, "--plot", build / "figures" / f"bench_{name}.png", "--dir", build]
    data = ["--tokens", tokens] if tokens else []
    subprocess.run([*command, *data, *outputs], check=True)
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


# 4. What came out


def summary(reports: dict[str, dict[str, Any]], tokens: Path, build: Path, seconds: float) -> str:
    """The table at the end, and what to do next."""
    count = facts_of(tokens)["tokens"]
    lines = [
        f"tokens                {count:>14,}   {shown(tokens)}",
        *(f"{what:<22}{rate:>14}" for what, rate in speeds(reports["dataset"])),
        f"{'ours, through loader':<22}{through_loader(reports['loader']):>14}",
        *(f"{what:<22}{time:>14}" for what, time in one_tensor(reports["reader"])),
        *(f"{what:<22}{time:>14}" for what, time in one_save(reports["checkpoint"])),
        f"pictures              {'':>14}   {shown(build / 'figures')}/",
        f"notebooks, executed   {'':>14}   {shown(build)}/*.html",
        "",
        f"It took {seconds:.0f} s. Next: `make lab` opens the notebooks for you to work through.",
    ]
    return "\n".join(lines)


def speeds(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Tokens per second of the common way and of ours, warm and cold."""
    rows = report["rows"]
    return [(what, best(rows, *contender)) for what, contender in COMPARED.items()]


def through_loader(report: dict[str, Any]) -> str:
    """The best setting of the loader, with a consumer that only takes."""
    settings = {row["setting"] for row in report["rows"] if "worker" in row["setting"]}
    rows = [row for row in report["rows"] if row["setting"] in settings]
    return best(rows, "warm", OURS)


def one_save(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Milliseconds that training stands still for a save, in a common way and in ours."""
    names = {"torch.save, stall": TORCH_SAVE, "ours, stall": OURS_SAVED}
    medians = {row["name"]: row["median"] for row in report["rows"] if row["group"] == STALL}
    return [(what, f"{medians[name]:,.1f} ms") for what, name in names.items()]


def one_tensor(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Milliseconds that the standard loader and ours take for one tensor of a legacy checkpoint."""
    names = {"torch.load, one tensor": TORCH_LOAD, "ours, one tensor": OURS}
    medians = {row["name"]: row["median"] for row in report["rows"] if row["group"] == READ_GROUP}
    return [
        (what, f"{medians[name]:,.1f} ms" if name in medians else "not measured")
        for what, name in names.items()
    ]


def best(rows: list[dict[str, Any]], group: str, name: str, setting: str | None = None) -> str:
    """The best median of a contender, over its settings if none is given."""
    medians = [
        row["median"]
        for row in rows
        if (row["group"], row["name"]) == (group, name) and setting in (None, row["setting"])
    ]
    return f"{max(medians):,.1f} Mtok/s" if medians else "not measured"


def shown(path: Path) -> str:
    """A path as a reader types it."""
    return os.path.relpath(path)


if __name__ == "__main__":
    raise SystemExit(main())
