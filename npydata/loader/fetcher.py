"""From batch numbers to batches: the quickest way that a dataset offers, chosen once.

A dataset of numbered windows is asked for windows, one with ``fetch`` for whole batches, any other
for its samples. Runs in worker threads.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from npydata.dataset.batches import split
from npydata.dataset.protocol import WindowDataset, with_accepted
from npydata.dataset.windows import IntArray
from npydata.errors import LoaderError
from npydata.loader.buffer_pool import BufferPool
from npydata.loader.sampler import EpochOrder
from npydata.loader.workers import as_no_worker

ADVISED_BATCHES = 4
"""At least so many batches lie between advising of a sample's pages and fetching it; a loader that
fetches more at a time advises of them all."""
NOTED_SAMPLES = 16
"""So many samples of a batch that failed are named in the error."""


class Fetcher(Protocol):
    """One way to get the batches of an epoch out of a dataset."""

    def batch(self, number: int) -> Any:
        """Return a batch in one piece."""

    def samples(self, number: int) -> list[Any]:
        """Return a batch's samples one by one."""

    def advise(self, numbers: range) -> None:
        """Tell the dataset that these batches will be fetched soon."""


class WindowFetcher:
    """Asks for windows, in memory of ours if there is a pool."""

    def __init__(
        self, dataset: WindowDataset, windows: EpochOrder, pool: BufferPool | None = None
    ) -> None:
        self.dataset, self.windows, self.pool = dataset, windows, pool
        self._named = getattr(dataset, "named", lambda pair: pair)

    def batch(self, number: int) -> Any:
        """Return the dataset's batch: ``x, y``, ``(B, seq_len)`` int64 each, or another it has."""
        windows = self.windows(number)
        out = self.pool.lend(len(windows)) if self.pool else None
        return self._named(self.dataset.fetch_windows(windows, out=out))

    def samples(self, number: int) -> list[Any]:
        """Return the same, cut into samples."""
        return split(self._named(self.dataset.fetch_windows(self.windows(number))))

    def advise(self, numbers: range) -> None:
        """Tell the dataset of the windows."""
        self.dataset.advise_windows(np.concatenate([self.windows(k) for k in numbers]))


class BatchFetcher:
    """Calls ``dataset.fetch(indices)``; it and ``will_need`` get ``seed`` and ``epoch`` too.

    ``will_need(indices)`` may be missing, and so may ``seed`` and ``epoch`` in either signature.
    """

    def __init__(self, dataset: Any, order: EpochOrder, seed: int, epoch: int) -> None:
        self.order = order
        self._fetch = with_accepted(dataset.fetch, seed=seed, epoch=epoch)
        will_need = getattr(dataset, "will_need", None)
        self._will_need = will_need and with_accepted(will_need, seed=seed, epoch=epoch)

    def batch(self, number: int) -> Any:
        """Return what ``fetch`` returns."""
        return self._fetch(self.order(number))

    def samples(self, number: int) -> list[Any]:
        """Return that, cut into samples."""
        return split(self._fetch(self.order(number)))

    def advise(self, numbers: range) -> None:
        """Call ``will_need``, if there is one."""
        if self._will_need:
            self._will_need(np.concatenate([self.order(k) for k in numbers]))


class SampleFetcher:
    """Asks for the samples, with one ``__getitems__`` or many ``[index]``, and collates them."""

    def __init__(
        self, dataset: Any, order: EpochOrder, check_cancelled: Callable[[], None]
    ) -> None:
        self.order = order
        one_by_one = partial(get_items, dataset, check_cancelled)
        self._get_items = getattr(dataset, "__getitems__", one_by_one)
        self._collate = as_no_worker(default_collate)

    def batch(self, number: int) -> Any:
        """Return the samples, collated as torch does it."""
        return self._collate(self.samples(number))

    def samples(self, number: int) -> list[Any]:
        """Return what the dataset has at the batch's indices."""
        return list(self._get_items(self.order(number).tolist()))

    def advise(self, numbers: range) -> None:
        """Such a dataset takes no advice."""


def get_items(dataset: Any, check_cancelled: Callable[[], None], indices: list[int]) -> list[Any]:
    """Return samples one by one, unless the epoch is left meanwhile."""
    samples = []
    for index in indices:
        check_cancelled()
        try:
            samples.append(dataset[index])
        except Exception as error:
            add_note(error, f"npydata: raised by dataset[{index!r}]")
            raise
    return samples


