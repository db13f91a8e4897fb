"""What lesson 08 kills, cuts off and draws."""

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course import lab
from course.lesson import ROOT, defined
from course.play import cells
from course.play.power import ends, left_by_kills, left_by_power_cuts, loads
from course.play.toy_disk import (
    NAME,
    NEW,
    OLD,
    STEPS,
    Protocol,
    ToyDisk,
    after_kills,
    after_power_cuts,
)

COLOURS = {
    "old": "#7fb0a8",
    "old or new": "#86c2b9",
    "new": "#0f766e",
    "maybe nothing": "#c2410c",
    "nothing": "#991b1b",
}
FOUND = {OLD: ("old", "old"), NEW: ("new", "new"), b"": ("empty", "nothing")}
"""By the content of the checkpoint: what to write into its cell, and its colour."""
SAVERS = {
    "torch.save": "torch.save, over the last one",
    "dcp.save": "dcp.save, over the last one",
    "HF Trainer, keeps 2": "HF Trainer, save_total_limit=2",
    "torch.save, fsync, rename": "torch.save, fsync and rename",
    "npydata": "ours, a folder per step",
}
"""Rows of the page of verdicts, by the name that they have here."""
ENDS = {"killed": "#7fb2e5", "power cut": "#1b4f72"}

Ends = Mapping[str, str]


# The save of lesson 00


def step_state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64,), float(step)), "step": torch.tensor(step)}


def first_save(write: Any, step: int) -> Callable[[Path], None]:
    return lambda root: write(root / f"step-{step:06d}", step_state(step))


def first_loads(latest: Any, read: Any) -> Callable[[Path], str]:
    """Return what loads by the functions of lesson 00, in words."""

    def load(root: Path) -> str:
        found = latest(root)
        if found is None:
            return "nothing"
        try:
            return f"step {int(read(found / 'state.safetensors', 'step'))}"
        except Exception as error:
            return type(error).__name__

    return load


def kill_the_first_save(write: Any, latest: Any, read: Any) -> str:
    """Kill it after each call; say what the worst kill leaves."""
    left = left_by_kills(first_save(write, 20), first_save(write, 10))
    found = {call: loads(files, first_loads(latest, read)) for call, files in left.items()}
    for call, what in found.items():
        print(f"killed after {call:<44} {what}")
    whole = all(what.startswith("step") for what in found.values())
    return "a whole checkpoint" if whole else "half a checkpoint"


def cut_the_first_save(write: Any, latest: Any, read: Any) -> str:
    """Cut the power at each call; say what the worst cut may leave."""
    left = left_by_power_cuts(first_save(write, 20), first_save(write, 10))
    found = ends(left, first_loads(latest, read))
    for call, what in found.items():
        print(f"no power after {call:<44} {what}")
    damaged = any("Error" in what for what in found.values())
    return "a checkpoint that is damaged" if damaged else "a whole checkpoint"


# The toy disk


def states_after(protocol: Protocol) -> list[tuple[str, list[bytes | None]]]:
    """Return for each step what may be found under the name of the checkpoint after it."""
    disk, found = ToyDisk({NAME: OLD}), []

    def note(step: str) -> None:
        different = dict.fromkeys(files.get(NAME) for files in disk.power_cuts())
        found.append((step, sorted(different, key=lambda one: (one != OLD, one != NEW))))

    disk.did = note
    protocol(disk, NEW)
    return found


def power_cut(*protocols: Protocol) -> Callable[..., tuple[Figure, str]]:
    """Return what the slider draws: what each save may leave if the power fails after a step."""

    def draw(after_step: int) -> tuple[Figure, str]:
        figure, (ax,) = cells.panels(1, 8, 2.0)
        cells.frame(ax, 4, len(protocols), f"The power fails after step {after_step}: you may find")
        ax.set_xlim(-1.2, 4.1)
        said = []
        for y, protocol in enumerate(protocols):
            steps = states_after(protocol)
            step, states = steps[min(after_step, len(steps)) - 1]
            when = step if after_step <= len(steps) else "returned"
            cells.name(ax, -1.2, y, f"{protocol.__name__}\n({when})")
            words = []
            for x, content in enumerate(states):
                word, colour = FOUND.get(content, ("half" if content else "none", "nothing"))
                cells.cell(ax, x, y, word, COLOURS[colour])
                words.append(word)
            said.append(f"{protocol.__name__:<15} {when:<14} {', '.join(words)}")
        return figure, "\n".join(said)

    return draw


def crash_matrix(*protocols: Protocol) -> tuple[dict[str, Ends], dict[str, Ends]]:
    """Return what loads after each step of each save, killed and without power."""
    return (
        {one.__name__: after_kills(one) for one in protocols},
        {one.__name__: after_power_cuts(one) for one in protocols},
    )


def which_are_safe(table: Mapping[str, Ends]) -> str:
    safe = {name: "nothing" not in row.values() for name, row in table.items()}
    print(safe)
    return {3: "all", 2: "the last two", 1: "only the last"}[sum(safe.values())]


