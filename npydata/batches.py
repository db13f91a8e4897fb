"""From indices to a batch: one gather where the dataset can, else sample by sample.

Runs in worker threads; holds no state but what it was made with.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from npydata.buffers import BufferPool
from npydata.errors import LoaderError
from npydata.schedule import EpochOrder
from npydata.windows import MASK64, IntArray

ANNOUNCED = 4
"""At least so many batches lie between announcing a sample's pages and fetching it; a loader that
makes more at a time announces them all."""

Transform = Callable[..., Any]


class BatchMaker:
    """Makes batch ``k`` of an epoch from any map-style dataset.

    A dataset with ``fetch(indices)`` gives whole batches; if it takes ``seed``, ``epoch`` or
    ``out``, it gets them, and ``windows`` if it has ``window_numbers``. Transforms and a
    ``collate_fn`` work on single samples.
    """

    def __init__(
        self,
        dataset: Any,
        order: EpochOrder,
        seed: int,
        epoch: int,
        *,
        transforms: Sequence[Transform] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        dtype: torch.dtype | None = None,
        pool: BufferPool | None = None,
    ) -> None:
        self.dataset, self.order, self.seed, self.epoch = dataset, order, seed, epoch
        self.transforms = [(transform, takes_rng(transform)) for transform in transforms]
        self.collate_fn, self.dtype = collate_fn, dtype
        self.fetch_options = fetch_options(dataset, seed, epoch)
        has_fetch = self.fetch_options is not None
        self.pool = pool if has_fetch and accepts(dataset.fetch, "out") else None
        self.will_need = getattr(dataset, "will_need", None) if has_fetch else None
        self.is_wanted: Callable[[], bool] = lambda: True
        self.ahead = ANNOUNCED
        self._announced = 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> Any:
        """Return batch ``number``, after announcing the ones a little further on."""
        self.require_wanted()
        self.announce(number)
        indices, windows = self.order.located(number)
        if self.transforms or self.collate_fn:
            samples = self.transformed(self.samples(indices), indices)
            batch = (self.collate_fn or default_collate)(samples)
        elif self.fetch_options is not None:
            batch = self.fetch(indices, windows)
        else:
            batch = default_collate(self.samples(indices))
        return batch if self.dtype is None else cast(batch, self.dtype)

    def announce(self, number: int) -> None:
        """Tell the dataset which samples come after batch ``number``, some batches at a time."""
        if self.will_need is None or number + self.ahead < self._announced:
            return
        with self._lock:
            begin, end = self._announced, max(self._announced, number + 2 * self.ahead + 1)
            if begin == 0:  # nobody fetches before pages come by hint: faults would read ahead
                self.hint(begin, end)
            self._announced = end
        if begin > 0:
            self.hint(begin, end)

    def hint(self, begin: int, end: int) -> None:
        """Tell the dataset which samples are in some batches."""
        coming = [self.order(k) for k in range(begin, min(end, self.order.count))]
        if coming and self.will_need is not None:
            self.will_need(np.concatenate(coming), **self.fetch_options or {})

    def fetch(self, indices: IntArray, windows: IntArray) -> Any:
        """Return a whole batch in one call, with what is known and into used memory if accepted."""
        options: dict[str, Any] = dict(self.fetch_options or {})
        if self.order.locate is not None:
            options["windows"] = windows
        if self.pool is not None:
            options["out"] = self.pool.lend(len(indices))
        return self.dataset.fetch(indices, **options)

    def samples(self, indices: IntArray) -> list[Any]:
        """Return the samples one by one."""
        if self.fetch_options is not None:
            return split(self.dataset.fetch(indices, **self.fetch_options))
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices.tolist()))
        samples = []
        for index in indices.tolist():
            self.require_wanted()
            samples.append(self.dataset[index])
        return samples

    def transformed(self, samples: list[Any], indices: IntArray) -> list[Any]:
        """Apply the transforms to each sample, in their order."""
        for place, index in enumerate(indices.tolist()):
            self.require_wanted()
            for which, (transform, wants_rng) in enumerate(self.transforms):
                options = {"rng": self.generator(index, which)} if wants_rng else {}
                samples[place] = transform(samples[place], **options)
        return samples

    def require_wanted(self) -> None:
        """Raise if the epoch was left: then nobody should wait for the rest of a slow batch."""
        if not self.is_wanted():
            raise LoaderError("the iterator was closed")

    def generator(self, index: int, which: int) -> np.random.Generator:
        """Return randomness that depends on seed, epoch, sample and transform, on no worker."""
        return np.random.default_rng([self.seed & MASK64, self.epoch, index, which])


def fetch_options(dataset: Any, seed: int, epoch: int) -> dict[str, int] | None:
    """Return what to call ``dataset.fetch`` with, or ``None`` if it has none."""
    fetch = getattr(dataset, "fetch", None)
    if fetch is None:
        return None
    return {name: v for name, v in {"seed": seed, "epoch": epoch}.items() if accepts(fetch, name)}


def locator(dataset: Any, seed: int, epoch: int) -> Callable[[IntArray], IntArray] | None:
    """Return what tells a dataset's windows from indices, if its ``fetch`` takes windows."""
    takes_windows = accepts(getattr(dataset, "fetch", None), "windows")
    if not takes_windows or not hasattr(dataset, "window_numbers"):
        return None
    return lambda indices: dataset.window_numbers(indices, seed, epoch)


def split(batch: Any) -> list[Any]:
    """Return the samples of a batch that came in one piece."""
    if isinstance(batch, dict):
        return [dict(zip(batch, sample, strict=True)) for sample in split([*batch.values()])]
    return list(zip(*batch, strict=True) if isinstance(batch, tuple | list) else batch)


def takes_rng(transform: Transform) -> bool:
    """Whether a transform wants a random generator."""
    return accepts(transform, "rng")


def accepts(function: Any, name: str) -> bool:
    """Whether a function can be called with that keyword, spelled out in its signature."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors of the dtype's own kind: floats to floats, integers to integers.

    Raises:
        LoaderError: An integer does not fit.
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() != dtype.is_floating_point:
            return tensor
        if tensor.dtype == torch.bool or tensor.is_complex():
            return tensor
        changed = tensor.to(dtype)
        if not dtype.is_floating_point and not torch.equal(changed.to(tensor.dtype), tensor):
            raise LoaderError(f"dtype={dtype} cannot hold {tensor.max().item()}")
        return changed

    return tree_map_only(torch.Tensor, one, batch)
