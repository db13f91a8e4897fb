"""Work of other threads has ended when it was waited for, interrupted or not."""

import signal
import threading
import time

import pytest

from npydata.system.wait_group import WaitGroup


def work_in_a_thread(group, until):
    """Begin a piece of work; return what it adds to when it was allowed and has ended."""
    done, begun = [], threading.Event()

    def work():
        with group.running() as allowed:
            begun.set()
            if allowed:
                assert until.wait(20)
                time.sleep(0.05)
                done.append(True)

    threading.Thread(target=work).start()
    assert begun.wait(10)
    return done


@pytest.mark.parametrize("interrupts", [0, 1, 3])
def test_what_was_begun_has_ended_whatever_interrupts(interrupts):
    group, until = WaitGroup(), threading.Event()
    done = work_in_a_thread(group, until)

    def interrupt():
        while not group.stopped:
            time.sleep(0.001)
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
        until.set()

    raised = []
    try:
        threading.Thread(target=interrupt).start()
        group.stop()
    except KeyboardInterrupt as error:
        raised.append(error)
    assert done
    assert len(raised) == min(interrupts, 1)


def test_nothing_begins_when_it_has_stopped():
    group, until = WaitGroup(), threading.Event()
    until.set()
    group.stop()
    done = work_in_a_thread(group, until)
    group.stop()
    assert not done
