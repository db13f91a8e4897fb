"""The account of one watched process: how long its loop was in which phase, and what it did there.

Written to a private file of the process's own, again and again, for the doctor to read.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npydata.doctor.inside import usage
    from npydata.doctor.inside.usage import Span, Usage
else:  # the watched interpreter may not know npydata
    from _npydata_doctor import usage
    from _npydata_doctor.usage import Span, Usage

SAVES_KEPT = 100
LINES_KEPT = 200
AFTER_SAVE = 20
"""So many batches after a save count as taken after it."""
BOOK_EVERY_S = 0.1
"""A step's time is booked when the next wait begins; where none does, this often."""
RENAME, GETPID = os.rename, os.getpid
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
LIBRARY = (os.path.dirname(os.__file__) + "/", PACKAGE + "/")  # noqa: PTH120
"""Where code lies that is not the user's."""


class Recorder:
    """What one process has done so far; ``role`` is "main", "worker" or "idle".

    The *loop* is the thread that takes batches or steps the optimizer. Its time is divided into
    phases, "wait", "save", "load" and, for all the rest, "step"; a worker's phase is "fetch".
    """

    def __init__(self, folder: str, start_watching: Callable[["Recorder"], None]) -> None:
        self.folder, self.start_watching = folder, start_watching
        self.thread = usage.ThreadState()
        self.begin("idle")

    def begin(self, role: str) -> None:
        """Forget all, for instance of the process that this one was forked from."""
        self.role, self.pid = role, GETPID()
        self.lock, self.writing = threading.Lock(), threading.Lock()
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.saves: list[dict[str, Any]] = []
        self.loads: dict[str, int] = {}
        self.lines: defaultdict[str, int] = defaultdict(int)
        self.grown: dict[str, list[int]] = {}
        self.watched: list[tuple[str, Any]] = []
        self.phase = ""
        self.loop = 0
        self.finished = self.fetches = self.is_quick = False
        self.quick_items = 0
        """Of a batch that the loop makes itself, in a wait that is not looked at."""
        self.since_save, self.look_next = -1, 0.0
        self.stepped_at = self.began = self.cpu_began = self.core_began = 0.0
        self.left: Usage = (0.0,)
        self.thread.forget()

    def become(self, role: str) -> None:
        """Begin a process's own account, and watch it."""
        self.begin(role)
        self.began, self.cpu_began = time.monotonic(), time.process_time()
        self.core_began = usage.core_waits()
        if role == "worker":
            self.loop = threading.get_ident()
        self.start_watching(self)

    def attend(self) -> None:
        """Begin an account of this process, if it has none yet."""
        if self.pid != GETPID() or self.role == "idle":
            self.become("main")

    def add(self, **amounts: float) -> None:
        """Add to counters; ``wait_s=0.1`` to ``wait_s``."""
        with self.lock:
            for name, amount in amounts.items():
                self.counts[name] += amount

    def book(self, phase: str, begin: Usage, end: Usage) -> None:
        """Add the time between two moments to a phase, and what was used meanwhile."""
        self.counts[phase + "_n"] += 1
        self.counts[phase + "_s"] += end[0] - begin[0]
        self.book_use(phase, begin, end)

    def book_use(self, phase: str, begin: Usage, end: Usage, **seen: float) -> None:
        """Add what was used between two moments, and ``seen``, if both were looked at closely.

        It stands for all of the phase since the last look: quick batches are looked at less often.
        """
        if len(begin) > 1 and len(end) > 1:
            used = [after - before for before, after in zip(begin[1:], end[1:], strict=True)]
            seen |= {f"{phase}_{what}": one for what, one in zip(usage.USED, used, strict=True)}
            seen[phase + "_faulted"] = seen[phase + "_faults"] > 0
            with self.lock:
                times = self.counts[phase + "_n"] - self.counts[phase + "_looked"]
                self.counts[phase + "_looked"] += times
                for name, amount in seen.items():
                    self.counts[name] += times * amount

    def mark(self, now: Usage) -> None:
        """Book the time since the last mark to the step; the caller is the loop."""
        me = threading.get_ident()
        if self.loop == me:
            self.book("step", self.left, now)
        elif self.loop:
            return
        else:
            self.attend()
            self.loop, self.phase, self.began = me, "step", now[0]
        self.left = now

    def stepped(self, *_: Any) -> None:
        """Count a step of the optimizer."""
        self.stepped_at = time.monotonic()
        if not self.loop or self.stepped_at - self.left[0] > BOOK_EVERY_S:
            self.mark(self.thread.usage())
        self.counts["steps"] += 1

    def span(self, phase: str, *, starts_loop: bool = False) -> Span:
        """Return a context of something that is not a step."""
        return Span(self, phase, starts_loop=starts_loop, is_close=True)

    def wait(self) -> Span:
        """Return a context of waiting for a batch."""
        anyway = 0 <= self.since_save < AFTER_SAVE
        is_close = self.thread.look(time.monotonic(), anyway=anyway)
        return Span(self, "wait", starts_loop=True, is_close=is_close)

    def wait_quickly(self, take: Callable[[Any], Any], iterator: Any, begin: float) -> Any:
        """Take a batch whose wait is not looked at closely, in few calls."""
        left, counts, kind = self.left, self.counts, "start_s"
        self.is_quick, self.quick_items, self.phase = True, 0, "wait"
        try:
            batch = take(iterator)
            kind = "else_s"
        finally:
            now = time.monotonic()
            self.is_quick = self.fetches = False
            self.phase, self.left = "step", (now,)
            counts["step_n"] += 1
            counts["step_s"] += begin - left[0]
            counts[kind] += now - begin
        counts["else_n"] += 1
        if self.quick_items:  # the loop made the batch, and did little else
            self.count_fetch(now - begin, self.quick_items)
        return batch

    def is_inside(self) -> bool:
        """Whether this thread is in a span already."""
        return self.thread.is_inside or (self.is_quick and self.loop == threading.get_ident())

    def batch(self, wait: Span, *, is_first: bool) -> None:
        """Note a batch that the loop was given."""
        if not wait.is_counted:
            return
        if is_first:
            self.add(batches=1, starts=1, start_s=wait.s)
            return
        if 0 <= self.since_save < AFTER_SAVE:
            self.book("after", wait.began, wait.ended)
        else:
            self.book("else", wait.began, wait.ended)
            # The next look is not before the step behind this batch is over.
            self.look_next = 0.0 if wait.is_close else self.thread.next_look
        if self.since_save >= 0:
            self.since_save += 1

    def pass_over(self, wait: Span) -> None:
        """Note a wait that ended in no batch: the pass was over, and let its workers go."""
        self.add(start_s=wait.counted_s)

    def stalled(self, wait: Span) -> None:
        """Note that the loop waited for the newest save to be done."""
        self.add(save_s=wait.counted_s)
        if self.saves:
            self.saves[-1]["stall_s"] += wait.counted_s

    def fetch(self, make: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Make a batch: a worker's phase, and of a loop that makes its own, part of its wait."""
        mine = self.loop == threading.get_ident()
        per_item = getattr(fetcher, "auto_collation", False) and hasattr(index, "__len__")
        items = len(index) if per_item else 1
        if mine and self.is_quick:
            self.quick_items, self.fetches = items, True
            return make(fetcher, index)
        thread, now = self.thread, time.monotonic()
        if mine:
            self.fetches, self.phase = True, "fetch" if self.role == "worker" else self.phase
        try:
            is_close = thread.is_close if thread.is_inside else thread.look(now, anyway=mine)
            begin: Usage = thread.usage() if is_close else (now,)
            batch = make(fetcher, index)
            end: Usage = thread.usage() if is_close else (time.monotonic(),)
        finally:
            if mine:
                self.fetches, self.phase = False, "" if self.role == "worker" else self.phase
        self.count_fetch(end[0] - begin[0], items)
        faults, read = thread.reads_since()
        self.add(fetch_faults=faults, fetch_read_bytes=read, per_item=per_item)
        if is_close:
            nbytes, tensors = usage.size_of(batch)
            self.book_use("fetch", begin, end, batch_bytes=nbytes, tensors=tensors,
                          collate_cpu_s=thread.collate_cpu_s)  # fmt: skip
        return batch

    def count_fetch(self, seconds: float, items: int) -> None:
        """Count a batch that was made, and keep how long the longest took."""
        counts = self.counts
        with self.lock:
            counts["fetch_n"] += 1
            counts["fetch_s"] += seconds
            counts["items"] += items
            if seconds > counts["longest_fetch_s"]:
                counts["longest_fetch_s"] = seconds

    def save(self, about: dict[str, Any], span: Span) -> None:
        """Note a save, with the caller's line, the path, and how the file was written."""
        self.add(saves=1, save_s=span.counted_s)
        self.since_save, self.look_next = 0, 0.0
        self.saves.append({**about, "s": span.s, "stall_s": span.counted_s})
        del self.saves[:-SAVES_KEPT]

    def note(self, kind: str, frame: Any) -> None:
        """Count the user's line at which a thread was seen."""
        if line := self.user_line(frame):
            self.lines[f"{kind} {line}"] += 1

    def user_line(self, frame: Any) -> str:
        """Return ``file:line name`` of the user's innermost frame; "" without one."""
        return line_of_user(frame)

    def watch(self, name: str, thing: Any) -> None:
        """Keep an eye on how many entries an object's attributes have."""
        if all(thing is not known for _, known in self.watched) and hasattr(thing, "__dict__"):
            self.watched.append((name, thing))
            del self.watched[:-8]

    def measure_growth(self) -> None:
        """Note the lengths of the containers of the watched objects, and of the script."""
        script = sys.modules.get("__main__")
        for name, thing in [("", script), *self.watched]:
            for attribute, value in list(getattr(thing, "__dict__", {}).items()):
                if type(value) in (list, dict, set, deque) and not attribute.startswith("__"):
                    full = f"{name}.{attribute}" if name else attribute
                    self.grown.setdefault(full, [len(value), 0])[1] = len(value)

    def finish(self) -> None:
        """Write for the last time: what comes after the last step is none."""
        self.finished = True
        self.write()
        self.write_last_word()

    def write(self) -> None:
        """Replace the process's file; whoever reads it finds a whole one."""
        if self.role == "idle" or self.pid != GETPID() or not self.writing.acquire(timeout=1):
            return
        try:
            self.measure_growth()
            path = f"{self.folder}/{self.pid}.json"
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(self.report(), file)
            RENAME(path + ".new", path)
        except OSError:  # the doctor has gone
            pass
        finally:
            self.writing.release()

    def write_last_word(self) -> None:
        """Say how the interpreter ends; also of one that had nothing to give an account of."""
        word = {"pid": GETPID(), "torch": "torch" in sys.modules, "error": uncaught()}
        path = f"{self.folder}/{word['pid']}.end"
        try:
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(word, file)
            RENAME(path + ".new", path)
        except OSError:  # the doctor has gone
            pass

    def report(self) -> dict[str, Any]:
        """Return everything as plain values."""
        torch = sys.modules.get("torch")
        grown = {name: sizes for name, sizes in self.grown.items() if sizes[1] > 2 * sizes[0] + 100}
        with self.lock:
            counts = defaultdict(float, self.counts)
        if self.finished and self.loop:
            counts["step_s"] += max(self.stepped_at - self.left[0], 0.0)
        counts["cpu_s"] = time.process_time() - self.cpu_began
        counts["core_s"] = usage.core_waits() - self.core_began
        going_on = {"phase": self.phase, "s": time.monotonic() - self.left[0]}
        return {
            "pid": self.pid, "parent": os.getppid(), "role": self.role, "argv": sys.argv,
            "began": self.began if self.loop else None,
            "going_on": going_on if self.loop and not self.finished else None,
            "torch": str(getattr(torch, "__version__", "")),
            "counts": counts, "saves": [dict(save) for save in self.saves],
            "loads": dict(self.loads), "grown": grown,
            "lines": sorted(self.lines.items(), key=lambda item: -item[1])[:LINES_KEPT],
        }  # fmt: skip


def uncaught() -> str:
    """Return the exception that ends this interpreter, in a line; "" without one.

    Python keeps it as it prints it: nothing of the script's need be wrapped.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    try:
        said = str(error).strip().splitlines()
    except Exception:  # a class of the script's
        said = []
    return ": ".join([type(error).__name__, *said[:1]])


def line_of_user(frame: Any) -> str:
    """Go outwards from a frame to the first that is no library's, and say which line it is at."""
    for _ in range(80):
        if frame is None:
            break
        path = frame.f_code.co_filename
        if not path.startswith(("<", *LIBRARY)) and "-packages" not in path:
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
