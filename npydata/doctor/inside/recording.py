"""The account of one watched process: how long its loop was in which phase, and what it did there.

Written to a private file of the process's own, again and again, for the doctor to read.
"""

import json
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVES_KEPT = 100
LINES_KEPT = 200
AFTER_SAVE = 20
"""So many batches after a save count as taken after it."""
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
        self.inside = threading.local()
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
        self.finished = self.fetches = False
        self.since_save = -1
        self.began = self.cpu_began = self.core_began = self.left = self.left_cpu = (
            self.left_core
        ) = 0.0
        self.inside.__dict__.clear()

    def become(self, role: str) -> None:
        """Begin a process's own account, and watch it."""
        self.begin(role)
        self.began, self.cpu_began = time.monotonic(), time.process_time()
        self.core_began = core_waits()
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

    def mark(self) -> None:
        """Book the time since the last mark to the step; the caller is the loop."""
        self.attend()
        now, cpu, core = time.monotonic(), time.thread_time(), self.core_wait()
        if not self.loop:
            self.loop, self.phase, self.began = threading.get_ident(), "step", now
        elif self.loop == threading.get_ident():
            self.add(step_s=now - self.left, step_cpu_s=cpu - self.left_cpu,
                     step_core_s=core - self.left_core)  # fmt: skip
        else:
            return
        self.left, self.left_cpu, self.left_core = now, cpu, core

    @contextmanager
    def span(self, phase: str, *, starts_loop: bool = False) -> Iterator[dict[str, float]]:
        """Do something that is not a step; yields what is known of it when it is over.

        What happens inside another span belongs to that one, and is not counted again.
        """
        spent = {"s": 0.0, "cpu_s": 0.0, "core_s": 0.0}
        outermost = not getattr(self.inside, "span", False)
        if outermost and (starts_loop or self.loop) and self.role != "worker":
            self.mark()
        counted = outermost and self.loop == threading.get_ident() and self.role == "main"
        begin, cpu, core = time.monotonic(), time.thread_time(), self.core_wait()
        if outermost:
            self.inside.span = True
        if counted:
            self.phase = phase
        try:
            yield spent
        finally:
            spent["s"], spent["cpu_s"] = time.monotonic() - begin, time.thread_time() - cpu
            spent["core_s"] = self.core_wait() - core
            if outermost:
                self.inside.span = False
            if counted:
                self.phase, self.left = "step", begin + spent["s"]
                self.left_cpu, self.left_core = cpu + spent["cpu_s"], core + spent["core_s"]
            spent["counted"] = counted

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Make a batch: a worker's phase, and of a loop that makes its own, part of its wait."""
        mine = self.loop == threading.get_ident()
        self.fetches |= mine
        if mine and self.role == "worker":
            self.phase = "fetch"
        try:
            yield
        finally:
            self.fetches &= not mine
            if mine and self.role == "worker":
                self.phase = ""

    def is_inside(self) -> bool:
        """Whether this thread is in a span already."""
        return bool(getattr(self.inside, "span", False))

    def core_wait(self) -> float:
        """Return the seconds that this thread was ready to run and had no core; 0 if unknown."""
        descriptor = getattr(self.inside, "schedstat", None)
        try:
            if descriptor is None:
                path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
                descriptor = self.inside.schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(descriptor, 80, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def batch(self, spent: dict[str, float], first: bool, faults: int, read: int) -> None:
        """Note a batch that the loop was given: the wait, and the process's reads meanwhile."""
        if not spent["counted"]:
            return
        if first:
            self.add(starts=1, start_s=spent["s"], batches=1)
            return
        core = min(spent["core_s"], spent["s"])  # the kernel's clock is another
        net = spent["s"] - core
        self.add(batches=1, wait_s=spent["s"], wait_cpu_s=spent["cpu_s"], wait_core_s=core)
        when = "after" if 0 <= self.since_save < AFTER_SAVE else "else"
        self.add(**{f"{when}_n": 1, f"{when}_wait_s": net, f"{when}_faults": faults,
                    f"{when}_read_bytes": read})  # fmt: skip
        if self.since_save >= 0:
            self.since_save += 1

    def pass_over(self, spent: dict[str, float]) -> None:
        """Note a wait that ended in no batch: the pass was over, and let its workers go."""
        self.add(start_s=spent["s"] if spent["counted"] else 0.0)

    def stalled(self, spent: dict[str, float]) -> None:
        """Note that the loop waited for the newest save to be done."""
        if spent["counted"]:
            self.add(save_s=spent["s"])
        if spent["counted"] and self.saves:
            self.saves[-1]["stall_s"] += spent["s"]

    def made(self, **amounts: float) -> None:
        """Add to counters of batches that were made, and keep how long the longest took."""
        self.add(**amounts)
        with self.lock:
            longest = max(self.counts["longest_fetch_s"], amounts["fetch_s"])
            self.counts["longest_fetch_s"] = longest

    def save(self, about: dict[str, Any], spent: dict[str, float]) -> None:
        """Note a save, with the caller's line, the path, and how the file was written."""
        stall = spent["s"] if spent["counted"] else 0.0
        self.add(saves=1, save_s=stall)
        self.since_save = 0
        self.saves.append({**about, "s": spent["s"], "stall_s": stall})
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
            counts = dict(self.counts)
        counts["cpu_s"] = time.process_time() - self.cpu_began
        counts["core_s"] = core_waits() - self.core_began
        going_on = {"phase": self.phase, "s": time.monotonic() - self.left}
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
