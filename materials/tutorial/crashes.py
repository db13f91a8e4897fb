"""End a save after each of its calls to the system, by a kill or a power cut, and see what loads.

A power cut is played: what was written and not synced since is taken away, and then the process is
killed. A file that was not synced is empty; a name that its new folder was not synced with is gone.
"""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt

from tutorial.figures import WIDTH, ink_on, use_style
from tutorial.kept import CheckpointError
from tutorial.kept.checkpointer.manifest import MODEL, TRAINING, check_content, read_manifest
from tutorial.killed_writer import MOST, after_each_call, in_fork
from tutorial.saving import COLORS
from tutorial.sliders import is_live, with_sliders
from tutorial.symbols import ROOT
from tutorial.toy_disk import NAME, NEW, OLD, Protocol, ToyDisk, loads, steps_of

Act = Callable[[Path], Any]
PAGE = {"torch.save, over the last one": "torch.save", "dcp.save, over the last one": "dcp.save",
        "Lightning ModelCheckpoint, save_last": "Lightning, save_last",
        "torch.save, fsync and rename": "torch.save, fsync, rename",
        "ours, a folder per step": "npydata"}  # fmt: skip


def loaded(mine: Any, root: Path) -> int:
    """The step that loads, whole and verified; 0 if none does."""
    folder = mine.latest_in(root)
    if folder is None:
        return 0
    try:
        manifest = read_manifest(folder)
        mine.check_sizes(folder, manifest)
        check_content(folder, manifest)
    except CheckpointError:
        return 0
    return int((folder / TRAINING).read_bytes())


def ends(mine: Any, power: bool = False) -> dict[str, int]:
    """What loads when the second of two saves ends after each of its calls."""

    def save(root: Path, step: int) -> None:
        mine.save(root / f"step_{step}", step, files_of(step), keep_last=1)

    return after_every_call(lambda root: save(root, 1), lambda root: save(root, 2),
                            lambda root: loaded(mine, root), power=power)  # fmt: skip


def listed(ends: dict[str, int], after: str) -> None:
    """Print a line for each call: what loads when all ends there."""
    for call, step in ends.items():
        print(f"{after} {call:<32} step {step} loads")


def files_of(step: int) -> dict[str, bytes]:
    """The files of a checkpoint that says which step it is of."""
    return {MODEL: b"weights of step %d" % step * 40, TRAINING: b"%d" % step}


def after_every_call(before: Act, save: Act, loaded: Act, *, power: bool = False) -> dict[str, Any]:
    """For each call that `save(root)` makes: what `loaded(root)` says if all ends there."""
    ends = {}
    for number in range(1, MOST):
        with TemporaryDirectory() as folder:
            root, notes = Path(folder) / "run 0", Path(folder) / "call"
            root.mkdir()

            def job(root: Path = root, notes: Path = notes, last: int = number) -> None:
                before(root)
                _die_at(last, root, notes, power)
                save(root)

            if not os.WIFSIGNALED(in_fork(job)):
                return ends
            ends[f"{number:2} {notes.read_text()}"] = loaded(root)
    raise RuntimeError("the save makes no end of calls")


def _die_at(last: int, root: Path, notes: Path, power: bool) -> None:
    """From now on count calls; after the last one end this process, and with power its memory."""
    known = {path.lstat().st_ino for path in (root, *root.rglob("*"))}
    synced: dict[int, set[str]] = {}
    sync, made = os.fsync, 0

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112
        names = set(os.listdir(descriptor)) if folder else set()
        synced[os.fstat(descriptor).st_ino] = names

    def die(call: str) -> None:
        nonlocal made
        made += 1
        if made == last:
            notes.write_text(call)
            if power:
                _forget(root, known, synced)
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    after_each_call(die)


def _forget(root: Path, known: set[int], synced: dict[int, set[str]]) -> None:
    """Take away what is new below a root and was not synced."""
    for path in list(root.rglob("*")):
        if not path.exists() or (inode := path.stat().st_ino) in known:
            continue
        if not path.is_dir():
            os.truncate(path, path.stat().st_size if inode in synced else 0)
            continue
        for entry in path.iterdir():
            if entry.name not in synced.get(inode, set()):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


# The moment of a power cut, to be chosen


def power_cut(protocol: Protocol) -> None:
    """Turn the moment: which of the states that a power cut may leave there hold a checkpoint."""
    use_style()
    names = steps_of(protocol)
    found: list[Counter[str]] = []
    disk = ToyDisk({NAME: OLD})
    disk.did = lambda step: found.append(Counter(loads(files) for files in disk.power_cuts()))
    protocol(disk, NEW)

    def draw(moment: float) -> None:
        counts, at = found[int(moment) - 1], 0.0
        _, ax = plt.subplots(figsize=(WIDTH, 1.5))
        for end, count in sorted(counts.items(), reverse=True):  # old before new
            share = count / counts.total()
            ax.barh(0, share, left=at, color=COLORS[end])
            ax.text(at + share / 2, 0, end, ha="center", va="center", color=ink_on(COLORS[end]))
            at += share
        ax.set(xlim=(0, 1), yticks=[], xlabel="share of the states that a power cut may leave")
        ax.set_title(f"The power fails after step {int(moment)}: {names[int(moment) - 1]}")
        plt.show()
        if is_live():
            print(_states(counts))

    widest = max(range(len(found)), key=lambda step: (len(found[step]), step)) + 1
    with_sliders(draw, moment=(widest, 1, len(names), 1))
    if not is_live():  # nobody can turn: all moments
        for name, counts in zip(names, found, strict=True):
            print(f"{name:<14}", _states(counts))


def _states(counts: Counter[str]) -> str:
    """How many states a power cut may leave, and what loads from them."""
    ends = ", ".join(f"{end} in {count}" for end, count in sorted(counts.items()))
    states = "1 state" if counts.total() == 1 else f"{counts.total()} states"
    return f"{states} may be left; what loads: {ends}"


# The page of verdicts


def saved_share(saver: str, fault: str) -> int:
    """Percent of the trials in the saved run after which a complete checkpoint loaded."""
    page = json.loads((ROOT / "materials/results/survival.json").read_text(encoding="utf-8"))
    cell = next(one for one in page["savers"] if one["name"] == saver)["cells"][fault]
    return round(100 * cell.get("whole", 0) / sum(cell.values()))


def verdicts(**mine: dict[str, Any]) -> None:
    """Print the page of verdicts with a line for the learner's own ends."""
    print(f"{'':<28}{'killed':>8}{'power cut':>12}")
    for saver, short in PAGE.items():
        kill, cut = (saved_share(saver, fault) for fault in ("kill", "power cut"))
        print(f"{short:<28}{kill:>6} %{cut:>10} %   in the saved run")
    shares = [round(100 * sum(map(bool, ends.values())) / len(ends)) for ends in mine.values()]
    print(f"{'yours':<28}{shares[0]:>6} %{shares[1]:>10} %   on this page")
