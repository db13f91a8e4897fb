"""Your loader: batches made ahead by threads, in order, errors at their place, resumed exactly."""

# ruff: noqa: F401, F821
import threading
from collections import deque

from tutorial.lesson_loader import (
    LOOK_AGAIN_SECONDS,
    ExceptionWrapper,
    LessonLoader,
    PrefetchIterator,
    ReorderBuffer,
    ThreadPrefetcher,
)


class MyBuffer(ReorderBuffer):
    """What stands between workers and consumer: its fields and `release` are the library's."""


class MyPrefetcher(ThreadPrefetcher):
    """Threads that run your worker around your buffer: starting and joining is the library's."""

    new_buffer = MyBuffer
    worker_loop = staticmethod(lambda *args: worker_loop(*args))
    fetch_chunk = staticmethod(lambda *args: fetch_chunk(*args))


class MyIterator(PrefetchIterator):
    """One pass over an epoch: it takes batches, raises errors, and counts for the resume."""


class MyLoader(LessonLoader):
    """The loader, with all its workers at work from the start."""

    _new_iterator = MyIterator

    def _prefetcher(self, fetch, count):
        if self.prefetch_factor == 0:
            return super()._prefetcher(fetch, count)
        workers = max(1, min(self.busy_workers, count))
        return MyPrefetcher(fetch, count, workers, self.capacity, self.batches_per_handoff)
