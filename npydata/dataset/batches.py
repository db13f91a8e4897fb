"""Batches that came in one piece: cut into samples, and joined out of several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from npydata.dataset.protocol import with_accepted
from npydata.dataset.windows import IntArray
from npydata.errors import NpyDataError


def collate(samples: list[Any]) -> Any:
    """Return samples as a batch: as they say themselves, else as torch does it."""
    own = None if not samples or isinstance(samples[0], str | bytes) else getattr(
        samples[0], "join", None)  # fmt: skip
    return own(samples) if own else default_collate(samples)


def split(batch: Any) -> list[Any]:
    """Return the samples of a batch that came in one piece."""
    if hasattr(batch, "samples"):  # a batch with parts that don't belong to one sample each
        return list(batch.samples())
    if isinstance(batch, dict):
        return [dict(zip(batch, sample, strict=True)) for sample in split([*batch.values()])]
    return list(zip(*batch, strict=True) if isinstance(batch, tuple | list) else batch)


def join(batches: list[Any], order: torch.Tensor, names: list[str]) -> Any:
    """Return the samples of several batches as one, in the order given."""
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        kinds = ", ".join(f"{n}: {type(b).__name__}" for n, b in zip(names, batches, strict=True))
        raise NpyDataError(f"batches of different kinds, expected one kind ({kinds})")
    if hasattr(first, "join"):
        return first.join(batches, order)
    if isinstance(first, torch.Tensor):
        shapes = [tuple(batch.shape[1:]) for batch in batches]
        if len(set(shapes)) > 1:
            found = ", ".join(f"{n}: {s}" for n, s in zip(names, shapes, strict=True))
            raise NpyDataError(f"samples of different shapes, expected one shape ({found})")
        return torch.cat(batches)[order]
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches], order, names) for key in first}
    if isinstance(first, tuple | list):
        parts = [join(list(part), order, names) for part in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise NpyDataError(f"batches of {type(first).__name__}, expected tensors, tuples or mappings")


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """What a batch takes of one epoch of one source."""

    source: int
    where: IntArray
    """Places in the batch."""
    indices: IntArray
    """The source's own samples for them."""
    seed: int
    epoch: int

    def call(self, function: Callable[..., Any]) -> Any:
        """Call ``fetch`` or ``will_need`` of the source."""
        return with_accepted(function, seed=self.seed, epoch=self.epoch)(self.indices)

    def fetch(self, source: Any) -> Any:
        """Return the samples as the source's batch."""
        return self.call(source.fetch)

    def samples(self, source: Any) -> list[Any]:
        """Return the samples one by one."""
        if hasattr(source, "fetch"):
            return split(self.fetch(source))
        if hasattr(source, "__getitems__"):
            return list(source.__getitems__(self.indices.tolist()))
        return [source[index] for index in self.indices.tolist()]


def samples_of(sources: Sequence[Any], parts: Sequence[SourceRequest]) -> list[Any]:
    """Return the samples of some parts one by one, each in its place in the batch."""
    found: list[Any] = [None] * sum(len(part.where) for part in parts)
    for part in parts:
        samples = part.samples(sources[part.source])
        for place, sample in zip(part.where.tolist(), samples, strict=True):
            found[place] = sample
    return found
