"""What is in the checkpoints that the tables read and write."""

from functools import partial

import torch
from harness import MIB
from safetensors.torch import save_file

FORMATS = {
    "zip": ("zip.pt", torch.save),
    "legacy": ("legacy.pt", partial(torch.save, _use_new_zipfile_serialization=False)),
    "safetensors": ("model.safetensors", save_file),
}
"""The name of a file of each format, and how people write it."""
COLUMNS = 1024
LAYER = 16 * MIB
"""Bytes of a tensor: a layer's size."""


def name_of(number):
    return f"model.layers.{number}.weight"


def make_state(nbytes, each=LAYER, device="cpu"):
    """Return random float32 parameters of so many bytes together."""
    shape = max(1, min(each, nbytes) // (4 * COLUMNS)), COLUMNS
    return {
        name_of(k): torch.nn.Parameter(torch.randn(shape, device=device))
        for k in range(max(1, nbytes // each))
    }


def plain_state(nbytes, each):
    """Return the same as plain tensors."""
    return {name: tensor.detach() for name, tensor in make_state(nbytes, each).items()}


def tiny_state(count):
    return {name_of(k): torch.full((16,), float(k)) for k in range(count)}


def write_as(kind, state, folder):
    name, writer = FORMATS[kind]
    writer(state, folder / name)
    return folder / name
