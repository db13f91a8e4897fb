"""Whole checkpoints: ours, PyTorch's loaders and those of safetensors, and the limits of both."""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from npydata import load_checkpoint, open_checkpoint
from npydata.bench.baselines import OURS, baseline
from npydata.bench.baselines.limits import COPY
from npydata.bench.states import State
from npydata.checkpointer.staging import StagingBuffer
from npydata.reader.parallel_read import page_end
from npydata.reader.private_memory import Bytes
from npydata.system.huge_pages import huge_memory

OURS_MAPPED, OURS_VERIFIED = "ours, mapped", "ours, verified"
TORCH, MAPPED, LOAD_FILE = "torch.load + copy", "torch.load(mmap=True) + copy", "load_file + copy"
PREAD, DCP_LOAD = 'safe_open(backend="pread") + copy', "dcp.load"
DIRECT_READ = "direct sequential read"
NEW, INTO = "new memory", "into a model"
BOTH = {NEW: {"into": False}, INTO: {"into": True}}
INTO_ONLY = {INTO: {"into": True}}
PIECE_BYTES = 1 << 24


@baseline("load safetensors, load zip, load legacy", OURS, "ours", settings=BOTH)
def our_load(path: Path, model: State, *, into: bool, verify: bool = False) -> State:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.load(into=model if into else None, verify=verify)


@baseline("load safetensors", OURS_VERIFIED, "ours", settings=BOTH)
def our_verified_load(path: Path, model: State, *, into: bool) -> State:
    """Compare with the checksums of a record on the way."""
    return our_load(path, model, into=into, verify=True)


@baseline("load safetensors, load zip", OURS_MAPPED, "ours", settings=BOTH)
def our_maps(path: Path, model: State, *, into: bool) -> State:
    """Map every tensor: what one does whose file is in memory, and stays as it is."""
    with open_checkpoint(path) as checkpoint:
        return copied(dict(checkpoint), model, into)


@baseline("load folder", OURS, "ours", settings=BOTH)
def our_checkpoint(path: Path, model: State, *, into: bool, verify: bool = False) -> State:
    return load_checkpoint(path, mmap=False, into=[model] if into else [], verify=verify)[0]


@baseline("load folder", OURS_VERIFIED, "ours", settings=BOTH)
def our_verified_checkpoint(path: Path, model: State, *, into: bool) -> State:
    return our_checkpoint(path, model, into=into, verify=True)


def copied(loaded: State, model: State, into: bool) -> State:
    """Do what ``load_state_dict`` does with tensors, or else touch what may be a map."""
    for name, tensor in loaded.items():
        if into:
            model[name].copy_(tensor)
        else:
            int(tensor.view(torch.uint8).view(-1)[:: mmap.PAGESIZE].sum())
    return loaded


@baseline("load zip", MAPPED, "peer", settings={NEW: {"into": False, "mmap": True},
                                                INTO: {"into": True, "mmap": True}})  # fmt: skip
@baseline("load zip, load legacy", TORCH, "naive", settings=BOTH)
def torch_load(path: Path, model: State, *, into: bool, mmap: bool = False) -> State:
    return copied(torch.load(path, weights_only=True, mmap=mmap), model, into)


@baseline("load safetensors", LOAD_FILE, "peer", settings=BOTH)
def loaded_file(path: Path, model: State, *, into: bool) -> State:
    return copied(load_file(path), model, into)


@baseline("load safetensors", PREAD, "peer", settings=BOTH)
def pread(path: Path, model: State, *, into: bool) -> State:
    with safe_open(path, "pt", backend="pread") as file:
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return copied(loaded, model, into)


@baseline("load folder", DCP_LOAD, "peer", settings=INTO_ONLY)
def dcp_load(path: Path, model: State, *, into: bool) -> State:
    """Load what ``dcp.save`` wrote beside ours."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(model, checkpoint_id=path.with_name("dcp"))
    return model


@baseline("load limit cold", DIRECT_READ, "limit", settings=BOTH)
def direct_read(path: Path, *, into: bool) -> Callable[[], object]:
    """Return a read of a file past the page cache, to memory that is there, or to new memory.

    Its pages are huge: of small ones, which lie apart, a request to a device holds only some 250.
    It is as large as the file: a few MiB again and again would stay in the processor's cache.
    """
    size = path.stat().st_size
    there = StagingBuffer().reserve(page_end(size), touch=True).numpy() if into else None

    def read() -> Bytes:
        memory = huge_memory(page_end(size)) if there is None else there
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            for begin in range(0, size, PIECE_BYTES):
                os.preadv(descriptor, [memory[begin : begin + PIECE_BYTES].data], begin)
        finally:
            os.close(descriptor)
        return memory

    return read


@baseline("load limit warm", COPY, "limit", settings=BOTH)
def memory_copy(path: Path, *, into: bool) -> Callable[[], object]:
    """Return a copy of as many bytes as a file has: to memory that is there, or to new memory."""
    source = np.ones(path.stat().st_size, np.uint8)
    return partial(np.copyto, source.copy(), source) if into else source.copy
