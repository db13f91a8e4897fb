"""What lesson 03 breaks, watches and draws. A scene frees its threads before it ends."""

import inspect
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course import lab
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
    frame, names = sys._current_frames().get(thread.ident or 0), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


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


def run_a_loop(loader: Any, got: list[Any], most: int = 100) -> threading.Thread:
    """Loop over a loader in a thread of its own, so that the page goes on if it hangs."""

    def loop() -> None:
        try:
            got.extend(islice(loader, most))
        except ValueError as error:
            got.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(STUCK_S)
    return thread


def one_bad_sample(loader: Any) -> str:
    """Show what a loop hears of an error in a worker."""
    got: list[Any] = []
    with watched() as (errors, _):
        loop = run_a_loop(loader(Samples(fails=3), 4, prefetch=2), got)
    print("The loop got batches", *got)
    for error in errors:
        print(f"The thread was ended by {type(error).__name__}: {error}")
    if loop.is_alive():
        print("The loop waits in:", "get" if "get" in standing(loop) else standing(loop)[0])
        return "nothing: it waits"
    return "the error" if "Error" in str(got[-1]) else "the end of the epoch"


def three_ways(loader: Any) -> None:
    """Print what becomes of a bad sample, of a loop that is left, and of two workers."""
    got: list[Any] = []
    with watched():
        hangs = run_a_loop(loader(Samples(fails=3), 4, prefetch=2), got).is_alive()
    print(
        "a bad sample     ", f"batches {got[:3]}, then", "nothing, for good" if hangs else got[-1]
    )

    with watched() as (_, new):
        for _batch in loader(Samples(), 4, prefetch=2):
            break
        end = time.monotonic() + STUCK_S
        for thread in new():
            thread.join(max(0.0, end - time.monotonic()))
        left = len(new())
        print("leaving by break ", f"threads left behind: {left}")

    if "workers" not in inspect.signature(loader).parameters:
        print("two workers      ", "there is one thread, and no way to have another")
    else:
        slow_first = loader(Samples(waits={0: 1}), 4, prefetch=2, workers=2)
        print(
            "two workers      ", f"the first batch is slow: batches {list(islice(slow_first, 4))}"
        )


# Two things at once


def side_by_side(data_ms: float, compute_ms: float, steps: int = 4) -> tuple[Figure, str]:
    """Draw a loop that makes its batches itself, and below it one whose batches are made ahead."""
    bars = one_by_one([data_ms] * steps, compute_ms)
    worker = consumer = 0.0
    for k in range(steps):
        bars.append(("side by side: worker", worker, worker + data_ms, "being made", k))
        worker += data_ms
        begin = max(worker, consumer)
        consumer = begin + compute_ms
        bars.append(("side by side: model", begin, consumer, "computed on", k))
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    lanes(
        figure.subplots(),
        bars,
        f"{steps} batches: {data_ms} ms to make, {compute_ms} ms to compute on",
    )
    return figure, f"one by one {bars[2 * steps - 1][2]:.0f} ms, side by side {consumer:.0f} ms"


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


def draw_turns() -> None:
    """Draw when each of two threads was at work, for a job in Python and one in C."""
    bars = []
    for job, what in ((python_loop, "Python"), (numpy_gathers, "C")):
        alone, spans = timed(job), both(job)
        zero, unit = spans[0][0], alone[1] - alone[0]
        for k, (begin, end) in enumerate(spans, 1):
            row = (f"{job.__name__} {k}", (begin - zero) / unit, (end - zero) / unit, what, "")
            bars.append(row)
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    ax = figure.subplots()
    lanes(ax, bars, "When each of two threads was at work", "1 = the job alone")
    ax.axvline(2, color="#374151", ls="--", lw=1)
    text = [f"{lane:<16}{begin:5.1f} to {end:4.1f}" for lane, begin, end, *_ in bars]
    lab.picture(figure, "\n".join(["in units of the job alone; 2 is one after the other", *text]))


def both(job: Callable[[], object]) -> list[tuple[float, float]]:
    """Return (begin, end) of a job in each of two threads, the first begin first."""
    spans: list[tuple[float, float]] = []
    pair = [threading.Thread(target=lambda: spans.append(timed(job))) for _ in range(2)]
    with long_turns():
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
    return sorted(spans)


