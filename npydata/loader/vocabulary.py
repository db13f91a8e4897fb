"""DataLoader's vocabulary: the names that its users, and the frameworks around it, give and read.

Each argument of ``torch.utils.data.DataLoader`` means here what it means there, or is refused by
name with what to write instead: a setting that is silently ignored is found weeks later.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_convert

from npydata.dataset.describing import Described
from npydata.dataset.protocol import WindowDataset
from npydata.errors import LoaderError
from npydata.loader.config import AsyncDataLoaderConfig
from npydata.loader.fetcher import Fetcher
from npydata.loader.sampler import BatchSampler, EpochOrder
from npydata.loader.state import Cursor
from npydata.loader.transforms import Transform

convert: Callable[[Any], Any] = default_convert
"""Makes tensors of the arrays in a sample."""

REFUSED: dict[str, tuple[Any, str]] = {
    "multiprocessing_context": (
        None,
        "workers are threads, and nothing is started or pickled; leave it out",
    ),
    "in_order": (
        True,
        "batches come in order, whoever is first, or no state could say which were given; leave it "
        "out",
    ),
    "pin_memory_device": ("", "write pin_memory=True, or device= to have batches brought there"),
}
"""Arguments that threads don't honour: the one value that says nothing, and what to do instead."""


def without_refused(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those that ask for nothing; raise at one we can't honour."""
    for name, (harmless, advice) in REFUSED.items():
        if name in settings and settings[name] != harmless:
            raise LoaderError(f"{name}={settings[name]!r}: {advice}")
    return {name: value for name, value in settings.items() if name not in REFUSED}


def require_one_order(
    dataset: Any, sampler: Any, batch_sampler: Any, settings: dict[str, Any]
) -> None:
    """Raise where two arguments decide which samples come, and in which order."""
    given = {"sampler": sampler, "batch_sampler": batch_sampler}
    names = [name for name, value in given.items() if value is not None]
    if is_stream(dataset):
        owner = f"{type(dataset).__name__} is an iterable-style dataset, which"
        for name in names:
            raise LoaderError(f"{name}= with {owner} has an order of its own; leave {name} out")
    elif not names:
        return
    else:
        owner = f"{names[-1]}="
    if len(names) == 2:
        raise LoaderError("sampler= with batch_sampler=, which decides whole batches; leave "
                          "sampler out")  # fmt: skip
    if settings.get("shuffle"):
        raise LoaderError(f"shuffle=True: {owner} decides the order; leave shuffle out")
    for name in ("rank", "world_size"):
        if settings.get(name) is not None:
            raise LoaderError(f"{name}={settings[name]}: {owner} decides what this rank gets, as a "
                              f"DistributedSampler does; leave {name} out")  # fmt: skip
    if batch_sampler is not None:
        harmless = {"batch_size": (1, None), "drop_last": (False,)}
        for name, values in harmless.items():
            if settings.get(name, values[0]) not in values:
                raise LoaderError(f"{name}={settings[name]}: batch_sampler= decides the batches; "
                                  f"leave {name} out")  # fmt: skip


def require_lossless(dataset: Any, dtype: torch.dtype | None) -> None:
    """Refuse a float dtype for token windows: a float32 loses ids above 2^24."""
    if dtype is not None and dtype.is_floating_point and isinstance(dataset, WindowDataset):
        raise LoaderError(f"dtype={dtype} over token windows would lose ids; leave it out")


def require_own_order(dataset: Any, shuffle: bool) -> None:
    """Refuse to shuffle a dataset that says why its samples must stay in order."""
    reason = getattr(dataset, "refuses_shuffle", None)
    if shuffle and reason:
        raise LoaderError(f"shuffle=True over a {type(dataset).__name__}, expected False: {reason}")


def as_list(transforms: Iterable[Transform]) -> list[Transform]:
    """Return the transforms as a list; a single one may be meant, but is not asked for."""
    if not isinstance(transforms, Iterable):
        raise LoaderError(f"transforms={transforms!r}, expected a list of functions")
    return list(transforms)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be gone through, one sample after the other."""
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    return is_iterable and hasattr(dataset, "__iter__") and not hasattr(dataset, "fetch")


def require_usable(dataset: Any) -> None:
    """Raise unless a dataset can be asked for its length and single samples, or gone through."""
    if is_stream(dataset):
        return
    name = type(dataset).__name__
    if isinstance(dataset, str | bytes | os.PathLike):
        raise LoaderError(
            f"dataset={dataset!r}, expected a dataset; of token files, give "
            "MmapDataset(path, seq_len) or NpyTokensDataset(path, seq_len)"
        )
    if not hasattr(dataset, "__len__"):
        raise LoaderError(
            f"{name} has no __len__; AsyncDataLoader shuffles 0 to len(dataset) - 1: let it return "
            "the number of samples"
        )
    if not any(hasattr(dataset, name) for name in ("fetch", "__getitems__", "__getitem__")):
        raise LoaderError(f"{name} has no __getitem__; AsyncDataLoader asks for dataset[index]")


def given_order(dataset: Any, sampler: Any, batch_sampler: Any) -> tuple[str, Any]:
    """Return what decides the order, and what kind of thing it is; ``None`` if we do."""
    if batch_sampler is not None:
        return "batch_sampler", batch_sampler
    if sampler is not None:
        return "sampler", sampler
    return ("stream", dataset) if is_stream(dataset) else ("index", None)


def brief(dataset: Any) -> str:
    """Return what a dataset says it is, if it is ours; of others, which may hold millions, less."""
    if isinstance(dataset, Described):
        return repr(dataset)
    length = ""
    with contextlib.suppress(Exception):  # some only say that they have a length
        length = f", {len(dataset):,} samples"
    return f"<{type(dataset).__name__}{length}>"


def seed_from(generator: torch.Generator | None) -> int:
    """Draw 63 bits, from torch's global generator if there is no other: manual_seed decides."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class SingleSamples:
    """Makes "batches" of one sample each, as it is: what ``batch_size=None`` asks for."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def batch(self, number: int) -> Any:
        """Return the sample, its arrays as tensors."""
        return convert(self.fetcher.samples(number)[0])


def collate_single(collate_fn: Callable[[Any], Any] | None) -> Callable[[list[Any]], Any]:
    """Return a collate function that gets the one sample there is, and no list."""

    def collate(samples: list[Any]) -> Any:
        return (collate_fn or convert)(samples[0])

    return collate


class DrawnIndices(list[int]):
    """The indices of a batch, with what random windows are drawn from besides.

    A stock ``DataLoader`` hands them to ``dataset.__getitems__`` as they are, in its workers too.
    """

    def __init__(self, indices: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch = seed, epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return DrawnIndices, (list(self), self.seed, self.epoch)


OrderOf = Callable[[int, bool, int | None], EpochOrder]
"""Returns this rank's order of an epoch, cut into batches of a size; ``None`` for the next one."""


class EpochIndices:
    """The sampler that a loader without one has: this rank's indices of the next epoch."""

    def __init__(self, order_of: OrderOf, size: int) -> None:
        self._order_of, self._size = order_of, size

    def __len__(self) -> int:
        return len(self._order_of(1, False, None).sampler)

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches(self._size, drop_last=False):
            yield from batch

    def batches(self, size: int, drop_last: bool, epoch: int | None = None) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other."""
        order = self._order_of(size, drop_last, epoch)
        for number in range(len(order.sampler)):
            yield DrawnIndices(order(number).tolist(), order.seed, order.epoch)

    def num_batches(self, size: int, drop_last: bool) -> int:
        """Return how many there are."""
        return len(self._order_of(size, drop_last, None).sampler)


class RankIndices(EpochIndices, DistributedSampler[Any]):
    """Those of one rank of several: Lightning gives ranks a sampler unless there is such a one."""

    def __init__(self, order_of: OrderOf, size: int, rank: int, world_size: int) -> None:
        EpochIndices.__init__(self, order_of, size)
        self.rank, self.num_replicas = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts its epochs."""


class EpochBatches:
    """The batch sampler of a loader without one: the indices of each batch of one rank.

    They are lists that know seed and epoch, so that other loaders draw the same random windows. Of
    transforms and casts they know nothing.
    """

    def __init__(self, sampler: Any, config: AsyncDataLoaderConfig, beside: str = "") -> None:
        self.sampler, self._config, self._epoch, self._beside = sampler, config, None, beside
        self.batch_size, self.drop_last = config.samples_per_batch, config.drop_last

    _epoch: int | None

    def __len__(self) -> int:
        if isinstance(self.sampler, EpochIndices):
            return self.sampler.num_batches(self.batch_size, self.drop_last)
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if self._beside:
            raise LoaderError(
                f"batches made of batch_sampler's indices elsewhere would lack this loader's "
                f"{self._beside}; the HF Trainer does that when it resumes in mid-epoch: let the "
                "dataset do it, or resume at the end of an epoch"
            )
        if isinstance(self.sampler, EpochIndices):
            return self.sampler.batches(self.batch_size, self.drop_last, self._epoch)
        return iter(torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last))

    def set_epoch(self, epoch: int) -> None:
        """Give the batches of that epoch, rather than of the one that begins next."""
        self._epoch = epoch


