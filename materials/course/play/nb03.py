"""What lesson 03 breaks, watches and draws. A scene that may hang is played in a child process."""

import queue
import sys
import threading
import time
from collections import defaultdict
from functools import wraps
from itertools import count, islice

from course.grading.child import Interrupted, in_child, within
from course.grading.observers import threads
from course.play import cells
from course.play.cells import COLOURS
from course.play.charts import strips

STUCK_S = 1.0
"""What has not come to its end by then is stuck: it would take some milliseconds."""


def scene(play):
    """Have a function run in a child process, where it may hang; print what it prints."""

    @wraps(play)
    def played(argument):
        ended = in_child(lambda: play(argument))
        if ended.printed:
            print(ended.printed)
        return ended.why or ended.value

    return played


# Three ways to break a loader


class Samples:
    """400 samples, in batches of 4. One batch may fail, and the first may be slow."""

    def __init__(self, fails=None, first_s=0.0):
        self.fails, self.first_s, self.made = fails, first_s, []

    def __len__(self):
        return 400

    def fetch(self, indices):
        number = indices[0] // 4
        if number == self.fails:
            raise ValueError(f"sample {indices[0] + 1} can't be read")
        time.sleep(0 if number else self.first_s)
        self.made.append(number)
        return number


@scene
def three_ways(loader):
    """Print what becomes of a bad sample, of a loop that is left, and of two workers.

    Return what a loop notices of the bad sample.
    """
    got, noticed = [], "the end of the epoch"
    try:
        with within(STUCK_S):
            for batch in loader(Samples(fails=3), 4, prefetch=2):
                got.append(batch)
    except Interrupted:
        noticed = "nothing: it waits"
    except ValueError as error:
        noticed = f"the error: {error}"
    print(f"a bad sample      batches {got}, then {noticed}")
    with threads() as counted:
        for _ in loader(Samples(), 4, prefetch=2):
            break
        print("leaving by break  threads left behind:", counted()["still running"])
    try:
        slow_first = loader(Samples(first_s=0.1), 4, prefetch=2, workers=2)
        print("two workers       the first batch is slow: batches", list(islice(slow_first, 4)))
    except TypeError:
        print("two workers       there is one thread, and no way to have another")
    return noticed


# Two things at once


@scene
def counted_beside(job):
    """Return how far the main thread counts while another thread does a job."""
    sys.setswitchinterval(30.0)  # usually a thread must offer the lock after 5 ms
    done = []
    threading.Thread(target=lambda: done.append(job())).start()
    for number in count():
        time.sleep(0)  # offer the lock to the other thread
        if done:
            return number


# The queue


def shared_queue(data, batch_size, prefetch, workers):
    """Yield batches that workers put into one queue."""
    ready, numbers = queue.Queue(workers * prefetch), count()

    def produce():
        for number in numbers:
            ready.put(data.fetch([number * batch_size]))

    for _ in range(workers):
        threading.Thread(target=produce, daemon=True).start()
    while True:
        yield ready.get()


@scene
def made_with(loader):
    """Return how many batches exist when the consumer holds one and nothing moves any more."""
    data, before = Samples(), -1
    batches = iter(loader(data, 4, prefetch=2, workers=2))
    next(batches)
    while before < len(data.made):
        before = len(data.made)
        time.sleep(0.5)
    return before


@scene
def left_by(leave):
    """Leave a worker that fills a queue; say whether the consumer gets out."""
    ready = queue.Queue(maxsize=4)
    worker = threading.Thread(target=lambda: [ready.put(k) for k in count()], daemon=True)
    worker.start()
    ready.get()
    try:
        with within(STUCK_S):
            leave(ready, worker)
    except Interrupted:
        return "no"
    return "yes"


# The reorder buffer

EVENTS = (
    "claim", "claim", "put 1", "claim", "put 0", "take_next", "claim", "put 2", "put 3",
    "take_next", "claim", "put 4", "take_next", "claim", "put 5", "take_next", "take_next",
)  # fmt: skip
"""What two workers and a consumer call, one after the other."""


def steps_of(Buffer, step):
    """Return what the slider draws: a buffer of room 3 after some events."""
    buffer = Buffer(10, capacity=3)
    for event in EVENTS[:step]:
        name, _, number = event.partition(" ")
        getattr(buffer, name)(*[int(number)] * 2 if number else [])
    line = [
        (
            k,
            "taken"
            if k < buffer.taken
            else "ready"
            if k in buffer.results
            else "being made"
            if k < buffer.claimed
            else "to come",
        )
        for k in range(buffer.count)
    ]
    fills = {one: COLOURS[one] for one in ("taken", "ready", "being made", "to come")}
    room = "there is room" if buffer.has_room() else "no room: the next claim would wait"
    text = f"claimed {buffer.claimed}, taken {buffer.taken}: {room}"
    return cells.rows([("", line)], f"After step {step}: {event}", fills), text


# The loader at work

MAKE_MS = (20, 30, 20, 10, 10, 60, 20, 20, 20, 5, 10, 30)
STEP_MS = 20


class Timed:
    """Samples that take such times, as from a disk; it notes which thread made which."""

    def __init__(self, make_ms):
        self.make_ms = make_ms
        self.start, self.made = time.perf_counter(), defaultdict(list)

    def __len__(self):
        return len(self.make_ms)

    def ms(self):
        return 1000 * (time.perf_counter() - self.start)

    def fetch(self, indices):
        begin, number = self.ms(), indices[0]
        time.sleep(self.make_ms[number] / 1000)
        self.made[threading.get_ident()].append((begin, self.ms(), "being made", number))
        return number


def run_of(Loader, workers, prefetch):
    """Return what the sliders draw: a real run of twelve batches."""
    data, consumer, waited, done = Timed(MAKE_MS), [], 0.0, 0.0
    for number in Loader(data, 1, prefetch=prefetch, workers=workers):
        got = data.ms()
        time.sleep(STEP_MS / 1000)
        consumer += [(done, got, "waits"), (got, data.ms(), "computed on", number)]
        waited, done = waited + got - done, data.ms()
    rows = {f"worker {k}": row for k, row in enumerate(data.made.values(), 1)}
    alone = sum(MAKE_MS) + len(MAKE_MS) * STEP_MS
    title = f"Twelve batches: workers {workers}, prefetch {prefetch}"
    return strips(rows | {"consumer": consumer}, COLOURS, title, "time (ms)"), (
        f"one after the other {alone} ms, side by side {done:.0f} ms, of which the consumer "
        f"waited {waited:.0f} ms"
    )
