"""The notebooks' view of a run that was killed: its processes, and the trace of its steps."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from tutorial import resuming

pytestmark = pytest.mark.notebook_10


def test_a_process_ends_where_the_steps_go_back():
    rows = [(1, 4.0), (2, 3.0), (3, 2.5), (2, 3.0), (3, 2.5), (3, 2.5)]
    assert resuming.lives(rows) == [rows[:3], rows[3:5], rows[5:]]


def test_a_run_that_nobody_killed_is_one_process():
    assert resuming.lives([(1, 4.0), (2, 3.0)]) == [[(1, 4.0), (2, 3.0)]]


def test_a_trace_tells_weights_before_the_step_its_batch_and_its_loss():
    model, batches = torch.nn.Linear(2, 1), [torch.ones(2), torch.zeros(2)]

    def train_step(model, optimizer, x, y):
        with torch.no_grad():
            model.weight += 1
        return 0.5

    def train(tokens, out, *, steps):
        for x in batches[:steps]:
            script.train_step(model, None, x, x)

    script = SimpleNamespace(train=train, train_step=train_step)
    before = resuming.checksum(model.weight.detach().numpy(), model.bias.detach().numpy())
    first, second = resuming.trace(script, None, None, steps=2)
    assert first == {"weights": before, "batch": resuming.checksum(batches[0].numpy()), "loss": 0.5}
    assert second["weights"] != before
    assert second["batch"] == resuming.checksum(batches[1].numpy())
    assert script.train_step is train_step


def test_equal_losses_are_rings_and_others_are_bars():
    whole = [{"loss": 2.0}, {"loss": 1.5}, {"loss": 1.25}]
    other = [{"loss": 2.0}, {"loss": 1.5}, {"loss": 1.0}]
    resuming.draw_apart(whole, {"optimizer": other, "loader": whole[::-1]})
    ax = plt.gcf().axes[0]
    assert list(ax.lines[0].get_xdata()) == [1, 2]
    assert [bar.get_height() > 0.1 for bar in ax.patches] == [False, False, True]
    plt.close("all")


def test_the_lowest_point_is_marked_where_it_is():
    def share(interval, step, stall, between):
        return stall / (interval * step) + interval * step / 2 / between

    resuming.draw_share(share, {"a": 2.0, "b": 0.5}, step=0.5, between_crashes=3600.0)
    for line, mark in zip(*[iter(plt.gca().lines)] * 2, strict=True):
        least = min(line.get_ydata())
        assert mark.get_ydata()[0] == pytest.approx(least, rel=1e-3)
        assert mark.get_ydata()[0] <= least
    plt.close("all")
