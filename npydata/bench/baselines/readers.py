"""Checkpoint readers: ours, the safetensors library, PyTorch's own, and a raw read for a limit."""

import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from npydata import open_checkpoint
from npydata.bench.baselines import OURS, baseline
from npydata.bench.states import SLICE_ROWS

SAFE_OPEN = "safe_open"
TORCH_LOAD, TORCH_MMAP = "torch.load", "torch.load(mmap=True)"
MAPPED = {"": {"mmap": True}}
CONVERT, COPY_FILE = "to_safetensors", "copy + fsync"


@baseline("reader zip, reader legacy, reader safetensors", OURS, "ours")
def our_tensor(path: Path, name: str) -> torch.Tensor:
    with open_checkpoint(path) as checkpoint:
        return checkpoint[name]


@baseline("reader zip slice, reader legacy slice, reader safetensors slice", OURS, "ours")
def our_rows(path: Path, name: str) -> torch.Tensor:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.get_slice(name)[:SLICE_ROWS]


@baseline("reader zip open, reader legacy open, reader safetensors open", OURS, "ours")
def opened_by_ours(path: Path) -> None:
    open_checkpoint(path).close()


@baseline("reader convert", CONVERT, "ours")
def convert(path: Path, out: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(out)


@baseline("reader safetensors", SAFE_OPEN, "peer")
def safe_open_tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


@baseline("reader safetensors slice", SAFE_OPEN, "peer")
def safe_open_rows(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        rows: torch.Tensor = file.get_slice(name)[:SLICE_ROWS]
    return rows


@baseline("reader safetensors open", SAFE_OPEN, "peer")
def opened_by_safe_open(path: Path) -> None:
    with safe_open(path, "pt"):
        pass


@baseline("reader zip", TORCH_MMAP, "peer", settings=MAPPED)
@baseline("reader zip, reader legacy", TORCH_LOAD, "naive")
def torch_load_tensor(path: Path, name: str, *, mmap: bool = False) -> torch.Tensor:
    """Read or map everything and keep one tensor."""
    tensor: torch.Tensor = torch.load(path, weights_only=True, mmap=mmap)[name]
    return tensor


@baseline("reader zip open", TORCH_MMAP, "peer", settings=MAPPED)
@baseline("reader legacy open", TORCH_LOAD, "naive")
def opened_by_torch_load(path: Path, *, mmap: bool = False) -> None:
    """Open a checkpoint, which is to read or map all of it."""
    torch.load(path, weights_only=True, mmap=mmap)


@baseline("reader zip, reader legacy, reader safetensors", "raw read", "limit")
def raw_read(path: Path, name: str) -> torch.Tensor:
    """Do the least that a reader does who copies: read bytes whose place is known."""
    offset, nbytes = span_of(path, name)
    memory = np.empty(nbytes, np.uint8)
    with open(path, "rb", buffering=0) as file:
        os.preadv(file.fileno(), [memory.data], offset)
    return torch.from_numpy(memory).view(torch.float32)


@cache
def span_of(path: Path, name: str) -> tuple[int, int]:
    """Return where a tensor's bytes begin in a file, and how many they are."""
    with open_checkpoint(path) as opened:
        info = opened.info(name)
    assert info.file_offset is not None
    return info.file_offset, info.nbytes


@baseline("reader convert", COPY_FILE, "peer")
def copy_file(path: Path, out: Path) -> None:
    """Copy a file as ``cp`` does, and wait until the disk has it."""
    shutil.copyfile(path, out)
    with out.open("rb") as file:
        os.fsync(file.fileno())
