"""What other threads do for this one has ended when it goes on, interrupted or not."""

import signal
import threading
import time

import pytest

from npydata.system.beside import Beside


def in_a_thread(beside, done, begun):
    """Take a while for a piece of work, counted."""

    def work():
        with beside.begun() as allowed:
            begun.set()
            if allowed:
                time.sleep(0.3)
                done.append(True)

    threading.Thread(target=work).start()
    assert begun.wait(10)


@pytest.mark.parametrize("interrupts", [0, 1, 3])
def test_it_ends_when_what_was_begun_has_ended_whatever_interrupts(interrupts):
    beside, done, begun = Beside(), [], threading.Event()
    in_a_thread(beside, done, begun)

    def interrupt():
        for _ in range(interrupts):
            time.sleep(0.03)
            signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    if interrupts:
        with pytest.raises(KeyboardInterrupt):
            beside.end()
    else:
        beside.end()
    assert done


def test_nothing_begins_when_it_has_ended():
    beside, done = Beside(), []
    beside.end()
    in_a_thread(beside, done, threading.Event())
    beside.end()
    assert not done
