"""What lesson 03 breaks, watches and draws. A scene frees its threads before it ends."""

import inspect
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course.play import cells
from course.play.lanes import COLOURS, Bar, lanes

STUCK_S = 1.0
"""Who has not moved on for so long is shown where it stands."""
PATIENCE_S = 10.0


def show(*things: Any) -> None:
    """Print functions as they are written."""
    print("\n\n".join(inspect.getsource(thing).rstrip() for thing in things))


def until(holds: Callable[[], bool]) -> None:
    """Return once something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"did not come true within {PATIENCE_S:.0f} seconds")
        time.sleep(0.001)


def standing(thread: threading.Thread) -> list[str]:
    """Return the functions that a thread is in, the innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [one.name for one in traceback.extract_stack(frame)][::-1] if frame else []


@contextmanager
def watched() -> Iterator[tuple[list[BaseException], Callable[[], list[threading.Thread]]]]:
    """Note the errors that end threads; the function given returns the threads that are new."""
    before, errors, hook = set(threading.enumerate()), [], threading.excepthook
    threading.excepthook = lambda one: errors.append(one.exc_value)
    try:
        yield errors, lambda: [one for one in threading.enumerate() if one not in before]
    finally:
        threading.excepthook = hook


# Three ways to break a loader


class Samples:
    """Samples 0, 1, 2, ... in batches of 4. Some batch may fail, and some may be told to wait."""

    def __init__(self, fails: int | None = None, waits: dict[int, int] | None = None) -> None:
        self.fails, self.waits, self.made = fails, waits or {}, set()

    def __len__(self) -> int:
        return 400

    def fetch(self, indices: Sequence[int]) -> int:
        number = indices[0] // 4
        if number == self.fails:
            raise ValueError(f"sample {4 * number + 1} can't be read")
        if number in self.waits:  # as a batch from a slow disk would
            until(lambda: self.waits[number] in self.made)
        self.made.add(number)
        return number


def three_ways(loader: Any) -> str:
    """Print what becomes of a bad sample, of a loop that is left, and of two workers.

    Return what a loop hears of the bad sample.
    """
    got: list[Any] = []

    def loop() -> None:  # in a thread of its own, so that the page goes on if it hangs
        try:
            got.extend(loader(Samples(fails=3), 4, prefetch=2))
        except ValueError as error:
            got.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=loop, daemon=True)
    with watched() as (errors, _):
        thread.start()
        thread.join(STUCK_S)
    where = "get" if "get" in standing(thread) else "another place"
    heard = f"nothing: the loop waits in {where}" if thread.is_alive() else got[-1]
    print(f"a bad sample      batches {got[:3]}, then {heard}")
    for error in errors:
        print(f"                  (its thread was ended by {type(error).__name__}: {error})")
    with watched() as (_, new):
        for _batch in loader(Samples(), 4, prefetch=2):
            break
        end = time.monotonic() + STUCK_S
        for thread in new():
            thread.join(max(0.0, end - time.monotonic()))
        print("leaving by break  threads left behind:", len(new()))

    if "workers" not in inspect.signature(loader).parameters:
        print("two workers       there is one thread, and no way to have another")
    else:
        slow_first = loader(Samples(waits={0: 1}), 4, prefetch=2, workers=2)
        print("two workers       the first batch is slow: batches", list(islice(slow_first, 4)))
    if thread.is_alive():
        return "nothing: it waits"
    return "the error" if "Error" in str(got[-1]) else "the end of the epoch"


# Two things at once


ROWS = np.arange(250_000).reshape(1_000, 250)
ORDER = np.random.default_rng(0).permutation(1_000)


def python_loop():
    total = 0
    for number in range(2_000_000):
        total += number


def numpy_gathers():
    for _ in range(400):
        ROWS[ORDER]


