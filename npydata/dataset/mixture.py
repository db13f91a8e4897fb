"""Several datasets as one, by weight: which of them sample i comes from is computed, not drawn.

Example::

    mixture = MixtureDataset({"web": web, "code": code}, [0.7, 0.3])
    loader = AsyncDataLoader(mixture, shuffle=False, seed=0)
"""

import hashlib
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from npydata.dataset.batches import SourceRequest, collate, join, samples_of
from npydata.dataset.datasets import as_indices
from npydata.dataset.describing import Described
from npydata.dataset.epochs import InEpochs, SharedInt
from npydata.dataset.given_sources import Weights, require_sources, weights_in_order
from npydata.dataset.hashing import MASK64, stream_key
from npydata.dataset.interleaving import FOREVER, Interleaving
from npydata.dataset.permutation import Permutation
from npydata.dataset.token_windows import as_int
from npydata.dataset.windows import IntArray
from npydata.errors import NpyDataError

OWN_ORDER = (
    "its samples come in the order that keeps the shares of its sources, which shuffle within "
    "themselves"
)
AT_THE_END = ("raise", "drop", "warn")


@dataclass(frozen=True, slots=True)
class SourceCount:
    """What a mixture has taken of one source."""

    samples: int
    epochs: float
    """Passes over the source, the one under way as a fraction."""
    tokens: int | None
    """Targets in these samples; ``None`` if the source does not say how many a sample has."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The samples from one on, until the next segment, and what came of each source before."""

    begin: int
    interleaving: Interleaving
    before: IntArray


