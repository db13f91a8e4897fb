"""Checkpoints for ``npydata bench reader``: random tensors in three formats, written as people do.

The tensors are maps of one file of random bytes, so that writing them takes no memory of its own.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from npydata.bench.dataset import random_tokens
from npydata.progress import progress_bar

State = dict[str, torch.Tensor]

ZIP, LEGACY, SAFETENSORS = "zip", "legacy", "safetensors"
COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
"""A tensor has 1,024 columns of float32; its first 64 rows are the slice that is read."""

SAVERS: dict[str, tuple[str, Callable[[State, Path], Any]]] = {
    ZIP: ("zip.pt", torch.save),
    LEGACY: ("legacy.pt", partial(torch.save, _use_new_zipfile_serialization=False)),
    SAFETENSORS: ("model.safetensors", save_file),
}
"""How each format is written, and the file's name."""


def make_random(path: Path, nbytes: int) -> Path:
    """Write random bytes, which no disk can compress."""
    bar = progress_bar("making tensors", nbytes, "B")
    with path.open("wb") as file:
        for chunk in random_tokens(nbytes // 2, bar):
            file.write(chunk.data)
    bar.close()
    return path


def mapped_state(path: Path, nbytes: int, count: int) -> State:
    """Return a file's bytes as ``count`` float32 tensors of ``nbytes`` each, none in memory."""
    shape = (nbytes // ROW_BYTES, COLUMNS)
    return {
        name_of(place): torch.from_numpy(np.memmap(path, np.float32, "c", place * nbytes, shape))
        for place in range(count)
    }


def tiny_state(count: int) -> State:
    """Return many small tensors, each with a storage of its own."""
    return {name_of(place): torch.full((16,), float(place)) for place in range(count)}


def name_of(place: int) -> str:
    """Return a name as models have them."""
    return f"model.layers.{place}.weight"


def save(state: State, folder: Path, format: str) -> Path:
    """Write a checkpoint into a folder and return its path."""
    name, writer = SAVERS[format]
    writer(state, folder / name)
    return folder / name
