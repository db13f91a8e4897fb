"""Faults in real system calls: ``strace`` is attached to the one thread that writes."""

import os
import re
import subprocess
import threading
from functools import cache

from faults.children import Child
from faults.layer import THREAD_NAME
from faults.saving import save_step
from faults.tools import not_installed
from npydata import AsyncCheckpointer

CHANGING = {"write", "pwrite64", "ftruncate", "fsync", "fdatasync", "fchmod", "chmod", "fchmodat",
            "mkdir", "rmdir", "unlink", "unlinkat", "rename", "renameat2", "flock", "openat",
            "open", "close"}  # fmt: skip
"""Calls that can leave a disk half done, and those that name what they are made on."""


@cache
def cannot_trace():
    """Return why faults can't be injected here, or an empty text."""
    if why := not_installed("strace"):
        return why
    done = subprocess.run(
        ["strace", "-e", "inject=getppid:retval=7", "true"], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else f"strace can't trace here: {done.stderr[-200:]}"


class TracedSave(Child):
    """A forked process that saves one step; its writing thread stands still until ``go``.

    It reports the errors that the first and the second ``wait`` raised, as text.
    """

    def __init__(self, folder, step, keep_last=2):
        tid_read, tid_write = os.pipe()
        go_read, self._go = os.pipe()

        def work(report):
            hold_writer(tid_write, go_read)
            keeper = AsyncCheckpointer(keep_last=keep_last)
            save_step(keeper, folder, step)
            for _ in range(2):
                report(outcome(keeper.wait))

        super().__init__(work)
        self.tid = int(os.read(tid_read, 20))
        for descriptor in (tid_read, tid_write, go_read):
            os.close(descriptor)

    def go(self):
        os.write(self._go, b"!")

    def close(self):
        os.close(self._go)
        super().close()


def hold_writer(tid_write, go_read):
    """Let the thread of a save say which one it is, and wait, whoever starts it."""
    original = threading.Thread.run

    def held(self):
        if self.name == THREAD_NAME:
            os.write(tid_write, str(threading.get_native_id()).encode())
            os.read(go_read, 1)
        original(self)

    threading.Thread.run = held


def outcome(wait):
    """Return ``fine``, or what was raised."""
    try:
        wait()
    except Exception as error:
        named = isinstance(error, OSError) and error.filename is not None
        return f"{type(error).__name__}{'' if named else ' without a path'}: {error}"
    return "fine"


def run_traced(save, *options):
    """Let a save go under ``strace``; return its report and what was traced."""
    command = ["strace", "-p", str(save.tid), "-o", "/dev/stdout", *options]
    tracer = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    attached = tracer.stderr.readline()
    assert "attached" in attached, attached
    save.go()
    report = save.lines()
    traced, _ = tracer.communicate(timeout=20)
    return report, traced


def calls_of(traced):
    """Return the calls that change something, each with its number among those of its name."""
    counts, calls = {}, []
    for name in re.findall(r"^(\w+)\(", traced, re.MULTILINE):
        counts[name] = counts.get(name, 0) + 1
        if name in CHANGING:
            calls.append((name, counts[name]))
    return calls
