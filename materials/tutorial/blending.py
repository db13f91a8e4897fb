"""Which of several sources each sample comes from: what lesson 11 builds, as plain code.

The library has a closed form in its place (``npydata.dataset.mixture.blend_counts``).

Pure arithmetic on integers. The j-th sample of a source has a window: from the first sample number
at which its share exceeds ``j - 1`` to the one at which it reaches ``j``. Giving each number to the
source whose window ends first keeps every window (they are tasks of a processor that is exactly
full), so a source is never a whole sample ahead of its share or behind it. With rational weights
the order repeats, so it is worked out for one period and known everywhere. Built in
``notebooks/11_documents_and_mixtures``.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import IntArray, stream_key

FINEST_SHARE = 100_000
"""Weights whose shares have no common denominator up to this are rounded to multiples of its
inverse: five decimals are exact."""

FOREVER = 1 << 62
"""A sample number that no run reaches."""


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of samples whose sources follow a pattern, some times over."""

    begin: int
    """Its first sample."""
    pattern: npt.NDArray[np.int64]
    """Which source each sample of one repetition comes from."""
    ranks: IntArray
    """For each, how many samples of the same source come before it in the pattern."""
    before: IntArray
    """For each source, how many of its samples come before the run."""
    per_pattern: IntArray
    """For each source, how many samples a repetition takes."""

    def sources_at(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return each sample's source, and how many of that source's samples came before it."""
        repetition, slot = divmod(samples - self.begin, len(self.pattern))
        found = self.pattern[slot]
        return found, self.before[found] + self.ranks[slot] + repetition * self.per_pattern[found]

    def counts_at(self, samples: int) -> IntArray:
        """Return how many of the first ``samples`` come from each source."""
        repetition, slot = divmod(samples - self.begin, len(self.pattern))
        begun = np.bincount(self.pattern[:slot], minlength=len(self.before))
        return self.before + repetition * self.per_pattern + begun


class Interleaving:
    """Sources in turn, by their weights; ``schedule`` gives other weights from a sample on.

    After any number of samples, each source has given its share of them to within less than one
    sample. The share is the sum of its weights, scheduled ones too, over the samples.
    """

    def __init__(
        self, weights: Sequence[Any], schedule: Mapping[int, Sequence[Any]] | None = None
    ) -> None:
        steps = {0: weights, **(schedule or {})}
        self.begins = sorted(steps)
        self.weights = [shares_of(steps[begin]) for begin in self.begins]
        if len({len(shares) for shares in self.weights}) != 1:
            raise ValueError("a schedule gives another number of weights, expected one a source")
        self.runs = list(Simulation(self.begins, self.weights).runs())
        self._run_begins = np.array([run.begin for run in self.runs])

    def sources_at(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return each sample's source, and how many of that source's samples came before it."""
        which = np.searchsorted(self._run_begins, samples, side="right") - 1
        sources, ranks = np.empty_like(samples), np.empty_like(samples)
        for k in np.unique(which).tolist():
            mine = which == k
            sources[mine], ranks[mine] = self.runs[k].sources_at(samples[mine])
        return sources, ranks

    def counts(self, samples: int) -> IntArray:
        """Return how many of the first ``samples`` come from each source."""
        which = int(np.searchsorted(self._run_begins, samples, side="right")) - 1
        return self.runs[which].counts_at(samples)

    def sample_of(self, source: int, rank: int) -> int:
        """Return the sample that takes a source's ``rank``-th, or ``FOREVER`` if none does."""
        low, high = 0, 1
        while self.counts(high)[source] <= rank:
            low, high = high, 2 * high
            if high >= FOREVER:
                return FOREVER
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.counts(middle)[source] > rank else (middle, high)
        return low


def shares_of(weights: Iterable[Any]) -> list[Fraction]:
    """Return weights as fractions that add up to one, of a common denominator small enough.

    A float stands for the decimal number it is written as: 0.1 is one tenth.
    """
    exact = [as_fraction(weight) for weight in weights]
    total = sum(exact)
    if total <= 0:
        raise ValueError(f"weights {[float(weight) for weight in exact]}, expected one above 0")
    shares = [weight / total for weight in exact]
    if math.lcm(*(share.denominator for share in shares)) <= FINEST_SHARE:
        return shares
    return rounded(shares)


def as_fraction(weight: Any) -> Fraction:
    """Return a weight as a fraction; raise unless it is a number of 0 or more."""
    try:
        found = Fraction(weight if isinstance(weight, Rational) else repr(float(weight)))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"weight {weight!r}, expected a number of 0 or more") from None
    if found < 0:
        raise ValueError(f"weight {weight!r}, expected a number of 0 or more")
    return found


def rounded(shares: Sequence[Fraction]) -> list[Fraction]:
    """Round shares to multiples of the finest; they still add up to one, and none becomes 0."""
    parts = [max(int(share > 0), math.floor(share * FINEST_SHARE)) for share in shares]
    missing = FINEST_SHARE - sum(parts)
    by_loss = sorted(range(len(parts)), key=lambda k: parts[k] - shares[k] * FINEST_SHARE)
    for k in by_loss[: max(0, missing)]:
        parts[k] += 1
    parts[max(range(len(parts)), key=parts.__getitem__)] += min(0, missing)
    return [Fraction(part, FINEST_SHARE) for part in parts]


