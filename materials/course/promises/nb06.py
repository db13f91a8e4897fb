"""What must hold of the reader of lesson 06, and one-line changes that break it."""

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
    """Every tensor of a safetensors file is as it was saved, and one more byte is refused"""
    save_file({name: one.contiguous().clone() for name, one in EXAMPLE.items()}, PATH)
    reads_as_saved(mine)
    PATH.write_bytes(PATH.read_bytes() + b"!")
    refused(lambda: opened(mine), "a byte after the last tensor")


CARDS = {
    "room at the end": Card(
        nb06.CHECK_NO_GAPS,
        "at != end >> at > end",
        safetensors_are_read,
        {
            "nothing, until somebody hides a second file after the tensors": "",
            "the last tensor is cut off": "The check moves no tensor; it only refuses less.",
            "a file with bytes after its tensors is refused, though all tensors are there": "That "
            "is what happens without the change.",
        },
    ),
}
