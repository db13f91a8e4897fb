"""Numbered results from worker threads to one consumer: in order, never too many, never stuck."""

import contextlib
import gc
import threading
import time
import traceback
import weakref

import pytest
from loader_tools import PATIENCE, all_workers_end, workers_alive

from npydata import handover
from npydata.handover import Background, Effort, Failure, Inline, OrderedWindow, make_run


def started(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def ended(threads):
    """Whether all threads end within our patience."""
    for thread in threads:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in threads)


def until_waiting(condition, waiters):
    """Return once that many threads wait on a condition."""
    deadline = time.monotonic() + PATIENCE
    while len(condition._waiters) < waiters:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def double(number):
    return 2 * number


def fail_at(bad, error):
    def make(number):
        if number == bad:
            raise error
        return number

    return make


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()  # of a test that failed, say: its traceback keeps its iterator
    yield
    assert all_workers_end(besides=before)


@pytest.fixture(autouse=True)
def _every_wait_is_ended_by_whoever_ends_it(monkeypatch):
    """Threads look again now and then, for the collector's sake; nothing else may need that."""
    monkeypatch.setattr(handover, "LOOK_AGAIN_SECONDS", 1000.0)


@pytest.mark.promise
@pytest.mark.notebook_02
class TestPromises:
    """What notebook 02 teaches, run against the module and against the notebook's own cells."""

    def test_numbers_are_claimed_in_order_and_then_none(self, taught):
        window = taught.OrderedWindow(3, 9)
        assert [window.claim() for _ in range(5)] == [0, 1, 2, None, None]

    def test_results_are_taken_in_order_whatever_the_order_they_were_put(self, taught):
        window = taught.OrderedWindow(4, 4)
        for number in [window.claim() for _ in range(4)][::-1]:
            window.put(number, double(number))
        assert [window.take() for _ in range(4)] == [0, 2, 4, 6]

    def test_the_consumer_waits_for_the_next_result_not_for_any(self, taught):
        window, taken = taught.OrderedWindow(2, 2), []
        window.claim(), window.claim()
        consumer = started(lambda: taken.extend([window.take(), window.take()]))
        until_waiting(window.ready, 1)
        window.put(1, "second")
        assert taken == []
        window.put(0, "first")
        assert ended([consumer])
        assert taken == ["first", "second"]

    def test_a_worker_waits_until_a_place_is_given_back(self, taught):
        window, claims = taught.OrderedWindow(9, 2), []
        for number in (window.claim(), window.claim()):
            window.put(number, None)
        workers = [started(lambda: claims.append(window.claim()))]
        until_waiting(window.room, 1)
        window.take()  # taken is not yet given back: whoever asks now waits as well
        workers.append(started(lambda: claims.append(window.claim())))
        until_waiting(window.room, 2)
        assert claims == []
        window.release(), window.release()
        assert ended(workers)
        assert claims == [2, 3]

    def test_many_threads_deliver_every_number_once_and_in_order_within_the_bound(self, taught):
        capacity, count = 5, 2_000
        window, alive, most = taught.OrderedWindow(count, capacity), set(), []

        def worker():
            while (number := window.claim()) is not None:
                alive.add(number)
                most.append(len(alive))
                window.put(number, number)

        threads = [started(worker) for _ in range(8)]
        for expected in range(count):
            assert window.take() == expected
            alive.remove(expected)
            window.release()
        window.close()
        assert ended(threads)
        assert max(most) <= capacity

    def test_close_wakes_every_worker_and_the_consumer(self, taught):
        full, empty, ends = taught.OrderedWindow(9, 1), taught.OrderedWindow(9, 1), []
        full.claim()

        def consume():
            with pytest.raises(RuntimeError, match="closed"):
                empty.take()
            ends.append("consumer")

        workers = [started(lambda: ends.append(full.claim())) for _ in range(3)]
        consumer = started(consume)
        until_waiting(full.room, 3)
        until_waiting(empty.ready, 1)
        full.close(), empty.close()
        assert ended([*workers, consumer])
        assert sorted(ends, key=str) == [None, None, None, "consumer"]

    def test_a_closed_window_lets_go_of_what_it_holds_and_of_what_still_comes(self, taught):
        window = taught.OrderedWindow(2, 2)
        held, late = (threading.Event() for _ in range(2))
        window.claim(), window.claim()
        window.put(0, held)
        refs = weakref.ref(held), weakref.ref(late)
        del held
        window.close()
        window.put(1, late)
        del late
        assert [ref() for ref in refs] == [None, None]
        assert window.claim() is None

    def test_close_may_come_from_a_thread_that_is_inside(self, taught):
        window = taught.OrderedWindow(2, 2)

        def close_inside():
            with window.room, window.ready:
                window.close()

        assert ended([started(close_inside)])
        assert window.claim() is None

    def test_an_error_takes_the_place_of_its_batch_and_ends_the_run(self, taught):
        error = ValueError("bad sample")
        run = list(taught.make_run(fail_at(2, error), range(5)))
        assert run[:2] == [0, 1]
        assert [item.error for item in run[2:]] == [error]

    def test_whatever_a_worker_raises_reaches_the_consumer(self, taught):
        for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()):
            (failure,) = taught.make_run(fail_at(0, error), range(1))
            assert failure.error is error

    def test_a_failure_is_raised_with_the_workers_traceback(self, taught):
        (failure,) = taught.make_run(fail_at(0, ValueError("bad sample")), range(1))
        with pytest.raises(ValueError, match="bad sample") as caught:
            failure.raise_again()
        assert "in make" in "".join(traceback.format_tb(caught.value.__traceback__))

    def test_a_failure_that_nobody_takes_is_freed_at_once(self, taught):
        class Noticed(Exception):  # noqa: N818
            pass

        def make(number):
            raise Noticed

        gc.disable()
        try:
            run = taught.make_run(make, range(1))
            ref = weakref.ref(run[0].error)
            del run
            assert ref() is None
        finally:
            gc.enable()

    def test_a_stop_iteration_does_not_look_like_the_end_of_the_epoch(self, taught):
        (failure,) = taught.make_run(fail_at(0, StopIteration()), range(1))
        with pytest.raises(RuntimeError, match="StopIteration"):
            failure.raise_again()

    def test_a_worker_makes_runs_until_there_are_none(self, taught):
        window = taught.OrderedWindow(3, 3)
        taught.work(window, double, 7, 3, Effort())
        assert [list(window.take()) for _ in range(3)] == [[0, 2, 4], [6, 8, 10], [12]]

    def test_a_worker_goes_on_behind_a_failure(self, taught):
        window = taught.OrderedWindow(3, 3)
        taught.work(window, fail_at(0, ValueError()), 3, 1, Effort())
        assert isinstance(window.take()[0], taught.Failure)
        assert [list(window.take()) for _ in range(2)] == [[1], [2]]

    @pytest.mark.parametrize(
        "workers, capacity, hop", [(1, 1, 1), (2, 4, 1), (4, 24, 8), (8, 9, 3)]
    )
    def test_batches_come_in_order_through_any_number_of_workers(
        self, taught, workers, capacity, hop
    ):
        background = taught.Background(double, 100, workers, capacity, hop)
        assert [background.next() for _ in range(100)] == list(range(0, 200, 2))
        background.close()

    @pytest.mark.parametrize(
        "workers, capacity, hop", [(1, 1, 1), (3, 6, 1), (3, 24, 8), (2, 7, 2)]
    )
    def test_no_more_batches_exist_than_the_capacity(self, taught, workers, capacity, hop):
        made = threading.Semaphore(0)
        begun = []

        def make(number):
            begun.append(number)
            made.release()
            return number

        background = taught.Background(make, 200, workers, capacity, hop)
        for taken in range(100):
            full = taken // hop * hop + capacity // hop * hop
            while len(begun) < full:
                assert made.acquire(timeout=PATIENCE)
            assert len(begun) - taken <= capacity
            assert background.next() == taken
        background.close()
        assert len(begun) <= 100 + capacity

    def test_close_ends_every_thread_and_forgets_what_was_made(self, taught):
        refs = []

        def make(number):
            batch = threading.Event()
            refs.append(weakref.ref(batch))
            return batch

        background = taught.Background(make, 1000, 4, 24, 8)
        background.next()
        background.close()
        assert not workers_alive()
        gc.collect()
        assert not any(ref() for ref in refs)

    def test_close_does_not_wait_long_for_a_batch_in_the_making(self, taught):
        go, reached = threading.Event(), threading.Event()

        def make(number):
            reached.set()
            go.wait(PATIENCE)

        background = taught.Background(make, 10, 2, 2, 1)
        assert reached.wait(PATIENCE)
        begun = time.perf_counter()
        background.close()
        assert time.perf_counter() - begun < 1
        assert workers_alive()
        go.set()

    def test_close_in_a_worker_does_not_wait_for_itself(self, taught):
        holder, filled, closed = [], threading.Event(), []

        def make(number):
            assert filled.wait(PATIENCE)
            holder[0].close()
            closed.append(number)

        background = taught.Background(make, 10, 1, 1, 1)
        holder.append(background)
        filled.set()
        assert ended(background.threads)
        assert closed == [0]

    def test_the_workers_do_not_keep_their_owner_alive(self, taught):
        background = taught.Background(double, 10, 2, 2, 1)
        window, ref = background.window, weakref.ref(background)
        del background
        gc.collect()
        assert ref() is None
        window.close()


