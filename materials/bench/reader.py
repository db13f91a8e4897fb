"""One tensor from a large checkpoint, and a checkpoint converted.

A checkpoint of equal tensors is made in each format. One tensor in its middle is read, opening the
file included and every page touched, by us and by the others, in turn. Then the memory that takes,
a few rows instead of a tensor, opening a file of very many tensors, and converting.

    python materials/bench/reader.py --quick
"""

import os
import shutil
import sys
from functools import cache, partial

import numpy as np
import torch
from disk import PAGE, make_cold, make_warm
from harness import (
    MIB,
    SHARE,
    Bench,
    Target,
    limit,
    main,
    milliseconds,
    naive,
    ours,
    peak_memory,
    peer,
)
from model_states import FORMATS, name_of, plain_state, tiny_state, write_as
from safetensors import safe_open

from npydata import open_checkpoint

SLICE_ROWS = 64


def our_tensor(path, name):
    with open_checkpoint(path) as checkpoint:
        return checkpoint[name]


def our_slice(path, name):
    with open_checkpoint(path) as checkpoint:
        return checkpoint.get_slice(name)[:SLICE_ROWS]


def our_open(path):
    open_checkpoint(path).close()


def convert(path, out):
    with open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(out)


def safe_tensor(path, name):
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def safe_slice(path, name):
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[:SLICE_ROWS]


def safe_opened(path):
    with safe_open(path, "pt"):
        pass


def torch_tensor(path, name, *, mmap=False):
    """Read or map everything and keep one tensor."""
    return torch.load(path, weights_only=True, mmap=mmap)[name]


def raw_read(path, name):
    """Do the least that a reader does who copies: read bytes whose place is known."""
    offset, nbytes = span_of(path, name)
    memory = np.empty(nbytes, np.uint8)
    with open(path, "rb", buffering=0) as file:
        os.preadv(file.fileno(), [memory.data], offset)
    return torch.from_numpy(memory)


@cache
def span_of(path, name):
    with open_checkpoint(path) as checkpoint:
        info = checkpoint.info(name)
    return info.file_offset, info.nbytes


def copied(path, out):
    """Copy a file as ``cp`` does, and wait until it is on the disk."""
    shutil.copyfile(path, out)
    with out.open("rb") as file:
        os.fsync(file.fileno())


MMAP = "torch.load(mmap=True)"
WAYS = [
    ("zip legacy safetensors", ours, "ours", our_tensor, {}),
    ("zip", peer, MMAP, torch_tensor, {"mmap": True}),
    ("zip legacy", naive, "torch.load", torch_tensor, {}),
    ("safetensors", peer, "safe_open", safe_tensor, {}),
    ("zip legacy safetensors", limit, "raw read", raw_read, {}),
]
ONE_TENSOR = [(kind, *way) for kind in FORMATS for kinds, *way in WAYS if kind in kinds]
ROWS = [
    *(role(kind, name, kind, work, **options) for kind, role, name, work, options in ONE_TENSOR),
    *(role("memory", name, kind, work, **options)
      for kind, role, name, work, options in ONE_TENSOR if role is not limit),
    *(ours("memory", "to_safetensors", kind, convert) for kind in ("zip", "legacy")),
    *(ours("slice", "ours", kind, our_slice) for kind in FORMATS),
    peer("slice", "safe_open", "safetensors", safe_slice),
    *(ours("many", "ours", kind, our_open) for kind in FORMATS),
    peer("many", "safe_open", "safetensors", safe_opened),
    peer("many", MMAP, "zip", torch.load, weights_only=True, mmap=True),
    naive("many", "torch.load", "legacy", torch.load, weights_only=True),
    *(row for kind in ("zip", "legacy") for row in (
        ours("convert", "to_safetensors", kind, convert),
        peer("convert", "copy + fsync", kind, copied))),
]  # fmt: skip
TARGETS = [
    *(Target(f"{kind}, {cache}: ours is {{}} as fast as {other}", f"{kind} {cache} | ours",
             f"{kind} {cache} | {other}", times)
      for kind, other, times in (("legacy", "torch.load", 25), ("zip", MMAP, 1),
                                 ("safetensors", "safe_open", 0.7))
      for cache in ("cold", "warm")),
    *(Target(f"{kind}: ours takes {{}} MiB of memory", f"memory | ours | {kind}",
             at_most=32, style="{:.1f}") for kind in FORMATS),
    *(Target(f"{kind}: converting reaches {{}} of a copy with fsync",
             f"convert | to_safetensors | {kind}", f"convert | copy* | {kind}", 0.7, style=SHARE)
      for kind in ("zip", "legacy")),
    *(Target(f"{kind}: converting takes {{}} MiB of memory", f"memory | to_safetensors | {kind}",
             at_most=80, style="{:.1f}") for kind in ("zip", "legacy")),
]  # fmt: skip