class Simulation:
    """The order of the sources, found sample by sample, until it repeats or the weights change.

    Shares are kept as integers, in units of one over the weights' common denominator.
    """

    def __init__(self, begins: Sequence[int], weights: Sequence[Sequence[Fraction]]) -> None:
        self.begins = [*begins, FOREVER]
        self.unit = math.lcm(*(share.denominator for shares in weights for share in shares))
        self.rates = [[int(share * self.unit) for share in shares] for shares in weights]
        self.periods = [math.lcm(*(share.denominator for share in shares)) for shares in weights]
        self.owed = [[0] * len(weights[0])]
        """For each phase, what each source's share is worth when the phase begins."""
        for k, rates in enumerate(self.rates[:-1]):
            length = self.begins[k + 1] - self.begins[k]
            self.owed.append(
                [owed + rate * length for owed, rate in zip(self.owed[-1], rates, strict=True)]
            )
        self.counts = [0] * len(weights[0])

    def runs(self) -> Iterator[Run]:
        """Yield the runs of all phases."""
        for phase in range(len(self.rates)):
            yield from self.runs_of(phase)

    def runs_of(self, phase: int) -> Iterator[Run]:
        """Yield a phase period by period, and as one run what repeats itself."""
        end, period = self.begins[phase + 1], self.periods[phase]
        now, seen, patterns = self.begins[phase], dict[tuple[int, ...], int](), list[IntArray]()
        while now < end:
            state = self.lead(phase, now)
            if state in seen:
                cycle = np.concatenate(patterns[seen[state] :])
                # Windows are no longer than a period: none that begins before sees the phase's end.
                times = (end - now - 2 * period - 2) // len(cycle)
                if times > 0:
                    yield self.take(now, cycle, times)
                    now += times * len(cycle)
                seen = {}
                if end == FOREVER:
                    return
            seen[state] = len(patterns)
            patterns.append(self.follow(phase, now, min(period, end - now)))
            yield self.take(now, patterns[-1], 1)
            now += len(patterns[-1])

    def lead(self, phase: int, now: int) -> tuple[int, ...]:
        """Return how far each source is ahead of its share."""
        passed = now - self.begins[phase]
        parts = zip(self.counts, self.owed[phase], self.rates[phase], strict=True)
        return tuple(count * self.unit - owed - rate * passed for count, owed, rate in parts)

    def take(self, begin: int, pattern: IntArray, times: int) -> Run:
        """Return a run that begins here, and count what it takes of each source."""
        taken = np.bincount(pattern, minlength=len(self.counts))
        before = np.array(self.counts)
        self.counts = [
            count + times * new for count, new in zip(self.counts, taken.tolist(), strict=True)
        ]
        return Run(begin, pattern, ranks_in(pattern), before, taken)

    def follow(self, phase: int, begin: int, length: int) -> IntArray:
        """Return the sources of some samples: each time the window that ends first."""
        counts = list(self.counts)
        waiting = [(self.reach(phase, k, counts[k] * self.unit + 1), k) for k in range(len(counts))]
        heapq.heapify(waiting)
        ready: list[tuple[int, int]] = []
        pattern = []
        for number in range(begin + 1, begin + length + 1):
            while waiting and waiting[0][0] <= number:
                k = heapq.heappop(waiting)[1]
                heapq.heappush(ready, (self.reach(phase, k, (counts[k] + 1) * self.unit), k))
            k = heapq.heappop(ready)[1]
            pattern.append(k)
            counts[k] += 1
            heapq.heappush(waiting, (self.reach(phase, k, counts[k] * self.unit + 1), k))
        return np.array(pattern, np.int64)

    def reach(self, phase: int, source: int, share: int) -> int:
        """Return the first number of samples, in a phase or later, that give a source that share.

        A share that was reached before the phase is reached when it begins.
        """
        for k in range(phase, len(self.rates)):
            rate, missing = self.rates[k][source], share - self.owed[k][source]
            if missing <= 0:
                return self.begins[k]
            if rate > 0 and (number := self.begins[k] + -(-missing // rate)) <= self.begins[k + 1]:
                return number
        return FOREVER


def ranks_in(pattern: IntArray) -> IntArray:
    """Return, for each place, how many equal values come before it."""
    ranks = np.empty_like(pattern)
    for source in np.unique(pattern).tolist():
        mine = np.flatnonzero(pattern == source)
        ranks[mine] = np.arange(len(mine))
    return ranks


def shuffled_samples(ranks: IntArray, length: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return the epoch of a source that its ``ranks``-th samples are of, and which they are.

    Each epoch has each sample once, in an order of its own.
    """
    epochs, samples = np.divmod(ranks, length)
    for epoch in np.unique(epochs).tolist():
        order = Permutation(length, int(stream_key(seed, epoch)))
        samples[epochs == epoch] = order(samples[epochs == epoch])
    return epochs, samples
