"""A loader that keeps the next batches ready: worker threads, in order, seeded, resumable.

Example::

    loader = AsyncDataLoader(dataset, batch_size=32, seed=0)
    for epoch in range(3):
        for x, y in loader:
            ...                                     # loader.state_dict() resumes after this batch

Built in ``notebooks/03_async_loader``; how to set it, in ``notebooks/04_throughput``.
"""

import copy
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Never, TypeGuard

import torch
from torch.utils.data import IterableDataset

from npydata.dataset.datasets import WindowDataset
from npydata.dataset.packed import PackedDataset
from npydata.dataset.windows import as_int
from npydata.errors import LoaderError
from npydata.loader.buffers import BufferPool
from npydata.loader.device import Transfer
from npydata.loader.fetch import Fetcher, Transform
from npydata.loader.iterator import LoaderStats, PrefetchIterator
from npydata.loader.prefetch import Prefetcher, ReorderBuffer
from npydata.loader.sampler import (
    EpochOrder,
    PulledOrder,
    RankSlices,
    draw_seed,
    rank_and_world_size,
)
from npydata.loader.state import STATE_VERSION, Cursor, Position, require_state
from npydata.system.accelerator import why_unusable
from npydata.system.progress import warn_caller

__all__ = ["AsyncDataLoader", "AsyncDataLoaderConfig"]

STOCK_ARGUMENTS = {
    "generator": "write seed=",
    **dict.fromkeys(
        (
            "worker_init_fn",
            "timeout",
            "persistent_workers",
            "multiprocessing_context",
            "in_order",
            "pin_memory_device",
        ),
        "leave it out: workers are threads of this process, and batches always come in order",
    ),
}
"""Arguments of torch's ``DataLoader`` that don't exist here, and what to write instead."""

SAMPLES_TOGETHER = 256
"""No more samples than this are fetched together; larger batches come one by one."""

SMALLEST = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 0, "seed": None, "rank": 0,
            "world_size": 1}  # fmt: skip
"""Settings that are integers, and the smallest value each may have."""

DECIDED_BY = {
    "sampler": ("shuffle", "rank", "world_size"),
    "batch_sampler": ("sampler", "shuffle", "rank", "world_size", "batch_size", "drop_last"),
}
"""Arguments that a sampler or a batch sampler decides."""


class ArgumentTypeError(LoaderError, TypeError):
    """An argument of the wrong type, or one that does not exist."""


@dataclass(frozen=True, slots=True)
class AsyncDataLoaderConfig:
    """The settings of an :class:`AsyncDataLoader`, which documents each of them.

    Raises:
        LoaderError: A setting has an invalid value; the message names both. If the value has the
            wrong type, the error is a ``TypeError`` as well.
    """

    batch_size: int = 32
    shuffle: bool | None = None
    drop_last: bool = False
    num_workers: int = 2
    prefetch_factor: int = 16
    seed: int | None = None
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    transforms: Iterable[Transform] = ()
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    pin_memory: bool = False
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        expected: dict[str, tuple[Any, str]] = {
            **dict.fromkeys(("shuffle", "drop_last", "pin_memory"), (bool, "True or False")),
            **dict.fromkeys(SMALLEST, (Integral, "an integer")),
            **dict.fromkeys(("sampler", "batch_sampler", "transforms"), (Iterable, "an iterable")),
            "dtype": (torch.dtype, "a torch.dtype such as torch.int32"),
        }
        defaults = {field.name: field.default for field in fields(self)}
        for name, (kind, text) in expected.items():
            value = getattr(self, name)
            is_wrong_number = kind is Integral and isinstance(value, bool)
            if value is not defaults[name] and (not isinstance(value, kind) or is_wrong_number):
                raise ArgumentTypeError(f"{name}={value!r:.60}, expected {text}")
        for name, least in SMALLEST.items():
            value = getattr(self, name)
            if value is not None and least is not None and value < least:
                raise LoaderError(f"{name}={value!r}, expected an integer of {least} or more")
        if self.rank not in (range(self.world_size) if self.world_size else (None,)):
            raise LoaderError(
                f"rank={self.rank}, world_size={self.world_size}: expected both or "
                "neither, and a rank below world_size"
            )
        for owner, others in DECIDED_BY.items():
            for name in others if getattr(self, owner) is not None else ():
                if getattr(self, name) is not defaults[name] and getattr(self, name) is not False:
                    raise LoaderError(
                        f"{name}={getattr(self, name)!r:.60} with {owner}=, which "
                        f"decides that; leave {name} out"
                    )


