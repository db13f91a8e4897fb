"""A model of worker threads and one consumer: arithmetic on a few times, nothing is measured.

Built in ``notebooks/04_throughput``, which also shows where it is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tutorial.lesson_loader import batches_per_handoff


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the model knows about a loader and its consumer."""

    step_s: float
    """Seconds that the consumer needs for a batch."""
    fetch_s: float
    """Seconds that a worker needs to make one."""
    workers: int = 1
    """Threads that make batches."""
    window: int = 2
    """Batches that may be under way or ready."""
    batches_per_handoff: int = 1
    """Batches that change hands at a time: a chunk."""
    serial_s: float = 0.0
    """The part of ``fetch_s`` that only one worker can do at a time."""
    wake_s: float = 0.0
    """From an event to the moment at which a thread that waited for it goes on."""


class Trip(NamedTuple):
    """A chunk of batches on its way from a worker to the consumer; times in seconds."""

    worker: int
    begun: float
    """The worker had claimed it, and began."""
    made: float
    taken: float
    done: float
    """The consumer's steps on it were over."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the model says happened, chunk by chunk."""

    trips: tuple[Trip, ...]
    chunk_size: int

    @property
    def batches_per_s(self) -> float:
        """Once the pipeline is full: over the second half."""
        half = len(self.trips) // 2
        return self.chunk_size * half / (self.trips[-1].done - self.trips[-1 - half].done)

    @property
    def wait_share(self) -> float:
        """Share of the second half in which the consumer stood still, 0 to 1."""
        late = self.trips[-1 - len(self.trips) // 2 :]
        return idle_share([(trip.taken, trip.done) for trip in late])


def timeline(p: Pipeline, batches: int) -> Timeline:
    """Follow so many batches, 2 chunks at least, from the workers to the consumer."""
    size = p.batches_per_handoff
    return Timeline(tuple(follow(in_chunks(p), max(2, batches // size))), size)


def in_chunks(p: Pipeline) -> Pipeline:
    """Return the same pipeline with what changes hands at a time counted as one batch."""
    size = p.batches_per_handoff
    return replace(p, step_s=size * p.step_s, fetch_s=size * p.fetch_s, serial_s=size * p.serial_s,
                   window=max(1, p.window // size), batches_per_handoff=1)  # fmt: skip


def follow(p: Pipeline, batches: int) -> list[Trip]:
    """Return the trips of so many batches, each of which changes hands alone.

    Workers are equally fast: the one that began first is free first, so they take turns.
    """
    trips: list[Trip] = []
    for k in range(batches):
        free = trips[k - p.workers].made if k >= p.workers else 0.0
        room = trips[k - p.window].taken if k >= p.window else 0.0
        begun = resume(free, room, p.wake_s)
        made = made_at(p, trips, begun)
        taken = resume(trips[-1].done if trips else 0.0, made, p.wake_s)
        trips.append(Trip(k % p.workers, begun, made, taken, taken + p.step_s))
    return trips


def resume(ready: float, event: float, wake_s: float) -> float:
    """Return when a thread goes on: at once if the event is past, else it has to be woken."""
    return ready if event <= ready else event + wake_s


def made_at(p: Pipeline, trips: Sequence[Trip], begun: float) -> float:
    """Return when a batch is made; first comes the part that only one worker can do at a time."""
    own = max(p.fetch_s - p.serial_s, 0.0)
    shared = max(begun, trips[-1].made - own) if trips else begun
    return shared + p.serial_s + own


def predict(
    step_s: float, fetch_s: float, workers: int, prefetch: int, batches: int = 64, **rest: Any
) -> Timeline:
    """Return the timeline of a loader with that setting; ``rest`` are fields of the pipeline."""
    workers = max(workers, 1)
    pipeline = Pipeline(step_s, fetch_s, workers, prefetch * workers)
    return timeline(replace(pipeline, **rest), batches)


def idle_share(busy: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time, from the first end to the last, between (begin, end) pairs."""
    idle = sum(after[0] - before[1] for before, after in pairwise(busy))
    return idle / (busy[-1][1] - busy[0][1])


def diagnose(trips: Sequence[Trip], least: float = 0.1) -> str:
    """Say what one worker and its consumer are: ``"fed"``, ``"starved"`` or ``"lock-step"``.

    Who stands idle for no more than the share ``least`` of the time does not wait.
    """
    consumer = idle_share([(trip.taken, trip.done) for trip in trips])
    worker = idle_share([(trip.begun, trip.made) for trip in trips])
    if consumer <= least:
        return "fed"
    return "lock-step" if worker > least else "starved"


def lanes(line: Timeline) -> list[tuple[str, float, float, str]]:
    """Return the bars of a Gantt chart: (lane, start, end, ``"cpu"`` or ``"gpu"``)."""
    made = sorted((f"worker {t.worker}", t.begun, t.made, "cpu") for t in line.trips)
    return made + [("consumer", t.taken, t.done, "gpu") for t in line.trips]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What :func:`predict` needs to know about a dataset on a machine, in seconds per batch."""

    fetch_s: float
    serial_s: float
    wake_s: float

    def predict(self, step_s: float, workers: int, prefetch: int, batches: int = 512) -> Timeline:
        """Predict an :class:`AsyncDataLoader` of that setting, with its own window and handoffs."""
        window = prefetch * max(workers, 1)
        size = batches_per_handoff(window, max(1, workers))
        busy = max(1, min(workers, window // size))
        return predict(step_s, self.fetch_s, busy, prefetch, batches, batches_per_handoff=size,
                       window=window, serial_s=self.serial_s, wake_s=self.wake_s)  # fmt: skip


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
