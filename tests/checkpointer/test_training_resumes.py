"""A training run that was stopped and resumed gives the weights of one that never was."""

import random

import numpy as np
import pytest
import torch
from checkpoint_tools import Run, bitwise
from children import run_child

from npydata import AsyncCheckpointer, CheckpointError, capture_rng, restore_rng

STOP, END = 7, 15


@pytest.fixture(scope="module")
def uninterrupted():
    run = Run()
    run.train(END)
    return run.weights()


def test_a_run_that_is_saved_on_the_way_trains_as_if_it_were_not(tmp_path, uninterrupted):
    run = Run()
    with AsyncCheckpointer() as checkpointer:
        for step in (3, STOP, END):
            run.train(step)
            run.save(checkpointer, tmp_path / f"{step}")
    assert run.weights() == uninterrupted


RESUME = """
import sys
from pathlib import Path
import torch
from checkpoint_tools import Run
torch.set_num_threads(int(sys.argv[4]))  # sums depend on it
run = Run()
run.load(sys.argv[1])
run.train(int(sys.argv[2]))
Path(sys.argv[3]).write_text(repr(run.weights()))
"""


def test_a_run_resumed_in_another_process_gives_the_same_bits(tmp_path, uninterrupted):
    run = Run()
    with AsyncCheckpointer() as checkpointer:
        run.train(STOP)
        run.save(checkpointer, tmp_path / "c")
    threads = torch.get_num_threads()
    done = run_child(RESUME, tmp_path / "c", END, tmp_path / "out", threads)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text() == repr(uninterrupted)


def draw():
    """The next numbers of every generator."""
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
            torch.rand(3).tolist(), torch.randn(1).tolist())  # fmt: skip


def test_restored_generators_go_on_with_the_same_numbers():
    draw()
    random.gauss(0, 1)
    state = capture_rng()
    wanted = draw()
    restore_rng(state)
    assert draw() == wanted


def broken(part, value):
    state = capture_rng()
    return state | {part: value}


@pytest.mark.parametrize(
    "make",
    [
        dict, lambda: None, lambda: broken("torch", b"short"), lambda: broken("numpy", ("MT",)),
        lambda: broken("python", 3), lambda: broken("python", (3, (-1,) * 625, None)),
        lambda: broken("torch", None),
    ],
    ids=["empty", "None", "torch", "numpy", "python", "negative", "no torch"],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_and_changes_no_generator(make):
    state = make()
    draw()
    before = bitwise(capture_rng())
    with pytest.raises(CheckpointError, match="random generators"):
        restore_rng(state)
    assert bitwise(capture_rng()) == before
