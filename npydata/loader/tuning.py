"""How to set a loader: the costs behind its speed, and a recommendation.

Example::

    print(recommend(dataset, step_s=0.02))

Built in ``notebooks/04_throughput``; the arithmetic is in :mod:`npydata.loader.pipeline`.
"""

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from npydata.loader.config import AsyncDataLoaderConfig
from npydata.loader.loader import AsyncDataLoader
from npydata.loader.pipeline import Timeline, predict
from npydata.loader.prefetcher import Fetch, Prefetcher, ThreadPrefetcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What :func:`predict` needs to know about a dataset on a machine, in seconds per batch."""

    fetch_s: float
    serial_s: float
    wake_s: float

    def predict(self, step_s: float, workers: int, prefetch: int, batches: int = 512) -> Timeline:
        """Predict an :class:`AsyncDataLoader` of that setting, with its own window and handoffs."""
        config = AsyncDataLoaderConfig(num_workers=workers, prefetch_factor=prefetch)
        return predict(step_s, self.fetch_s, config.busy_workers, prefetch, batches,
                       batches_per_handoff=config.batches_per_handoff, window=config.capacity,
                       serial_s=self.serial_s, wake_s=self.wake_s)  # fmt: skip


def calibrate(dataset: Any, *, seconds: float = 1.0, repeats: int = 5, **options: Any) -> Costs:
    """Measure what :func:`predict` needs, with three settings of the loader itself.

    One worker with room fetches batches as fast as it can (``fetch_s``). Two of them show what they
    can't do at once (``serial_s``). A window of one batch makes worker and consumer wait for each
    other in turn, so every batch pays for two wakes (``wake_s``).
    """
    return costs_of(times_in_turn(dataset, PROBES, seconds, repeats, options, FixedWorkers))


class FixedWorkers(AsyncDataLoader):
    """A loader that begins with all its workers and keeps them, so that numbers can be compared."""

    def _prefetcher(self, fetch: Fetch, count: int) -> Prefetcher:
        config = self.config
        if config.prefetch_factor == 0:
            return super()._prefetcher(fetch, count)
        workers = max(1, min(config.busy_workers, count))
        return ThreadPrefetcher(fetch, count, workers, config.capacity, config.batches_per_handoff)


PROBES = ((1, 16), (2, 16), (1, 1))
"""Workers and prefetch factors whose speeds tell the costs."""


def costs_of(times: Mapping[tuple[int, int], float]) -> Costs:
    """Return the costs behind the seconds per batch of the :data:`PROBES`.

    Two workers that are no faster than one share something: the GIL, or the memory. If they are
    nearly twice as fast, nothing is known about what they share, and nothing is assumed.
    """
    one, two, lock_step = (times[probe] for probe in PROBES)
    return Costs(fetch_s=one, serial_s=two if two > 0.55 * one else 0.0,
                 wake_s=max(0.0, lock_step - one) / 2)  # fmt: skip


def times_in_turn(
    dataset: Any,
    settings: Sequence[tuple[int, int]],
    seconds: float,
    repeats: int,
    options: dict[str, Any],
    loader_type: type[AsyncDataLoader] = AsyncDataLoader,
) -> dict[tuple[int, int], float]:
    """Return the seconds per batch of each ``(workers, prefetch)``: the median over the turns.

    A first turn, in which pages and page tables get ready, is as long as the others together.
    """
    taken: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    each = seconds / len(settings) / 2
    for turn in range(repeats + 1):
        for setting, times in taken.items():
            workers, prefetch = setting
            loader = loader_type(dataset, num_workers=workers, prefetch_factor=prefetch,
                                 **{"seed": 0, **options})  # fmt: skip
            times.append(seconds_per_batch(loader, each / repeats if turn else each))
    return {setting: median(times[1:]) for setting, times in taken.items()}


def seconds_per_batch(loader: AsyncDataLoader, seconds: float) -> float:
    """Take batches for some seconds and return the time between two, start-up left out."""
    with closing(endless_batches(loader)) as batches:
        for _ in islice(batches, loader.config.capacity + 2):
            pass
        return seconds_each(batches, seconds)


def seconds_each(batches: Iterator[Any], seconds: float) -> float:
    """Take batches for so many seconds, two of them at least, and return the seconds of one."""
    count, begin, passed = 0, time.perf_counter(), 0.0
    while passed < seconds or count < 2:
        next(batches)
        count, passed = count + 1, time.perf_counter() - begin
    return passed / count


def endless_batches(loader: AsyncDataLoader) -> Generator[Any, None, None]:
    """Yield epoch after epoch; closing it stops the workers."""
    while True:
        with iter(loader) as batches:
            yield from batches


# The recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """How to set a loader, and why; ``print`` it."""

    num_workers: int
    prefetch_factor: int
    batches_per_s: float
    """What that setting delivered to a consumer that does nothing."""
    enough: bool
    """Whether that is twice what the training step takes."""
    reason: str

    @property
    def settings(self) -> dict[str, int]:
        """As keywords: ``AsyncDataLoader(dataset, **recommendation.settings)``."""
        return {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def __str__(self) -> str:
        settings = f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}"
        return f"{settings}:\n  {self.reason}"


CANDIDATES = ((1, 2), (1, 8), (1, 16), (1, 32), (2, 2), (2, 8), (2, 16), (4, 8))
"""Workers and prefetch factors that are tried: from the smallest window to the largest."""

HEADROOM = 2.0
"""A loader that is only just fast enough starves its consumer whenever the machine is busy."""

AS_GOOD = 0.95
"""A setting that reaches this share of the best one is as good, and the cheapest of them wins."""


def recommend(
    dataset: Any, *, step_s: float = 0.0, seconds: float = 2.0, repeats: int = 3, **options: Any
) -> Recommendation:
    """Measure some settings of the loader briefly and say which to use.

    Args:
        dataset: What the loader will read; let its files be as warm or cold as in training.
        step_s: Seconds that a training step takes; 0 asks for the fastest setting.
        seconds: How long to measure, over all settings.
        repeats: Turns; every setting is measured in each, and the median counts.
        options: For :class:`AsyncDataLoader`: batch size, transforms, ...

    Raises:
        LoaderError: The dataset, or an option, is nothing for a loader.

    The cheapest setting, with the fewest workers and then the smallest prefetch factor, that makes
    batches twice as fast as they are used is enough. Where none does, the fastest one is
    recommended, and the reason says so.
    """
    candidates = [c for c in CANDIDATES if c[0] <= max(1, os.cpu_count() or 1)]
    times = times_in_turn(dataset, candidates, seconds, repeats, options)
    return choose({one: 1 / time for one, time in times.items()}, step_s)


def choose(rates: dict[tuple[int, int], float], step_s: float) -> Recommendation:
    """Choose among measured settings, cheapest first: ``(workers, prefetch) -> batches/s``."""
    workers, prefetch = cheapest(rates, step_s)
    rate, best = rates[workers, prefetch], max(rates.values())
    return Recommendation(num_workers=workers, prefetch_factor=prefetch, batches_per_s=rate,
                          enough=bool(step_s) and best >= HEADROOM / step_s,
                          reason=reason_for(rate, best, step_s))  # fmt: skip


def cheapest(rates: Mapping[tuple[int, int], float], step_s: float) -> tuple[int, int]:
    """Return the first setting with headroom for a step; where none has, the first of the fastest.

    ``rates`` are in batches/s, cheapest setting first. With a step of 0, nothing is enough.
    """
    needed = HEADROOM / step_s if step_s else float("inf")
    best = max(rates.values())
    target = needed if best >= needed else AS_GOOD * best
    return next(setting for setting, rate in rates.items() if rate >= target)


def reason_for(rate: float, best: float, step_s: float) -> str:
    """Say why a setting was chosen."""
    made = f"it makes a batch every {milliseconds(1 / rate)}"
    if not step_s:
        return f"{made}; the fastest of all settings needs {milliseconds(1 / best)}"
    used = f"a step of {milliseconds(step_s)}"
    if best >= HEADROOM / step_s:
        times = f"{step_s * rate:.0f}" if step_s * rate >= 10 else f"{step_s * rate:.1f}"
        return f"{made}, which is {times} times as fast as {used} uses them"
    if best * step_s >= 1:
        return f"{made}: fast enough for {used}, but with little to spare; no setting has more"
    return f"{made}, too slow for {used}, and no setting is faster: make samples cheaper"


def milliseconds(seconds: float) -> str:
    """Return a duration with the digits that mean something."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