if TYPE_CHECKING:
    StockLoader = object
else:
    StockLoader = DataLoader


class Vocabulary(StockLoader):
    """The attributes of a ``DataLoader``, as Lightning, accelerate and the HF Trainer read them.

    It is one, for those that look at the class (``accelerator.prepare`` passes over all others),
    but nothing of it is used.
    """

    config: AsyncDataLoaderConfig
    dataset: Any
    generator: torch.Generator | None
    worker_init_fn: Callable[[int], Any] | None
    transforms: list[Transform]
    rank: int
    world_size: int
    seed: int
    device: torch.device | str | None
    _cursor: Cursor
    _kind: str
    _source: Any
    _given_sampler: Any
    _given_batch_sampler: Any

    multiprocessing_context = None
    pin_memory_device = ""
    in_order = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change what a loader was made with, and what its state goes by."""
        attribute = getattr(type(self), name, None)
        fixed = isinstance(attribute, property) and attribute.fset is None
        if fixed or (name == "dataset" and name in vars(self)):
            raise LoaderError(f"{name}: can't be changed; make another loader with {name}=")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        order = f"shuffle={self.config.shuffle}"
        if self._source is not None:
            order = "in its own order" if self._kind == "stream" else f"order of {self._kind}="
        ranks = f", rank={self.rank}, world_size={self.world_size}" if self.world_size > 1 else ""
        device = "" if self.device is None else f", device={str(self.device)!r}"
        return (
            f"{type(self).__name__}({brief(self.dataset)}, batch_size={self.batch_size}, {order}, "
            f"num_workers={self.num_workers}, prefetch_factor={self.config.prefetch_factor}, "
            f"seed={self.seed}{ranks}{device})"
        )

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; ``None`` if a batch sampler decides, or samples come singly."""
        return None if self._given_batch_sampler is not None else self.config.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the last batch of an epoch is left out if it is short."""
        return self.config.drop_last

    @property
    def num_workers(self) -> int:
        """Threads that may fetch batches."""
        return self.config.num_workers

    @property
    def prefetch_factor(self) -> int | None:
        """Batches ahead per worker; ``None`` without workers, as a ``DataLoader`` has it."""
        return self.config.prefetch_factor if self.config.num_workers else None

    @property
    def pin_memory(self) -> bool:
        """Whether batches are left in memory that a GPU can copy from by itself."""
        return self.config.pin_memory

    @property
    def timeout(self) -> float:
        """Seconds that the caller waits for one batch; 0 means for ever."""
        return self.config.timeout

    @property
    def persistent_workers(self) -> bool:
        """What was given: it changes nothing for threads."""
        return self.config.persistent_workers

    @property
    def sampler(self) -> Any:
        """What was given, or one that gives the indices of the epoch that begins next.

        ``None`` for an iterable-style dataset.
        """
        if self._given_sampler is not None:
            return self._given_sampler
        if self._given_batch_sampler is not None:
            return getattr(self._given_batch_sampler, "sampler", None)
        return None if is_stream(self.dataset) else self._epoch_indices()

    @property
    def batch_sampler(self) -> Any:
        """What was given, or one that gives the indices of each batch; ``None`` without batches."""
        if self._given_batch_sampler is not None:
            return self._given_batch_sampler
        if self.config.batch_size is None or is_stream(self.dataset):
            return None
        beside = "transforms" if self.transforms else "dtype" if self.config.dtype else ""
        return EpochBatches(self.sampler, self.config, beside)

    def _epoch_indices(self) -> EpochIndices:
        next_epoch = self._cursor.for_next_iterator().epoch

        def order_of(size: int, drop_last: bool, epoch: int | None) -> EpochOrder:
            sampler = BatchSampler(len(self.dataset), size, rank=self.rank,
                                   world_size=self.world_size, drop_last=drop_last)  # fmt: skip
            epoch = next_epoch if epoch is None else epoch
            return EpochOrder(sampler, self.seed, epoch, self.config.shuffle)

        size = self.config.samples_per_batch
        if self.world_size > 1:
            return RankIndices(order_of, size, self.rank, self.world_size)
        return EpochIndices(order_of, size)

    def _length(self, given: int) -> int:
        """Return how many batches a given order has, behind so many items."""
        left = max(0, len(self._source) - given)  # a TypeError where it has none
        if self._kind == "batch_sampler" or self.config.batch_size is None:
            return left
        full, rest = divmod(left, self.config.batch_size)
        return full + (rest > 0 and not self.config.drop_last)

    def _length_if_known(self, given: int) -> int | None:
        with contextlib.suppress(TypeError):
            return self._length(given)
        return None
