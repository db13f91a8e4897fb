"""A whole checkpoint, from the disk and from the page cache.

A checkpoint of equal tensors is made in each format, and read whole: into new memory, as a fresh
process does, and into the tensors of a model. Beside it stand the disk's own speed past the page
cache and a copy in memory, in the same turns. What is only mapped is touched or copied, so that in
the end everybody has the bytes.

    python materials/bench/load.py --quick
"""

import os
import sys
from ctypes import CDLL
from functools import cache, partial
from itertools import product

import numpy as np
import torch
from disk import PAGE, aligned_memory, direct_read, make_cold, make_warm
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
from model_states import FORMATS, plain_state, tiny_state, write_as
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_read
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from npydata import load_checkpoint, open_checkpoint, save_checkpoint

KINDS = (*FORMATS, "folder")
NEW, INTO = "new memory", "into a model"


def prepare(args):
    """Write every checkpoint but our folders, which each npydata writes for itself."""
    state = plain_state(args.size_mb * MIB, args.tensor_kb << 10)
    for kind in FORMATS:
        write_as(kind, state, args.folder)
    dcp_save(state, checkpoint_id=args.folder / "dcp")
    torch.save(tiny_state(args.tiny), args.folder / "tiny.pt")


def our_folder(name, args):
    path = args.folder / f"{name}-{os.getpid()}"
    if not path.exists():
        small = name == "tiny"
        state = tiny_state(args.tiny) if small else model_of(args.size_mb, args.tensor_kb)
        save_checkpoint(path, state)
    return path


@cache
def model_of(size_mb, tensor_kb):
    """Return the tensors of a model, all of them touched."""
    return plain_state(size_mb * MIB, tensor_kb << 10)


def our_load(path, model, *, into):
    with open_checkpoint(path) as checkpoint:
        return checkpoint.load(into=model if into else None)


def our_maps(path, model, *, into):
    """Map every tensor: what one does whose file is in memory, and stays as it is."""
    with open_checkpoint(path) as checkpoint:
        return copied(dict(checkpoint), model, into)


def load_folder(path, model, *, into, verify=False):
    return load_checkpoint(path, mmap=False, into=model if into else None, verify=verify)[0]


def copied(loaded, model, into):
    """Do what ``load_state_dict`` does with tensors, or else touch what may be a map."""
    for name, tensor in loaded.items():
        if into:
            model[name].copy_(tensor)
        else:
            int(tensor.view(torch.uint8).view(-1)[::PAGE].sum())
    return loaded


def torch_load(path, model, *, into, mmap=False):
    return copied(torch.load(path, mmap=mmap), model, into)


def safe_load(path, model, *, into):
    return copied(load_file(path), model, into)


def safe_pread(path, model, *, into):
    with safe_open(path, "pt", backend="pread") as file:
        return copied({name: file.get_tensor(name) for name in file.keys()}, model, into)  # noqa: SIM118


def dcp_load(path, model, *, into):
    """Load what ``dcp.save`` wrote beside ours."""
    dcp_read(model, checkpoint_id=path.with_name("dcp"))
    return model


@cache
def memory_for(nbytes, which=0):
    return aligned_memory(nbytes)


def direct(path, model, *, into):
    """Read the file past the page cache, to memory that is there or to new memory."""
    make = memory_for if into else aligned_memory
    return direct_read(path, make(path.stat().st_size))


def memory_copy(path, model, *, into):
    """Copy as many bytes as the file has, to memory that is there or to new memory."""
    source = memory_for(path.stat().st_size, 1)
    return np.copyto(memory_for(len(source)), source) if into else source.copy()


def tiny_torch(path):
    return torch.load(path.with_name("tiny.pt"))


