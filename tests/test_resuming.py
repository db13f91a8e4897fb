"""The notebooks' view of a run that was killed: its processes, its next step, what a save costs."""

import matplotlib.pyplot as plt
import pytest
import torch
from tutorial import resuming
from tutorial.checks.nb10 import train

pytestmark = pytest.mark.notebook_10


def test_a_process_ends_where_the_steps_go_back():
    rows = [(1, 4.0), (2, 3.0), (3, 2.5), (2, 3.0), (3, 2.5), (3, 2.5)]
    assert resuming.lives(rows) == [rows[:3], rows[3:5], rows[5:]]


def test_a_run_that_nobody_killed_is_one_process():
    assert resuming.lives([(1, 4.0), (2, 3.0)]) == [[(1, 4.0), (2, 3.0)]]


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PARTS = ("weights", "loader", "generators", "optimizer")


@pytest.mark.parametrize(
    ("parts", "differing"),
    [
        (PARTS, []),
        (("loader", "generators", "optimizer"), ["weights", "loss", "after"]),
        (("weights",), ["batch", "loss", "after"]),
        (("weights", "loader"), ["loss", "after"]),
        (("weights", "loader", "generators"), ["after"]),
    ],
)
def test_a_part_that_is_not_restored_shows_where_it_is_used_first(one_thread, parts, differing):
    whole, again = resuming.next_step(train, *parts)
    assert [name for name in whole if whole[name] != again[name]] == differing


def test_the_lowest_point_is_marked_where_the_learner_s_interval_is():
    resuming.turn_interval(lambda step, stall, between: 1_234)
    mark = next(line for line in plt.gca().lines if line.get_marker() == "o")
    assert mark.get_xdata()[0] == 1_234
    share = resuming.share_lost(1_234, 0.5, 18.0, 8 * 3600)
    assert mark.get_ydata()[0] == pytest.approx(100 * share)
    plt.close("all")


def test_the_naive_script_begins_again_with_other_bits(capsys):
    assert resuming.naive_killed(after=6) == "step 1"
    assert "same weights again: False" in capsys.readouterr().out
