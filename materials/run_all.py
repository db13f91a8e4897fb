"""The main job, behind `make run`: real text, a token file, every notebook, figures and a table.

python materials/run_all.py [--text PATH ...] [--build FOLDER]
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from tqdm import tqdm
from tutorial.sync import NOTEBOOKS, ROOT, execute

from npydata.errors import NpyDataError
from npydata.prepare import prepare
from npydata.text import list_sources

CELL_TIMEOUT_S = 300
LAST_LINES = 12  # of a traceback: where it happened and what it says


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
        step(2, "the notebooks, on these tokens")
        for notebook in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
            run_notebook(notebook, options.build, tokens)
        step(
            3,
            "how fast tokens can be read (a rough run; `npydata bench dataset` is the long one)",
        )
        report = bench(options.build, tokens)
    except (NpyDataError, OSError, NotebookError, subprocess.CalledProcessError) as error:
        print(f"\nmake run stopped: {error}", file=sys.stderr)
        return 2
    step(4, "done")
    print(summary(report, tokens, options.build, time.monotonic() - begin))
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
        if made["source"] == wanted:
            print(f"{shown(tokens)} is up to date: {made['tokens']:,} tokens")
            return tokens
    receipt.unlink(missing_ok=True)
    report = prepare(text or [], tokens, python_text=not text, progress=True)
    print(str(report).replace(str(tokens), shown(tokens)))
    receipt.write_text(json.dumps({"source": wanted, "tokens": report.num_tokens}))
    return tokens


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
        nbformat.write(notebook, build / path.name)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    (build / f"{path.stem}.html").write_text(html, encoding="utf-8")
    save_figures(notebook, build / "figures", path.stem)


def execute_with_bar(notebook: nbformat.NotebookNode, name: str, tokens: Path) -> None:
    """Run every cell where the notebook lives, with a bar that counts them."""
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    with tqdm(total=total, desc=name, unit="cell", file=sys.stdout) as bar:
        try:
            env = {"NPYDATA_TOKENS": str(tokens.resolve())}
            execute(notebook, NOTEBOOKS, timeout=CELL_TIMEOUT_S, env=env, on_cell=bar.update)
        except CellExecutionError as error:
            raise NotebookError(what_failed(notebook, name, error)) from None


def what_failed(notebook: nbformat.NotebookNode, name: str, error: CellExecutionError) -> str:
    """Say which cell failed and why."""
    failed = next(
        cell
        for cell in notebook.cells
        if any(output.output_type == "error" for output in cell.get("outputs", []))
    )
    why = "\n".join(str(error).strip().splitlines()[-LAST_LINES:])
    return (
        f"{name}, cell [{failed.execution_count}] raised {error.ename}: {error.evalue}\n\n"
        f"{failed.source}\n\n{why}"
    )


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


def bench(build: Path, tokens: Path) -> dict[str, Any]:
    """Measure the datasets on the real tokens, in a process of its own."""
    out = build / "bench_dataset.json"
    command = [sys.executable, "-m", "npydata", "bench", "dataset", "--quick"]
    outputs = ["--json", out, "--plot", build / "figures" / "bench_dataset.png", "--dir", build]
    subprocess.run([*command, "--tokens", tokens, *outputs], check=True)
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


# 4. What came out


def summary(report: dict[str, Any], tokens: Path, build: Path, seconds: float) -> str:
    """The table at the end, and what to do next."""
    count = json.loads((build / "tokens.json").read_text(encoding="utf-8"))["tokens"]
    lines = [
        f"tokens                {count:>14,}   {shown(tokens)}",
        *(f"{what:<22}{rate:>14}" for what, rate in speeds(report)),
        f"pictures              {'':>14}   {shown(build / 'figures')}/",
        f"notebooks, executed   {'':>14}   {shown(build)}/*.html",
        "",
        f"It took {seconds:.0f} s. Next: `make lab` opens the notebooks for you to work through.",
    ]
    return "\n".join(lines)


def speeds(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Tokens per second of the common way and of ours, warm and cold."""
    wanted = [
        ("naive, warm", "warm", "naive"),
        ("ours, warm", "warm", "ours"),
        ("naive, cold", "cold", "naive"),
        ("ours, cold", "cold", "ours"),
    ]
    return [(what, best(report["rows"], group, role)) for what, group, role in wanted]


def best(rows: list[dict[str, Any]], group: str, role: str) -> str:
    """The best median among the rows of a kind."""
    medians = [row["median"] for row in rows if (row["group"], row["role"]) == (group, role)]
    return f"{max(medians):,.1f} Mtok/s" if medians else "not measured"


def shown(path: Path) -> str:
    """A path as a reader types it."""
    return os.path.relpath(path)


if __name__ == "__main__":
    raise SystemExit(main())
