"""Batches of a given order: pulled one after the other, made by workers, taken with its state."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from npydata.dataset.batches import split
from npydata.dataset.protocol import with_accepted
from npydata.dataset.windows import IntArray
from npydata.loader.fetcher import get_items, note_batch
from npydata.loader.given import UNKNOWN, Cut, GivenCursor, GivenOrder
from npydata.loader.iterator import PrefetchIterator
from npydata.loader.prefetcher import ExceptionWrapper
from npydata.loader.workers import as_no_worker


@dataclass(frozen=True, slots=True)
class Pulled:
    """A batch, and where the order stands behind it; without a cut, the end of the epoch."""

    batch: Any
    cut: Cut | None


class GivenFetcher:
    """Makes batches of what a given order names: indices of a dataset, or samples themselves."""

    def __init__(
        self,
        dataset: Any,
        order: GivenOrder,
        seed: int,
        epoch: int,
        check_cancelled: Callable[[], None],
    ) -> None:
        self.dataset, self._order, self._check_cancelled = dataset, order, check_cancelled
        fetch = getattr(dataset, "fetch", None) if order.kind != "stream" else None
        self._fetch: Any = fetch and with_accepted(fetch, seed=seed, epoch=epoch)
        self._collate = as_no_worker(default_collate)

    def order(self, number: int) -> IntArray:
        """Return what tells the samples of a batch apart."""
        return self._order.keys(number)

    def batch(self, number: int) -> Any:
        """Return a batch as ``fetch`` gives it, or collated as torch does it."""
        if self._fetch:
            return self._fetch(np.asarray(self._indices(self._cut(number)), np.int64))
        return self._collate(self.samples(number))

    def samples(self, number: int) -> list[Any]:
        """Return a batch's samples one by one."""
        cut = self._cut(number)
        if self._order.kind == "stream":
            return list(cut.items)
        if self._is_single(cut):
            return [self.dataset[cut.items[0]]]
        indices = self._indices(cut)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        if hasattr(self.dataset, "__getitem__"):
            return get_items(self.dataset, self._check_cancelled, indices)
        return split(self._fetch(np.asarray(indices, np.int64)))

    def advise(self, numbers: range) -> None:
        """What comes next is not known before it is pulled."""

    def _cut(self, number: int) -> Cut:
        cut = self._order.cut(number)
        if cut is None:
            raise IndexError(f"batch {number} lies behind the end")
        return cut

    def _is_single(self, cut: Cut) -> bool:
        return cut.is_whole and self._order.kind != "batch_sampler"

    def _indices(self, cut: Cut) -> list[Any]:
        return list(cut.items[0]) if cut.is_whole else cut.items


class PulledBatches:
    """Batch ``k`` of a given order as the caller wants it, with the order's state behind it."""

    def __init__(
        self,
        order: GivenOrder,
        make: Callable[[int], Any],
        stages: Sequence[Callable[[Any], Any]],
        check_cancelled: Callable[[], None],
    ) -> None:
        self.order, self.make, self.stages = order, make, stages
        self.check_cancelled = check_cancelled

    def __call__(self, number: int) -> Pulled:
        """Return batch ``number``; behind the last one, the end. An error says which it is."""
        self.check_cancelled()
        cut = self.order.cut(number)
        if cut is None:
            return Pulled(None, None)
        try:
            batch = self.make(number)
            for stage in self.stages:
                batch = stage(batch)
        except Exception as error:
            note_batch(error, number, self.order.epoch, self.order.keys)
            raise
        self.order.forget(number)
        return Pulled(batch, cut)


class PulledIterator(PrefetchIterator):
    """One pass over an epoch of a given order, which ends when the order does.

    ``len`` is the number of batches still to come where the order has a length, and a
    ``TypeError`` where it has none.
    """

    _sampler: Any  # a GivenOrder
    _cursor: GivenCursor
    length: int | None = None
    """Batches that the order says it has left."""
    _ahead: Any = None
    """The next batch, if somebody wanted to know whether there is one."""

    def is_last(self) -> bool:
        """Whether the order has ended, if need be by waiting for its next batch."""
        if not self._finalizer.alive:
            return True
        if self._ahead is None:
            self._ahead = self._prefetcher.next()
        return isinstance(self._ahead, Pulled) and self._ahead.cut is None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("how many batches are left is not known: what is iterated over "
                            "has no len()")  # fmt: skip
        return max(0, self.length - self._delivered) if self._finalizer.alive else 0

    def _left(self) -> int:
        return UNKNOWN if self._finalizer.alive else 0

    def _next(self) -> Any:
        asked = time.perf_counter()
        pulled = self._ahead or self._prefetcher.next()
        self._ahead = None
        now = time.perf_counter()
        if isinstance(pulled, ExceptionWrapper):
            self._cursor.after_failure = self._sampler.behind(self._delivered, self._cursor.epoch)
            pulled.reraise()
        if pulled.cut is None:
            self._finish()
            raise StopIteration
        self._cut = pulled.cut
        self._count(pulled.batch, now - asked, now)
        return self._transfer.receive(pulled.batch) if self._transfer.moves else pulled.batch

    def _advance(self) -> None:
        """Move the loader's place behind the batch that the caller gets now."""
        self._delivered += 1
        self._cursor.advance(self._cut.samples)
        self._cursor.order_state = self._cut.order_state

    def _finish(self) -> None:
        """Stand at the start of the next epoch, once the order has ended."""
        if self._finalizer.alive:
            self._cursor.move_to_next_epoch()
            self._cursor.order_state, self._cursor.is_elsewhere = self._sampler.end(), False
            self.close()
