"""How many files one follows an index, a name or a tensor through, and that the way leads down.

A whole call enters more files than what one follows through it: a save reads the old manifest too.
"""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_project import IMPORTS

import npydata

ROOT = Path(npydata.__file__).parent
RUNS_WHAT_IT_IS_GIVEN = {"npydata.checkpointer.background", "npydata.system.garbage"}


def module_of(frame):
    """Return the name of the package's module that a frame runs in, if it does."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or frame.f_code.co_name == "<module>":
        return None
    return ".".join(("npydata", *path.relative_to(ROOT).with_suffix("").parts))


def walk(call, followed=lambda frame: True):
    """Return the modules that a call enters, in that order, and which of them called which.

    Counted are those that get what is followed, as an argument or in one.
    """
    entered, calls = {}, set()

    def profile(frame, event, argument):
        if event == "call" and (module := module_of(frame)) and followed(frame):
            entered[module] = None
            while frame := frame.f_back:
                if caller := module_of(frame):
                    calls.add((caller, module))
                    return

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(entered), calls


def inside(value):
    """Return what a container, or an object of the package, refers to."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if not type(value).__module__.startswith("npydata"):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(value, "__dict__", {}), *slots]
    return [getattr(value, name) for name in names if hasattr(value, name)]


def has_bytes(value, addresses, depth=5):
    """Whether a value is, or refers to, memory in which one of the addresses lies."""
    if isinstance(value, torch.Tensor | memoryview) and value.nbytes:
        begin = np.asarray(value).ctypes.data
        return any(begin <= one < begin + value.nbytes for one in addresses)
    return depth > 0 and any(has_bytes(one, addresses, depth - 1) for one in inside(value))


def fetching(folder):
    npydata.write_tokens(folder / "t.npy", [np.arange(100)])
    tokens = npydata.MmapDataset(folder / "t.npy", 8)
    return lambda: tokens.fetch([0])


def opening(folder):
    save_file({"w": torch.zeros(3)}, folder / "m.safetensors")
    return lambda: npydata.open_checkpoint(folder / "m.safetensors")["w"]


def saving(folder):
    keeper = npydata.AsyncCheckpointer()

    def save():
        keeper.save(folder / "a", {"w": torch.zeros(3)})
        keeper.wait()

    return save


@pytest.mark.parametrize(("making", "most"), [(fetching, 8), (opening, 15), (saving, 21)])
def test_one_call_is_followed_through_few_files_that_call_none_above_them(tmp_path, making, most):
    call = making(tmp_path)
    call()  # what is imported at the first one has been
    entered, calls = walk(call)
    assert len(entered) <= most, entered
    assert_downward(calls)


def test_a_name_and_a_saved_tensor_pass_at_most_8_files(tmp_path):
    save_file({"w": torch.zeros(3)}, tmp_path / "m.safetensors")
    checkpoint = npydata.open_checkpoint(tmp_path / "m.safetensors")
    entered, calls = walk(lambda: checkpoint["w"])
    assert "npydata.reader.tensors" in entered
    assert len(entered) <= 8, entered
    assert_downward(calls)

    weight, keeper = torch.zeros(3), npydata.AsyncCheckpointer()
    keeper.prepare({"w": weight})
    staged = keeper._buffers["model.safetensors"].bytes.data_ptr()

    def save():
        keeper.save(tmp_path / "a", {"w": weight})
        keeper.wait()

    addresses = weight.data_ptr(), staged
    entered, calls = walk(
        save, lambda frame: any(has_bytes(one, addresses) for one in list(frame.f_locals.values()))
    )
    assert "npydata.checkpointer.writer" in entered
    assert len(entered) <= 8, entered
    assert_downward(calls)


def assert_downward(calls):
    upward = {
        (one, other)
        for one, other in calls
        if one not in RUNS_WHAT_IT_IS_GIVEN and (other, one, False) in IMPORTS
    }
    assert upward == set()
