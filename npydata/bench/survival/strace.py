"""The calls of a saving process that change files: recorded, made to fail, or its last."""

import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from npydata.bench.survival.process import PATIENCE, Process
from npydata.errors import NpyDataError

WRITES = "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range"
SYNCS = "fsync,fdatasync,sync_file_range,syncfs,sync,msync"
CHANGES = (f"{WRITES},{SYNCS},open,openat,creat,ftruncate,truncate,fallocate,mkdir,mkdirat,rmdir,"
           "unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,chmod,fchmod,"
           "fchmodat")  # fmt: skip
CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One traced call: its number among those of its name in its thread, and what it was given."""

    name: str
    number: int
    text: str
    """Arguments and result, descriptors with their paths."""


@cache
def cannot_trace() -> str:
    """Return why calls can't be traced here, or an empty text."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(["strace", "-e", "inject=getppid:retval=7", "true"],
                          capture_output=True, text=True)  # fmt: skip
    return "" if done.returncode == 0 else f"strace can't trace here: {done.stderr.strip()[-200:]}"


def traced(process: Process, *options: str, patience: float = PATIENCE) -> tuple[str, list[str]]:
    """Let a process that is ready go under ``strace``; return the trace and what it reported.

    When one of its processes is killed, all are: a job dies as a whole.
    """
    command = ["strace", "-f", "-y", "-s", "0", "-o", "/dev/stdout", *options]
    for pid in process.pids():
        command += ["-p", str(pid)]
    tracer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              bufsize=1)  # fmt: skip
    assert tracer.stdout is not None
    assert tracer.stderr is not None
    output, said = tracer.stdout, tracer.stderr.readline()
    if "attached" not in said:
        process.kill()
        process.end()
        tracer.communicate()
        raise NpyDataError(f"strace can't attach: {said.strip()}")
    process.go()
    trace: list[str] = []

    def follow() -> None:
        for line in output:
            trace.append(line)
            if "+++ killed by SIGKILL +++" in line:
                process.kill()

    follower = threading.Thread(target=follow)
    follower.start()
    lines = process.end(patience)
    follower.join()
    tracer.communicate()
    return "".join(trace), lines


def calls_of(trace: str, root: Path) -> list[SystemCall]:
    """Return the calls on files below a root, each where it ended."""
    counts: dict[tuple[str, str], int] = {}
    begun: dict[str, tuple[str, int, str]] = {}
    calls = []
    for line in trace.splitlines():
        if resumed := RESUMED.match(line):
            pid, name, rest = resumed.groups()
            _, number, text = begun.pop(pid, (name, 0, ""))
        elif found := CALL.match(line):
            pid, name, text = found.groups()
            counts[pid, name] = number = counts.get((pid, name), 0) + 1
            rest = ""
            if text.endswith("<unfinished ...>"):
                begun[pid] = name, number, text.removesuffix("<unfinished ...>")
                continue
        else:
            continue
        calls.append(SystemCall(name, number, text + rest))
    return [call for call in calls if str(root) in call.text and changes(call)]


def changes(call: SystemCall) -> bool:
    """Whether a call did something to a file: one that failed did not."""
    if " = -1 " in call.text:
        return False
    opened = call.name in ("open", "openat")
    return not opened or "O_CREAT" in call.text or "O_TRUNC" in call.text


def evenly(things: list[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """Return at most so many of them, the first and the last included."""
    if len(things) <= most:
        return things
    return [things[round(k * (len(things) - 1) / (most - 1))] for k in range(most)]
