"""A fuzzer that looks for short files that cost much: CPU seconds and bytes of memory per byte.

A file is a recipe: a value that is said once, what is done with it again and again, how often, and
the container. Each climb starts at a random recipe and keeps whatever change costs more, measured
over opening, reading everything, inspecting and converting. A recipe can be tried by itself::

    python tests/fuzz_cost.py --seed 7 --climbs 20 --steps 40
    python tests/fuzz_cost.py --recipe '["list", 60000, "named", 30000, "zip"]'
"""

import argparse
import gc
import io
import json
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attacks.containers import FORMS
from checkpoint_files import safetensors_file
from checkpoint_reading import read_everything
from fuzz_checkpoints import peak_mebibytes
from pickle_code import (
    ADDITEMS,
    APPENDS,
    BUILD,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    MARK,
    NONE,
    POP,
    SETITEM,
    SETITEMS,
    Code,
    build,
    bytes8,
    call,
    get,
    integer,
    name,
    program,
    put,
    storage,
    tensor,
    unicode,
    value,
)

from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import inspect_checkpoint

SECONDS_PER_KIB, MOST_SECONDS = 0.020, 2.0
MEBIBYTES_PER_KIB, MOST_MEBIBYTES = 1, 256
MOST_BYTES = 1 << 20
SMALL_KIB = 4
"""A shorter file counts as one of this size: to open any takes a millisecond or two."""
Recipe = list[Any]
"""What is said once, how much of it, what is done with it, how often, and the container."""


def numbers(count: int) -> bytes:
    return b"".join(integer(number) for number in range(count))


F4 = build(call(name("numpy", "dtype"), "f4", False, True), (3, "<", None, None, None, -1, -1, 0))
SAID: dict[str, Callable[[int], bytes]] = {
    "list": lambda n: EMPTY_LIST + MARK + b"K\1" * n + APPENDS,
    "tuple": lambda n: MARK + b"K\1" * n + b"t",
    "set": lambda n: EMPTY_SET + MARK + numbers(n) + ADDITEMS,
    "dict": lambda n: EMPTY_DICT + MARK + b"".join(integer(k) + NONE for k in range(n)) + SETITEMS,
    "text": lambda n: unicode("x" * n),
    "controls": lambda n: unicode("\0" * n),
    "bytes": lambda n: bytes8(b"x" * n),
    "tensor": lambda n: tensor(storage("0", 4), 0, (4,) * min(n % 20, 1) or (4,)),
    "deep": lambda n: EMPTY_LIST * min(n, 190) + b"a" * (min(n, 190) - 1),
    "names": lambda n: EMPTY_DICT + MARK + b"".join(
        unicode(f"{k}") + NONE for k in range(n)) + SETITEMS,
    "opaque": lambda n: call(name("made.up", "f")) + value({"a" * min(n, 200): 1}) + BUILD,
    "array": lambda n: build(
        call(name("numpy._core.multiarray", "_reconstruct"), name("numpy", "ndarray"), (0,), b"b"),
        (1, (n,), F4, False, bytes(4 * n))),
}  # fmt: skip
CALLED = {"ordered": ("collections", "OrderedDict"), "counter": ("collections", "Counter"),
          "to_set": ("builtins", "set"), "size": ("torch", "Size"), "made_up": ("made.up", "f"),
          "device": ("torch", "device"), "parameter": ("torch.nn.parameter", "Parameter"),
          "bytearray": ("builtins", "bytearray"), "dtype": ("numpy", "dtype")}  # fmt: skip
AGAIN: dict[str, Callable[[int], bytes]] = {
    "listed": lambda n: EMPTY_LIST + MARK + get(0) * n + APPENDS,
    "named": lambda n: EMPTY_DICT + MARK + b"".join(
        integer(k) + get(0) for k in range(n)) + SETITEMS,
    "keys": lambda n: EMPTY_LIST + MARK + (EMPTY_DICT + get(0) + NONE + SETITEM) * n + APPENDS,
    "in_lists": lambda n: EMPTY_LIST + MARK + (EMPTY_LIST + get(0) + b"a") * n + APPENDS,
    "in_tuples": lambda n: EMPTY_LIST + MARK + (get(0) + get(0) + b"\x86") * n + APPENDS,
    "states": lambda n: EMPTY_LIST + MARK + (
        name("made.up", "f") + b")R" + get(0) + BUILD) * n + APPENDS,
    "popped": lambda n: (get(0) + POP) * n + get(0),
    "doubled": lambda n: get(0) + DUP * min(n, 60_000) + (b"\x86" * min(n, 60_000)),
    "tensors": lambda n: EMPTY_LIST + MARK + tensor() * n + APPENDS,
    "storages": lambda n: EMPTY_LIST + MARK + storage() * n + APPENDS,
    "chain": lambda n: name("made.up", "f") + b")R" * n,
    "marks": lambda n: MARK * n + b"1" * n + get(0),
    "sets": lambda n: EMPTY_LIST + MARK + EMPTY_SET * n + APPENDS,
    "module_names": lambda n: EMPTY_LIST + MARK + b"ca\nb\n" * n + APPENDS,
    **{title: (lambda n, path=path: EMPTY_LIST + MARK + put(name(*path), 1) + POP
               + (get(1) + get(0) + b"\x85R") * n + APPENDS)
       for title, path in CALLED.items()},
}  # fmt: skip