def timed(job: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    job()
    return begin, time.perf_counter()


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


def left_early() -> tuple[int, list[int]] | None:
    """Leave a worker by draining: what it holds and what is queued, or None if that worked."""
    with producers(1, 4) as (ready, (worker,), made):
        consumer = threading.Thread(target=drain_and_join, args=(ready, worker), daemon=True)
        consumer.start()
        consumer.join(STUCK_S)
        for name, thread, place in (("consumer", consumer, "join"), ("worker", worker, "put")):
            print(f"the {name} waits in {place}:", place in standing(thread))
        return (made[-1], list(ready.queue)) if consumer.is_alive() else None


def draw_stuck(stuck: tuple[int, list[int]] | None) -> None:
    """Draw who waits for whom."""
    if stuck is None:
        print("This time it got out: the worker was slower than the drain.")
        return
    held, queued = stuck
    figure, (ax,) = cells.panels(1, 8, 2.6)
    queue_text = f"queue, full\n{'  '.join(map(str, queued))}"
    for x, what, text in (
        (1, "being made", f"worker\nin put({held})"),
        (5, "ready", queue_text),
        (9, "computed on", "consumer\nin join()"),
    ):
        ink = cells.INK if x == 1 else "white"
        box = {"boxstyle": "round,pad=0.8", "fc": COLOURS[what], "ec": "#9ca3af"}
        ax.text(x, 0, text, ha="center", va="center", color=ink, bbox=box)
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "lw": 2, "color": "#c2410c"}
    for x, text in ((2.1, "waits\nfor room"), (6.4, "waits to\nbe emptied")):
        ax.annotate("", (x + 1.5, 0), (x, 0), arrowprops=style)
        ax.text(x + 0.75, -0.7, text, ha="center", va="center", color=style["color"])
    back = style | {"connectionstyle": "arc3,rad=-0.15"}
    ax.annotate("", (1, 0.8), (9, 0.8), arrowprops=back)
    ax.text(5, 1.9, "waits for the worker to end", ha="center", color=style["color"])
    cells.frame(ax, 10, 2.6, "Who waits for whom")
    ax.set_ylim(2.2, -1.2)
    lab.picture(figure, f"worker: put({held}) -> queue: {queued} -> consumer: join() -> worker")


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
        figure, (ax,) = cells.panels(1, 8, 1.3)
        for number, state in enumerate(states):
            cells.cell(ax, number, 0, number, COLOURS[state])
        cells.frame(ax, len(states), 1, f"Batches after step {len(texts)}: {texts[-1]}")
        cells.legend(ax, {one: COLOURS[one] for one in ("taken", "ready", "being made", "to come")})
        return figure, counts

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
        self.made: list[tuple[str, int, float, float]] = []

    def __len__(self) -> int:
        return len(MAKE_MS)

    def fetch(self, indices: Sequence[int]) -> int:
        begin = time.perf_counter()
        time.sleep(MAKE_MS[indices[0]] / 1000)
        name = threading.current_thread().name
        self.made.append((name, indices[0], begin, time.perf_counter()))
        return indices[0]


def run_of(loader_class: Any) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: a real run of twelve batches."""

    def draw(workers: int, prefetch: int) -> tuple[Figure, str]:
        data, taken = Timed(), []
        asked = start = time.perf_counter()
        for number in loader_class(data, 1, prefetch=prefetch, workers=workers):
            got = time.perf_counter()
            time.sleep(STEP_MS / 1000)
            taken.append((number, asked, got, time.perf_counter()))
            asked = taken[-1][-1]
        bars = [
            (lane, 1000 * (begin - start), 1000 * (end - start), what, text)
            for lane, begin, end, what, text in in_lanes(data.made, taken)
            if end - begin > 0.0005
        ]
        alone, total = sum(MAKE_MS) + len(MAKE_MS) * STEP_MS, 1000 * (asked - start)
        figure = Figure(figsize=(8, 2.4 + 0.3 * workers * (1 + prefetch)), layout="constrained")
        lanes(
            figure.subplots(),
            one_by_one(MAKE_MS, STEP_MS) + bars,
            f"Twelve batches: workers {workers}, prefetch {prefetch}",
        )
        waited = 1000 * sum(got - asked for _, asked, got, _ in taken)
        order = " ".join(str(number) for number, *_ in taken)
        return figure, (
            f"delivered: {order}\none after the other {alone} ms, side by side {total:.0f} ms, "
            f"of which the consumer waited {waited:.0f}"
        )

    return draw


def one_by_one(make_ms: Sequence[float], step_ms: float) -> list[Bar]:
    """Return the bars of a loop that makes each batch when it needs it."""
    bars: list[Bar] = []
    now = 0.0
    for number, lasts in enumerate(make_ms):
        bars.append(("one by one", now, now + lasts, "being made", number))
        now += lasts + step_ms
        bars.append(("one by one", now - step_ms, now, "computed on", number))
    return bars


def in_lanes(made: Sequence[Any], taken: Sequence[Any]) -> Iterator[Any]:
    """Yield (lane, begin, end, what, number): workers, what is ready, and the consumer."""
    names = {name: f"worker {k}" for k, name in enumerate(sorted({one[0] for one in made}), 1)}
    for name, number, begin, end in sorted(made):
        yield names[name], begin, end, "being made", number
    delivered, free, ready = {number: got for number, _, got, _ in taken}, [], []
    for arrival, number in sorted((end, number) for _, number, _, end in made):
        place = next((k for k, gone in enumerate(free) if gone <= arrival), len(free))
        free[place : place + 1] = [delivered[number]]
        ready.append((place, arrival, delivered[number], number))
    for place, arrival, gone, number in sorted(ready):
        yield " " * place or "ready", arrival, gone, "ready", number
    for number, asked, got, done in taken:
        yield "consumer", asked, got, "waits", ""
        yield "consumer", got, done, "computed on", number


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
