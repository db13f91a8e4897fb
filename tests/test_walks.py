"""How many files a reader opens to follow one call, and that the way leads down."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_project import IMPORTS

import npydata

ROOT = Path(npydata.__file__).parent
RUNS_WHAT_IT_IS_GIVEN = {"npydata.checkpointer.background"}


def module_of(frame):
    """Return the name of the package's module that a frame runs in, if it does."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT) or frame.f_code.co_name == "<module>":
        return None
    return ".".join(("npydata", *path.relative_to(ROOT).with_suffix("").parts))


def walk(call):
    """Return the modules that a call enters, in that order, and which of them called which."""
    entered, calls = {}, set()

    def profile(frame, event, argument):
        if event == "call" and (module := module_of(frame)):
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


@pytest.mark.parametrize(("making", "most"), [(fetching, 8), (opening, 15), (saving, 14)])
def test_one_call_is_followed_through_few_files_that_call_none_above_them(tmp_path, making, most):
    call = making(tmp_path)
    call()  # what is imported at the first one has been
    entered, calls = walk(call)
    assert len(entered) <= most, entered
    upward = {
        (one, other)
        for one, other in calls
        if one not in RUNS_WHAT_IT_IS_GIVEN and (other, one, False) in IMPORTS
    }
    assert upward == set()