def prepare(args):
    """Make every checkpoint; the disk has them before anything is timed."""
    each = args.tensor_mb * MIB
    states = {
        "one": plain_state(args.size_mb * MIB, each),
        "tiny": tiny_state(args.tiny),
        "converted": plain_state(args.convert_mb * MIB, each),
    }
    for name, state in states.items():
        (args.folder / name).mkdir()
        for kind in FORMATS:
            make_cold(write_as(kind, state, args.folder / name))
    args.tensor = name_of(args.size_mb // args.tensor_mb // 2)


def turn(row, args):
    section, kind = row.section, row.setting
    folder = {"many": "tiny", "convert": "converted"}.get(section, "one")
    path = args.folder / folder / FORMATS[kind][0]
    out = path.with_name("out.safetensors")
    if section == "many":
        return {"many": repeated(lambda: row.work(path, **row.options))}
    if section == "convert":
        make_warm(path)
        took = milliseconds(lambda: row.work(path, out))
        out.unlink()
        return {"convert": path.stat().st_size / took / 1e3}
    if row.work is convert:
        return {"memory": peak_memory(partial, convert, path, out)}
    read = partial(read_one, row.work, path, args.tensor, row.options)
    if section == "memory":
        make_warm(path)
        return {"memory": peak_memory(partial, read)}
    if section == "slice":
        make_cold(path)
        return {"slice": milliseconds(read)}
    check(read(), path, args.tensor)
    make_warm(path)
    warm = repeated(read)
    make_cold(path)
    return {f"{kind} warm": warm, f"{kind} cold": milliseconds(read)}


def read_one(work, path, name, options):
    """Read a tensor, and look at one byte of each of its pages."""
    tensor = work(path, name, **options)
    int(tensor.view(torch.uint8).flatten()[::PAGE].sum())
    return tensor


def check(tensor, path, name):
    """Refuse to time a reader that reads something else."""
    right = raw_read(path, name)
    assert torch.equal(tensor.view(torch.uint8).flatten(), right), f"{path.name}: wrong bytes"


def repeated(work):
    """Return the mean milliseconds of work that is done again for a tenth of a second."""
    took = [milliseconds(work)]
    while sum(took) < 100:
        took.append(milliseconds(work))
    return sum(took) / len(took)


BENCH = Bench(
    name="reader",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    prepare=prepare,
    turn=turn,
    rounds={"memory": 0},
    options={
        "size_mb": (1024, 128),
        "tensor_mb": (16, 4),
        "tiny": (10_000, 1000),
        "convert_mb": (2048, 256),
    },
    groups={
        **{
            f"{kind} {cache}": (f"One tensor, {kind}, file {where}", "ms")
            for kind in FORMATS
            for cache, where in (("warm", "in memory"), ("cold", "on the disk"))
        },
        "memory": ("Memory that it takes, at the peak", "MiB"),
        "slice": (f"{SLICE_ROWS} rows of the tensor, file on the disk", "ms"),
        "many": ("Opening a file of very many tensors", "ms"),
        "convert": ("A checkpoint in memory to safetensors on the disk", "MB/s"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
