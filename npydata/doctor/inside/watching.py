"""A thread that wakes up now and then: how late it comes, where the loop stands, and its account.

A thread of the kernel that Python's ``threading`` does not list, so that scripts count as before.
"""

import _thread
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npydata.doctor.inside.recording import Recorder

PERIOD_S, ENOUGH = 0.04, 250
"""From one wake-up to the next, on average; after so many of them twice as long."""
WRITE_EVERY = 25
LATE_S = 0.0005
"""A wake-up that is later, apart from waiting for a core, waited for the interpreter lock."""
turns = {"own": 0.0}
"""The interval at which threads hand the interpreter lock on, while ours stands in its place."""
BESIDE = {"wait": "threads", "step": "beside"}
"""What the lines of other threads are noted as, by the loop's phase."""
IDLE = ("wait", "acquire", "get", "poll", "select", "_recv", "sleep")


def shorten_turns() -> None:
    """Let the lock be taken from who holds it as soon as that counts as held."""
    if sys.getswitchinterval() > LATE_S:
        turns["own"] = sys.getswitchinterval()
        sys.setswitchinterval(LATE_S)


def restore_turns() -> None:
    """Undo that, also in a process that was forked meanwhile, unless the script set another."""
    if turns["own"] and sys.getswitchinterval() == LATE_S:
        sys.setswitchinterval(turns["own"])
    turns["own"] = 0.0


os.register_at_fork(after_in_child=restore_turns)


def start(recorder: "Recorder") -> None:
    """Begin to watch this process."""
    recorder.add(wakes=0)
    _thread.start_new_thread(run, (recorder, os.getpid()))


def periods() -> Iterator[float]:
    """Yield the seconds before each wake-up; equal ones could keep step with the loop."""
    numbers = random.Random(0)
    for count in itertools.count():
        yield PERIOD_S * (1 if count < ENOUGH else 2) * numbers.uniform(0.75, 1.25)


def run(recorder: "Recorder", process: int) -> None:
    """Wake up until the process ends."""
    clock, sleep = time.monotonic, time.sleep
    was_short, core_wait = False, recorder.thread.core_wait
    for rounds, period in enumerate(periods(), 1):
        if recorder.pid != process:
            return
        core, due = core_wait(), clock() + period
        if was_short:
            shorten_turns()
        interval = sys.getswitchinterval()
        sleep(period)
        late = clock() - due - (core_wait() - core)
        restore_turns()
        phase = recorder.phase
        recorder.add(**{f"{phase}_wakes": 1, f"{phase}_held": late > min(LATE_S, interval / 2)})
        look(recorder, phase, taken=late >= interval)
        was_short = LATE_S < late < interval
        if rounds % WRITE_EVERY == 0:
            recorder.write()


def look(recorder: "Recorder", phase: str, *, taken: bool) -> None:
    """Note the line at which the loop stands, and those at which others work meanwhile.

    If the lock was ``taken`` from the loop, which had held it for an interval, it computed there.
    After a shorter wait it stands where it let go of the lock by itself: at a sleep, perhaps; then
    the next interval is a short one.
    """
    if not phase:
        return
    me = _thread.get_ident()
    for thread, frame in sys._current_frames().items():
        if thread == recorder.loop:
            recorder.note("fetch" if recorder.fetches else phase, frame)
            if taken and phase == "step":
                recorder.note("held", frame)
        elif thread != me and phase in BESIDE and frame.f_code.co_name not in IDLE:
            recorder.note(BESIDE[phase], frame)
