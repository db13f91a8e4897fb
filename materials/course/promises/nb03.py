"""What the loader of lesson 03 promises, tested on the learner's own, and cards that break it."""

import threading

from course.exercises import nb03
from course.exercises.nb03 import Numbers
from course.grading.scripted import Script
from course.lab import Card
from course.promises import expect

ENDS_S = 5.0


class OutOfOrder(Numbers):
    """Numbers whose first batch is there only when two others have begun."""

    def __init__(self, length):
        super().__init__(length)
        self.others = threading.Semaphore(0)

    def fetch(self, indices):
        if indices[0] == 0:
            self.others.acquire(timeout=ENDS_S) and self.others.acquire(timeout=ENDS_S)
        else:
            self.others.release()
        return super().fetch(indices)


def batches_come_in_order(mine):
    """Batches come in order, whatever the number of workers"""
    for workers in (2, 3, 5):
        found = list(mine.Loader(OutOfOrder(60), 2, prefetch=2, workers=workers))
        expect(found, [[k, k + 1] for k in range(0, 60, 2)], f"batches of {workers} workers")


def a_call_without_a_reason_changes_nothing(mine):
    """A worker that is woken for nothing goes back to sleep"""
    seen = Script(mine.Buffer(9, 1)).play(["claim", "claim", "wake", "close"])
    expect(seen["2. claim"], "waits for `room`, gives None", "the second claim of a capacity of 1")


def a_resume_gets_the_next_batch(mine):
    """A run that resumes gets the very next batch, with another number of workers"""
    stopped = mine.Loader(OutOfOrder(24), 2, prefetch=4, workers=2)
    batches = iter(stopped)
    before = [next(batches) for _ in range(3)]
    resumed = mine.Loader(Numbers(24), 2, prefetch=1, workers=3)
    resumed.given = stopped.given
    batches.close()
    expect(before + list(resumed), [[k, k + 1] for k in range(0, 24, 2)], "batches")


CARDS = {
    "a look too few": Card(
        nb03.CLAIM,
        "while not ( >> if not (",
        a_call_without_a_reason_changes_nothing,
        {
            "Now and then, more memory is used than the settings say.": "",
            "Batches come out of order, now and then.": "The order is made in `take_next`.",
            "Training waits for good.": "A worker goes on too early, never too late.",
        },
    ),
    "counted where it was claimed": Card(
        nb03.LOADER,
        "self.given += 1 >> self.given = buffer.claimed",
        a_resume_gets_the_next_batch,
        {
            "After a resume, some batches are never seen.": "",
            "After a resume, some batches come twice.": "What is claimed is ahead, never behind.",
            "The epoch ends too early, in every run.": "A run that isn't resumed never reads it.",
        },
    ),
}
