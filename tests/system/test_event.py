"""An event whose waiting thread may be interrupted: nobody is left waiting for a lock."""

import pytest

from npydata.system.threads import InterruptSafeEvent


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
