"""Several datasets as one, by weight: the source of sample i is computed, not drawn.

Example::

    mixture = MixtureDataset({"web": web, "code": code}, [0.7, 0.3])
    loader = AsyncDataLoader(mixture, seed=0)
"""

import copy
import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from npydata.dataset.batches import join
from npydata.dataset.datasets import Empty, TokenDataset, as_indices, empty_int64
from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import MASK64, IntArray, as_int, stream_key

Weights = Mapping[str, Any] | Sequence[Any]
LARGEST_TOTAL = 1 << 31
"""Weights are integers that add up to at most this, so that products stay below 2**62."""


class SourceCount(NamedTuple):
    """What a mixture has taken from one source."""

    samples: int
    epochs: float
    """Passes over the source, the current one as a fraction."""
    tokens: int
    """Targets in these samples; 0 if the source has no ``seq_len``."""


class Phase(NamedTuple):
    """A stretch of samples with the same weights, until the next phase."""

    begin: int
    weights: tuple[int, ...]
    before: IntArray
    """For each source, how many of its samples come before the phase."""

    def counts(self, samples: IntArray) -> IntArray:
        """Return how many of the first samples, ``(n,)``, each source has: ``(sources, n)``."""
        return self.before[:, None] + blend_counts(samples - self.begin, self.weights)


