"""DataLoader's vocabulary: the names that its users, and the frameworks around it, give and read.

Each argument of ``torch.utils.data.DataLoader`` means here what it means there, or is refused by
name with what to write instead: a setting that is silently ignored is found weeks later.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_convert

from npydata.errors import LoaderError
from npydata.loader.config import AsyncDataLoaderConfig
from npydata.loader.fetcher import Fetcher
from npydata.loader.sampler import BatchSampler, EpochOrder

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


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be gone through, one sample after the other."""
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    return is_iterable and hasattr(dataset, "__iter__") and not hasattr(dataset, "fetch")


def require_usable(dataset: Any) -> None:
    """Raise unless a dataset can be asked for its length and single samples, or gone through."""
    if is_stream(dataset):
        return
    name = type(dataset).__name__
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


class EpochIndices:
    """The sampler that a loader without one has: the indices of the epoch that begins next."""

    def __init__(self, length: Callable[[], int], order: Callable[[BatchSampler], EpochOrder]):
        self._length, self._order = length, order

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches(1024, drop_last=False):
            yield from batch

    def batches(self, size: int, drop_last: bool) -> Iterator[list[int]]:
        """Yield the indices of one batch after the other."""
        sampler = BatchSampler(len(self), size, drop_last=drop_last)
        order = self._order(sampler)
        return (np.asarray(order(number)).tolist() for number in range(len(sampler)))


class EpochBatches:
    """The batch sampler of a loader without one: the indices of each batch of one rank."""

    def __init__(self, sampler: Any, config: AsyncDataLoaderConfig) -> None:
        self.sampler, self._config = sampler, config
        self.batch_size, self.drop_last = config.samples_per_batch, config.drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.sampler, EpochIndices):
            return self.sampler.batches(self.batch_size, self.drop_last)
        return iter(torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last))


class Vocabulary:
    """The attributes of a ``DataLoader``, as Lightning, accelerate and the HF Trainer read them."""

    config: AsyncDataLoaderConfig
    dataset: Any
    generator: torch.Generator | None
    worker_init_fn: Callable[[int], Any] | None
    _given_sampler: Any
    _given_batch_sampler: Any

    multiprocessing_context = None
    pin_memory_device = ""
    in_order = True

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
    def prefetch_factor(self) -> int:
        """Batches ahead per worker."""
        return self.config.prefetch_factor

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
        return EpochBatches(self.sampler, self.config)

    def _epoch_indices(self) -> EpochIndices:
        raise NotImplementedError
