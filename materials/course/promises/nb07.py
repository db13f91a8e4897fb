"""What the saver of lesson 07 promises, tested on the learner's own, and cards that break it."""

import json
import threading
from pathlib import Path
from unittest.mock import patch

import safetensors.torch
import torch

from course.exercises import nb07
from course.grading.observers import files
from course.lab import Card

WAIT_S = 5.0


def expect(found, expected, what):
    assert found == expected, f"{what}: {found}, expected {expected}"


def saver_of(mine):
    """A saver whose copies run as the file defines them."""
    mine.Copy.run = mine.run
    return mine.Saver()


def state():
    return {
        "mask": torch.arange(901) % 3 == 0,
        "weight": torch.randn(24, 32).T,
        "scale": torch.nn.Parameter(torch.randn(600).bfloat16()),
        "empty": torch.zeros(0, 4),
        "step": torch.tensor(3),
    }


def a_save_is_of_one_moment(mine):
    """A save holds the state as it was at the call, whatever is changed afterwards"""
    changed, real = threading.Event(), mine.write_image

    def write_image(*given):
        changed.wait(WAIT_S)  # the thread is slower than the next step
        real(*given)

    with files(), patch.dict(mine.Saver.save.__globals__, write_image=write_image):
        saver, weights = saver_of(mine), {"w": torch.zeros(1000)}
        saver.save(Path("step-1"), weights)
        weights["w"].fill_(9)
        changed.set()
        saver.wait()
        found = safetensors.torch.load_file("step-1/state.safetensors")["w"]
    expect(found.max().item(), 0.0, "a weight that was 0 at the save, and is 9 now")


def another_library_opens_the_file(mine):
    """Another library opens the file; scattered, empty and odd tensors come back as they were"""
    with files():
        saver, saved = saver_of(mine), state()
        saver.save(Path("step-1"), saved)
        saver.wait()
        found = safetensors.torch.load_file("step-1/state.safetensors")
    expect(sorted(found), sorted(saved), "names")
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), f"{name} came back with other values"


def every_element_is_aligned(mine):
    """The tensors' bytes have no gaps, and every element is at a multiple of its size"""
    with files():
        saver = saver_of(mine)
        saver.save(Path("step-1"), state())
        saver.wait()
        data = Path("step-1/state.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    spans = {name: entry["data_offsets"] for name, entry in json.loads(data[8 : 8 + n]).items()}
    end = 0
    for name, (begin, after) in sorted(spans.items(), key=lambda item: item[1]):
        expect(begin, end, f"{name} begins at")
        expect((8 + n + begin) % state()[name].dtype.itemsize, 0, f"{name}: bytes too far")
        end = after
    expect(len(data), 8 + n + end, "bytes of the file")


def the_next_save_uses_the_same_memory(mine):
    """The next save uses the same memory"""
    with files():
        saver, places = saver_of(mine), set()
        for number in range(3):
            saver.save(Path(f"step-{number}"), state())
            saver.wait()
            places.add(saver.memory.bytes.data_ptr())
    expect(len(places), 1, "places in memory")


def an_error_is_raised_once(mine):
    """An error of the write is raised once, by the next save or by `wait`; then saving works"""
    with files():
        for ask in ("wait", "save"):
            saver = saver_of(mine)
            Path(f"{ask}-1.tmp").write_text("a file where the folder should be")
            saver.save(Path(f"{ask}-1"), state())
            try:
                saver.wait() if ask == "wait" else saver.save(Path(f"{ask}-2"), state())
            except OSError:
                pass
            else:
                raise AssertionError(f"{ask} raised nothing, expected an OSError")
            saver.save(Path(f"{ask}-3"), state())
            saver.wait()
            assert Path(f"{ask}-3/state.safetensors").exists(), "the save after it is not there"


def one_save_is_in_flight(mine):
    """Only one save is in flight: the next one waits for it"""
    running, most, lock = 0, 0, threading.Lock()

    def write_image(*_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.05)
        with lock:
            running -= 1

    with patch.dict(mine.Saver.save.__globals__, write_image=write_image):
        saver = saver_of(mine)
        for number in range(4):
            saver.save(Path(str(number)), state())
        saver.wait()
    expect(most, 1, "saves at once")


PROMISES = [
    a_save_is_of_one_moment,
    another_library_opens_the_file,
    every_element_is_aligned,
    the_next_save_uses_the_same_memory,
    an_error_is_raised_once,
    one_save_is_in_flight,
]

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
            "The process ends at the first error.": "That is for whoever calls `save` to decide.",
        },
    ),
    "no wait": Card(
        nb07.SAVER,
        "self.wait() >> pass",
        one_save_is_in_flight,
        {
            "When the disk is slow, a checkpoint holds parts of two steps.": "",
            "Training waits longer for a save.": "It waits less: nobody asks for the save before.",
            "The last checkpoint is missing at the end.": (
                "`wait` still asks for the last one. The others are overwritten in memory."
            ),
        },
    ),
}
