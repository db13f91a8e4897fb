"""The notebooks' view of threads: who waits, who stands where, which batch was where when."""

import queue
import sys
import threading

import matplotlib.pyplot as plt
import pytest
from tutorial import tracing


def test_long_turns_end_with_the_block():
    before = sys.getswitchinterval()
    with tracing.long_turns():
        assert sys.getswitchinterval() == tracing.LONG_TURN
    assert sys.getswitchinterval() == before


def test_a_thread_is_found_waiting_in_the_function_where_it_stands():
    full = queue.Queue(1)
    full.put(0)
    worker = threading.Thread(target=full.put, args=(1,), name="worker", daemon=True)
    worker.start()
    tracing.until_waiting(full.not_full, threads=1)
    assert "put" in tracing.standing("worker")
    full.get()
    worker.join()
    assert tracing.standing("worker") == []


def test_what_never_comes_true_is_an_error():
    with pytest.raises(TimeoutError, match="did not come true"):
        tracing.until(lambda: False, seconds=0.0)


def test_a_job_is_timed_in_every_thread():
    spans = tracing.intervals(lambda: None, threads=3)
    assert len(spans) == 3
    assert spans[0][0] == 0.0
    assert all(start <= end for start, end in spans)


def test_a_trace_shows_each_batch_where_it_was_and_ready_ones_in_free_places():
    trace = tracing.Trace()
    trace.made = [("npydata-worker-0", 0, 0.0, 0.3), ("npydata-worker-1", 1, 0.0, 0.1)]
    trace.made += [("npydata-worker-1", 2, 0.1, 0.2), ("npydata-worker-1", 3, 0.6, 0.7)]
    trace.taken = [(k, 0.3 + 0.2 * k, 0.3 + 0.2 * k, 0.4 + 0.2 * k) for k in range(4)]
    rows, numbers = trace.rows()
    shown = [(lane, numbers[i]) for i, (lane, _, _, role) in enumerate(rows) if role == "touched"]
    assert shown == [("ready", "1"), ("ready", "3"), (" ", "2")]
    assert [row[0] for row in rows if row[3] == "cpu"] == ["worker 0"] + 3 * ["worker 1"]
    assert [numbers[i] for i, row in enumerate(rows) if row[3] == "gpu"] == ["0", "1", "2", "3"]


def test_the_figures_can_be_drawn():
    trace = tracing.Trace()
    make = trace.making([0.001, 0.001])
    numbers = iter([make(0), make(1)])
    trace.consume(lambda: next(numbers), 2, step=0.001)
    fig, (above, below) = plt.subplots(2)
    trace.draw(above)
    tracing.draw_deadlock(below, held=5, queued=[1, 2, 3, 4])
    fig.canvas.draw()
    plt.close(fig)
    assert [text.get_text() for text in above.get_yticklabels()][-1] == "consumer"
