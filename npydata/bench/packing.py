"""``npydata bench packing``: rows of whole documents beside windows, and beside others' packing.

The documents are the files of Python's standard library, or those of a given file. Tokens per
second come first; what each way makes of an epoch stands beside its name: the share of all places
that hold a token, and the share of all tokens that are cropped.
"""

import argparse
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from npydata.bench.baselines import OURS, Baseline, baselines_of
from npydata.bench.baselines.loaders import DEFAULT_MARK
from npydata.bench.baselines.packers import WINDOWS, packed_rows
from npydata.bench.caches import make_warm, noting
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row, asked_for
from npydata.bench.report import Report, Verdict
from npydata.bench.targets import CLOSE_TIMES, SHARE, compare, find
from npydata.bench.tokens import FULL, QUICK, Task, warm_rows
from npydata.dataset.prepare import prepare
from npydata.dataset.text import PYTHON_CORPUS_SKIPS, list_sources

TITLES = {
    "row": "Rows in this process, and what an epoch of them holds",
    "loader": "Through the loader",
}
SAMPLE_MB, QUICK_FILES = 2, 300


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, notes, rows = asked_for(args, FULL, QUICK), list[str](), list[Row]()
    path = args.tokens or standard_library(folder / "library.npy", args.quick)
    task = Task(path=path, dtype=args.dtype if args.tokens else None, seq_len=args.seq_len,
                batch_size=args.batch_size)  # fmt: skip
    with noting(notes):
        make_warm(task.path)
        methods = baselines_of("packing", quick=args.quick)
        rows += with_shares(warm_rows("rows", methods, task, plan.repeats, plan.warm_s,
                                      group="row"), methods, task)  # fmt: skip
        rows += warm_rows("loader", baselines_of("packing loader", quick=args.quick), task,
                          plan.repeats, plan.warm_s, group="loader")  # fmt: skip
    report = packed_rows(task).report
    notes.append(f"ours: {report}")
    settings = {"seq_len": task.seq_len, "batch_size": task.batch_size, "repeats": plan.repeats,
                "documents": report.documents, "warm_file_bytes": path.stat().st_size}  # fmt: skip
    size = f"{task.batch_size} rows of {task.seq_len} tokens · {report.documents:,} documents"
    return Report(benchmark="packing", titles=TITLES, conditions=size,
                  machine=machine_facts(path), settings=settings, rows=rows, notes=notes,
                  verdicts=packing_verdicts(rows, report.filled, report.cropped_share),
                  )  # fmt: skip


def standard_library(path: Path, quick: bool) -> Path:
    """Make a token file of the standard library's files; of some of them in a quick run."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = list_sources([folder], suffix=".py", skip_folders=PYTHON_CORPUS_SKIPS).files
    step = max(1, len(found) // QUICK_FILES) if quick else 1
    prepare([one.path for one in found[::step]], path, sample_mb=SAMPLE_MB, progress=True)
    return path


def with_shares(rows: Sequence[Row], methods: Sequence[Baseline], task: Task) -> list[Row]:
    """Return rows whose settings say what an epoch holds."""
    with_shares = []
    for row, method in zip(rows, methods, strict=True):
        count = Counter[str]()
        for _ in () if method.name == WINDOWS else method.where(count=count).start(task):
            pass
        with_shares.append(replace(row, setting=", ".join([row.setting, *shares(count, task)])))
    return with_shares


def shares(count: Counter[str], task: Task) -> list[str]:
    """Return how full rows are, and how much of the corpus is in none; nothing if none ran."""
    if not count["rows"]:
        return []
    dataset = packed_rows(task)
    total, width = dataset.num_tokens, task.seq_len
    if not count["cropped"]:  # rows of the others hold one token more, the last target
        width += 1
        count["cropped"] = total - count["used"]
    filled = count["used"] / (count["rows"] * width)
    return [f"{filled:.1%} filled", f"{count['cropped'] / total:.1%} cropped"]


def is_default(setting: str) -> bool:
    """Whether this is how a loader is set unless told otherwise."""
    return setting.endswith(DEFAULT_MARK)


def packing_verdicts(rows: Sequence[Row], filled: float, cropped: float) -> list[Verdict]:
    return [
        *compare("a packed row costs {} a random window", find(rows, "row", WINDOWS),
                 find(rows, "row", OURS), 2, CLOSE_TIMES, at_most=True),
        *compare("through the loader at its default, packed rows reach {} of random windows",
                 find(rows, "loader", OURS, is_default), find(rows, "loader", WINDOWS, is_default),
                 0.5, SHARE),
        *compare("through the loader at its best, packed rows reach {} of random windows",
                 find(rows, "loader", OURS), find(rows, "loader", WINDOWS), 0.5, SHARE),
        Verdict(claim="{} of the places hold a token", value=filled, target=0.99, style="{:.2%}"),
        Verdict(claim="{} of the tokens are cropped", value=cropped, target=0.1, style="{:.2%}",
                at_most=True),
    ]  # fmt: skip
