"""Numbered results from worker threads to one consumer: in order, never too many, never stuck."""

import contextlib
import gc
import sys
import threading
import time
import traceback
import weakref

import pytest
from loader_tools import PATIENCE, all_workers_end, workers_alive

from npydata.loader import prefetcher as prefetcher_module
from npydata.loader import reorder_buffer
from npydata.loader.prefetcher import (
    ExceptionWrapper,
    SynchronousFetcher,
    ThreadPrefetcher,
    chunk_maker,
    fetch_chunk,
    worker_loop,
)
from npydata.loader.reorder_buffer import ReorderBuffer


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
    monkeypatch.setattr(reorder_buffer, "LOOK_AGAIN_SECONDS", 1000.0)


class TestPromises:
    """What the learner builds in notebook 03."""

    def test_numbers_are_claimed_in_order_and_then_none(self):
        buffer = ReorderBuffer(3, 9)
        assert [buffer.claim() for _ in range(5)] == [0, 1, 2, None, None]

    def test_results_are_taken_in_order_whatever_the_order_they_were_put(self):
        buffer = ReorderBuffer(4, 4)
        for number in [buffer.claim() for _ in range(4)][::-1]:
            buffer.put(number, double(number))
        assert [buffer.take_next() for _ in range(4)] == [0, 2, 4, 6]

    def test_the_consumer_waits_for_the_next_result_not_for_any(self):
        buffer, taken = ReorderBuffer(2, 2), []
        buffer.claim(), buffer.claim()
        consumer = started(lambda: taken.extend([buffer.take_next(), buffer.take_next()]))
        until_waiting(buffer.ready, 1)
        buffer.put(1, "second")
        assert taken == []
        buffer.put(0, "first")
        assert ended([consumer])
        assert taken == ["first", "second"]

    def test_a_worker_waits_until_a_place_is_given_back(self):
        buffer, claims = ReorderBuffer(9, 2), []
        for number in (buffer.claim(), buffer.claim()):
            buffer.put(number, None)
        workers = [started(lambda: claims.append(buffer.claim()))]
        until_waiting(buffer.room, 1)
        buffer.take_next()  # taken is not yet given back: whoever asks now waits as well
        workers.append(started(lambda: claims.append(buffer.claim())))
        until_waiting(buffer.room, 2)
        assert claims == []
        buffer.release(), buffer.release()
        assert ended(workers)
        assert claims == [2, 3]

    def test_many_threads_deliver_every_number_once_and_in_order_within_the_bound(self):
        capacity, count = 5, 2_000
        buffer, alive, most = ReorderBuffer(count, capacity), set(), []

        def worker():
            while (number := buffer.claim()) is not None:
                alive.add(number)
                most.append(len(alive))
                buffer.put(number, number)

        threads = [started(worker) for _ in range(8)]
        for expected in range(count):
            assert buffer.take_next() == expected
            alive.remove(expected)
            buffer.release()
        buffer.close()
        assert ended(threads)
        assert max(most) <= capacity

    def test_close_wakes_every_worker_and_the_consumer(self):
        full, empty, ends = ReorderBuffer(9, 1), ReorderBuffer(9, 1), []
        full.claim()

        def consume():
            with pytest.raises(RuntimeError, match="closed"):
                empty.take_next()
            ends.append("consumer")

        workers = [started(lambda: ends.append(full.claim())) for _ in range(3)]
        consumer = started(consume)
        until_waiting(full.room, 3)
        until_waiting(empty.ready, 1)
        full.close(), empty.close()
        assert ended([*workers, consumer])
        assert sorted(ends, key=str) == [None, None, None, "consumer"]

    def test_a_closed_buffer_lets_go_of_what_it_holds_and_of_what_still_comes(self):
        buffer = ReorderBuffer(2, 2)
        held, late = (threading.Event() for _ in range(2))
        buffer.claim(), buffer.claim()
        buffer.put(0, held)
        refs = weakref.ref(held), weakref.ref(late)
        del held
        buffer.close()
        buffer.put(1, late)
        del late
        assert [ref() for ref in refs] == [None, None]
        assert buffer.claim() is None

    def test_close_may_come_from_a_thread_that_is_inside(self):
        buffer = ReorderBuffer(2, 2)

        def close_inside():
            with buffer.room, buffer.ready:
                buffer.close()

        assert ended([started(close_inside)])
        assert buffer.claim() is None

    def test_an_error_takes_the_place_of_its_batch_and_ends_the_chunk(self):
        error = ValueError("bad sample")
        chunk = list(fetch_chunk(fail_at(2, error), range(5)))
        assert chunk[:2] == [0, 1]
        assert [item.error for item in chunk[2:]] == [error]

    def test_whatever_a_worker_raises_reaches_the_consumer(self):
        for error in (KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()):
            (wrapper,) = fetch_chunk(fail_at(0, error), range(1))
            assert wrapper.error is error

    def test_an_error_is_raised_with_the_workers_traceback(self):
        (wrapper,) = fetch_chunk(fail_at(0, ValueError("bad sample")), range(1))
        with pytest.raises(ValueError, match="bad sample") as caught:
            wrapper.reraise()
        assert "in make" in "".join(traceback.format_tb(caught.value.__traceback__))

    def test_an_error_that_nobody_takes_is_freed_at_once(self):
        class Noticed(Exception):  # noqa: N818
            pass

        def make(number):
            raise Noticed

        gc.disable()
        try:
            chunk = fetch_chunk(make, range(1))
            ref = weakref.ref(chunk[0].error)
            del chunk
            assert ref() is None
        finally:
            gc.enable()

    def test_a_stop_iteration_does_not_look_like_the_end_of_the_epoch(self):
        (wrapper,) = fetch_chunk(fail_at(0, StopIteration()), range(1))
        with pytest.raises(RuntimeError, match="StopIteration"):
            wrapper.reraise()

    def test_a_worker_fetches_chunks_until_there_are_none(self):
        buffer = ReorderBuffer(3, 3)
        worker_loop(buffer, chunk_maker(fetch_chunk, double, 7, 3))
        assert [list(buffer.take_next()) for _ in range(3)] == [[0, 2, 4], [6, 8, 10], [12]]

    def test_a_worker_goes_on_behind_an_error(self):
        buffer = ReorderBuffer(3, 3)
        worker_loop(buffer, chunk_maker(fetch_chunk, fail_at(0, ValueError()), 3, 1))
        assert isinstance(buffer.take_next()[0], ExceptionWrapper)
        assert [list(buffer.take_next()) for _ in range(2)] == [[1], [2]]

    @pytest.mark.parametrize(
        "workers, capacity, chunk_size", [(1, 1, 1), (2, 4, 1), (4, 24, 8), (8, 9, 3)]
    )
    def test_batches_come_in_order_through_any_number_of_workers(
        self, workers, capacity, chunk_size
    ):
        prefetcher = ThreadPrefetcher(double, 100, workers, capacity, chunk_size)
        assert [prefetcher.next() for _ in range(100)] == list(range(0, 200, 2))
        prefetcher.close()

    @pytest.mark.parametrize(
        "workers, capacity, chunk_size", [(1, 1, 1), (3, 6, 1), (3, 24, 8), (2, 7, 2)]
    )
    def test_no_more_batches_exist_than_the_capacity(self, workers, capacity, chunk_size):
        made = threading.Semaphore(0)
        begun = []

        def make(number):
            begun.append(number)
            made.release()
            return number

        prefetcher = ThreadPrefetcher(make, 200, workers, capacity, chunk_size)
        for taken in range(100):
            full = taken // chunk_size * chunk_size + capacity // chunk_size * chunk_size
            while len(begun) < full:
                assert made.acquire(timeout=PATIENCE)
            assert len(begun) - taken <= capacity
            assert prefetcher.next() == taken
        prefetcher.close()
        assert len(begun) <= 100 + capacity

    def test_close_ends_every_thread_and_forgets_what_was_made(self):
        refs = []

        def make(number):
            batch = threading.Event()
            refs.append(weakref.ref(batch))
            return batch

        before = workers_alive()  # of another test
        prefetcher = ThreadPrefetcher(make, 1000, 4, 24, 8)
        prefetcher.next()
        prefetcher.close()
        assert all_workers_end(besides=before)
        gc.collect()
        assert not any(ref() for ref in refs)

    def test_close_does_not_wait_long_for_a_batch_in_the_making(self):
        go, reached = threading.Event(), threading.Event()

        def make(number):
            reached.set()
            go.wait(PATIENCE)

        prefetcher = ThreadPrefetcher(make, 10, 2, 2, 1)
        assert reached.wait(PATIENCE)
        begun = time.perf_counter()
        prefetcher.close()
        assert time.perf_counter() - begun < 1
        assert workers_alive()
        go.set()

    def test_close_in_a_worker_does_not_wait_for_itself(self):
        holder, filled, closed = [], threading.Event(), []

        def make(number):
            assert filled.wait(PATIENCE)
            holder[0].close()
            closed.append(number)

        prefetcher = ThreadPrefetcher(make, 10, 1, 1, 1)
        holder.append(prefetcher)
        filled.set()
        assert ended(prefetcher.threads)
        assert closed == [0]

    def test_the_workers_do_not_keep_their_owner_alive(self):
        prefetcher = ThreadPrefetcher(double, 10, 2, 2, 1)
        buffer, ref = prefetcher.buffer, weakref.ref(prefetcher)
        del prefetcher
        gc.collect()
        assert ref() is None
        buffer.close()