def test_a_close_by_the_garbage_collector_just_before_a_worker_sleeps_is_noticed(monkeypatch):
    monkeypatch.undo()

    # The collector may run in a worker that has looked at `closed` and is about to wait.
    class Late(threading.Condition):
        def wait(self, timeout=None):
            window.close()
            return super().wait(timeout)

    window = OrderedWindow(9, 1)
    window.claim()
    window.room = Late(window.lock)
    assert ended([started(window.claim)])


def test_interruptions_do_not_leave_the_lock_taken():
    window = OrderedWindow(9, 9)
    window.claim()
    window.put(0, "first")

    class Interrupted(threading.Condition):
        """A condition whose own Python code is interrupted right after it took its lock."""

        def __enter__(self):
            super().__enter__()
            raise KeyboardInterrupt

    window.ready = Interrupted(window.lock)
    with contextlib.suppress(KeyboardInterrupt):
        window.take()
    assert ended([started(window.close)])


def test_threads_that_started_end_when_a_further_one_cannot(monkeypatch):
    start, count = threading.Thread.start, iter(range(2))

    def third_fails(thread):
        if next(count, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(RuntimeError, match="start new thread"):
        Background(double, 100, 4, 4, 1)
    monkeypatch.undo()
    assert all_workers_end()


def test_ready_counts_the_batches_that_wait_for_the_consumer():
    background = Background(double, 6, 1, 6, 2)
    assert ended(background.threads)
    counts = [background.ready]
    for _ in range(6):
        background.next()
        counts.append(background.ready)
    assert counts == [6, 5, 4, 3, 2, 1, 0]
    background.close()


def test_the_effort_is_the_time_in_making_over_all_workers():
    background = Background(double, 40, 4, 8, 2)
    for _ in range(40):
        background.next()
    background.close()
    assert len(background.effort.by_worker) <= 4
    assert background.effort.seconds == sum(background.effort.by_worker.values()) > 0


def test_inline_makes_a_batch_when_it_is_asked_for():
    begun = []
    inline = Inline(lambda number: begun.append(number) or number)
    assert begun == []
    assert [inline.next(), inline.next()] == [0, 1] == begun
    assert (inline.threads, inline.ready) == ((), 0)
    assert inline.effort.seconds > 0
    inline.close()


def test_inline_gives_a_failure_in_its_batchs_place():
    inline = Inline(fail_at(1, ValueError()))
    assert inline.next() == 0
    assert isinstance(inline.next(), Failure)


def test_a_run_without_numbers_is_empty():
    assert list(make_run(double, range(0))) == []
