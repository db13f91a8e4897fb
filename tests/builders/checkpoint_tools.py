"""What the tests of the checkpointer share: states, and how to compare them."""

import pickle
from unittest.mock import Mock

import torch
from checkpoint_reading import bits

FILES = {"model.safetensors", "optimizer.safetensors", "training_state.json", "manifest.json"}


def small_state():
    """A state like the seed's: the weight and the bias of a layer."""
    return {
        "layers.0.weight": torch.arange(1.0, 7.0).reshape(2, 3),
        "layers.0.bias": torch.ones(3),
    }


def bitwise(value):
    """A nested value as something that ``==`` compares to the bit, NaN and types included."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return "dict", [(bitwise(key), bitwise(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bitwise(one) for one in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    return type(value).__name__, repr(value)


def refuse_pickles(patch):
    """Let no pickle be run from here on."""
    refuse = Mock(side_effect=AssertionError("a pickle was run"))
    for name in ("load", "loads", "Unpickler"):
        patch.setattr(pickle, name, refuse)
    patch.setattr(torch, "load", refuse)


def tree_of(folder):
    """Every file below a folder with its content, and every link with its target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found
