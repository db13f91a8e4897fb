"""What lesson 00's parts promise, tested on the learner's own, and cards that break it."""

import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import torch

from course.exercises import nb00
from course.lab import Card
from course.promises import expect


def the_loader_stays_close(mine):
    """The loader is never further ahead than its queue is long"""
    data = nb00.Numbers(400)
    batches = iter(mine.Loader(data, 2, 3))
    next(batches)
    time.sleep(0.3)  # time enough to run away
    made = len(data.asked)
    assert made <= 1 + 3 + 1, f"one batch was taken and {made} were made, expected at most 5"


def a_save_is_of_one_moment(mine):
    """What is saved is the state of the moment of the save"""
    seen = nb00.saver_seen(mine.Saver, 1)
    expect(seen["in the files"], {"0": [0, 0]}, "of a weight that was 0 at the save, and is -1 now")


def a_name_means_complete(mine):
    """A save that is cut off is not taken for a checkpoint"""
    mine.write_checkpoint(Path("root/step-000006"), {"w": torch.zeros(3)})
    with patch("os.fsync", side_effect=OSError("the disk is gone")), suppress(OSError):
        mine.write_checkpoint(Path("root/step-000012"), {"w": torch.zeros(3)})
    expect(mine.latest(Path("root")), Path("root/step-000006"), "latest")


CARDS = {
    "a queue without an end": Card(
        nb00.LOADER,
        "maxsize=self.prefetch >> maxsize=0",
        the_loader_stays_close,
        {
            "With a slow model, memory fills with batches.": "",
            "Batches come in another order.": "It is still a line: first in, first out.",
            "The loop gets no batch at all.": "A maxsize of 0 means no limit, not no room.",
        },
    ),
    "no copy": Card(
        nb00.SAVER,
        "tensor.clone() >> tensor",
        a_save_is_of_one_moment,
        {
            "A checkpoint may hold weights of later steps.": "",
            "The file can't be read back.": (
                "Its header and its size are right; only its numbers are of another step."
            ),
            "The save takes longer.": "It takes less: a copy is what save waits for.",
        },
    ),
    "a folder that only looks finished": Card(
        nb00.LATEST,
        'if path.suffix != ".tmp" >> ',
        a_name_means_complete,
        {
            "After a kill in mid-save the run can't go on, or goes on from rubbish.": "",
            "It goes on from an older checkpoint than it could.": (
                "Names that end in .tmp sort after the same name without: the newest wins."
            ),
            "Nothing: a kill never leaves a folder that ends in .tmp.": (
                "Look again at what was left above; and try it more than once."
            ),
        },
    ),
}
