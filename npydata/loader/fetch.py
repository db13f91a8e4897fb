"""From a plan to a batch: fetched or collated, transformed, cast, on its device.

Runs in worker threads, or in the caller where there are none. A dataset with ``fetch`` is asked for
whole batches, any other for its samples.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from npydata.dataset.batches import copied, samples_of, split
from npydata.dataset.windows import MASK64
from npydata.errors import LoaderError
from npydata.loader.buffers import BufferPool
from npydata.loader.device import Transfer
from npydata.loader.prefetch import ExceptionWrapper, make_or_wrap
from npydata.loader.sampler import LEAST_ADVISED, EpochOrder, Plan, PulledOrder
from npydata.loader.state import Position

Transform = Callable[..., Any]

NOTED_SAMPLES = 16
"""How many samples of a failed batch are named in the error."""


class Delivery(NamedTuple):
    """A batch on its way to the consumer, and where the epoch stands after it."""

    batch: Any
    after: Position
    is_end: bool = False
    """There is no batch: the epoch is over."""


class Fetcher:
    """Makes the batches of an epoch, a group at a time; workers call it with a group's number.

    It holds no reference to the loader or its iterator: threads hold it, and an iterator that the
    caller drops must be collected, because that ends the threads.

    Args:
        dataset: Map-style, or a stream, whose samples are in the plans themselves.
        order: Plans by number.
        seed: Seed of random windows and of transforms.
        transforms: Called on each sample, in order.
        collate_fn: Makes a batch of a list of samples; ``None`` uses the dataset's or torch's.
        dtype: Cast tensors to this.
        transfer: Brings a batch to its device.
        group: How many batches a number stands for; they are fetched together.
        pool: Memory for batches that are fetched whole.
        require_open: Raises if the epoch was abandoned, so that the rest of a slow batch is not
            waited for.
    """

    def __init__(
        self,
        dataset: Any,
        order: EpochOrder | PulledOrder,
        *,
        seed: int,
        transforms: Sequence[Transform],
        collate_fn: Callable[[list[Any]], Any] | None,
        dtype: torch.dtype | None,
        transfer: Transfer,
        group: int,
        pool: BufferPool,
        require_open: Callable[[], None],
    ) -> None:
        self.dataset, self.order, self.seed = dataset, order, seed
        self.transforms = [(one, accepts(one, "rng")) for one in transforms]
        self.collate_fn, self.dtype, self.transfer = collate_fn, dtype, transfer
        self.group, self.require_open = group, require_open
        known = {"seed": seed, "epoch": order.epoch, "empty": pool.empty}
        self.is_stream = isinstance(order, PulledOrder) and order.kind == "stream"
        fetch = None if self.is_stream else getattr(dataset, "fetch", None)
        self.fetch = fetch and with_accepted(fetch, known)
        if self.fetch and not accepts(fetch, "empty"):
            # A fetch that takes ``empty`` gives each batch its own memory; this one may not.
            self.fetch = BufferReuseGuard(self.fetch)
        self.read_ahead = None
        if isinstance(order, EpochOrder) and hasattr(dataset, "will_need"):
            advise = with_accepted(dataset.will_need, known)
            self.read_ahead = ReadAhead(order, advise, max(LEAST_ADVISED, order.window))

    def __call__(self, number: int) -> list[Delivery | ExceptionWrapper]:
        """Return the batches of a group, each of which may have failed."""
        numbers = range(number * self.group, (number + 1) * self.group)
        plans = [self.order(k) for k in numbers]
        batches: list[Any] = [None] * self.group
        if self.group > 1 and plans[-1].items is not None:
            with suppress(Exception):  # raised again below, by the batch it belongs to
                batches = self.fetch_group(numbers.start, plans)
        return [
            make_or_wrap(partial(self.deliver, plan=plan, batch=batch), k)
            for k, plan, batch in zip(numbers, plans, batches, strict=True)
        ]

    def fetch_group(self, first: int, plans: list[Plan]) -> Any:
        """Fetch several batches as one, and split it."""
        assert self.fetch
        if self.read_ahead:
            self.read_ahead.before(first)
        batch = self.fetch(np.concatenate([plan.items for plan in plans]))
        return split(batch, [len(plan.items) for plan in plans])

    def deliver(self, number: int, *, plan: Plan, batch: Any) -> Delivery:
        """Return a batch, made now if it isn't there; an error names the batch and its samples."""
        self.require_open()
        if plan.items is None:
            return Delivery(None, plan.after, is_end=True)
        try:
            if batch is None:
                if self.read_ahead:
                    self.read_ahead.before(number)
                batch = self.make(plan)
            if self.dtype is not None:
                batch = cast(batch, self.dtype)
            if self.transfer.moves:
                batch = self.transfer.send(batch)
        except Exception as error:
            first = list(map(int, plan.keys[:NOTED_SAMPLES]))
            add_note(
                error,
                f"npydata: in batch {number} of this iterator, epoch {self.order.epoch}, "
                f"of {len(plan.keys)} samples, which begin with {first}",
            )
            raise
        return Delivery(batch, plan.after)

    def make(self, plan: Plan) -> Any:
        """Return a plan's batch as fetched; or its samples, transformed and collated."""
        batch = self.fetch and self.fetch(np.asarray(plan.items))
        if self.fetch and not self.transforms and not self.collate_fn:
            return batch
        samples = samples_of(batch) if self.fetch else self.samples(plan)
        if self.transforms:
            for k, key in enumerate(plan.keys):
                self.require_open()
                samples[k] = self.transformed(samples[k], int(key))
        return (self.collate_fn or default_collate)(samples)

    def samples(self, plan: Plan) -> list[Any]:
        """Return the samples of a plan one by one."""
        if self.is_stream:
            return list(plan.items)
        indices = plan.items.tolist() if isinstance(plan.items, np.ndarray) else plan.items
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.sample(index) for index in indices]

    def sample(self, index: Any) -> Any:
        """Return one sample; raise if the epoch was abandoned."""
        self.require_open()
        try:
            return self.dataset[index]
        except Exception as error:
            add_note(error, f"npydata: raised by dataset[{index!r}]")
            raise

    def transformed(self, sample: Any, key: int) -> Any:
        """Return a sample after all transforms.

        One with a parameter ``rng`` gets a ``numpy.random.Generator`` that depends on seed, epoch,
        sample and its own place among the transforms, not on the worker.
        """
        for which, (transform, wants_rng) in enumerate(self.transforms):
            drawn_from = [self.seed & MASK64, self.order.epoch, key & MASK64, which]
            options = {"rng": np.random.default_rng(drawn_from)} if wants_rng else {}
            try:
                sample = transform(sample, **options)
            except Exception as error:
                name = getattr(transform, "__name__", type(transform).__name__)
                add_note(error, f"npydata: raised by transform {name}, of sample {key}")
                raise
        return sample


