"""Scenes with threads: what becomes of a worker, a buffer and a consumer, told in a few lines.

    fill(UnorderedBuffer(200, 4), worker_loop)          # how many batches exist, when all stand
    finish_in([2, 0, 1], MyBuffer(3, 3), worker_loop)   # in which order the consumer gets them
    one_bad_batch(MyBuffer(10, 4), worker_loop)         # what is heard of an error
    left_early(worker_loop, drain_and_join)             # who stands where
    ahead(MyLoader)                                     # for the scoreboard

The broken versions that lessons talk about are here, each named for what it lacks; `show` prints
them. A scene frees its threads before it ends.
"""

import inspect
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from npydata import NpyTokensDataset
from tutorial.figures import WIDTH, use_style
from tutorial.lesson_loader import ExceptionWrapper
from tutorial.tracing import (
    ENDED_BY,
    PATIENCE,
    draw_deadlock,
    standing,
    started,
    until,
    until_waiting,
)

WorkerLoop = Callable[[Any, Callable[[int], Any]], None]
STUCK_S = 2.0
"""Who has not moved on for so long is shown where it stands."""


def show(*things: Any) -> None:
    """Print functions and classes as they are written."""
    print("\n\n".join(inspect.getsource(thing).rstrip() for thing in things))


# Batches that take their time


class SlowTokens(NpyTokensDataset):
    """Random windows whose batches take 15 ms longer, as if a disk stood behind them."""

    def fetch(self, indices: Any, **options: Any) -> Any:
        time.sleep(0.015)
        return super().fetch(indices, **options)


def when_asked(path: Path) -> Iterator[Any]:
    """Slow batches, each made when the training loop asks for it."""
    data = SlowTokens(path, seq_len=32, seed=0)
    return (data.fetch(range(k, k + 64)) for k in range(0, 64 * 100, 64))


def ahead(loader: Callable[..., Any]) -> Callable[[Path], Any]:
    """Slow batches, made ahead by a loader, for the scoreboard."""
    return lambda path: loader(SlowTokens(path, seq_len=32), batch_size=64, seed=0)


# Two jobs for a thread

ROWS = np.arange(4_000_000).reshape(4_000, 1_000)
ORDER = np.random.default_rng(0).permutation(4_000)


def python_loop():
    total = 0
    for number in range(2_000_000):
        total += number


def numpy_gathers():
    for _ in range(20):
        ROWS[ORDER]


# A queue is not enough


class UnorderedBuffer:
    def __init__(self, count, capacity):
        self.numbers = iter(range(count))
        self.ready = queue.Queue(capacity)  # `put` waits while it is full, `get` while it is empty

    def claim(self):
        return next(self.numbers, None)

    def put(self, number, result):
        self.ready.put(result)

    def take_next(self):
        return self.ready.get()


def drain_and_join(buffer, worker):
    while not buffer.ready.empty():
        buffer.take_next()  # make room, so that the worker can go on
    worker.join()  # and wait until it has ended


def fill(buffer: UnorderedBuffer, worker_loop: WorkerLoop) -> int:
    """Two workers, a consumer that took one batch, and nobody moves: how many batches were made."""
    made: list[int] = []
    workers = [
        started(f"worker {k}", worker_loop, buffer, lambda number: made.append(number))
        for k in range(2)
    ]
    buffer.take_next()
    until_waiting(buffer.ready.not_full, threads=2)
    exist = len(made)
    _free(buffer, workers)
    return exist


def _free(buffer: UnorderedBuffer, threads: Sequence[Thread]) -> None:
    buffer.numbers = iter(())
    while any(thread.is_alive() for thread in threads):
        while not buffer.ready.empty():
            buffer.ready.get()
        for thread in threads:
            thread.join(timeout=0.01)


def finish_in(finished: Sequence[int], buffer: Any, worker_loop: WorkerLoop) -> None:
    """One worker for each batch, and they finish in this order: what does the consumer get?"""
    gates, put, got = [Event() for _ in finished], [], []

    def make(number: int) -> int:
        gates[number].wait()
        return number

    def noted(number: int, result: int) -> None:
        type(buffer).put(buffer, number, result)
        put.append(number)

    def consume() -> None:
        for _ in finished:
            got.append(buffer.take_next())

    buffer.put = noted
    consumer = started("consumer", consume)
    workers = [started(f"worker {k}", worker_loop, buffer, make) for k in finished]
    for number in finished:
        gates[number].set()
        until(lambda number=number: number in put)
    for thread in (consumer, *workers):
        thread.join(PATIENCE)
    print("finished:", *finished)
    print("the consumer got:", *got)


# An error


def unreadable(number):
    if number == 3:
        raise ValueError("sample 1234567 can't be read")
    return number


def one_bad_batch(
    buffer: Any,
    worker_loop: WorkerLoop,
    fetch_chunk: Callable[..., deque[Any]] | None = None,
) -> None:
    """Batch 3 of 10 can't be made: what the consumer gets, and where it stands if it is stuck.

    It stops at an error, as a training loop does in which the error is raised.
    """
    got: list[Any] = []

    def make(number: int) -> Any:
        one = range(number, number + 1)
        return fetch_chunk(unreadable, one)[0] if fetch_chunk else unreadable(number)

    def consume() -> None:
        for _ in range(10):
            got.append(buffer.take_next())
            buffer.release()
            if isinstance(got[-1], ExceptionWrapper):
                break

    ENDED_BY.clear()
    worker, consumer = started("worker", worker_loop, buffer, make), started("consumer", consume)
    consumer.join(STUCK_S)
    print("the consumer got:", *map(_named, got))
    if "worker" in ENDED_BY:
        error = ENDED_BY["worker"]
        print(f"the worker was ended by {type(error).__name__}: {error}")
    if consumer.is_alive():
        print("the consumer still stands in take_next:", "take_next" in standing("consumer"))
    buffer.close()
    for thread in (consumer, worker):
        thread.join(PATIENCE)


def _named(item: Any) -> str:
    return type(item.error).__name__ if isinstance(item, ExceptionWrapper) else str(item)


# Leaving


def left_early(
    worker_loop: WorkerLoop, leave: Callable[[Any, Thread], None]
) -> tuple[int, list[int]]:
    """A consumer takes one batch and leaves: where both stand; what is held, and what is queued."""
    buffer, made = UnorderedBuffer(10_000, capacity=4), []
    worker = started("worker", worker_loop, buffer, lambda k: made.append(k) or k)
    buffer.take_next()
    until_waiting(buffer.ready.not_full, threads=1)
    consumer = started("consumer", leave, buffer, worker)
    consumer.join(STUCK_S)
    print("the consumer got out:", not consumer.is_alive())
    for name, place in (("consumer", "join"), ("worker", "put")):
        print(f"the {name} stands in {place}:", place in standing(name))
    stuck = made[-1], list(buffer.ready.queue)
    _free(buffer, [worker, consumer])
    return stuck


def draw_stuck(held: int, queued: Sequence[int]) -> None:
    """Draw who waits for whom."""
    use_style()
    _, ax = plt.subplots(figsize=(WIDTH, 3.1))
    draw_deadlock(ax, held, queued)
    plt.show()


def standing_still(prefetcher: Any) -> None:
    """Return once every worker of a prefetcher waits for room."""
    until_waiting(prefetcher.buffer.room, threads=len(prefetcher.threads))
