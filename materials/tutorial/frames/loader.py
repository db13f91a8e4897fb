"""Your loader: batches made ahead by threads, in order, errors at their place, resumed exactly."""

# ruff: noqa: F401, F821
import threading
from collections import deque

from npydata import AsyncDataLoader
from npydata.loader.iterator import PrefetchIterator
from npydata.loader.prefetcher import ExceptionWrapper, ThreadPrefetcher
from npydata.loader.reorder_buffer import LOOK_AGAIN_SECONDS, ReorderBuffer


class MyBuffer(ReorderBuffer):
    """What stands between workers and consumer: its fields and `release` are the library's."""


class MyPrefetcher(ThreadPrefetcher):
    """Threads that run your worker around your buffer: starting and joining is the library's."""

    new_buffer = MyBuffer
    worker_loop = staticmethod(lambda *args: worker_loop(*args))
    fetch_chunk = staticmethod(lambda *args: fetch_chunk(*args))


class MyIterator(PrefetchIterator):
    """One pass over an epoch: it takes batches, raises errors, and counts for the resume."""


class MyLoader(AsyncDataLoader):
    """The loader, with all its workers at work from the start."""

    _new_iterator = MyIterator

    def _prefetcher(self, fetch, count):
        config = self.config
        if config.prefetch_factor == 0:
            return super()._prefetcher(fetch, count)
        workers = max(1, min(config.busy_workers, count))
        return MyPrefetcher(fetch, count, workers, config.capacity, config.batches_per_handoff)
