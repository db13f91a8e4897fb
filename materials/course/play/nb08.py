"""What lesson 08 kills, cuts off and draws."""

import json
import os
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from course import lab
from course.lab import scratch as scratch
from course.lesson import ROOT, defined
from course.play import cells
from course.play.charts import bars
from course.play.toy_disk import NAME, NEW, OLD, Filmed, ToyDisk

COLOURS = {
    "old": "#7fb0a8",
    "old or new": "#86c2b9",
    "new": "#0f766e",
    "maybe nothing": "#c2410c",
    "nothing": "#991b1b",
}
SAVERS = (
    "torch.save, over the last one",
    "dcp.save, over the last one",
    "HF Trainer, save_total_limit=2",
    "torch.save, fsync and rename",
    "ours, a folder per step",
)
"""Rows of the page of verdicts that are shown."""
FAULTS = {"kill": "#7fb2e5", "power cut": "#1b4f72"}


# Attacks


def step_state(step):
    return {"weight": torch.full((64,), float(step)), "step": torch.tensor(step)}


def first_saver(write, latest, read):
    """Return a save by lesson 00's, and what says what loads."""

    def save(step, root):
        write(root / f"step-{step:06d}", step_state(step))

    def load(root):
        try:
            return f"step {int(read(latest(root) / 'state.safetensors', 'step'))}"
        except Exception:
            return "an error"

    return save, load


def film(save, load, syncs=True, before=None):
    """Save step 20 into a folder where step 10 was saved, perhaps by another `before`. Return what
    loads, for each call that changes names or flushes: if the process is killed after it, and if
    the power fails."""
    left = {}
    with TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        (before or save)(10, root)
        disk = Filmed(root)

        def note(call):
            left[call] = [disk.seen()], list(disk.power_cuts())

        def noted(name):
            real = getattr(os, name)

            def call(path, *given, **options):
                real(path, *given, **options)
                disk.look()
                note(f"{len(left) + 1:2} {name} {os.path.relpath(path, root)}")

            return call

        def fsync(descriptor):
            disk.look()
            inode = os.fstat(descriptor).st_ino
            if syncs:
                disk.sync(inode)
            paths = {one: path for path, one in disk.paths(disk.names)}
            note(f"{len(left) + 1:2} fsync {paths.get(inode, 'the root')}")

        calls = {name: noted(name) for name in ("mkdir", "rename", "replace")}
        with patch.multiple(os, fsync=fsync, **calls):
            save(20, root)
        disk.look()
        note("   (returned)")

    @cache
    def loaded(*files):
        with TemporaryDirectory() as folder:
            for name, content in files:
                path = Path(folder, name)
                path.mkdir() if content is None else path.write_bytes(content)
            return load(Path(folder))

    def what_loads(states):
        return " or ".join(sorted({loaded(*sorted(files.items())) for files in states}))

    return [{call: what_loads(both[k]) for call, both in left.items()} for k in (0, 1)]


def table(**columns):
    """Print what loads, by the call after which a save ended."""
    for call in ["", *next(iter(columns.values()))]:
        words = (f"{one.get(call, name.replace('_', ' ')):<28}" for name, one in columns.items())
        print("".join([f"{call:<44}", *words]).rstrip())


# The toy disk


def crash_matrix(*saves):
    """Show what loads after each step of each save, killed and cut off."""
    matrix = {}
    for end, save in product(("killed", "power cut"), saves):
        disk = ToyDisk({NAME: OLD})
        row = matrix[f"{save.__name__.replace('_', ' ')}, {end}"] = {}

        def note(step, end=end, disk=disk, row=row):
            row.pop(step, None)  # a step that comes again stands where it came last
            row[step] = in_a_word(left_on(disk, end))

        disk.did = note
        save(disk, NEW)
    steps = max(matrix.values(), key=len)
    lines = [
        (
            name,
            [
                (row.get(step, "·").replace(" ", "\n", 1), COLOURS.get(row.get(step), "#ffffff"))
                for step in steps
            ],
        )
        for name, row in {"": {step: step for step in steps}, **matrix}.items()
    ]
    text = "\n".join(f"{name}: {', '.join(row.values())}" for name, row in matrix.items())
    lab.picture(cells.rows(lines, "What loads after each step"), text)


def left_on(disk, end):
    """Return all that may be found on a disk when a process is killed now, or the power fails."""
    return list(disk.power_cuts()) if end == "power cut" else [disk.seen()]


def in_a_word(finds):
    """Return which checkpoint loads where one of these may be found."""
    words = {{OLD: "old", NEW: "new"}.get(files.get(NAME), "nothing") for files in finds}
    if "nothing" in words:
        return "nothing" if len(words) == 1 else "maybe nothing"
    return " or ".join(sorted(words, reverse=True))


# The commit


def make_root(root, made, latest=None):
    """Commit checkpoints in this order, one with a "!" damaged afterwards; then write `latest`."""
    for word in made.split():
        name = word.rstrip("!")
        temporary = root / f"{name}.tmp"
        temporary.mkdir()
        (temporary / "model").write_text(name)
        defined("08")["write_manifest"](temporary, root)
        temporary.rename(root / name)
        if word != name:
            (root / name / "model").write_text("")
    if latest is not None:
        (root / "latest").write_text(latest)


def saver_of(commit, latest_in, keep_last=1):
    """Return a save of two files that ends with a commit, and what says what loads."""

    def save(step, root):
        temporary = root / f"step-{step}.tmp"
        temporary.mkdir()
        for name in ("model", "optimizer"):
            defined("08")["write_small"](temporary / name, b"%d" % step * 20)
        commit(temporary, root / f"step-{step}", keep_last)

    def load(root):
        folder = latest_in(root)
        if folder is None:
            return "nothing"
        step = folder.name.removeprefix("step-")
        whole = all((folder / name).read_text() == 20 * step for name in ("model", "optimizer"))
        return f"step {step}" if whole else "damaged"

    return save, load


# The page of verdicts


def verdicts(*found):
    """Show in percent after how many moments a complete checkpoint loads: those of the saved run,
    and the learner's own."""
    page = json.loads((ROOT / "materials/results/survival.json").read_text(encoding="utf-8"))
    ends = {one["name"]: one["cells"] for one in page["savers"]}
    rows = {}
    for name in SAVERS:
        cells = {fault: Counter(ends[name][fault]) for fault in FAULTS}
        whole = {fault: one["whole"] + one["older"] for fault, one in cells.items()}
        rows[name] = {fault: round(100 * whole[fault] / cells[fault].total()) for fault in FAULTS}
    rows["yours"] = {}
    for fault, mine in zip(FAULTS, found, strict=True):
        whole = [{"nothing", "damaged"}.isdisjoint(what.split()) for what in mine.values()]
        rows["yours"][fault] = round(100 * sum(whole) / len(whole))
    title = "Moments after which a complete checkpoint loads"
    lines = [f"{name:<31}{row['kill']:>4} % {row['power cut']:>4} %" for name, row in rows.items()]
    lab.picture(bars(rows, FAULTS, title, "%"), "\n".join(lines))
    return rows