def zipped_again(code: bytes, folder: Path) -> Path:
    """A zip file with compressed records."""
    plain, path = FORMS["zip"](lambda: code, folder), folder / "again.pt"
    content = io.BytesIO()
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(content, "w", 8) as new:
        for one in old.namelist():
            new.writestr(one, old.read(one))
    path.write_bytes(content.getvalue())
    return path


def in_safetensors(code: bytes, folder: Path) -> Path:
    """A header of as many tensors of no bytes."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {str(k): entry for k in range(len(code) // 60)} | {"__metadata__": {"a": "\0" * 1000}}
    return safetensors_file(folder / "a.safetensors", header, b"")


CONTAINERS: dict[str, Callable[[bytes, Path], Path]] = {
    **{title: (lambda code, folder, wrap=wrap: wrap(lambda: code, folder))
       for title, wrap in FORMS.items()},
    "again": zipped_again,
    "safetensors": in_safetensors,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--climbs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", type=json.loads, help="try this one by itself")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        warm(Path(folder))
        if chosen.recipe:
            print(json.dumps(tried(chosen.recipe, Path(folder))))
        else:
            found = fuzz(chosen.seed, chosen.climbs, chosen.steps, Path(folder))
            print(json.dumps(found))


def fuzz(seed: int, climbs: int, steps: int, folder: Path) -> dict[str, Any]:
    """The dearest recipe of each climb, and those that cost more than is allowed."""
    tops = []
    for climb in range(climbs):
        dice = random.Random(f"cost/{seed}/{climb}")
        best = tried(random_recipe(dice), folder)
        for _ in range(steps):
            other = tried(changed(dice, best["recipe"]), folder)
            best = max(best, other, key=lambda one: one["share"])
        print(json.dumps(best), file=sys.stderr, flush=True)
        tops.append(best)
    tops.sort(key=lambda one: -one["share"])
    return {"tried": climbs * (steps + 1), "worst": tops[:3],
            "failures": [one for one in tops if one["share"] > 1]}  # fmt: skip


def random_recipe(dice: random.Random) -> Recipe:
    return [dice.choice(sorted(SAID)), magnitude(dice), dice.choice(sorted(AGAIN)),
            magnitude(dice), dice.choice(sorted(CONTAINERS))]  # fmt: skip


def magnitude(dice: random.Random) -> int:
    return int(2 ** dice.uniform(0, 18))


def changed(dice: random.Random, recipe: Recipe) -> Recipe:
    """A recipe that differs in one thing."""
    other, place = list(recipe), dice.randrange(len(recipe))
    if place in (1, 3):
        other[place] = max(1, int(recipe[place] * 2 ** dice.uniform(-2, 2)))
    else:
        other[place] = random_recipe(dice)[place]
    return other


def tried(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What a recipe's file costs, and the larger share of what it may cost."""
    said, size, again, times, container = recipe
    code = program(put(Code(SAID[said](size)), 0), POP, AGAIN[again](times))
    path = CONTAINERS[container](code, folder)
    nbytes = path.stat().st_size
    if nbytes > MOST_BYTES:
        return {"recipe": recipe, "share": 0, "nbytes": nbytes}
    kibibytes = max(SMALL_KIB, nbytes / 1024)
    seconds, mebibytes = cost(path, folder / "out.safetensors")
    most_seconds = min(MOST_SECONDS, SECONDS_PER_KIB * kibibytes)
    most_mebibytes = min(MOST_MEBIBYTES, MEBIBYTES_PER_KIB * kibibytes)
    share = max(seconds / most_seconds, mebibytes / most_mebibytes)
    return {"recipe": recipe, "share": round(share, 3), "nbytes": nbytes,
            "seconds": round(seconds, 3), "mebibytes": round(mebibytes, 1)}  # fmt: skip


def cost(path: Path, out: Path) -> tuple[float, float]:
    """CPU seconds and MiB that it takes to do everything with a file once."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = peak_mebibytes(), time.process_time()
    for use in (read_everything, inspect_checkpoint, lambda path: converted(path, out)):
        try:
            use(path)
        except CheckpointError:
            continue
    return time.process_time() - begin, peak_mebibytes() - before


def converted(path: Path, out: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(out)


def warm(folder: Path) -> None:
    """Read a file of each kind, so that imports are nobody's cost."""
    for container in CONTAINERS:
        tried(["tensor", 1, "listed", 2, container], folder)


if __name__ == "__main__":
    main()
