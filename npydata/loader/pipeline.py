"""A model of worker threads and one consumer: arithmetic on a few times, nothing is measured.

Built in ``notebooks/04_throughput``, which also shows where it is wrong.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple


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
        waits = [after.taken - before.done for before, after in pairwise(late)]
        return sum(waits) / (late[-1].done - late[0].done)


def timeline(p: Pipeline, batches: int) -> Timeline:
    """Follow so many batches, 2 chunks at least, from the workers to the consumer."""
    free, lock, size = [0.0] * p.workers, 0.0, p.batches_per_handoff
    room = max(1, p.window // size)
    trips: list[Trip] = []
    for k in range(max(2, batches // size)):
        worker = free.index(min(free))
        begun = resume(free[worker], trips[k - room].taken if k >= room else 0.0, p.wake_s)
        lock = max(begun, lock) + size * p.serial_s
        made = lock + size * max(p.fetch_s - p.serial_s, 0.0)
        taken = resume(trips[-1].done if trips else 0.0, made, p.wake_s)
        trips.append(Trip(worker, begun, made, taken, taken + size * p.step_s))
        free[worker] = made
    return Timeline(tuple(trips), size)


def resume(ready: float, event: float, wake_s: float) -> float:
    """Return when a thread goes on: at once if the event is past, else it has to be woken."""
    return ready if event <= ready else event + wake_s


def predict(
    step_s: float, fetch_s: float, workers: int, prefetch: int, batches: int = 64, **rest: Any
) -> Timeline:
    """Return the timeline of a loader with that setting; ``rest`` are fields of the pipeline."""
    workers = max(workers, 1)
    pipeline = Pipeline(step_s, fetch_s, workers, prefetch * workers)
    return timeline(replace(pipeline, **rest), batches)


def lanes(line: Timeline) -> list[tuple[str, float, float, str]]:
    """Return the bars of a Gantt chart: (lane, start, end, ``"cpu"`` or ``"gpu"``)."""
    made = sorted((f"worker {t.worker}", t.begun, t.made, "cpu") for t in line.trips)
    return made + [("consumer", t.taken, t.done, "gpu") for t in line.trips]