class AsyncDataLoader:
    """Batches of a dataset, made ahead by worker threads.

    Args:
        dataset: Anything with ``len`` and ``[index]``. A dataset with ``fetch(indices)``, such as
            npydata's own, gives whole batches, which is many times faster; ``seed``, ``epoch`` and
            ``empty`` (memory for the batch, as ``numpy.empty`` gives it) are passed to it if it has
            such parameters. Its ``will_need(indices)``, if it has one, is called some batches
            ahead. Or an iterable-style dataset, which one thread reads in its own order.
        config: Settings that replace the defaults below. A keyword whose value is not its default
            overrides the config; to reset one to its default, use ``dataclasses.replace(config,
            ...)``. An integer is the batch size.
        batch_size: Samples per batch on one rank.
        shuffle: A new order in each epoch, or the dataset's own; ``None`` asks the dataset: windows
            in order and mixtures are not shuffled, all others are.
        drop_last: Leave out the last batch of an epoch if it is short. The last ``len(dataset) %
            world_size`` samples of an order go to no rank in any case.
        num_workers: Threads that fetch batches. With 0, one still prefetches.
        prefetch_factor: Batches ahead per worker; with 0, the caller fetches each batch itself.
        seed: Decides order, random windows and transforms. The dataset's own if not given, else
            drawn; part of the state.
        sampler: Decides which indices come, and in which order, for this rank.
        batch_sampler: Decides which indices make each batch.
        collate_fn: Makes a batch of a list of samples; torch's own if not given.
        transforms: Called on each sample, in order. One with a parameter ``rng`` gets a
            ``numpy.random.Generator`` that depends on (seed, epoch, index) only.
        dtype: Cast tensors of the same kind (floats, or integers) to this, no others; ``None``
            casts none.
        device: Where tensors should be. For a GPU they are copied on a stream of their own.
        pin_memory: Leave batches in pinned memory, which a GPU can copy from by itself.
        rank: Which slice of each global batch is ours; from ``torch.distributed`` if not given.
        world_size: How many ranks share an epoch; from ``torch.distributed`` if not given.

    An epoch is ``for batch in loader``. A batch of npydata's datasets is ``x, y``, ``(batch_size,
    seq_len)`` int64 each, on ``device``. ``loader.stats`` says how the newest iterator is doing.
    ``len(loader)`` counts the batches of a full epoch.

    Promises: the same seed gives the same batches in the same order, whatever the number of
    workers; an exception in a worker is raised at its batch; leaving early stops every thread; a
    batch that you keep is never overwritten; a state taken after any batch resumes with the next
    one, also on another number of ranks or with another batch size. Where a sampler or a stream
    decides the order, a state is only for this rank. Several small batches of windows share one
    piece of memory of up to 256 samples: to keep only a few of them, keep a ``clone()``. Built in
    ``notebooks/03_async_loader``.

    Raises:
        LoaderError: A setting is invalid, or would lose data.
        TypeError: An argument has the wrong type, or does not exist.
    """

    def __init__(
        self,
        dataset: Any,
        config: AsyncDataLoaderConfig | int | None = None,
        *positional: Never,
        batch_size: int = 32,
        shuffle: bool | None = None,
        drop_last: bool = False,
        num_workers: int = 2,
        prefetch_factor: int = 16,
        seed: int | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transforms: Iterable[Transform] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **unknown: Never,
    ) -> None:
        arguments = locals()
        refuse_unknown(positional, unknown)
        given = {field.name: arguments[field.name] for field in fields(AsyncDataLoaderConfig)}
        self.config = config = with_overrides(config, given)
        self._kind, self._source = order_of(dataset, config)
        self.dataset, self.transforms = dataset, list(config.transforms)
        self.batch_size = None if self._kind == "batch_sampler" else int(config.batch_size)
        self.drop_last, self.num_workers = config.drop_last, config.num_workers
        self.prefetch_factor, self.pin_memory = config.prefetch_factor, config.pin_memory
        self._shuffle = self._source is None and wants_shuffle(dataset, config.shuffle)
        self.rank, self.world_size = rank_and_world_size(config.rank, config.world_size)
        self.seed = choose_seed(dataset, config.seed, self.world_size)
        self.device = config.device
        if self.device is not None and (why := why_unusable(self.device)):
            raise LoaderError(why)
        self._cursor = Cursor(Position())
        self._iterator: weakref.ref[PrefetchIterator] | None = None
        self._source_locks = defaultdict[int, threading.RLock](threading.RLock)
        """By process: a fork may copy one that a thread of the parent holds."""
        self.stats = LoaderStats()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({describe(self.dataset)}, batch_size={self.batch_size}, "
            f"shuffle={self._shuffle}, num_workers={self.num_workers}, "
            f"prefetch_factor={self.prefetch_factor}, seed={self.seed})"
        )

    def __len__(self) -> int:
        found = self._batches_left(Position())
        if found is None:
            raise TypeError(
                f"how many batches there are is not known: the {self._kind} has no len()"
            )
        return found

    @property
    def num_batches(self) -> int:
        """Batches in a full epoch, the same for every rank."""
        return len(self)

    def __iter__(self) -> PrefetchIterator:
        """Begin the next epoch, or the one a loaded state points into.

        The same epoch begins again if the previous iterator delivered fewer than two batches. A
        running iterator is ended, and raises a ``LoaderError`` if it is used again.
        """
        self._end_iterator("a newer iter(loader)")
        _, ranks = rank_and_world_size(self.config.rank, self.config.world_size)
        if self._source is None and ranks > self.world_size:
            raise LoaderError(
                f"made for {self.world_size} of {ranks} ranks: make it after init_process_group()"
            )
        window = self.prefetch_factor * max(1, self.num_workers)  # 0: made by the caller
        group = self._group_size()
        # Claimed batches, ``capacity * group``, and the group being read stay within ``window``.
        buffer = ReorderBuffer((window + 1 - group) // group)
        start = self._cursor.next_start()
        order: EpochOrder | PulledOrder
        if self._source is None:
            order = EpochOrder(
                self._batches_from(start.samples),
                self.seed,
                start.epoch,
                shuffle=self._shuffle,
                window=window,
            )
        else:
            if self._cursor.source_in_position:  # by ending its epoch: nothing to load or skip
                start = start._replace(order=None)
            order = PulledOrder(
                self._source,
                self._kind,
                self.batch_size or 1,
                drop_last=self.drop_last,
                start=start,
                seed=self.seed,
                lock=self._source_locks[os.getpid()],
                require_open=buffer.require_open,
            )
            start = order.start
        transfer = Transfer(self.device, pin_memory=self.pin_memory)
        # Besides those ahead: the batch just taken, and the one before it, which a loop's variables
        # hold until then.
        pool = BufferPool(buffer.capacity + 2, pinned=transfer.stream is not None)
        fetcher = Fetcher(
            self.dataset,
            order,
            seed=self.seed,
            transforms=self.transforms,
            collate_fn=self.config.collate_fn,
            dtype=self.config.dtype,
            transfer=transfer,
            group=group,
            pool=pool,
            require_open=buffer.require_open,
        )
        self._cursor = Cursor(start)
        # A stream has one order: more threads would only wait for each other.
        threads = 1 if self._kind == "stream" else max(1, self.num_workers)
        prefetcher = Prefetcher(fetcher, threads if window else 0, buffer)
        cursor = self._cursor
        progress: Any = getattr(self.dataset, "progress", lambda *_: {})
        self.stats = LoaderStats(sources_at=lambda: progress(cursor.at.epoch, cursor.at.samples))
        iterator = PrefetchIterator(
            prefetcher, transfer, self._cursor, self.stats, self._batches_left(start)
        )
        self._iterator = weakref.ref(iterator)
        return iterator

    def iter_epoch(
        self, input_name: str = "input", target_name: str = "target"
    ) -> Iterator[dict[str, Any]]:
        """Begin an epoch as ``iter`` does; ``x, y`` come as ``{input_name: x, target_name: y}``."""
        batches = iter(self)

        def named(batch: Any) -> dict[str, Any]:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise LoaderError(
                    f"a batch of type {type(batch).__name__}, expected an input and a target"
                )
            return dict(zip((input_name, target_name), batch, strict=True))

        return map(named, batches)

    def with_transform(self, transform: Transform) -> "AsyncDataLoader":
        """Add a transform after the others, from the next epoch on; returns the loader."""
        self.transforms.append(transform)
        return self

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter`` begin this epoch, for trainers that count epochs themselves.

        No-op if that epoch is next, even from its middle after a loaded state. The ``set_epoch`` of
        a sampler (also inside a batch sampler) or a stream, if it has one, is called as well.
        """
        epoch = as_int(epoch, "epoch", least=0)
        source: Any
        for source in self._source, getattr(self._source, "sampler", None):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
        if epoch != self._cursor.next_start().epoch:
            self._move_to(Position(epoch), "set_epoch()")

    def reshuffle(self) -> None:
        """Advance to the next epoch and its order; ends a running iterator, as ``iter`` does.

        No-op at the beginning of any epoch but the first, so that none is skipped.
        """
        at = self._cursor.at
        if at.samples or not at.epoch:
            self._move_to(Position(at.epoch + 1), "reshuffle()")

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as plain values.

        ``seed``, ``epoch`` and ``shuffle`` identify the order, ``samples`` is how many of its
        samples all ranks together have received, ``fingerprint`` identifies the data, and ``data``
        describes it, for the error message if it differs. Prefetched batches do not count until
        they are delivered. Where a sampler or a stream decides the order, ``order`` holds what
        restores it; torchdata's ``RandomSampler``, for one, has a tensor in it.
        """
        at = self._cursor.at
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": at.epoch,
            "samples": at.samples,
            "fingerprint": self.fingerprint(at.epoch, at.samples),
            "data": describe(self.dataset),
            "shuffle": self._shuffle if self._source is None else self._kind,
            "order": copy.deepcopy(at.order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter``; ends a running iterator, as ``iter`` does.

        The seed in the state replaces the loader's own.

        Raises:
            LoaderError: The state is malformed, or belongs to other data or another order.
        """
        most = len(self.dataset) if self._source is None else None
        require_state(state, self.state_dict(), self.fingerprint, most)
        position = Position(state["epoch"], state["samples"], copy.deepcopy(state["order"]))
        self._move_to(position, "load_state_dict()")
        self.seed = state["seed"]

    def fingerprint(self, epoch: int, samples: int) -> str:
        """Return a text that identifies the data before a position.

        That is the dataset's own ``fingerprint_at(epoch, samples)``, which lets later samples
        change, or its ``fingerprint()``, or else its length.
        """
        if hasattr(self.dataset, "fingerprint_at"):
            return str(self.dataset.fingerprint_at(epoch, samples))
        if hasattr(self.dataset, "fingerprint"):
            return str(self.dataset.fingerprint())
        return "a stream" if self._kind == "stream" else f"{len(self.dataset)} samples"

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``pickle`` and ``copy`` take along: all but the iterator and its threads.

        The copy continues as if it had loaded this loader's state.
        """
        return {
            **self.__dict__,
            "transforms": [*self.transforms],
            "stats": LoaderStats(),
            "_cursor": Cursor(self._cursor.at),
            "_iterator": None,
            "_source_locks": defaultdict(threading.RLock),
        }

    def _group_size(self) -> int:
        """Return how many batches are fetched as one, with one wake-up of a thread.

        Small batches of windows and packed rows are fetched together: they come so fast that calls
        and wake-ups would take longer. All others, dictionaries too, come one by one.
        """
        is_plain = self._source is None and not (self.transforms or self.config.collate_fn)
        fetch = getattr(type(self.dataset), "fetch", None)
        is_known = fetch in (WindowDataset.fetch, PackedDataset.fetch)
        if not (is_plain and is_known) or self.dataset.as_dict:
            return 1
        return max(1, min(self.prefetch_factor // 2, SAMPLES_TOGETHER // self.config.batch_size))

    def _batches_from(self, start: int) -> RankSlices:
        """Return how the rest of an epoch is cut into our batches."""
        return RankSlices(
            num_samples=len(self.dataset),
            batch_size=self.batch_size or 1,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.drop_last,
            start=start,
        )

    def _batches_left(self, position: Position) -> int | None:
        """Return how many batches come after a position; ``None`` where the order has no length."""
        if self._source is None:
            return len(self._batches_from(position.samples))
        try:
            left = len(self._source) - (position.order["given"] if position.order else 0)
        except TypeError:
            return None
        full, rest = divmod(max(0, left), self.batch_size or 1)
        return full + (rest > 0 and not self.drop_last)

    def _move_to(self, position: Position, cause: str) -> None:
        self._end_iterator(cause)
        self._cursor = Cursor(position)

    def _end_iterator(self, cause: str) -> None:
        running = self._iterator() if self._iterator else None
        if running is not None:
            running.end(cause)


def refuse_unknown(positional: tuple[object, ...], unknown: dict[str, Any]) -> None:
    """Raise on an argument that doesn't exist, with what to write instead."""
    names = [field.name for field in fields(AsyncDataLoaderConfig)]
    if positional:
        raise ArgumentTypeError(
            f"{positional[0]!r:.60} by position: name what follows the batch size (shuffle=True)"
        )
    for name in unknown:
        near = get_close_matches(name, names, 1)
        instead = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
        raise ArgumentTypeError(f"unknown argument {name}=: {STOCK_ARGUMENTS.get(name, instead)}")


def with_overrides(
    config: AsyncDataLoaderConfig | int | None, given: dict[str, Any]
) -> AsyncDataLoaderConfig:
    """Return the configuration, overridden by the arguments that aren't at their default."""
    defaults = AsyncDataLoaderConfig()
    given = {name: v for name, v in given.items() if v is not getattr(defaults, name)}
    if is_integer(config):
        if "batch_size" in given:
            raise LoaderError(
                f"batch_size given twice: {config} by place, {given['batch_size']} by name"
            )
        config, given["batch_size"] = None, config
    if not isinstance(config, AsyncDataLoaderConfig | None):
        raise ArgumentTypeError(
            f"config={config!r:.60}, expected an AsyncDataLoaderConfig, or an "
            "integer: the batch size"
        )
    return replace(config or defaults, **given)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer, Python's or numpy's, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def order_of(dataset: Any, config: AsyncDataLoaderConfig) -> tuple[str, Any]:
    """Return what decides the order: a seed (``"index"``), or a kind of source and the source.

    Raises:
        LoaderError: Nothing can decide the order, or more than one argument does.
    """
    name = type(dataset).__name__
    if isinstance(dataset, str | bytes | os.PathLike):
        raise LoaderError(
            f"dataset={dataset!r}, expected a dataset; of token files, give "
            "MmapDataset(path, seq_len) or NpyTokensDataset(path, seq_len)"
        )
    source = config.sampler if config.batch_sampler is None else config.batch_sampler
    is_map = any(hasattr(dataset, one) for one in ("fetch", "__getitem__", "__getitems__"))
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not is_map):
        if source is not None or config.shuffle or config.world_size:
            raise LoaderError(
                f"sampler=, batch_sampler=, shuffle=True or world_size= with {name}, a stream, "
                "which has an order of its own; leave it out"
            )
        return "stream", dataset
    if not is_map or not hasattr(dataset, "__len__"):
        raise LoaderError(f"{name}, expected a dataset with __len__ and __getitem__")
    if source is None:
        return "index", None
    return "sampler" if config.batch_sampler is None else "batch_sampler", source


def wants_shuffle(dataset: Any, shuffle: bool | None) -> bool:
    """Return whether to shuffle; raise where a dataset says why its samples must stay in order."""
    if shuffle is None:
        return bool(getattr(dataset, "shuffle_by_default", True))
    if shuffle and (reason := getattr(dataset, "refuses_shuffle", None)):
        raise LoaderError(f"shuffle=True over a {type(dataset).__name__}, expected False: {reason}")
    return shuffle


def choose_seed(dataset: Any, seed: int | None, world_size: int) -> int:
    """Return the seed that was given, else the dataset's, else one that is drawn."""
    own = getattr(dataset, "seed", None)
    if is_integer(own) and seed not in (None, own):
        warn_caller(
            f"seed={seed} of the loader, seed={own} of the dataset: the loader's decides "
            "what comes when; give only one of them"
        )
    chosen = own if seed is None else seed
    return int(chosen) if is_integer(chosen) else draw_seed(world_size)


def describe(dataset: Any) -> str:
    """Describe a dataset in one line: by its own ``repr`` if it has a fingerprint."""
    return repr(dataset) if hasattr(dataset, "fingerprint") else type(dataset).__name__
