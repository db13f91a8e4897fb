"""What must hold of the machine of lesson 05, and one-line changes that break it."""

import pickle
from pathlib import Path
from typing import Any

import torch

from course.exercises import nb05
from course.grading.child import in_one_line
from course.lab import Card
from course.play.nb05 import Folder, record, saved
from course.promises.nb01 import expect
from npydata import CheckpointError


def refused(call: Any, what: str) -> None:
    """Raise unless a call ends in a CheckpointError; any other end is a broken promise."""
    found = "accepted"
    try:
        call()
    except CheckpointError:
        return
    except Exception as error:
        found = in_one_line(error)
    raise AssertionError(f"{what}: {found}, expected a CheckpointError")


def values_come_back(mine: Any) -> None:
    """Plain values come back as they were saved"""
    values = {"a": (1, 300, 70_000, -5, 0.5, 2**40), "b": {"c": ["x", "x", ()], 5: None}, "€": True}
    data = pickle.dumps(values, protocol=2)
    expect(mine.describe(b"N." + data, 2), (values, len(data) + 2), "value, and the byte after it")


def shared_values_are_one(mine: Any) -> None:
    """A value that occurs twice is one value"""
    row = [1, 2]
    (a, b), _ = mine.describe(pickle.dumps((row, row), protocol=2))
    expect(a is b, True, "one list, not two")


def nothing_is_called(mine: Any) -> None:
    """Nothing that a file names is called or imported"""
    folder = Path("made").absolute()
    found, _ = mine.describe(record(saved({"note": Folder(folder), "step": 3}), "data.pkl"))
    expect(folder.exists(), False, "the folder exists")
    expect((found["step"], found["note"].name), (3, "os.makedirs"), "step and note")
    found, _ = mine.describe(b"cno_such_module\nfly\n)R.")
    expect(found.name, "no_such_module.fly", "a module that doesn't exist")


def tensors_are_described(mine: Any) -> None:
    """A tensor becomes storage, shape, strides and offset"""
    tensor = torch.arange(24.0).reshape(4, 6)[1:3, ::2]
    path = saved({"model": tensor, "weight": torch.nn.Parameter(tensor)})
    for found in mine.describe(record(path, "data.pkl"))[0].values():
        expect(type(found).__name__, "Stored", "what the call becomes")
        expect((found.shape, found.stride, found.offset), ((2, 3), (6, 2), 6), "place of elements")
        expect((found.storage.dtype, found.storage.numel), (torch.float32, 24), "dtype, elements")


def a_cut_is_an_error(mine: Any) -> None:
    """A pickle that is cut off anywhere is a CheckpointError"""
    data = pickle.dumps({"a": (1, "text", (2, 3), 4, 5), "b": [300, 0.5]}, protocol=2)
    for length in range(len(data)):
        refused(lambda length=length: mine.describe(data[:length]), f"{length} bytes of it")


def rubbish_is_an_error(mine: Any) -> None:
    """Bytes that are no pickle are a CheckpointError, never another error"""
    for data in (b"s.", b"K\x01s.", b"t.", b"R.", b"(.", b"\x80\x7f.", b"X\xff\xff\xff\xffab.",
                 b"cos\n", b"c\xff\n\xff\n.", b"}]Ns.", b"K\x01)R.", b"cos\nfly\nNR."):  # fmt: skip
        refused(lambda data=data: mine.describe(data), data.hex(" "))


PROMISES = [
    values_come_back,
    shared_values_are_one,
    nothing_is_called,
    tensors_are_described,
    a_cut_is_an_error,
    rubbish_is_an_error,
]

CARDS = {
    "a list aside": Card(
        nb05.MARK_MACHINE,
        "self.stack = [] >> self.stack.clear()",
        values_come_back,
        {
            "an error: the opcode that stores finds no dictionary where one should be": "",
            "a dictionary that comes back empty": "The dictionary itself was swept away, too: "
            "there is none to come back.",
            "nothing: a cleared list is as good as a new one": "The list that was put aside is "
            "this very list. Clearing it empties both.",
        },
    ),
    "not every error": Card(
        nb05.STEP,
        "except MALFORMED as error >> except KeyError as error",
        a_cut_is_an_error,
        {
            "a file that was cut off ends the script with an IndexError that names no file": "",
            "a file that was cut off is read as if it ended there": "The machine still misses its "
            "next opcode, and raises; only the error is another one.",
            "the machine runs on, into the bytes that follow in memory": "After the bytes that it "
            "was given Python finds none, and raises.",
        },
    ),
    "the last word of a name": Card(
        nb05.NOTE_MACHINE,
        'Name(f"{module}.{name}") >> Name(name)',
        tensors_are_described,
        {
            "every tensor is a note of a call that was not made": "",
            "a file can run a function of its own, if it gives it a harmless name": "Whatever it "
            "is called, no function of the file's is ever called.",
            "nothing: the module only says where a function comes from": "`CALLS` is asked by "
            "whole names, module and all.",
        },
    ),
}
