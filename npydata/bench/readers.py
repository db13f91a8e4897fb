"""The ways of reading a checkpoint that ``npydata bench reader`` compares.

Each way opens a file and returns one tensor of it: ours, torch's loader, the same with a map, and
the safetensors library. A tensor counts as read when each of its pages was touched. What a way
costs in memory is measured in a process of its own, for which this module has a second entry.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from npydata.bench.reader_files import LEGACY, SAFETENSORS, ZIP
from npydata.bench.targets import OURS, SAFE_OPEN, TORCH_LOAD, TORCH_MMAP
from npydata.errors import NpyDataError
from npydata.lazy.checkpoint import open_checkpoint
from npydata.pages import PAGE_SIZE

SLICE_ROWS = 64

MIB = 1 << 20
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"

Way = Callable[[Path, str], torch.Tensor]


def ours(path: Path, name: str) -> torch.Tensor:
    """Read one tensor with this library."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint[name]


def torch_load(path: Path, name: str) -> torch.Tensor:
    """Read everything and keep one tensor: the standard loader."""
    tensor: torch.Tensor = torch.load(path, weights_only=True)[name]
    return tensor


def torch_mmap(path: Path, name: str) -> torch.Tensor:
    """Map the whole file; zip files only."""
    tensor: torch.Tensor = torch.load(path, weights_only=True, mmap=True)[name]
    return tensor


def with_safe_open(path: Path, name: str) -> torch.Tensor:
    """Read one tensor with the safetensors library."""
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def our_rows(path: Path, name: str) -> torch.Tensor:
    """Read the first rows of a tensor with this library."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.get_slice(name)[:SLICE_ROWS]


def safe_open_rows(path: Path, name: str) -> torch.Tensor:
    """Read the first rows of a tensor with the safetensors library."""
    with safe_open(path, "pt") as file:
        rows: torch.Tensor = file.get_slice(name)[:SLICE_ROWS]
    return rows


PEERS: dict[str, dict[str, Way]] = {
    ZIP: {OURS: ours, TORCH_MMAP: torch_mmap, TORCH_LOAD: torch_load},
    LEGACY: {OURS: ours, TORCH_LOAD: torch_load},
    SAFETENSORS: {OURS: ours, SAFE_OPEN: with_safe_open},
}
"""Who can read one tensor of a format, ours first."""


def open_ours(path: Path) -> None:
    """Open a checkpoint and learn of all its tensors."""
    open_checkpoint(path).close()


def open_safe(path: Path) -> None:
    """The same with the safetensors library."""
    with safe_open(path, "pt"):
        pass


OPENERS: dict[str, dict[str, Callable[[Path], object]]] = {
    ZIP: {OURS: open_ours, TORCH_MMAP: partial(torch.load, weights_only=True, mmap=True)},
    LEGACY: {OURS: open_ours, TORCH_LOAD: partial(torch.load, weights_only=True)},
    SAFETENSORS: {OURS: open_ours, SAFE_OPEN: open_safe},
}
"""Who can open a file of a format, ours first."""


def raw_read(offset: int, nbytes: int) -> Way:
    """Return the least that a reader does who copies: read the bytes, knowing where they are."""

    def way(path: Path, name: str) -> torch.Tensor:
        memory = np.empty(nbytes, np.uint8)
        with open(path, "rb", buffering=0) as file:
            os.preadv(file.fileno(), [memory.data], offset)
        return torch.from_numpy(memory).view(torch.float32)

    return way


def touch(tensor: torch.Tensor) -> int:
    """Look at one byte of each page of a tensor."""
    content = tensor.view(torch.uint8).flatten()
    return int(content[::PAGE_SIZE].sum()) + int(content[-1])


def extra_memory(what: str, *arguments: str | Path) -> tuple[float, float]:
    """Run one of ``TASKS`` in a process of its own; return MiB at the peak, and anonymous at last.

    Both are what came on top of the imported libraries. Pages of a file that are mapped count in
    the first: the kernel can take them back, but they are not free.
    """
    code = "import sys; from npydata.bench.readers import print_memory; print_memory(*sys.argv[1:])"
    command = [sys.executable, "-c", code, what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NpyDataError(f"measuring the memory of {what} failed: {last[0]}")
    peak, anonymous = json.loads(done.stdout)
    return peak / MIB, anonymous / MIB


def print_memory(what: str, *arguments: str) -> None:
    """Do one of ``TASKS`` in this process, and print the memory that it took in bytes."""
    touch(torch.zeros(PAGE_SIZE))  # torch's threads and buffers are there before we look
    CLEAR_REFS.write_text(RESET_PEAK)
    before = memory_counters()
    held = TASKS[what](*arguments)
    after = memory_counters()
    del held
    print(json.dumps([after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"]]))


def memory_counters() -> dict[str, int]:
    """Return what the kernel counts for this process: its resident memory, kinds and peak."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[-1] == "kB"}


def read_one(format: str, way: str, path: str, name: str) -> Any:
    """Read one tensor, each of its pages, and hold it."""
    tensor = PEERS[format][way](Path(path), name)
    touch(tensor)
    return tensor


def convert(path: str | Path, out: str | Path) -> None:
    """Convert a checkpoint to safetensors with this library."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(out)


TASKS: dict[str, Callable[..., Any]] = {"read": read_one, "convert": convert}
