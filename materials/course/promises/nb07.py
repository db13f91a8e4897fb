"""What the saver of lesson 07 promises, tested on the learner's own, and cards that break it."""

import threading
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from course.exercises import nb07
from course.lab import Card
from course.promises import expect

SLOW_S = 0.3


def a_save_is_of_one_moment(mine):
    """A save holds the state as it was at the call, whatever is changed or saved meanwhile"""
    later, weights, real = threading.Event(), torch.ones(9), mine.write_image

    def write_image(*given):
        later.wait(SLOW_S)  # a slow disk: a save that doesn't wait for it comes first
        real(*given)

    with patch.dict(mine.Saver.save.__globals__, write_image=write_image):
        saver = mine.Saver()
        for number in ("1", "2"):
            saver.save(Path(number), {"w": weights.fill_(int(number))})
        weights.fill_(9)
        later.set()
        saver.wait()
        found = {one: load_file(f"{one}/state.safetensors")["w"].max().item() for one in "12"}
    expect(found, {"1": 1.0, "2": 2.0}, "in the files of saves 1 and 2")


def another_library_opens_the_file(mine):
    """Another library opens the file; scattered, empty and odd tensors come back as they were"""
    saved = {
        "mask": torch.arange(901) % 3 == 0,
        "weight": torch.randn(24, 32).T,
        "scale": torch.nn.Parameter(torch.randn(600).bfloat16()),
        "empty": torch.zeros(0, 4),
    }
    saver = mine.Saver()
    saver.save(Path("step-1"), saved)
    saver.wait()
    found = load_file("step-1/state.safetensors")
    same = {name: torch.equal(found[name], tensor) for name, tensor in saved.items()}
    expect(same, dict.fromkeys(saved, True), "came back as they were")


def the_next_save_uses_the_same_memory(mine):
    """The next save uses the same memory"""
    expect(nb07.saver_seen(mine.Saver, 3, 0)["places in memory"], 1, "places in memory")


def an_error_is_raised_once(mine):
    """An error of the write is raised once, by the next save or by `wait`; then saving works"""
    seen = nb07.saver_seen(mine.Saver, 3, 1)
    expect((seen["save 2"], seen["save 3"]), ("raises OSError", "returns"), "the next two saves")
    seen = nb07.task_seen(mine.Task, OSError)
    expect(seen["first result()"], "raises OSError", "asked for the result, the task")
    expect(seen["second result()"], "returns", "asked a second time, by the next save, the task")


CARDS = {
    "as they come": Card(
        nb07.SLOTS_FOR,
        "sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize) >> tensors",
        another_library_opens_the_file,
        {
            "Nothing, until an odd number of bytes stands before a weight: its copy fails.": "",
            "Files become longer.": "They hold the same bytes, in another order.",
            "Other libraries refuse the files.": "The format allows any order of the tensors.",
        },
    ),
    "an error for ever": Card(
        nb07.TASK,
        "error, self.error = self.error, None >> error = self.error",
        an_error_is_raised_once,
        {
            "The disk was full once; every later save fails, until the process is restarted.": "",
            "The disk was full, and nobody hears of it.": "It is raised, and not only once.",
            "The process ends at the first error.": "The caller of `save` may catch it, and go on.",
        },
    ),
    "no wait": Card(
        nb07.SAVER,
        "self.wait() >> pass",
        a_save_is_of_one_moment,
        {
            "When the disk is slow, a checkpoint holds weights of a later step.": "",
            "Training waits longer for a save.": "It waits less: the one before may still run.",
            "The last checkpoint is missing at the end.": (
                "`wait` still asks for the last one. The others are overwritten in memory."
            ),
        },
    ),
}
