"""What the loader of lesson 03 promises, tested on the learner's own, and cards that break it."""

import threading
import time
import traceback
from itertools import islice

from course.exercises import nb03
from course.exercises.nb03 import Numbers
from course.grading.observers import threads
from course.grading.scripted import Script
from course.lab import Card
from course.promises.nb01 import expect

ENDS_S = 5.0


def buffer_of(mine, count, capacity):
    """A buffer with the methods as they stand in a file, or among the names of a card."""
    methods = {name: getattr(mine, name) for name in ("claim", "put", "take_next", "close")}
    return type("Buffer", (mine.Buffer,), methods)(count, capacity)


def scripted(mine, count, capacity, *calls):
    fields, rooms = ("claimed", "taken", "closed", "results"), ("room", "ready")
    return Script(buffer_of(mine, count, capacity), fields, rooms).play(calls)


class Gated(Numbers):
    """Numbers whose first batch is made only when another has been; it notes what was made."""

    def __init__(self, length, first_after=1):
        super().__init__(length)
        self.first_after, self.begun, self.enough = first_after, [], threading.Event()

    def fetch(self, indices):
        self.begun.append(indices[0])
        if len(self.begun) > self.first_after:
            self.enough.set()
        if indices[0] == 0:
            self.enough.wait(ENDS_S)
        return super().fetch(indices)


def batches_come_in_order(mine):
    """Batches come in order, each made once, whatever the number of workers"""
    for workers in (2, 3, 5):
        data = Gated(60)
        found = list(mine.Loader(data, 2, prefetch=2, workers=workers))
        expect(found, [[k, k + 1] for k in range(0, 60, 2)], f"batches of {workers} workers")
        expect(sorted(data.begun), list(range(0, 60, 2)), "batches made")


def no_more_than_the_capacity(mine):
    """No more batches exist than the capacity, and the one you hold"""
    data = Gated(400)
    batches = iter(mine.Loader(data, 2, prefetch=2, workers=2))
    next(batches)
    end = time.monotonic() + ENDS_S
    while len(data.begun) < 5 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)  # time enough to run away
    expect(len(data.begun), 5, "batches made; one is held, and the capacity is 4")
    batches.close()


def a_call_without_a_reason_changes_nothing(mine):
    """A worker that is woken for nothing goes back to sleep"""
    seen = scripted(mine, 9, 1, "claim", "claim", "wake", "close")
    expect(seen["2. claim"], "waits for `room`, gives None", "the second claim of a capacity of 1")


def errors_come_in_their_place(mine):
    """An error comes where its batch would come, and knows the line that raised it"""
    got = []
    try:
        got.extend(mine.Loader(Numbers(60, fails_at=9), 2, prefetch=2, workers=3))
        raised = "nothing"
    except ValueError as error:
        raised = [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1]
    expect((len(got), raised), (4, "fetch"), "batches before, and the function that raised")


def leaving_stops_every_thread(mine):
    """Leaving early stops every thread"""
    with threads() as counted:
        for _ in islice(mine.Loader(Numbers(4000), 2, prefetch=2, workers=4), 2):
            pass
        expect(counted(), {"threads started": 4, "still running": 0}, "threads")


def a_closed_buffer_is_empty(mine):
    """A closed buffer holds no batch, not even one that a worker puts afterwards"""
    buffer = buffer_of(mine, 9, 4)
    early, late = buffer.claim(), buffer.claim()
    buffer.put(early, "early")
    buffer.close()
    buffer.put(late, "late")
    expect(buffer.results, {}, "results")


def a_resume_gets_the_next_batch(mine):
    """A run that resumes gets the very next batch, with any other number of workers"""
    for stop, workers in ((1, 2), (3, 3), (7, 1)):
        stopped = mine.Loader(Gated(24, first_after=2), 2, prefetch=4, workers=2)
        batches = iter(stopped)
        before = [next(batches) for _ in range(stop)]
        resumed = mine.Loader(Numbers(24), 2, prefetch=1, workers=workers)
        resumed.given = stopped.given
        batches.close()
        found = before + list(resumed)
        expect(found, [[k, k + 1] for k in range(0, 24, 2)], f"stopped after {stop}: batches")


PROMISES = [
    batches_come_in_order,
    no_more_than_the_capacity,
    a_call_without_a_reason_changes_nothing,
    errors_come_in_their_place,
    leaving_stops_every_thread,
    a_closed_buffer_is_empty,
    a_resume_gets_the_next_batch,
]

CARDS = {
    "a look too few": Card(
        nb03.CLAIM,
        "while not ( >> if not (",
        a_call_without_a_reason_changes_nothing,
        {
            "now and then, more memory than the settings say": "",
            "batches out of order, now and then": "the order is made in `take_next`",
            "training that waits for good": "a worker goes on too early, never too late",
        },
    ),
    "counted where it was claimed": Card(
        nb03.LOADER,
        "self.given += 1 >> self.given = buffer.claimed",
        a_resume_gets_the_next_batch,
        {
            "after a resume, some batches are never seen": "",
            "after a resume, some batches come twice": "what is claimed is ahead of what is given",
            "the epoch ends too early, in every run": "a run that isn't resumed never reads it",
        },
    ),
    "put after close": Card(
        nb03.PUT,
        "if not self.closed: >> if True:",
        a_closed_buffer_is_empty,
        {
            "after leaving early, a batch or two stay in memory": "",
            "the next epoch begins with a batch of the last one": "the next epoch has a buffer of "
            "its own",
            "a worker never ends, because its buffer is full": "`put` waits for nothing: its place "
            "was claimed before",
        },
    ),
}