def add_note(error: BaseException, note: str) -> None:
    """Note on an error where it came from; once, if the same error is raised again."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def note_batch(
    error: BaseException, number: int, epoch: int, keys_of: Callable[[int], IntArray]
) -> None:
    """Note on an error which batch of an iterator failed, from 0 on, and which samples it has."""
    with suppress(Exception):  # nothing may take the place of the error
        keys = keys_of(number).tolist()
        shown = ", ".join(map(str, keys[:NOTED_SAMPLES])) + ", ..." * (len(keys) > NOTED_SAMPLES)
        add_note(error, f"npydata: in batch {number} of this iterator, epoch {epoch}, "
                        f"of {len(keys)} samples: {shown}")  # fmt: skip


def gives_windows(dataset: Any) -> bool:
    """Whether a dataset's numbered windows are what its ``fetch`` gives, so that we may ask them.

    A class that changes ``fetch`` and leaves ``fetch_windows`` as it was means its ``fetch``.
    """
    if not isinstance(dataset, WindowDataset):
        return False
    definitions = [getattr(dataset, "__dict__", {}), *map(vars, type(dataset).__mro__)]
    first = next((d for d in definitions if "fetch" in d or "fetch_windows" in d), {})
    return "fetch_windows" in first


class ReadAhead:
    """Tells a dataset which batches come after one, some of them at a time, each of them once."""

    def __init__(self, advise: Callable[[range], None], count: int, distance: int) -> None:
        self._advise, self._count, self._distance = advise, count, distance
        self._advised = 0
        self._lock = threading.Lock()

    def before(self, number: int) -> None:
        """Advise of ``distance`` to twice as many batches behind ``number``, if that is due."""
        if number + self._distance < self._advised:
            return
        with self._lock:
            begin, end = self._advised, max(self._advised, number + 2 * self._distance + 1)
            if begin == 0:  # nobody fetches before the advice is taken: faults would read ahead
                self._advise_of(begin, end)
            self._advised = end
        if begin > 0:
            self._advise_of(begin, end)

    def _advise_of(self, begin: int, end: int) -> None:
        if coming := range(begin, min(end, self._count)):
            self._advise(coming)


class Cancellation:
    """Says whether the epoch was left: then nobody should wait for the rest of a slow batch."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """End what still runs at its next look."""
        self.cancelled = True

    def check(self) -> None:
        """Raise if the epoch was left."""
        if self.cancelled:
            raise LoaderError("the iterator was closed")


class EpochFetcher:
    """Batch ``k`` of an epoch as the caller wants it: advised of, fetched, and made ready.

    ``stages`` are what is done with each batch: casting it, bringing it to a device.
    """

    def __init__(
        self,
        fetch: Callable[[int], Any],
        read_ahead: ReadAhead,
        check_cancelled: Callable[[], None],
        stages: Sequence[Callable[[Any], Any]] = (),
        order: EpochOrder | None = None,
    ) -> None:
        self.fetch, self.read_ahead, self.order = fetch, read_ahead, order
        self.check_cancelled, self.stages = check_cancelled, stages

    def __call__(self, number: int) -> Any:
        """Return batch ``number``; an error says which it is, and of which samples."""
        self.check_cancelled()
        try:
            self.read_ahead.before(number)
            batch = self.fetch(number)
            for stage in self.stages:
                batch = stage(batch)
        except Exception as error:
            if self.order is not None:
                note_batch(error, number, self.order.epoch, self.order)
            raise
        return batch


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
        if not dtype.is_floating_point:
            require_fitting(tensor, dtype)
        return tensor.to(dtype)

    return tree_map_only(torch.Tensor, one, batch)


def require_fitting(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise at the first integer that a dtype can't hold."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    held = torch.iinfo(tensor.dtype)
    if least <= held.min and held.max <= most:
        return
    values: IntArray = tensor.numpy(force=True)
    outside = (values < least) | (values > most)
    if outside.any():
        raise LoaderError(
            f"dtype={dtype} cannot hold {values[outside][0]}, expected {least} to {most}"
        )