class MixtureDataset(InEpochs, Described, Dataset[Any]):
    """Samples of several datasets, each by its weight, exact at every prefix.

    Args:
        sources: Map-style datasets by name; other mixtures may be among them.
        weights: One for each source, by name or in their order. Only their ratios count. A float
            stands for the decimal number it is written as; shares finer than five decimals are
            rounded, see ``weights``.
        schedule: Other weights from a sample on: ``{sample number: weights}``.
        num_samples: How long an epoch of the mixture is. If not given, it ends when the first
            source has been passed over once.
        seed: Decides the order within each source; a loader's own seed takes its place.
        max_epochs: How often a source may be passed over; as often as it takes if not given.
        at_the_end: What happens when a source would begin one epoch more: ``"raise"`` an error,
            ``"drop"`` the source, so that the others share what is left, or ``"warn"`` and go on.

    Raises:
        ValueError: Weights, names or numbers are impossible; the message names them.

    Promises: after any number of samples, each source has given its share to within less than one
    sample, over scheduled changes too. Each source's samples come shuffled, each once in each of
    its epochs; a source that ends begins its next epoch, also in the middle of the mixture's.
    Sample i of an epoch is a pure function of (seed, epoch, i), and the mixture's epochs go on
    where the last one ended, so a loader's state, which is a few integers, says where every source
    stands; there is no ``state_dict`` here, which could only say something else. The samples of a
    batch must fit together: of one kind, and of one shape.

    Let the loader not shuffle (``shuffle=False``); it refuses to. A ``schedule`` counts samples
    over all epochs of the mixture.
    """

    refuses_shuffle, shuffle_by_default = OWN_ORDER, False
    """Why a loader must not shuffle the samples."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        schedule: Mapping[int, Weights] | None = None,
        num_samples: int | None = None,
        seed: int = 0,
        max_epochs: int | None = None,
        at_the_end: str = "raise",
    ) -> None:
        require_sources(sources)
        self.sources, self.names = list(sources.values()), list(sources)
        self.lengths = [len(source) for source in self.sources]
        self.seed, self.max_epochs = as_int(seed, "seed"), max_epochs
        if max_epochs is not None:
            as_int(max_epochs, "max_epochs", least=1)
        if at_the_end not in AT_THE_END:
            raise ValueError(f"at_the_end={at_the_end!r}, expected one of {', '.join(AT_THE_END)}")
        self.at_the_end = at_the_end
        self._epoch = SharedInt(torch.zeros(1, dtype=torch.int64))
        self._warned: set[str] = set()
        self._segments: list[Segment] = []
        self._begin_segment(0, weights, schedule)
        longest = self._one_pass() if num_samples is None else num_samples
        self.num_samples = as_int(longest, "num_samples", least=1)

    def __len__(self) -> int:
        return self.num_samples

    def describe(self) -> dict[str, Any]:
        """Return samples, shares at the beginning, and each source's own description."""
        return {
            "kind": type(self).__name__,
            "samples": self.num_samples,
            "weights": {name: str(weight) for name, weight in self.weights.items()},
            "sources": {
                name: source.describe() if isinstance(source, Described)
                else {"kind": type(source).__name__, "samples": length}
                for name, source, length in zip(self.names, self.sources, self.lengths, strict=True)
            },
        }  # fmt: skip

    def __repr__(self) -> str:
        shares = ", ".join(f"{name!r}: {float(w):.4g}" for name, w in self.weights.items())
        return f"MixtureDataset({{{shares}}}, {self.num_samples:,} samples)"

    @property
    def weights(self) -> dict[str, Fraction]:
        """The shares at the beginning, exactly as they are kept; they add up to one."""
        return self.weights_at(0)

    def weights_at(self, sample: int) -> dict[str, Fraction]:
        """Return the shares at a sample, counted over all epochs."""
        segment = self._segment_of(sample)
        within = sample - segment.begin
        phase = int(np.searchsorted(segment.interleaving.begins, within, side="right")) - 1
        return dict(zip(self.names, segment.interleaving.weights[phase], strict=True))

    def reweighted(
        self, at: int, weights: Weights, schedule: Mapping[int, Weights] | None = None
    ) -> "MixtureDataset":
        """Return the same mixture with other weights from a sample on.

        Args:
            at: The first sample of the new weights, counted over all epochs: ``epoch * len(self) +
                samples`` of a loader's state.
            weights: As for a new mixture; shares are counted from here.
            schedule: As for a new mixture, with sample numbers behind ``at``.

        Every source goes on where it stands: no sample is lost or repeated. A state taken at
        ``at`` or before it fits the new mixture as well.
        """
        if at < self._segments[-1].begin:
            raise ValueError(f"at={at}, expected {self._segments[-1].begin} or more")
        new = MixtureDataset.__new__(MixtureDataset)
        new.__dict__.update(self.__dict__)
        new._epoch = SharedInt(torch.tensor([self.epoch]))
        kept = [segment for segment in self._segments if segment.begin < at]
        new._segments, new._warned = kept, set()
        new._begin_segment(at, weights, schedule)
        return new

    def counts(self, samples: int) -> dict[str, int]:
        """Return how many of the first samples, counted over all epochs, come from each source."""
        return dict(zip(self.names, self._counts(samples).tolist(), strict=True))

    def progress(self, epoch: int, samples: int) -> dict[str, SourceCount]:
        """Return what each source has given when so many samples of an epoch are taken."""
        counts = self._counts(epoch * self.num_samples + samples).tolist()
        lengths = [getattr(source, "seq_len", None) for source in self.sources]
        return {
            name: SourceCount(count, count / length, None if seq_len is None else count * seq_len)
            for name, count, length, seq_len in zip(
                self.names, counts, self.lengths, lengths, strict=True
            )
        }

    def sources_of(
        self, indices: npt.ArrayLike, *, epoch: int | None = None
    ) -> tuple[IntArray, IntArray]:
        """Return for each sample its source, and how many of that source's came before it."""
        epoch = self.epoch if epoch is None else epoch
        samples = as_indices(indices, self.num_samples) + epoch * self.num_samples
        sources, ranks = np.empty_like(samples), np.empty_like(samples)
        begins = [segment.begin for segment in self._segments]
        which = np.searchsorted(begins, samples, side="right") - 1
        for k in np.unique(which).tolist():
            segment, mine = self._segments[k], which == k
            found, since = segment.interleaving.sources_at(samples[mine] - segment.begin)
            sources[mine], ranks[mine] = found, since + segment.before[found]
        return sources, ranks

    def fetch(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> Any:
        """Return a batch, as its sources give it; safe to call from many threads.

        Raises:
            IndexError: An index is not in the dataset.
            NpyDataError: A source would be passed over more than ``max_epochs`` times, or the
                sources' samples don't fit together.
        """
        parts = list(self._parts(indices, seed, epoch))
        if not all(hasattr(self.sources[part.source], "fetch") for part in parts):
            return collate(samples_of(self.sources, parts))
        batches = [part.fetch(self.sources[part.source]) for part in parts]
        if len(batches) == 1:
            return batches[0]
        where = np.concatenate([part.where for part in parts])
        names = [self.names[part.source] for part in parts]
        return join(batches, torch.from_numpy(np.argsort(where)), names)

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Tell the sources of samples fetched soon, those that want to know."""
        for part in self._parts(indices, seed, epoch):
            will_need = getattr(self.sources[part.source], "will_need", None)
            if will_need:
                part.call(will_need)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample; for a slice or a list a batch, as ``fetch`` does."""
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))
        try:
            one = operator.index(index)
        except TypeError:
            return self.fetch(index)
        return self.__getitems__([one])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch one by one, for a stock ``DataLoader``'s collate."""
        return samples_of(self.sources, list(self._parts(indices, None, None)))

    def fingerprint(self) -> str:
        """Return a short text that tells this mixture from any other."""
        return self.fingerprint_at(0, FOREVER)

    def fingerprint_at(self, epoch: int, samples: int) -> str:
        """Return what decides the samples before a place, so that what comes after may change."""
        passed = epoch * self.num_samples + samples
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.num_samples if epoch else None, self.max_epochs)).encode())
        for segment in self._segments:
            if segment.begin < max(1, passed):
                digest.update(repr(self._described(segment, passed)).encode())
        for name, source, count in zip(
            self.names, self.sources, self._counts(min(passed, FOREVER)), strict=True
        ):
            if count or not passed:
                own = getattr(source, "fingerprint", None)
                digest.update(repr((name, len(source), own and str(own()))).encode())
        return digest.hexdigest()

    def _described(self, segment: Segment, passed: int) -> list[Any]:
        """Return the weights of a segment's phases that begin before a place."""
        phases = zip(segment.interleaving.begins, segment.interleaving.weights, strict=True)
        begun = [(segment.begin + begin, weights) for begin, weights in phases]
        return [
            (begin, [(name, str(w)) for name, w in zip(self.names, weights, strict=True) if w])
            for begin, weights in begun
            if begin < max(1, passed)
        ]

    def _begin_segment(
        self, at: int, weights: Weights, schedule: Mapping[int, Weights] | None
    ) -> None:
        """Take samples by these weights from ``at`` on."""
        steps = {at: weights_in_order(weights, self.names)}
        for sample, later in (schedule or {}).items():
            if as_int(sample, "sample number of a schedule") <= at:
                raise ValueError(f"a schedule's sample number {sample}, expected more than {at}")
            steps[sample] = weights_in_order(later, self.names)
        while True:
            before = self._counts(at) if at else np.zeros(len(self.sources), np.int64)
            shifted = {sample - at: given for sample, given in steps.items()}
            segment = Segment(at, Interleaving(shifted.pop(0), shifted), before)
            self._segments.append(segment)
            ended = self._first_to_end(segment)
            if ended is None:
                return
            at, steps = self._without(*ended, steps)
            if not any(steps[at]):  # all were passed over as often as they may be
                return

    def _first_to_end(self, segment: Segment) -> tuple[int, list[int]] | None:
        """Return the sample at which sources are used up for good, and which; if they drop out."""
        if self.max_epochs is None or self.at_the_end != "drop":
            return None
        ends = [self._end_of(segment, k) for k in range(len(self.sources))]
        first = min(ends)
        return None if first >= FOREVER else (first, [k for k, e in enumerate(ends) if e == first])

    def _end_of(self, segment: Segment, source: int) -> int:
        """Return the sample behind the last one of a source that will still be passed over."""
        left = self.lengths[source] * (self.max_epochs or 1) - int(segment.before[source])
        if left <= 0:
            return FOREVER
        last = segment.interleaving.sample_of(source, left - 1)
        return FOREVER if last >= FOREVER else segment.begin + last + 1

    def _without(
        self, at: int, ended: list[int], steps: Mapping[int, list[Any]]
    ) -> tuple[int, dict[int, list[Any]]]:
        """Return the weights from a sample on, without some sources."""
        now = max(begin for begin in steps if begin <= at)
        later = {at: steps[now], **{b: given for b, given in steps.items() if b > at}}
        left = {b: [0 if k in ended else w for k, w in enumerate(g)] for b, g in later.items()}
        return at, left

    def _segment_of(self, sample: int) -> Segment:
        return next(segment for segment in reversed(self._segments) if segment.begin <= sample)

    def _counts(self, samples: int) -> IntArray:
        """Return how many of the first samples come from each source."""
        segment = self._segment_of(max(0, samples - 1))
        return segment.before + segment.interleaving.counts(samples - segment.begin)

    def _one_pass(self) -> int:
        """Return how many samples there are until the first source was passed over once."""
        last = [
            self._segments[0].interleaving.sample_of(k, length - 1)
            for k, length in enumerate(self.lengths)
        ]
        return min(last) + 1

    def _parts(
        self, indices: npt.ArrayLike, seed: int | None, epoch: int | None
    ) -> Iterator[SourceRequest]:
        """Yield what is asked of each source, and of each of its epochs, for some samples."""
        seed = self.seed if seed is None else seed
        sources, ranks = self.sources_of(indices, epoch=epoch)
        for k in np.unique(sources).tolist():
            own_seed = int(stream_key(seed, k)) & (MASK64 >> 1)
            where = np.flatnonzero(sources == k)
            if hasattr(self.sources[k], "refuses_shuffle"):
                epochs, taken = np.divmod(ranks[where], self.lengths[k])
            else:
                epochs, taken = shuffled_samples(ranks[where], self.lengths[k], own_seed)
            for one in np.unique(epochs).tolist():
                self._require_allowed(k, one)
                mine = epochs == one
                yield SourceRequest(k, where[mine], taken[mine], own_seed, one)

    def _require_allowed(self, source: int, epoch: int) -> None:
        """Raise, or warn once, if a source may not be passed over as often as that."""
        if self.max_epochs is None or epoch < self.max_epochs:
            return
        message = (
            f"source {self.names[source]!r} begins epoch {epoch + 1}, "
            f"expected {self.max_epochs} at most (max_epochs)"
        )
        if self.at_the_end != "warn":
            raise NpyDataError(message)
        if self.names[source] not in self._warned:
            self._warned.add(self.names[source])
            warnings.warn(message, stacklevel=2)


def shuffled_samples(ranks: IntArray, length: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return the epoch of a source that its ``ranks``-th samples are of, and which they are.

    Each epoch has each sample once, in an order of its own.
    """
    epochs, samples = np.divmod(ranks, length)
    for epoch in np.unique(epochs).tolist():
        order = Permutation(length, int(stream_key(seed, epoch)))
        samples[epochs == epoch] = order(samples[epochs == epoch])
    return epochs, samples
