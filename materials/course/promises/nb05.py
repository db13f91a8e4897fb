"""What must hold of the machine of lesson 05, and one-line changes that break it."""

import pickle
from pathlib import Path

import torch

from course.exercises import nb05
from course.lab import Card
from course.play.nb05 import record, saved
from course.promises import expect, refused


def values_come_back(mine):
    """Plain values come back as they were saved, and what occurs twice is one value"""
    row = ["x", 1, 300, 70_000, -5, 0.5, 2**40]
    data = pickle.dumps({"a": (row, row), "b": {5: None}, "€": True}, protocol=2)
    found, at = mine.describe(b"N." + data, 2)
    expect((found, at), (pickle.loads(data), len(data) + 2), "value, and the byte after it")
    expect(found["a"][0] is found["a"][1], True, "one list, not two")


def nothing_is_called(mine):
    """Nothing that a file names is called or imported"""
    found, _ = mine.describe(b"cos\nmakedirs\nX\x04\0\0\0made\x85R.")
    seen = found.name, Path("made").exists()
    expect(seen, ("os.makedirs", False), "note, folder exists")


def tensors_are_described(mine):
    """A tensor becomes storage, shape, strides and offset"""
    tensor = torch.arange(24.0).reshape(4, 6)[1:3, ::2]
    path = saved({"model": tensor, "weight": torch.nn.Parameter(tensor)})
    for found in mine.describe(record(path, "data.pkl"))[0].values():
        kept = found.storage
        seen = found.shape, found.stride, found.offset, kept.dtype, kept.numel
        expect(seen, ((2, 3), (6, 2), 6, torch.float32, 24), "place of elements, and storage")


def damage_is_an_error(mine):
    """A pickle that is cut off anywhere, and bytes that aren't a pickle, raise CheckpointError"""
    whole = pickle.dumps({"a": (1, "text", (2, 3), 4, 5), "b": [300, 0.5]}, protocol=2)
    for data in (b"s.", b"t.", b"\x80\x7f.", *(whole[:length] for length in range(len(whole)))):
        refused(lambda data=data: mine.describe(data), data.hex(" "))


CARDS = {
    "not every error": Card(
        nb05.STEP,
        "except MALFORMED as error >> except ValueError as error",
        damage_is_an_error,
        {
            "a file that was cut off ends the script with an IndexError that names no place": "",
            "a file that was cut off is read as if it ended there": "The machine still misses its "
            "next opcode, and raises; only the error is another one.",
            "the machine runs on, into the bytes that follow in memory": "After the bytes that it "
            "was given Python finds none, and raises.",
        },
    ),
}
