"""A fuzzer that looks for short files that cost much: CPU seconds and bytes of memory per byte.

A file is a recipe of ``attacks/recipes.py`` and a container. Each climb starts at a random one and
keeps whatever change costs more: the dearest of opening and reading everything, opening and
inspecting, opening and converting. A file can be tried by itself::

    python tests/builders/fuzz_cost.py --seed 7 --climbs 20 --steps 40
    python tests/builders/fuzz_cost.py --file '["list", 60000, "named", 30000, "zip"]'

``--counted`` measures calls in place of seconds, and what Python holds in place of what the system
gave: the same climb each time, wherever it runs, and blind to what a single call of C does.
"""

import argparse
import cProfile
import gc
import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attacks.containers import FORMS
from attacks.recipes import AGAIN, SAID, recipe_program
from checkpoint_files import safetensors_file
from checkpoint_reading import read_everything
from fuzz_agreement import zipped_again
from fuzz_checkpoints import peak_mebibytes

from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import inspect_checkpoint

SMALL_KIB = 4
"""A shorter file counts as one of this size: to open any takes a millisecond or two."""
Recipe = list[Any]
"""What is said once, how much of it, what is done with it, how often, and the container."""
Cost = tuple[float, float]
"""Seconds, or calls; and MiB."""


def in_zip_again(code: bytes, folder: Path) -> Path:
    """A zip file with compressed records."""
    path = folder / "again.pt"
    path.write_bytes(zipped_again(FORMS["zip"](lambda: code, folder)))
    return path


def in_safetensors(code: bytes, folder: Path) -> Path:
    """A header of as many tensors of no bytes."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {str(k): entry for k in range(len(code) // 60)} | {"__metadata__": {"a": "\0" * 1000}}
    return safetensors_file(folder / "a.safetensors", header, b"")


CONTAINERS: dict[str, Callable[[bytes, Path], Path]] = {
    **{title: (lambda code, folder, wrap=wrap: wrap(lambda: code, folder))
       for title, wrap in FORMS.items()},
    "again": in_zip_again,
    "safetensors": in_safetensors,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--climbs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--file", type=json.loads, help="try this one by itself")
    parser.add_argument("--counted", action="store_true", help="calls, not seconds")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    limits = COUNTED if chosen.counted else MEASURED
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        warm(folder)
        if chosen.file:
            print(json.dumps(tried(chosen.file, folder, limits)))
        else:
            print(json.dumps(fuzz(chosen.seed, chosen.climbs, chosen.steps, folder, limits)))


def uses(path: Path, out: Path) -> list[Callable[[], object]]:
    """Opening a file and reading all of it, inspecting it, converting it."""
    return [partial(read_everything, path), partial(inspected, path), partial(converted, path, out)]


def used(uses: list[Callable[[], object]]) -> None:
    """Use a file, unless it is refused."""
    for use in uses:
        with suppress(CheckpointError):
            use()


def inspected(path: Path) -> None:
    report = inspect_checkpoint(path)
    report.to_table()
    report.to_json()


def converted(path: Path, out: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(out)


def measured(path: Path, out: Path) -> Cost:
    """CPU seconds and MiB of what takes most of them to do with a file."""
    costs = []
    for use in uses(path, out):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, begin = peak_mebibytes(), time.process_time()
        used([use])
        costs.append((time.process_time() - begin, peak_mebibytes() - before))
    return max(seconds for seconds, _ in costs), max(mebibytes for _, mebibytes in costs)


def counted(path: Path, out: Path) -> Cost:
    """Calls, those of C included, and MiB that Python holds, for doing everything once."""
    profile = cProfile.Profile()
    gc.collect()
    tracemalloc.start()
    try:
        profile.runcall(used, uses(path, out))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return sum(one.callcount for one in profile.getstats()), peak / 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a file may cost."""

    cost: Callable[[Path, Path], Cost]
    per_kib: Cost
    most: Cost
    """However large the file is."""
    most_bytes: int
    """Larger files are not tried."""
    most_times: int
    """How large the numbers in a recipe may be."""

    def of(self, nbytes: int) -> Cost:
        """Return what a file of this size may cost."""
        kibibytes = max(SMALL_KIB, nbytes / 1024)
        return (min(self.most[0], self.per_kib[0] * kibibytes),
                min(self.most[1], self.per_kib[1] * kibibytes))  # fmt: skip


MEASURED = Limits(
    cost=measured, per_kib=(0.020, 1.0), most=(2.0, 256.0), most_bytes=1 << 20, most_times=1 << 20
)
COUNTED = Limits(
    cost=counted,
    per_kib=(250_000, 1.0),
    most=(2.5e7, 256.0),
    most_bytes=1 << 14,
    most_times=1 << 12,
)
"""Without being counted a call takes 0.04 to 0.1 microseconds: so many of them in 20 ms."""


def fuzz(seed: int, climbs: int, steps: int, folder: Path, limits: Limits) -> dict[str, Any]:
    """The dearest file of each climb, and those that cost more than is allowed."""
    tops = []
    for climb in range(climbs):
        dice = random.Random(f"cost/{seed}/{climb}")
        best = tried(random_recipe(dice, limits), folder, limits)
        for _ in range(steps):
            other = tried(changed(dice, best["file"], limits), folder, limits)
            best = max(best, other, key=lambda one: one["share"])
        print(json.dumps(best), file=sys.stderr, flush=True)
        tops.append(best)
    tops.sort(key=lambda one: -one["share"])
    return {"seed": seed, "tried": climbs * (steps + 1), "worst": tops[:3],
            "failures": [one for one in tops if one["share"] > 1]}  # fmt: skip


def random_recipe(dice: random.Random, limits: Limits) -> Recipe:
    return [dice.choice(sorted(SAID)), magnitude(dice, limits), dice.choice(sorted(AGAIN)),
            magnitude(dice, limits), dice.choice(sorted(CONTAINERS))]  # fmt: skip


def magnitude(dice: random.Random, limits: Limits) -> int:
    return int(limits.most_times ** dice.random())


def changed(dice: random.Random, recipe: Recipe, limits: Limits) -> Recipe:
    """A recipe that differs in one thing."""
    other, place = list(recipe), dice.randrange(len(recipe))
    if place in (1, 3):
        other[place] = max(1, int(recipe[place] * 2 ** dice.uniform(-2, 2)))
    else:
        other[place] = random_recipe(dice, limits)[place]
    return other


def tried(recipe: Recipe, folder: Path, limits: Limits) -> dict[str, Any]:
    """What a recipe's file costs, and the larger share of what it may cost."""
    *what, container = recipe
    path = CONTAINERS[container](recipe_program(*what), folder)
    if (nbytes := path.stat().st_size) > limits.most_bytes:
        return {"file": recipe, "share": 0, "nbytes": nbytes}
    most = limits.of(nbytes)
    work, mebibytes = limits.cost(path, folder / "out.safetensors")
    share = max(work / most[0], mebibytes / most[1])
    return {"file": recipe, "share": round(share, 3), "nbytes": nbytes,
            "work": round(work, 3), "mebibytes": round(mebibytes, 1)}  # fmt: skip


def warm(folder: Path) -> None:
    """Use a file of each kind, so that imports are nobody's cost."""
    for container in CONTAINERS:
        tried(["tensor", 1, "listed", 2, container], folder, MEASURED)


if __name__ == "__main__":
    main()
