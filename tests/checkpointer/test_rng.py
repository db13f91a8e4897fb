"""The random generators go on where a checkpoint was made."""

import random

import numpy as np
import pytest
import torch
from checkpoint_tools import bitwise

from npydata import CheckpointError, capture_rng, restore_rng


def draw():
    """The next numbers of every generator."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    )


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
    with pytest.raises(CheckpointError, match="capture_rng"):
        restore_rng(state)
    assert bitwise(capture_rng()) == before