class BufferReuseGuard:
    """Copies the batches of a dataset that may reuse one buffer.

    The first two batches are fetched one at a time. If they share memory, all others are, too: two
    threads would overwrite each other's batch.
    """

    def __init__(self, fetch: Callable[[Any], Any]) -> None:
        self._fetch = fetch
        self._lock, self._seen, self._reuses = threading.Lock(), 0, False
        self._last: Any = None

    def __call__(self, indices: Any) -> Any:
        """Return a copy of what ``fetch`` gives."""
        with self._lock if self._reuses or self._seen < 2 else nullcontext():
            batch = self._fetch(indices)
            if self._seen < 2:
                # The first one is held until the second is there, so that its memory can't be
                # reused.
                self._reuses = self._seen > 0 and address(batch) == address(self._last)
                self._last, self._seen = batch, self._seen + 1
            return copied(batch)


def address(batch: Any) -> int | None:
    """Return where the memory of a batch's first tensor or array begins."""
    found = first_tensor(batch)
    return None if found is None else found.untyped_storage().data_ptr()


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of a batch; an array as a tensor."""
    while isinstance(batch, tuple | list | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        return torch.as_tensor(batch)
    return batch if isinstance(batch, torch.Tensor) else None


class ReadAhead:
    """Tells a dataset which batches come next, several at a time and each of them once."""

    def __init__(self, order: EpochOrder, advise: Callable[[Any], None], distance: int) -> None:
        self._order, self._advise, self._distance = order, advise, distance
        self._advised = 0
        self._lock = threading.Lock()

    def before(self, number: int) -> None:
        """Advise of the next ``distance`` to twice as many batches after ``number``, if due."""
        if number + self._distance < self._advised:
            return
        with self._lock:
            begin, end = self._advised, max(self._advised, number + 2 * self._distance + 1)
            if begin > 0:  # the other threads need not wait
                self._advised = end
            # At the beginning they wait: faults before the advice would trigger the kernel's
            # readahead.
            coming = [self._order.indices(k) for k in range(begin, min(end, len(self._order)))]
            if coming:
                self._advise(np.concatenate(coming))
            self._advised = end


def accepts(function: Any, name: str) -> bool:
    """Whether a function can be called with that keyword, spelled out in its signature."""
    try:
        return name in inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False


def with_accepted(function: Callable[..., Any], known: dict[str, Any]) -> Callable[..., Any]:
    """Bind those of the known values that a function has parameters for."""
    return partial(function, **{name: v for name, v in known.items() if accepts(function, name)})


def add_note(error: BaseException, note: str) -> None:
    """Note on an error where it came from; once, if the same error is raised again."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors of the dtype's own kind: floats to floats, integers to integers.

    Raises:
        LoaderError: An integer does not fit.
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        same_kind = tensor.is_floating_point() == dtype.is_floating_point
        if not same_kind or tensor.dtype == torch.bool or tensor.is_complex():
            return tensor
        moved = tensor.to(dtype)
        if not dtype.is_floating_point and not torch.equal(moved.double(), tensor.double()):
            least, most = tensor.double().aminmax()
            raise LoaderError(f"dtype={dtype} cannot hold integers from {least:.0f} to {most:.0f}")
        return moved

    return tree_map_only(torch.Tensor, one, batch)
