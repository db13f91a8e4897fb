"""What lesson 08 kills, cuts off and draws."""

import json
from functools import partial

import torch
from matplotlib.figure import Figure

from course import lab
from course.lesson import ROOT, defined
from course.play import cells
from course.play.charts import bars
from course.play.nb07 import scratch as scratch
from course.play.power import ends, left_by_kills, left_by_power_cuts, loads
from course.play.toy_disk import STEPS, in_a_word, states_after

COLOURS = {
    "old": "#7fb0a8",
    "old or new": "#86c2b9",
    "new": "#0f766e",
    "maybe nothing": "#c2410c",
    "nothing": "#991b1b",
}
SAVERS = {
    "torch.save": "torch.save, over the last one",
    "dcp.save": "dcp.save, over the last one",
    "HF Trainer, keeps 2": "HF Trainer, save_total_limit=2",
    "torch.save, fsync, rename": "torch.save, fsync and rename",
    "npydata": "ours, a folder per step",
}
"""Rows of the page of verdicts, by the name that they have here."""
FAULTS = {"kill": "#7fb2e5", "power cut": "#1b4f72"}


# Attacks


def step_state(step):
    return {"weight": torch.full((64,), float(step)), "step": torch.tensor(step)}


def first_saver(write, latest, read):
    """Return a save of step 20 by lesson 00's, that of step 10 before, and what says what loads."""

    def save(step, root):
        write(root / f"step-{step:06d}", step_state(step))

    def load(root):
        try:
            return f"step {int(read(latest(root) / 'state.safetensors', 'step'))}"
        except Exception:
            return "an error"

    return partial(save, 20), partial(save, 10), load


def kill(save, before, load):
    """Kill a save after each of its calls."""
    return {call: loads(files, load) for call, files in left_by_kills(save, before).items()}


def cut(save, before, load, syncs=True):
    """Cut the power after each call of a save."""
    return ends(left_by_power_cuts(save, before, syncs), load)


def worst(found):
    """Say what the worst of some ends has left."""
    damaged = any("error" in what for what in found.values())
    return "a damaged checkpoint" if damaged else "a whole checkpoint"


def table(columns):
    """Print what loads, by the call after which a save ended, in one column or several."""
    print(f"{'':<44}" + "".join(f"{name:<28}" for name in columns).rstrip())
    for call in next(iter(columns.values())):
        print(f"{call:<44}" + "".join(f"{one[call]:<28}" for one in columns.values()).rstrip())


# The toy disk


def crash_matrix(*protocols):
    """Return what loads after each step of each save, killed and without power."""
    found = {one.__name__.replace("_", " "): states_after(one) for one in protocols}
    killed = {n: {s: in_a_word({now}) for s, (now, _) in one.items()} for n, one in found.items()}
    cut = {n: {s: in_a_word(cuts) for s, (_, cuts) in one.items()} for n, one in found.items()}
    return {"killed": killed, "power cut": cut}


def draw_matrix(matrix):
    """Show what loads after each step: a panel for kills, one for power cuts."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    lines = []
    for ax, (fault, table) in zip(figure.subplots(2, 1), matrix.items(), strict=True):
        ax.axis("off")
        cells.frame(ax, len(STEPS), len(table) + 0.9, f"{fault} after ...")
        ax.set_xlim(-1.6, len(STEPS) + 0.1)
        for x, step in enumerate(STEPS):
            cells.name(ax, x + 0.5, len(table) + 0.1, step.replace(" ", "\n"), ha="center")
        for y, (name, row) in enumerate(table.items()):
            cells.name(ax, -1.6, y, name)
            lines.append(f"{name}, {fault}: {', '.join(row.values())}")
            for x, step in enumerate(STEPS):
                word = row.get(step, "·")
                cells.cell(ax, x, y, word.replace(" ", "\n", 1), COLOURS.get(word, "#ffffff"))
    lab.picture(figure, "\n".join(lines))


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
    """Return saves of two files that end with a commit; the files say which step they are of."""

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

    return partial(save, 20), partial(save, 10), load


# The page of verdicts


def saved_share(saver, fault):
    """Percent of the trials in the saved run after which a complete checkpoint loaded."""
    page = json.loads((ROOT / "materials/results/survival.json").read_text(encoding="utf-8"))
    found = next(one for one in page["savers"] if one["name"] == saver)["cells"][fault]
    return round(100 * (found.get("whole", 0) + found.get("older", 0)) / sum(found.values()))


def verdicts(kills, cuts):
    """Show the page of verdicts, with a row for the learner's own."""
    rows = {name: {fault: saved_share(saver, fault) for fault in FAULTS}
            for name, saver in SAVERS.items()}  # fmt: skip
    rows["yours"] = {
        fault: round(100 * sum({"nothing", "damaged"}.isdisjoint(what.split()) for what in found)
                     / len(found))
        for fault, found in {"kill": kills.values(), "power cut": cuts.values()}.items()
    }  # fmt: skip
    title = "Moments after which a complete checkpoint loads"
    lines = [f"{name:<27}{row['kill']:>4} % {row['power cut']:>4} %" for name, row in rows.items()]
    lab.picture(bars(rows, FAULTS, title, "%"), "\n".join(lines))
