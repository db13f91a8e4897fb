"""Transforms of single samples, with randomness of their own, and how they become a batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from npydata.dataset.batches import collate
from npydata.dataset.hashing import MASK64
from npydata.dataset.protocol import accepts
from npydata.dataset.windows import IntArray
from npydata.loader.fetcher import Fetcher, add_note
from npydata.loader.sampler import EpochOrder
from npydata.loader.workers import as_no_worker

Transform = Callable[..., Any]


class TransformedBatches:
    """Batches made of samples that transforms act on, in order, before they are collated.

    A transform with a parameter ``rng`` gets a ``numpy.random.Generator`` that depends on seed,
    epoch, sample and transform, and on no worker.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        order: EpochOrder | Callable[[int], IntArray],
        seed: int,
        epoch: int,
        *,
        transforms: Sequence[Transform],
        collate_fn: Callable[[list[Any]], Any] | None,
        check_cancelled: Callable[[], None],
    ) -> None:
        self.fetcher, self.order, self.seed, self.epoch = fetcher, order, seed, epoch
        self.transforms = [(transform, accepts(transform, "rng")) for transform in transforms]
        self.collate_fn = as_no_worker(collate_fn or collate)
        self.check_cancelled = check_cancelled

    def batch(self, number: int) -> Any:
        """Return a batch of transformed samples."""
        samples = self.fetcher.samples(number)
        for k, index in enumerate(self.order(number).tolist()):
            self.check_cancelled()
            samples[k] = self.transformed(samples[k], index)
        return self.collate_fn(samples)

    def transformed(self, sample: Any, index: int) -> Any:
        """Return a sample after all transforms."""
        for which, (transform, wants_rng) in enumerate(self.transforms):
            options = {"rng": self.generator(index, which)} if wants_rng else {}
            try:
                sample = transform(sample, **options)
            except Exception as error:
                name = getattr(transform, "__name__", type(transform).__name__)
                add_note(error, f"npydata: raised by transform {name}, of sample {index}")
                raise
        return sample

    def generator(self, index: int, which: int) -> np.random.Generator:
        """Return the randomness of one transform on one sample."""
        return np.random.default_rng([self.seed & MASK64, self.epoch, index, which])
