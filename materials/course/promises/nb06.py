"""What must hold of the reader of lesson 06, and one-line changes that break it."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from course.exercises import nb06
from course.lab import Card, earlier
from course.play.nb06 import File
from course.promises import expect, refused

PATH = Path("file.pt")
BASE = torch.arange(40, dtype=torch.int32).reshape(5, 8)
EXAMPLE = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": BASE[1:4, ::3],
    "turned": BASE.t(),
    "half": torch.tensor(7.0).half(),
    "none": torch.empty(0, 3),
}


def opened(mine):
    return mine.MyCheckpoint(File(PATH), earlier("05", "describe"))


def reads_as_saved(mine):
    found = opened(mine)
    expect(sorted(found.tensors), sorted(EXAMPLE), "names")
    for name, tensor in EXAMPLE.items():
        seen = found[name].dtype, found[name].shape, found[name].tolist()
        expect(seen, (tensor.dtype, tensor.shape, tensor.tolist()), name)


def zip_files_are_read(mine):
    """Every tensor of a .pt file is as it was saved"""
    torch.save(EXAMPLE, PATH)
    reads_as_saved(mine)


def old_files_are_read(mine):
    """Every tensor of a file from before 2020 is as it was saved"""
    torch.save(EXAMPLE, PATH, _use_new_zipfile_serialization=False)
    reads_as_saved(mine)


def safetensors_are_read(mine):
    """Every tensor of a safetensors file is as it was saved"""
    save_file({name: one.contiguous().clone() for name, one in EXAMPLE.items()}, PATH)
    reads_as_saved(mine)


def no_byte_is_hidden_or_shared(mine):
    """Bytes of a safetensors file that belong to no tensor, or to two, are refused"""
    for places, size in [([(0, 8)], 9), ([(1, 9)], 9), ([(0, 8), (4, 12)], 12),
                         ([(0, 8), (9, 17)], 17), ([(0, 8)], 7)]:  # fmt: skip
        refused(partial(mine.check_no_gaps, places, 0, size), f"tensors at {places} of {size}")


CARDS = {
    "no padding": Card(
        nb06.PAYLOAD_BEGIN,
        "+ extra_length >>",
        zip_files_are_read,
        {
            "the file does not open: its pickle begins with padding": "",
            "all tensors are shifted by a few numbers, and nobody notices": "The pickle is an "
            "entry like the others, and it is read before any tensor.",
            "nothing: torch's files have no padding": "They have: the bytes of each entry begin at "
            "a multiple of 64.",
        },
    ),
    "room at the end": Card(
        nb06.CHECK_NO_GAPS,
        "at != end >> at > end",
        no_byte_is_hidden_or_shared,
        {
            "nothing, until somebody hides a second file after the tensors": "",
            "the last tensor is cut off": "The check moves no tensor; it only refuses less.",
            "a file with bytes after its tensors is refused, though all tensors are there": "That "
            "is what happens without the change.",
        },
    ),
    "eight bytes short": Card(
        nb06.SCAN_STORAGES,
        "at = first + >> at = at +",
        old_files_are_read,
        {
            "the second count is read out of weights, and refused": "",
            "every tensor after the first is shifted by two numbers": "No tensor is read yet: the "
            "second count comes first, and it fails.",
            "the last tensor is missing": "The scan fails at the second count, however many "
            "follow.",
        },
    ),
}
