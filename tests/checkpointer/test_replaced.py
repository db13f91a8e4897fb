"""Who reads a folder while it is replaced or removed gets one checkpoint, or an error."""

import os
import re
import shutil
from contextlib import contextmanager

import pytest
import torch

from npydata import (
    CheckpointError,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


def save(folder, step):
    """Save a checkpoint in which every number is the step: of a tensor that is mapped, and one that
    is read."""
    state = {"w": torch.full((50_000,), float(step)), "b": torch.full((3,), float(step))}
    save_checkpoint(folder, state, {"m": state}, TrainingState(step=step))


def loaded(folder, verify=False):
    model, optimizer, training = load_checkpoint(folder, verify=verify)
    numbers = [one for state in (model, optimizer["m"]) for one in state.values()]
    return {float(training.step), *torch.cat(numbers).unique().tolist()}


def opened(folder):
    with open_checkpoint(folder) as checkpoint:
        numbers = torch.cat([checkpoint[name] for name in checkpoint]).unique().tolist()
        return {float(checkpoint.metadata["training_state.step"]), *numbers}


LOOKS = {
    "load": loaded,
    "load and verify": lambda folder: loaded(folder, verify=True),
    "open": opened,
    "verify": lambda folder: {verify_checkpoint(folder).step},
    "load the latest": lambda folder: loaded(latest_checkpoint(folder.parent)),
}


@contextmanager
def before_open(monkeypatch, number, act):
    """Call ``act`` before the file or folder that is opened as the ``number``-th; count them."""
    count, real = [0], os.open

    def counting(*args, **options):
        count[0] += 1
        if count[0] == number:
            act()
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", counting)
        yield count


@pytest.mark.parametrize("look", LOOKS)
def test_whenever_a_folder_is_replaced_its_reader_gets_one_checkpoint(tmp_path, monkeypatch, look):
    folder = tmp_path / "c"
    save(folder, 0)
    for number in range(1, 100):
        with before_open(monkeypatch, number, lambda step=number: save(folder, step)) as count:
            seen = LOOKS[look](folder)
        assert seen in ({number - 1}, {number})
        if count[0] < number:
            break
    assert 3 < number < 99


@pytest.mark.parametrize("look", [one for one in LOOKS if one != "load the latest"])
def test_whenever_a_folder_is_removed_its_reader_gets_all_of_it_or_says_so(
    tmp_path, monkeypatch, look
):
    refusals = (CheckpointError, FileNotFoundError) if look == "open" else CheckpointError
    for number in range(1, 100):
        folder = tmp_path / f"{number}"
        save(folder, 1)
        with before_open(monkeypatch, number, lambda gone=folder: shutil.rmtree(gone)) as count:
            try:
                seen = LOOKS[look](folder)
            except refusals as error:
                seen = str(error)
        assert seen == {1} or re.search("removed while it was read|no such f", seen, re.IGNORECASE)
        if count[0] < number:
            break
    assert 3 < number < 99