def blend_counts(samples: IntArray, weights: Sequence[int]) -> IntArray:
    """Return how many of the first ``samples``, ``(n,)``, come from each source: ``(sources, n)``.

    The first source takes its share of them, rounded, and passes the rest on to the next, which
    takes its share of that. Each further sample goes to exactly one source. The heaviest source
    goes first, which keeps each of n sources within ``(1 + 1 + 1/2 + ... + 1/(n-1)) / 2`` samples
    of its share: within 1 for two, within 2.5 for twenty.
    """
    counts = np.zeros((len(weights), *samples.shape), np.int64)
    total = sum(weights)
    for k in sorted(range(len(weights)), key=lambda k: -weights[k]):
        if weights[k] == 0:
            break
        # samples * weight / total, rounded; cut in two because the product is beyond 64 bits.
        whole, part = np.divmod(samples, total)
        counts[k] = whole * weights[k] + (part * weights[k] + total // 2) // total
        samples, total = samples - counts[k], total - weights[k]
    return counts


class MixtureDataset(TokenDataset):
    """Samples of several datasets, each by its weight, at every prefix.

    Args:
        sources: Map-style datasets by name; other mixtures may be among them. Those that aren't
            npydata's are read sample by sample.
        weights: One for each source, by name or in their order. Only their ratios count. A float
            stands for the decimal number it is written as; the property ``weights`` gives the exact
            shares.
        schedule: Other weights from given samples on: ``{sample number: weights}``, counted over
            all epochs of the mixture.
        num_samples: How long an epoch of the mixture is. If not given, it ends when the first
            source has given all its samples once.
        seed: Decides the order within each source; a loader's own seed takes its place.

    Raises:
        ValueError: Weights, names or numbers are invalid; the message names them.

    Promises: after any number of samples, each source has given its share, to within one sample for
    two sources and two and a half for twenty (:func:`blend_counts`); each change of weights begins
    a new count. Each source's samples come shuffled, each once in each of its epochs; a source that
    runs out begins its next epoch, even in the middle of the mixture's. Sample i of an epoch is a
    pure function of (seed, epoch, i), and each epoch of the mixture continues where the last one
    ended, so a loader's state says where every source stands. The samples of a batch must fit
    together: one kind, one shape.
    """

    shuffle_by_default = False
    refuses_shuffle = (
        "its samples come in the order that keeps the shares of its sources, which shuffle within "
        "themselves"
    )
    """Why a loader must not shuffle the samples."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        schedule: Mapping[int, Weights] | None = None,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__([])
        if not isinstance(sources, Mapping):
            raise TypeError(f"sources={sources!r}, expected a dictionary of datasets by name")
        for name, source in sources.items():
            if isinstance(source, str | bytes) or not hasattr(source, "__getitem__"):
                raise TypeError(f"source {name!r} is a {type(source).__name__}, expected a dataset")
            if len(source) < 1:
                raise ValueError(f"source {name!r} has {len(source)} samples, expected 1 or more")
        self.sources, self.names = list(sources.values()), list(sources)
        self.lengths = [len(source) for source in self.sources]
        self.seed = None if seed is None else as_int(seed, "seed")
        self._phases: list[Phase] = []
        self._add_phases(0, weights, schedule)
        if num_samples is None:
            lengths = np.array(self.lengths)
            num_samples = bisect_left(
                range(1 << 62), True, key=lambda n: bool((self._counts(n) >= lengths).any())
            )
        self.num_samples = as_int(num_samples, "num_samples", least=1)

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        shares = ", ".join(f"{name!r}: {float(w):.4g}" for name, w in self.weights.items())
        return f"MixtureDataset({{{shares}}}, {self.num_samples:,} samples)"

    @property
    def weights(self) -> dict[str, Fraction]:
        """The exact shares at the beginning; they add up to one."""
        weights = self._phases[0].weights
        return {
            name: Fraction(w, sum(weights)) for name, w in zip(self.names, weights, strict=True)
        }

    def reweighted(self, at: int, weights: Weights) -> "MixtureDataset":
        """Return the same mixture with other weights from sample ``at`` on.

        Args:
            at: The first sample with the new weights, counted over all epochs: ``epoch * len(self)
                + samples`` of a loader's state.
            weights: As for a new mixture; shares are counted from ``at``.

        Every source continues where it stands: no sample is lost or repeated. A state taken at
        ``at`` or before it fits the new mixture as well.
        """
        new = copy.copy(self)
        TokenDataset.__init__(new, [])  # an epoch of its own
        new.set_epoch(self.epoch)
        new._phases = [phase for phase in self._phases if phase.begin < at]
        new._add_phases(at, weights, None)
        return new

    def progress(self, epoch: int, samples: int) -> dict[str, SourceCount]:
        """Return what each source has given after ``samples`` samples of an epoch."""
        counts = self._counts(epoch * self.num_samples + samples).tolist()
        return {
            name: SourceCount(count, count / len(source), count * getattr(source, "seq_len", 0))
            for name, source, count in zip(self.names, self.sources, counts, strict=True)
        }

    def fetch(
        self,
        indices: npt.ArrayLike,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        empty: Empty = empty_int64,
    ) -> Any:
        """Return a batch, as its sources give it; safe to call from many threads.

        ``empty`` isn't called: samples of several sources are joined in new memory.

        Raises:
            IndexError: An index is not in the dataset.
            NpyDataError: The sources' samples don't fit together.
        """
        batches, places, names = [], [], []
        for k, where, own, options in self._requests(indices, seed, epoch):
            source = self.sources[k]
            if isinstance(source, TokenDataset):
                batches.append(source.fetch(own, **options))
            else:
                samples = [source[index] for index in own.tolist()]
                batches.append(tree_map(lambda *parts: default_collate([*parts]), *samples))
            places.append(where)
            names.append(self.names[k])
        if not batches:
            return self.sources[0].fetch([])
        if len(batches) == 1:
            return batches[0]
        order = np.argsort(np.concatenate(places))
        return join(batches, torch.from_numpy(order), names)

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Tell npydata's datasets among the sources which samples will be fetched soon."""
        for k, _, own, options in self._requests(indices, seed, epoch):
            if isinstance(self.sources[k], TokenDataset):
                self.sources[k].will_need(own, **options)

    def fingerprint(self) -> str:
        """Return a short text that identifies this mixture."""
        return self.fingerprint_at(0, 1 << 62)

    def fingerprint_at(self, epoch: int, samples: int) -> str:
        """Return a hash of what decides the samples before a position; later ones may change."""
        passed = min(epoch * self.num_samples + samples, 1 << 62)
        phases = [(p.begin, p.weights) for p in self._phases if p.begin < passed]
        sources = [
            (name, len(source), str(getattr(source, "fingerprint", str)()))
            for name, source, count in zip(
                self.names, self.sources, self._counts(passed), strict=True
            )
            if count
        ]
        decided_by = repr((self.num_samples if epoch else None, phases, sources))
        return hashlib.blake2b(decided_by.encode(), digest_size=16).hexdigest()

    def _add_phases(
        self, at: int, weights: Weights, schedule: Mapping[int, Weights] | None
    ) -> None:
        """Take samples by these weights from ``at`` on."""
        for given, now in [(at, weights), *sorted((schedule or {}).items())]:
            begin = as_int(given, "a sample number", least=0)
            if self._phases and begin <= self._phases[-1].begin:
                last = self._phases[-1].begin
                raise ValueError(f"a schedule's sample number {begin}, expected more than {last}")
            before = self._counts(begin) if begin else np.zeros(len(self.sources), np.int64)
            self._phases.append(Phase(begin, integer_weights(now, self.names), before))

    def _counts(self, samples: int) -> IntArray:
        """Return how many of the first samples come from each source."""
        k = bisect_left(self._phases, samples, key=lambda phase: phase.begin)
        return self._phases[max(0, k - 1)].counts(np.array([samples]))[:, 0]

    def _sources_at(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return each sample's source, and how many of that source's samples came before it."""
        sources, ranks = np.empty_like(samples), np.empty_like(samples)
        begins = [phase.begin for phase in self._phases]
        which = np.searchsorted(begins, samples, side="right") - 1
        for k in np.unique(which).tolist():
            mine = np.flatnonzero(which == k)
            before, after = np.split(
                self._phases[k].counts(np.concatenate([samples[mine], samples[mine] + 1])),
                2,
                axis=1,
            )
            found = np.argmax(after > before, axis=0)
            sources[mine], ranks[mine] = found, before[found, np.arange(len(mine))]
        return sources, ranks

    def _requests(
        self, indices: npt.ArrayLike, seed: int | None, epoch: int | None
    ) -> Iterator[tuple[int, IntArray, IntArray, dict[str, int]]]:
        """Yield what a batch takes from each epoch of each source.

        The source, the positions in the batch, the source's own samples for them, and the seed and
        epoch that its ``fetch`` gets if it is one of npydata's datasets.
        """
        seed = (self.seed or 0) if seed is None else seed
        epoch = self.epoch if epoch is None else epoch
        samples = as_indices(indices, self.num_samples) + epoch * self.num_samples
        sources, ranks = self._sources_at(samples)
        for k in np.unique(sources).tolist():
            own_seed = int(stream_key(seed, k)) & (MASK64 >> 1)
            where = np.flatnonzero(sources == k)
            epochs, taken = np.divmod(ranks[where], self.lengths[k])
            for own_epoch in np.unique(epochs).tolist():
                mine = epochs == own_epoch
                if not hasattr(self.sources[k], "refuses_shuffle"):
                    taken[mine] = shuffle_of(self.lengths[k], own_seed, own_epoch)(taken[mine])
                yield k, where[mine], taken[mine], {"seed": own_seed, "epoch": own_epoch}


@lru_cache(maxsize=256)
def shuffle_of(length: int, seed: int, epoch: int) -> Permutation:
    """Return the order of one epoch of a source."""
    return Permutation(length, int(stream_key(seed, epoch)))


def integer_weights(weights: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Return weights, by name or in order, as integers in the order of the sources' names.

    A float stands for the decimal number it is written as: 0.1 is one tenth. Ratios finer than
    one in 2**31 are rounded; none becomes 0.
    """
    if isinstance(weights, Mapping):
        if unknown := sorted(weights.keys() ^ set(names), key=str):
            raise ValueError(
                f"weights by name: {unknown[0]!r} is not in both, expected weights for "
                f"{', '.join(names)}"
            )
        weights = [weights[name] for name in names]
    if isinstance(weights, str) or np.shape(weights) != (len(names),):
        raise ValueError(f"weights={weights!r}, expected one for each of {', '.join(names)}")
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(str(weight)))
        except ValueError:
            exact.append(Fraction(-1))
        if exact[-1] < 0:
            raise ValueError(f"weight {weight!r}, expected a number of 0 or more")
    if not any(exact):
        raise ValueError(f"weights {weights!r} of sources {names}, expected one above 0")
    shares = [weight / sum(exact) for weight in exact]
    unit = math.lcm(*(share.denominator for share in shares))
    if unit > LARGEST_TOTAL:
        unit = LARGEST_TOTAL - len(shares)  # rounding up may add one for each
    return tuple(math.ceil(share * unit) for share in shares)
