"""What is in the checkpoints that the tables read and write."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import MIB
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
FORMATS = {
    "zip": ("zip.pt", torch.save),
    "legacy": ("legacy.pt", partial(torch.save, _use_new_zipfile_serialization=False)),
    "safetensors": ("model.safetensors", save_file),
}
"""The name of a file of each format, and how people write it."""
COLUMNS = 1024
LAYER = 16 * MIB
"""Bytes of a tensor: a layer's size."""


def name_of(number: int) -> str:
    return f"model.layers.{number}.weight"


def make_state(nbytes: int, each: int = LAYER, device: str | torch.device = "cpu") -> State:
    """Return random float32 parameters of so many bytes together."""
    shape = max(1, min(each, nbytes) // (4 * COLUMNS)), COLUMNS
    return {
        name_of(k): torch.nn.Parameter(torch.randn(shape, device=device))
        for k in range(max(1, nbytes // each))
    }


def mapped_state(path: Path, nbytes: int, each: int = LAYER) -> State:
    """Return such tensors in a file of random bytes, none of them in memory."""
    if not path.exists() or path.stat().st_size < nbytes:
        rng = np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(-(-nbytes // LAYER)):
                file.write(rng.standard_normal(LAYER // 4, dtype=np.float32).data)
    shape = each // (4 * COLUMNS), COLUMNS
    return {
        name_of(k): torch.from_numpy(np.memmap(path, np.float32, "c", k * each, shape))
        for k in range(nbytes // each)
    }


def tiny_state(count: int) -> State:
    return {name_of(k): torch.full((16,), float(k)) for k in range(count)}


def write_as(kind: str, state: State, folder: Path) -> Path:
    name, writer = FORMATS[kind]
    writer(state, folder / name)
    return folder / name
