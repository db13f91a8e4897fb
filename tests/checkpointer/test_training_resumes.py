"""A training run that was stopped and resumed gives the weights of one that never was."""

import random

import numpy as np
import pytest
import torch
from checkpoint_tools import Run, bitwise
from children import run_child

from npydata import AsyncCheckpointer, CheckpointError, capture_rng, restore_rng

STOP, END = 7, 15


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


def test_a_run_that_saves_and_one_resumed_in_another_process_give_the_same_bits(tmp_path):
    uninterrupted = Run()
    uninterrupted.train(END)
    run = Run()  # which seeds all generators
    with AsyncCheckpointer() as checkpointer:
        for step in (STOP, END):
            run.train(step)
            run.save(checkpointer, tmp_path / f"{step}")
    assert run.weights() == uninterrupted.weights()
    threads = torch.get_num_threads()
    done = run_child(RESUME, tmp_path / f"{STOP}", END, tmp_path / "out", threads)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text() == repr(uninterrupted.weights())


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


BROKEN = {
    "empty": {}, "None": None, "torch": {"torch": b"short"}, "no torch": {"torch": None},
    "numpy": {"numpy": ("MT",)}, "python": {"python": 3},
    "negative": {"python": (3, (-1,) * 625, None)},
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_state_that_is_none_is_refused_and_changes_no_generator(case):
    state = capture_rng() | BROKEN[case] if BROKEN[case] else BROKEN[case]
    draw()
    before = bitwise(capture_rng())
    with pytest.raises(CheckpointError, match="random generators"):
        restore_rng(state)
    assert bitwise(capture_rng()) == before
