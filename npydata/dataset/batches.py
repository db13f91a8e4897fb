"""Batches that came in one piece: cut into samples, joined out of several, copied where need be."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from npydata.errors import NpyDataError


def split(batch: Any) -> list[Any]:
    """Return the samples of a batch: of a tensor, a tuple or a dictionary of them, packed rows."""
    if hasattr(batch, "samples"):  # a batch with parts that don't belong to one sample each
        return list(batch.samples())
    if isinstance(batch, Mapping):
        return [dict(zip(batch, sample, strict=True)) for sample in split([*batch.values()])]
    return list(zip(*batch, strict=True) if isinstance(batch, tuple | list) else batch)


def join(batches: list[Any], order: torch.Tensor, names: list[str]) -> Any:
    """Return the samples of several batches as one, in the order given.

    Raises:
        NpyDataError: They don't fit together; the message says which of ``names`` is what.
    """
    first = batches[0]
    shapes = [getattr(getattr(batch, "inputs", batch), "shape", ()) for batch in batches]
    kinds = [f"{type(batch).__name__} {tuple(shape[1:])}"
             for batch, shape in zip(batches, shapes, strict=True)]  # fmt: skip
    if len(set(kinds)) > 1:
        found = ", ".join(f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True))
        raise NpyDataError(f"samples of different kinds or shapes, expected one ({found})")
    if hasattr(first, "samples"):
        return first.collate(batches, order)
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)[order]
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches], order, names) for key in first}
    if isinstance(first, tuple | list):
        parts = [join(list(part), order, names) for part in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise NpyDataError(f"batches of {type(first).__name__}, expected tensors, tuples or mappings")


def copied(batch: Any) -> Any:
    """Return a batch or sample with copies of its tensors and arrays."""
    batch = tree_map_only(torch.Tensor, torch.clone, batch)
    return tree_map_only(np.ndarray, np.copy, batch)