WAYS = [
    ("zip legacy safetensors", ours, "ours", our_load, {}),
    ("zip safetensors", ours, "ours, mapped", our_maps, {}),
    ("folder", ours, "ours", load_folder, {}),
    ("folder", ours, "ours, verified", load_folder, {"verify": True}),
    ("zip", peer, "torch.load(mmap=True) + copy", torch_load, {"mmap": True}),
    ("zip legacy", naive, "torch.load + copy", torch_load, {}),
    ("safetensors", peer, "load_file + copy", safe_load, {}),
    ("safetensors", peer, 'safe_open(backend="pread") + copy', safe_pread, {}),
    ("folder", peer, "dcp.load", dcp_load, {}),
]
LIMITS = {"cold": ("direct sequential read", direct), "warm": ("memory copy", memory_copy)}
ROWS = [
    *(row for kind, heat in product(KINDS, LIMITS) for row in (
        *(role(f"{kind} {heat}", name, setting, work, into=setting == INTO, **options)
          for kinds, role, name, work, options in WAYS if kind in kinds
          for setting in ((INTO,) if work is dcp_load else (NEW, INTO))),
        *(limit(f"{kind} {heat}", LIMITS[heat][0], setting, LIMITS[heat][1], into=setting == INTO)
          for setting in (NEW, INTO)))),
    ours("tiny", "ours", "a folder", load_checkpoint),
    naive("tiny", "torch.load", "a zip file", tiny_torch),
    *(ours("memory", "ours", kind, load_folder if kind == "folder" else our_load, into=False)
      for kind in KINDS),
]  # fmt: skip
STOCK = {**dict.fromkeys(FORMATS, "*+ copy"), "folder": "dcp.load"}
TARGETS = [
    *(Target(f"{kind} {heat}, {setting}: ours is {{}} the best stock reader",
             f"{kind} {heat} | ours* | {setting}", f"{kind} {heat} | {STOCK[kind]} | {setting}",
             1 if heat == "cold" else 0.9)
      for kind, heat, setting in product(KINDS, LIMITS, (NEW, INTO))
      if setting == INTO or kind in FORMATS),
    *(Target(f"folder cold, {setting}: verifying on the way adds {{}} to the time",
             f"folder cold | ours, verified | {setting}", f"folder cold | ours | {setting}",
             at_most=0.1, style=SHARE, extra=True) for setting in (NEW, INTO)),
    Target("very many tiny tensors: ours takes {} of torch.load's time", "tiny | ours",
           "tiny | torch.load", at_most=0.5),
]  # fmt: skip


def turn(row, args):
    kind, _, heat = row.section.partition(" ")
    if kind == "memory":
        kind = row.setting
    path = our_folder(kind, args) if kind in ("folder", "tiny") else args.folder / FORMATS[kind][0]
    if row.section == "memory":
        return {"memory": peak_memory(partial, partial(row.work, into=False), path, {})}
    if kind == "tiny":
        return {"tiny": milliseconds(lambda: row.work(path))}
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *args.folder.glob("dcp/*")]
    for one in files:
        (make_cold if heat == "cold" else make_warm)(one)
    if not (into := row.options["into"]):
        # A virtual machine gets some memory from its host only when it is first touched, at a
        # speed that is neither the loader's nor the disk's. And a fresh process has no memory left
        # from the last turn.
        aligned_memory(files[0].stat().st_size)
        CDLL(None).malloc_trim(0)
    model = model_of(args.size_mb, args.tensor_kb) if into else {}
    source = files[0] if row.role == "limit" else path
    took = milliseconds(lambda: row.work(source, model, **row.options))
    return {row.section: args.size_mb * MIB / took / 1e3}


BENCH = Bench(
    name="load",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    prepare=prepare,
    turn=turn,
    options={"size_mb": (1024, 128), "tensor_kb": 16 << 10, "tiny": (100_000, 5_000)},
    rounds={"memory": 0},
    groups={
        **{
            f"{kind} {heat}": (f"A whole checkpoint, {kind}, {where}", "MB/s")
            for kind in KINDS
            for heat, where in (("cold", "on the disk"), ("warm", "in memory"))
        },
        "tiny": ("Very many tiny tensors", "ms"),
        "memory": ("Memory that it takes, at the peak", "MiB"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