@contextmanager
def long_turns() -> Iterator[None]:
    """Let a thread keep the lock for 30 seconds; usually it must offer it after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def counted_beside(job: Callable[[], object]) -> int:
    """Return how far the main thread counts while another thread does a job."""
    count, done = 0, []
    thread = threading.Thread(target=lambda: done.append(job()))
    with long_turns():
        thread.start()
        while not done:
            count += 1
            time.sleep(0)  # offer the lock to the other thread
    return count


def how_far(count: int) -> str:
    return "0" if count <= 1 else "to about 10" if count < 100 else "beyond 1,000"


# The queue


def drain_and_join(ready, worker):
    while not ready.empty():
        ready.get()  # make room, so that the worker can go on
    worker.join()  # and wait until it has ended


@contextmanager
def producers(workers: int, room: int) -> Iterator[tuple[Any, list[threading.Thread], list[int]]]:
    """Let workers fill a queue; yield it, the workers, and what was made, once all stand still."""
    ready: queue.Queue[int] = queue.Queue(maxsize=room)
    made: list[int] = []
    over: list[bool] = []

    def produce() -> None:
        while not over:
            made.append(len(made))
            ready.put(made[-1])

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    ready.get()
    until(lambda: ready.full() and all("wait" in standing(one)[0] for one in threads))
    yield ready, threads, made
    over.append(True)
    while any(thread.is_alive() for thread in threads):
        while not ready.empty():
            ready.get()
        time.sleep(0.001)


def made_with_a_queue(workers: int, room: int) -> int:
    """Return how many batches exist when all stand still: one was taken, and the queue is full."""
    with producers(workers, room) as (_, _, made):
        return len(made)


def left_early() -> str:
    """Leave a worker by draining its queue; say whether the consumer got out."""
    with producers(1, 4) as (ready, (worker,), _):
        consumer = threading.Thread(target=drain_and_join, args=(ready, worker), daemon=True)
        consumer.start()
        consumer.join(STUCK_S)
        for name, thread, place in (("consumer", consumer, "join"), ("worker", worker, "put")):
            print(f"the {name} waits in {place}:", place in standing(thread))
        return "no" if consumer.is_alive() else "yes"


# The reorder buffer


def finish_in(order: Sequence[int], buffer: Any) -> None:
    """Let one worker for each batch finish in this order, and print what the consumer gets."""
    for _ in order:
        buffer.claim()
    for number in order:
        buffer.put(number, number)
    got = [buffer.take_next() for _ in order]
    print("finished:        ", *order)
    print("the consumer got:", *got)


LASTS = (3, 1, 4, 2, 2, 1, 3, 1, 2, 1)
"""How many rounds each of ten batches takes a worker; the consumer takes two for each."""


def steps_of(buffer_class: Any) -> Callable[..., tuple[Figure, str]]:
    """Return what the slider draws: a buffer after some events."""

    def draw(step: int, capacity: int) -> tuple[Figure, str]:
        buffer = buffer_class(len(LASTS), capacity)
        texts = list(islice(events(buffer), step))
        states = [
            "taken"
            if k < buffer.taken
            else "ready"
            if k in buffer.results
            else "being made"
            if k < buffer.claimed
            else "to come"
            for k in range(buffer.count)
        ]
        room = "there is room" if buffer.has_room() else "no room: the next claim would wait"
        counts = f"claimed {buffer.claimed}, taken {buffer.taken}: {room}"
        line = [(number, COLOURS[state]) for number, state in enumerate(states)]
        fills = {one: COLOURS[one] for one in ("taken", "ready", "being made", "to come")}
        return cells.rows([("", line)], f"After step {len(texts)}: {texts[-1]}", fills), counts

    return draw


def events(buffer: Any) -> Iterator[str]:
    """Let two workers and a consumer use a buffer, in rounds; yield each step in words."""
    busy: dict[int, int] = {}
    computing = 0
    while buffer.taken < buffer.count:
        while len(busy) < 2 and buffer.claimed < buffer.count and buffer.has_room():
            number = buffer.claim()
            busy[number] = LASTS[number]
            yield f"a worker claims {number}"
        busy = {number: left - 1 for number, left in busy.items()}
        computing -= computing > 0
        for number in sorted(number for number, left in busy.items() if not left):
            del busy[number]
            buffer.put(number, number)
            yield f"a worker puts {number}"
        if not computing and buffer.taken in buffer.results:
            computing = 2
            yield f"the consumer takes {buffer.take_next()}"


# The loader at work

MAKE_MS = (20, 30, 20, 10, 10, 60, 20, 20, 20, 5, 10, 30)
STEP_MS = 20


class Timed:
    """Twelve batches that take such times, as a disk would; it notes who made which when."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.made: list[Bar] = []

    def __len__(self) -> int:
        return len(MAKE_MS)

    def ms(self) -> float:
        return 1000 * (time.perf_counter() - self.start)

    def fetch(self, indices: Sequence[int]) -> int:
        begin, number = self.ms(), indices[0]
        time.sleep(MAKE_MS[number] / 1000)
        self.made.append((threading.current_thread().name, begin, self.ms(), "being made", number))
        return number


def run_of(loader_class: Any) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: a real run of twelve batches."""

    def draw(workers: int, prefetch: int) -> tuple[Figure, str]:
        data, taken, order, done = Timed(), [], [], 0.0
        for number in loader_class(data, 1, prefetch=prefetch, workers=workers):
            got = data.ms()
            time.sleep(STEP_MS / 1000)
            taken.append(("consumer", done, got, "waits", ""))
            taken.append(("consumer", got, data.ms(), "computed on", number))
            order.append(number)
            done = data.ms()
        alone, now = [], 0
        for number, lasts in enumerate(MAKE_MS):
            alone.append(("one by one", now, now + lasts, "being made", number))
            now += lasts + STEP_MS
            alone.append(("one by one", now - STEP_MS, now, "computed on", number))
        names = sorted({bar[0] for bar in data.made})
        made = [(f"worker {names.index(name) + 1}", *rest) for name, *rest in sorted(data.made)]
        figure = Figure(figsize=(8, 2.2 + 0.3 * workers), layout="constrained")
        title = f"Twelve batches: workers {workers}, prefetch {prefetch}"
        lanes(figure.subplots(), alone + made + taken, title)
        waited = sum(end - begin for _, begin, end, what, _ in taken if what == "waits")
        return figure, (
            f"delivered: {' '.join(map(str, order))}\none after the other {now} ms, side by side "
            f"{done:.0f} ms, of which the consumer waited {waited:.0f}"
        )

    return draw


def made_with(loader_class: Any) -> int:
    """Return how many batches exist when all stand still and the consumer holds one."""
    data = Samples()
    with watched() as (_, new):
        batches = iter(loader_class(data, 4, prefetch=2, workers=2))
        next(batches)
        until(lambda: all("wait" in standing(thread)[:1] for thread in new()))
        time.sleep(0.05)
        made = len(data.made)
        batches.close()
    return made