def test_a_close_by_the_garbage_collector_just_before_a_worker_sleeps_is_noticed(monkeypatch):
    monkeypatch.undo()

    # The collector may run in a worker that has looked at `closed` and is about to wait.
    class Late(threading.Condition):
        def wait(self, timeout=None):
            buffer.close()
            return super().wait(timeout)

    buffer = ReorderBuffer(9, 1)
    buffer.claim()
    buffer.room = Late(buffer.lock)
    assert ended([started(buffer.claim)])


def test_interruptions_do_not_leave_the_lock_taken():
    buffer = ReorderBuffer(9, 9)
    buffer.claim()
    buffer.put(0, "first")

    class Interrupted(threading.Condition):
        """A condition whose own Python code is interrupted right after it took its lock."""

        def __enter__(self):
            super().__enter__()
            raise KeyboardInterrupt

    buffer.ready = Interrupted(buffer.lock)
    with contextlib.suppress(KeyboardInterrupt):
        buffer.take_next()
    assert ended([started(buffer.close)])


def test_threads_that_started_end_when_a_further_one_cannot(monkeypatch):
    start, count = threading.Thread.start, iter(range(2))

    def third_fails(thread):
        if next(count, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    with pytest.raises(RuntimeError, match="start new thread"):
        ThreadPrefetcher(double, 100, 4, 4, 1)
    monkeypatch.undo()
    assert all_workers_end()


def test_ready_counts_the_batches_that_wait_for_the_consumer():
    prefetcher = ThreadPrefetcher(double, 6, 1, 6, 2)
    assert ended(prefetcher.threads)
    counts = [prefetcher.ready]
    for _ in range(6):
        prefetcher.next()
        counts.append(prefetcher.ready)
    assert counts == [6, 5, 4, 3, 2, 1, 0]
    prefetcher.close()


def test_the_worker_seconds_are_the_time_in_fetching_of_each_worker():
    prefetcher = ThreadPrefetcher(double, 40, 4, 8, 2)
    for _ in range(40):
        prefetcher.next()
    prefetcher.close()
    assert len(prefetcher.worker_seconds) == 4
    assert sum(prefetcher.worker_seconds) > 0


def test_without_workers_a_batch_is_fetched_when_it_is_asked_for():
    begun = []
    fetcher = SynchronousFetcher(lambda number: begun.append(number) or number)
    assert begun == []
    assert [fetcher.next(), fetcher.next()] == [0, 1] == begun
    assert fetcher.ready == 0
    assert fetcher.worker_seconds[0] > 0
    fetcher.close()


def test_without_workers_an_error_stands_in_for_its_batch():
    fetcher = SynchronousFetcher(fail_at(1, ValueError()))
    assert fetcher.next() == 0
    assert isinstance(fetcher.next(), ExceptionWrapper)


def test_ctrl_c_at_any_moment_of_a_fetch_is_an_interruption_and_nothing_else():
    """It comes between two instructions; the batch may be made already."""

    def interrupted_at(count):
        steps = iter(range(count))

        def trace(frame, event, _):
            if frame.f_code.co_filename != prefetcher_module.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(steps, None) is None:
                raise KeyboardInterrupt
            return trace

        fetcher, before = SynchronousFetcher(str), sys.gettrace()
        sys.settrace(trace)
        try:
            batch = fetcher.next()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        if isinstance(batch, ExceptionWrapper):
            return isinstance(batch.error, KeyboardInterrupt)
        assert batch == "0"
        return False

    seen = [interrupted_at(count) for count in range(200)]
    assert seen == sorted(seen, reverse=True)
    assert 20 < sum(seen) < 200
