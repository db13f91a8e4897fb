"""Batches: their samples, split into smaller ones, joined into one, and copied."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map, tree_map_only

from npydata.errors import NpyDataError


def samples_of(batch: Any) -> list[Any]:
    """Return the samples of a batch: tensors, also nested in containers, or packed rows."""
    if hasattr(batch, "samples"):  # a batch with parts that don't belong to one sample each
        return list(batch.samples())
    if isinstance(batch, Mapping):
        return [dict(zip(batch, sample, strict=True)) for sample in samples_of([*batch.values()])]
    if isinstance(batch, tuple | list) and not isinstance(batch[0], str | int | float):
        return list(zip(*map(samples_of, batch), strict=True))
    return list(batch)


def split(batch: Any, sizes: list[int]) -> Any:
    """Return a batch of tensors or packed rows as several batches of ``sizes`` samples."""
    if hasattr(batch, "samples"):
        return batch.split(sizes)
    return list(zip(*[one.split(sizes) for one in batch], strict=True))


def join(batches: list[Any], order: torch.Tensor, names: list[str]) -> Any:
    """Return the samples of several batches as one batch, in the given order.

    Raises:
        NpyDataError: They don't fit together; the message says what each of ``names`` gave.
    """
    kinds = [str(tree_map(kind_of, batch)) for batch in batches]
    if len(set(kinds)) > 1:
        found = ", ".join(f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True))
        raise NpyDataError(f"samples of different kinds or shapes, expected one ({found})")
    if hasattr(batches[0], "samples"):
        samples = [one for batch in batches for one in batch.samples()]
        return batches[0].collate([samples[k] for k in order.tolist()])

    def joined(*parts: Any) -> torch.Tensor:
        if not isinstance(parts[0], torch.Tensor):
            raise NpyDataError(
                f"samples hold {kind_of(parts[0])}, expected tensors, in tuples, "
                "lists or dictionaries"
            )
        return torch.cat(parts)[order]

    return tree_map(joined, *batches)


def kind_of(leaf: Any) -> Any:
    """Return the shape of a tensor's samples, and the type of anything else."""
    return tuple(leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def copied(batch: Any) -> Any:
    """Return a batch or sample with copies of its tensors and arrays."""
    batch = tree_map_only(torch.Tensor, torch.clone, batch)
    return tree_map_only(np.ndarray, np.copy, batch)