def draw_matrix(killed: Mapping[str, Ends], cut: Mapping[str, Ends]) -> None:
    """Show what loads after each step: a panel for kills, one for power cuts."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots(2, 1)
    panels = {"the process is killed after ...": killed, "the power fails after ...": cut}
    for ax, (title, table) in zip(axes, panels.items(), strict=True):
        ax.axis("off")
        cells.frame(ax, len(STEPS), len(table) + 0.9, title)
        ax.set_xlim(-1.6, len(STEPS) + 0.1)
        for y, (name, row) in enumerate(table.items()):
            cells.name(ax, -1.6, y, name.replace("_", " "))
            for x, step in enumerate(STEPS):
                if step in row:
                    cells.cell(ax, x, y, row[step].replace(" ", "\n", 1), COLOURS[row[step]])
                else:
                    cells.name(ax, x + 0.5, y, "·", ha="center")
        for x, step in enumerate(STEPS):
            cells.name(ax, x + 0.5, len(table) + 0.1, step.replace(" ", "\n"), ha="center")
    text = [f"{name}, {how}: {', '.join(row[step] for step in STEPS if step in row)}"
            for how, table in (("killed", killed), ("power cut", cut))
            for name, row in table.items()]  # fmt: skip
    lab.picture(figure, "\n".join(text))


# The commit


def make_root(root: Path, made: str, latest: str | None = None) -> None:
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


def write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, content)
    os.fsync(descriptor)
    os.close(descriptor)


def commit_save(commit: Any, step: int, keep_last: int | None = 1) -> Callable[[Path], None]:
    """Return a save of two files that ends with a commit; they say which step they are of."""

    def save(root: Path) -> None:
        folder = root / f"step-{step}"
        temporary = root / f"step-{step}.tmp"
        temporary.mkdir()
        for name in ("model", "optimizer"):
            write_synced(temporary / name, b"%d" % step * 20)
        commit(temporary, folder, keep_last)

    return save


def commit_loads(latest_in: Any) -> Callable[[Path], str]:
    """Return what loads, both files whole and of one step, in words."""

    def load(root: Path) -> str:
        folder = latest_in(root)
        if folder is None:
            return "nothing"
        step = folder.name.removeprefix("step-")
        whole = all((folder / name).read_text() == 20 * step for name in ("model", "optimizer"))
        return f"step {step}" if whole else "damaged"

    return load


def kill_commit(commit: Any, latest_in: Any) -> dict[str, str]:
    """Kill the second of two saves after each call; print and return what loads."""
    left = left_by_kills(commit_save(commit, 20), commit_save(commit, 10))
    found = {call: loads(files, commit_loads(latest_in)) for call, files in left.items()}
    for call, what in found.items():
        print(f"killed after {call:<36} {what}")
    return found


def cut_commit(commit: Any, latest_in: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Cut the power at each call of the second save, with its syncs and without."""
    saves = commit_save(commit, 20), commit_save(commit, 10)
    cuts = [ends(left_by_power_cuts(*saves, syncs=syncs), commit_loads(latest_in))
            for syncs in (True, False)]  # fmt: skip
    return cuts[0], cuts[1]


def first_new(kills: Ends) -> str:
    """Say after which call the new step loads for the first time."""
    call = next(call for call, what in kills.items() if what == "step 20")
    if "replace" in call:
        return "the replacement of latest"
    return "the rename of the folder" if "rename" in call else "the fsync of the manifest"


def side_by_side(tables: Mapping[str, Ends]) -> None:
    """Print what loads after a power cut, a column for each table."""
    print(f"{'no power after':<36}" + "".join(f"{name:<22}" for name in tables).rstrip())
    for call in next(iter(tables.values())):
        print(f"{call:<36}" + "".join(f"{one[call]:<22}" for one in tables.values()).rstrip())


def save_some(saver_type: Any, commit: Any, latest_in: Any) -> None:
    """Save three steps with both parts of the learner's; print what is there."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        saver = saver_type(partial(commit, keep_last=2))
        for step in (10, 20, 30):
            saver.save(root / f"step-{step:06d}", step_state(step))
        saver.wait()
        print("in the root:", *sorted(path.name for path in root.iterdir()))
        print("to load:", latest_in(root).name)


# The page of verdicts


def saved_share(saver: str, fault: str) -> int:
    """Percent of the trials in the saved run after which a complete checkpoint loaded."""
    page = json.loads((ROOT / "materials/results/survival.json").read_text(encoding="utf-8"))
    found = next(one for one in page["savers"] if one["name"] == saver)["cells"][fault]
    return round(100 * (found.get("whole", 0) + found.get("older", 0)) / sum(found.values()))


def verdicts(kills: Ends, cuts: Ends) -> None:
    """Show the page of verdicts, with a row for the learner's own."""
    rows = {
        name: [saved_share(saver, fault) for fault in ("kill", "power cut")]
        for name, saver in SAVERS.items()
    }
    bad = ("nothing", "damaged")
    rows["yours"] = [
        round(100 * sum(not any(word in what for word in bad) for what in table.values())
              / len(table))
        for table in (kills, cuts)
    ]  # fmt: skip
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    for y, shares in enumerate(rows.values()):
        for k, (share, colour) in enumerate(zip(shares, ENDS.values(), strict=True)):
            ax.barh(y + 0.36 * k - 0.18, share, height=0.34, color=colour)
            ax.text(share + 1, y + 0.36 * k - 0.18, f"{share} %", va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.get_yticklabels()[-1].set_fontweight("bold")
    ax.invert_yaxis()
    ax.set_xlim(0, 112)
    ax.set_xlabel("moments after which a complete checkpoint loads (%)")
    ax.set_title("Who survives?", loc="left", fontweight="bold", fontsize=11, pad=24)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(
        handles=[Patch(color=colour, label=name) for name, colour in ENDS.items()],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )
    lines = [f"{'':<27}{'killed':>8}{'power cut':>12}"]
    lines += [f"{name:<27}{kill:>6} %{cut:>10} %" for name, (kill, cut) in rows.items()]
    lab.picture(figure, "\n".join(lines))
