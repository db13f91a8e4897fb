"""The scenes of lesson 03: they show what the lesson says, and leave no thread behind."""

import threading

import matplotlib.pyplot as plt
import pytest
from tutorial import tracing, workers
from tutorial.workers import UnorderedBuffer

from npydata.loader.prefetcher import ThreadPrefetcher, fetch_chunk, worker_loop
from npydata.loader.reorder_buffer import ReorderBuffer


@pytest.fixture(autouse=True)
def _every_scene_frees_its_threads():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


@pytest.fixture
def no_window(monkeypatch):
    monkeypatch.setattr(plt, "show", plt.close)


def test_a_bounded_queue_holds_more_than_its_bound():
    assert workers.fill(UnorderedBuffer(200, capacity=4), worker_loop) == 7


@pytest.mark.parametrize(
    "buffer, order", [(UnorderedBuffer, "2 0 3 1"), (ReorderBuffer, "0 1 2 3")]
)
def test_a_queue_gives_what_is_finished_first_and_a_reorder_buffer_what_is_next(
    capsys, buffer, order
):
    workers.finish_in([2, 0, 3, 1], buffer(4, 4), worker_loop)
    assert f"the consumer got: {order}" in capsys.readouterr().out


def test_an_error_that_nobody_catches_leaves_the_consumer_waiting(capsys, monkeypatch):
    monkeypatch.setattr(workers, "STUCK_S", 0.1)
    workers.one_bad_batch(ReorderBuffer(10, 4), worker_loop)
    assert "still stands in take_next: True" in capsys.readouterr().out


def test_an_error_in_its_place_stops_the_consumer_there(capsys):
    workers.one_bad_batch(ReorderBuffer(10, 4), worker_loop, fetch_chunk)
    assert capsys.readouterr().out == "the consumer got: 0 1 2 ValueError\n"


@pytest.mark.usefixtures("no_window")
def test_to_drain_and_join_is_a_deadlock(capsys, monkeypatch):
    monkeypatch.setattr(workers, "STUCK_S", 0.5)
    held, queued = workers.left_early(worker_loop, workers.drain_and_join)
    assert queued == [held - 4, held - 3, held - 2, held - 1]
    assert "the consumer got out: False" in capsys.readouterr().out
    workers.draw_stuck(held, queued)


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_the_events_of_a_buffer_are_four_for_each_batch_and_keep_its_bound(capacity):
    buffer = ReorderBuffer(len(tracing.STEPPED), capacity)
    texts = []
    for text in tracing.events(buffer):
        assert buffer.claimed - buffer.released <= capacity
        texts.append(text)
    assert len(texts) == 4 * buffer.count
    assert [text[-1] for text in texts if "takes" in text] == list("0123456789")


@pytest.mark.usefixtures("no_window")
def test_what_can_be_turned_is_drawn_at_both_ends(capsys, monkeypatch):
    def at_both_ends(draw, **ranges):
        draw(**{name: low for name, (_, low, _, _) in ranges.items()})
        draw(**{name: high for name, (_, _, high, _) in ranges.items()})

    monkeypatch.setattr(tracing, "with_sliders", at_both_ends)
    tracing.draw_steps(ReorderBuffer)
    tracing.draw_run(ThreadPrefetcher)
    printed = capsys.readouterr().out
    assert "claimed 10, taken 10, released 10" in printed
    assert printed.count("delivered: 0 1 2 3 4 5 6 7 8 9 10 11") == 2
