"""What a thread has used so far, and stretches of its time that are no step."""

import os
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npydata.doctor.inside.recording import Recorder

LOOK_EVERY_S, RARELY_S, LOOK_SHARE = 0.05, 0.5, 0.05
"""Of quick batches one in so many seconds is looked at closely, and ever fewer, down to the second:
one each time the loop is older by that share. A look takes 0.1 ms and more beside a step whose code
and data fill the caches, ten times what it takes alone."""
THIS_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
SECTOR = 512
"""Bytes that ``getrusage`` counts as one block."""

Usage = tuple[float, ...]
"""The time; if looked at closely, also the thread's seconds on a core, its seconds ready to run
without one, and the process's major faults and bytes fetched."""
USED = ("cpu_s", "core_s", "faults", "read_bytes")
"""The counters of these, behind the name of a phase."""


def reads(who: int) -> tuple[int, int]:
    """Return major faults, and bytes fetched from storage, of this thread or process so far."""
    used = resource.getrusage(who)
    return used.ru_majflt, SECTOR * used.ru_inblock


class ThreadState(threading.local):
    """What is known of the thread that asks."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, for instance in a forked process, whose thread is another."""
        self.is_inside = False
        """Whether it is in a span already."""
        self.is_close, self.collate_cpu_s = False, 0.0
        """Whether the batch that it makes is looked at closely, and what putting the items of the
        last such one together took."""
        self.first_look = self.next_look = 0.0
        self.schedstat, self.reads = -1, reads(THIS_THREAD)

    def look(self, now: float, *, anyway: bool = False) -> bool:
        """Whether to look closely at the batch that the thread makes, or waits for, now."""
        self.is_close = anyway or now >= self.next_look
        if self.is_close:
            self.first_look = self.first_look or now
            rarer = LOOK_SHARE * (now - self.first_look)
            self.next_look = now + min(max(LOOK_EVERY_S, rarer), RARELY_S)
        return self.is_close

    def usage(self) -> Usage:
        """Return what was used so far."""
        faults, read = reads(resource.RUSAGE_SELF)
        return time.monotonic(), time.thread_time(), self.core_wait(), faults, read

    def reads_since(self) -> tuple[int, int]:
        """Return what the thread has read since this was asked last, so that none is missed.

        That of a loop that makes its own batches holds what its steps read.
        """
        before, self.reads = self.reads, reads(THIS_THREAD)
        return self.reads[0] - before[0], self.reads[1] - before[1]

    def core_wait(self) -> float:
        """Return the seconds that this thread was ready to run and had no core; 0 if unknown."""
        try:
            if self.schedstat < 0:
                path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
                self.schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self.schedstat, 80, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


class Span:
    """Something that is not a step, as a context; what is known of it when it is over.

    What happens inside another span belongs to that one, and is not counted again.
    """

    __slots__ = ("began", "ended", "is_close", "is_counted", "is_outermost", "phase", "recorder",
                 "starts_loop")  # fmt: skip

    def __init__(
        self, recorder: "Recorder", phase: str, *, starts_loop: bool, is_close: bool
    ) -> None:
        self.recorder, self.phase, self.starts_loop = recorder, phase, starts_loop
        self.is_close = is_close
        self.is_counted = False
        """Whether it is the loop's time."""

    def __enter__(self) -> "Span":
        recorder, thread = self.recorder, self.recorder.thread
        # After a close look the step is over now, too.
        is_close = self.is_close or len(recorder.left) > 1
        self.began = self.ended = thread.usage() if is_close else (time.monotonic(),)
        self.is_outermost = not recorder.is_inside()
        if self.is_outermost:
            if (self.starts_loop or recorder.loop) and recorder.role != "worker":
                recorder.mark(self.began)
            thread.is_inside = True
            if recorder.loop == threading.get_ident() and recorder.role == "main":
                self.is_counted, recorder.phase = True, self.phase
        return self

    def __exit__(self, *_: Any) -> None:
        recorder = self.recorder
        self.ended = recorder.thread.usage() if self.is_close else (time.monotonic(),)
        if self.is_outermost:
            recorder.thread.is_inside = False
        if self.is_counted:
            recorder.phase, recorder.left = "step", self.ended

    @property
    def s(self) -> float:
        """The seconds that it took."""
        return self.ended[0] - self.began[0]

    @property
    def counted_s(self) -> float:
        """Those of the loop."""
        return self.s if self.is_counted else 0.0


def core_waits() -> float:
    """Return the seconds that this process's threads were ready to run and had no core."""
    waits = 0.0
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                waits += int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):  # it has just ended
            continue
    return waits


def size_of(batch: Any, depth: int = 4) -> tuple[int, int]:
    """Return bytes and number of the tensors in a batch."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes), 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple) or not depth:
        return 0, 0
    sizes = [size_of(one, depth - 1) for one in batch]
    return sum(size for size, _ in sizes), sum(count for _, count in sizes)
