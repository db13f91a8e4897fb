"""Who resumes exactly? A loader is killed at a random batch; another goes on with what it kept.

The samples are the numbers of one shuffled epoch. What was seen before the kill and after it is
compared with the epoch of a loader that nobody stopped.
"""

import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from npydata.bench.survival.process import Inside, ask

SAMPLES, SEED = 960, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a loader is set up."""

    folder: Path
    """For files that a loader needs; the same for all of its processes."""
    workers: int = 2
    batch_size: int = 8
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """A loader's epoch, or what is left of it."""

    batches: Iterator[list[int]]
    state: Callable[[], Any]
    """What a checkpoint would hold after the last batch that was taken."""


Resumer = Callable[[Setting, Any], Stream]
"""Opens a loader with a setting, and with a state when it resumes."""

CASES: dict[str, dict[str, int]] = {
    "as it was": {},
    "2 to 0 workers": {"workers": 0},
    "2 to 3 workers": {"workers": 3},
    "batch of 8 to 12": {"batch_size": 12},
    "1 to 2 ranks": {"world_size": 2},
}


def resumed(resumer: Resumer, folder: Path, kills: int) -> dict[str, dict[str, Any]]:
    """Return what becomes of the samples in each case, over all kills."""
    whole = run(resumer, Setting(folder=folder), None)
    results: dict[str, dict[str, Any]] = {}
    for case, changed in CASES.items():
        chance, total = random.Random(SEED), Counter[str]()
        note = ""
        for _ in range(kills):
            try:
                total += after_a_kill(resumer, folder, changed, chance.randrange(10, 60), whole)
            except RuntimeError as error:
                note = str(error)
                break
        counts = {each: total[each] for each in ("lost", "repeated", "changed")}
        results[case] = {"kills": kills, "samples": SAMPLES * kills, "note": note, **counts}
    return results


def after_a_kill(
    resumer: Resumer, folder: Path, changed: dict[str, Any], batches: int, whole: list[list[int]]
) -> Counter[str]:
    """Kill one loader, go on with another, and count what differs from a whole epoch."""
    setting = Setting(folder=folder)
    before = run(resumer, setting, None, batches)
    state = pickle.loads((folder / "state").read_bytes())
    setting = replace(setting, **changed)
    ranks = [run(resumer, replace(setting, rank=rank), state)
             for rank in range(setting.world_size)]  # fmt: skip
    together = chain.from_iterable(zip_longest(*ranks, fillvalue=[]))
    seen = [*chain(*before), *chain(*together)]
    expected = list(chain(*whole))
    counts = Counter(seen)
    lost = len(set(expected) - counts.keys())
    repeated = sum(counts.values()) - len(counts)
    moved = sum(a != b for a, b in zip(seen, expected, strict=False))
    return Counter(lost=lost, repeated=repeated, changed=0 if lost or repeated else moved)


def run(resumer: Resumer, setting: Setting, state: Any, stop: int | None = None) -> list[list[int]]:
    """Return the batches of a process, which keeps its state and is killed at ``stop``."""
    kept, taken = setting.folder / "state", setting.folder / "taken"

    def take(inside: Inside) -> None:
        stream, batches = resumer(setting, state), []
        for batch in stream.batches:
            batches.append([int(sample) for sample in batch])
            if len(batches) == stop:
                kept.write_bytes(pickle.dumps(stream.state()))
                taken.write_bytes(pickle.dumps(batches))
                os.kill(os.getpid(), signal.SIGKILL)
        taken.write_bytes(pickle.dumps(batches))

    taken.unlink(missing_ok=True)
    problems = ask(take, 120.0)
    if not taken.exists():
        raise RuntimeError((problems or ["it died"])[-1].removeprefix("raised ")[:120])
    found: list[list[int]] = pickle.loads(taken.read_bytes())
    return found
