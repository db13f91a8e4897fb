"""What the saver of lesson 07 promises, tested on the learner's own, and cards that break it."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from course.exercises import nb07
from course.lab import Card
from course.play.nb07 import on_a_full_disk
from course.promises import expect


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


def an_error_is_raised_once(mine):
    """On a full disk each of three saves raises its error, and each only once"""
    heard, _ = on_a_full_disk(mine.Saver())
    expect(heard, 3, "errors heard in 3 saves")


CARDS = {
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
}
