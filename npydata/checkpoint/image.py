"""The bytes of a safetensors file, laid out before a tensor is copied: the snapshot is the file.

Pure arithmetic. The header is padded so that the data begins on a page; tensors follow by falling
size of their elements, so that each is aligned and none leaves a gap. Built in
``notebooks/05_async_checkpointer``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npydata.errors import CheckpointError
from npydata.lazy.convert import header_bytes
from npydata.lazy.safetensors_archive import CODES, COMPLEX_AS_REAL, NOTES

PAGE = 4096


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of one tensor's elements in the data of a file."""

    name: str
    dtype: torch.dtype
    """As stored: a complex dtype that safetensors lacks is stored as pairs of this one."""
    shape: tuple[int, ...]
    """As stored."""
    begin: int
    """Bytes of the data before it."""
    nbytes: int

    @property
    def header(self) -> dict[str, Any]:
        """The tensor's entry in the file's header."""
        return {
            "dtype": CODES[self.dtype],
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.begin + self.nbytes],
        }


@dataclass(frozen=True, slots=True)
class Image:
    """A whole file: the header, and a slot for each tensor that is stored."""

    header: bytes
    slots: tuple[TensorSlot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(slot.nbytes for slot in self.slots)

    @property
    def capacity(self) -> int:
        """Bytes of the file, up to whole pages, which is what direct writes want."""
        return -(-self.nbytes // PAGE) * PAGE


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Image:
    """Return the image of a file that holds these tensors; tied ones have one slot.

    Raises:
        CheckpointError: A tensor is of a kind or dtype that safetensors can't hold.
    """
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    ties = find_ties(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
    slots, at = [], 0
    for name in sorted(kept, key=lambda one: -kept[one].dtype.itemsize):
        dtype, shape = stored[name]
        nbytes = math.prod(shape) * dtype.itemsize
        slots.append(TensorSlot(name, dtype, shape, at, nbytes))
        at += nbytes
    return Image(header_bytes(slots, metadata_of(kept, ties)), tuple(slots))


def metadata_of(kept: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return what the header says beside the tensors: ties, and dtypes stored as pairs."""
    complex_names = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in kept.items() if tensor.dtype in COMPLEX_AS_REAL
    }  # fmt: skip
    notes = {key: note for key, note in (("ties", ties), ("dtypes", complex_names)) if note}
    return {"format": "pt", **({NOTES: json.dumps(notes)} if notes else {})}


def find_ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the very same elements as an earlier one."""
    first: dict[Any, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(),
                tensor.is_conj(), tensor.is_neg())  # fmt: skip
        if (earlier := first.setdefault(same, name)) != name:
            ties[name] = earlier
    return ties


def stored_as(name: str, tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape with which a tensor is stored."""
    if type(tensor).__name__ == "DTensor":
        raise CheckpointError(f"{name}: is sharded over processes; save it with save_distributed")
    for kind in ("meta", "quantized", "nested"):
        if getattr(tensor, f"is_{kind}"):
            raise CheckpointError(f"{name}: a {kind} tensor, expected a dense one")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"{name}: a {tensor.layout} tensor, expected a dense one")
    if tensor.numel() and tensor.data_ptr() == 0:
        raise CheckpointError(f"{name}: a {type(tensor).__name__} without memory of its own")
    if (real := COMPLEX_AS_REAL.get(tensor.dtype)) is not None:
        return real, (*tensor.shape, 2)
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{name}: safetensors has no code for {tensor.dtype}")
    return tensor.dtype, tuple(tensor.shape)
