"""What is in the checkpoints that the benches read and write, and what saves them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from npydata.bench.measure import MIB
from npydata.bench.tokens import random_tokens

State = dict[str, torch.Tensor]

TENSOR_BYTES = 16 * MIB
SHARDED, REPLICATED = "sharded", "replicated"

ZIP, LEGACY, SAFETENSORS = "zip", "legacy", "safetensors"
FORMATS: dict[str, tuple[str, Callable[[State, Path], Any]]] = {
    ZIP: ("zip.pt", torch.save),
    LEGACY: ("legacy.pt", partial(torch.save, _use_new_zipfile_serialization=False)),
    SAFETENSORS: ("model.safetensors", save_file),
}
"""The name of a file of each format, and how people write it."""

COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
"""A tensor has 1,024 columns of float32; its first rows are the slice that is read."""

SLICE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """One way of saving a state, again and again."""

    save: Callable[[Path], object]
    """Saves into a new folder; training goes on when it returns."""
    finish: Callable[[Path], object] = lambda folder: None
    """Waits until the disk has everything that was saved there."""
    close: Callable[[], object] = lambda: None
    """Gives back what it holds."""
    holds: Any = None
    """What must live as long as the saver does."""


def make_state(nbytes: int, tensor_bytes: int = TENSOR_BYTES) -> State:
    """Return parameters of so many bytes in all, in tensors of a layer's size."""
    shape = (tensor_bytes // ROW_BYTES, COLUMNS)
    return {
        name_of(k): torch.nn.Parameter(torch.randn(shape))
        for k in range(max(1, nbytes // tensor_bytes))
    }


def distributed_state(case: str, nbytes: int, tensor_bytes: int) -> State:
    """Return parameters of so many bytes in all: spread over the ranks, or the same on each."""
    torch.manual_seed(0)
    if case == REPLICATED:
        return make_state(nbytes, tensor_bytes)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: State = {}
    for k in range(max(1, nbytes // tensor_bytes)):
        tensor = empty((tensor_bytes // ROW_BYTES, COLUMNS), device_mesh=mesh,
                       placements=[Shard(0)])  # fmt: skip
        tensor.to_local().normal_()
        state[name_of(k)] = torch.nn.Parameter(tensor)
    return state


def mapped_state(path: Path, nbytes: int, count: int) -> State:
    """Return a file's bytes as ``count`` float32 tensors of ``nbytes`` each, none in memory."""
    shape = (nbytes // ROW_BYTES, COLUMNS)
    return {
        name_of(k): torch.from_numpy(np.memmap(path, np.float32, "c", k * nbytes, shape))
        for k in range(count)
    }


def tiny_state(count: int) -> State:
    return {name_of(k): torch.full((16,), float(k)) for k in range(count)}


def name_of(number: int) -> str:
    return f"model.layers.{number}.weight"


def make_random(path: Path, nbytes: int) -> Path:
    """Write random bytes, which no disk can compress."""
    with path.open("wb") as file:
        for chunk in random_tokens(nbytes // 2, "making tensors"):
            file.write(chunk.data)
    return path


def write_as(format: str, state: State, folder: Path) -> Path:
    name, writer = FORMATS[format]
    writer(state, folder / name)
    return folder / name
