"""An event whose waiting thread may be interrupted: nobody is left waiting for a lock."""

import threading
import time

import pytest
from faults.saving import PATIENCE

from npydata.system.threads import InterruptSafeEvent


def test_all_that_wait_are_woken_and_later_ones_do_not_wait():
    event = InterruptSafeEvent()
    threads = [threading.Thread(target=event.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert all(thread.is_alive() for thread in threads)
    assert not event.is_set()
    began = time.perf_counter()
    event.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert time.perf_counter() - began < 0.3, "they looked by themselves"
    event.wait()
    assert event.is_set()


def test_a_wake_up_that_an_interrupt_has_swallowed_is_made_up_for():
    event = InterruptSafeEvent()

    class Interrupted:
        def get(self, timeout):
            event._wake_up = whole  # the interrupt came when the wake-up had been taken
            event.set()
            whole.get()
            raise KeyboardInterrupt

    whole, event._wake_up = event._wake_up, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        event.wait()
    event.wait()
