"""Run a script that dies, as by `kill -9`, right after a call to the system that a save makes.

    python killed.py TIMES CALL SCRIPT [ARGUMENTS...]

It dies once CALL was made so many times: what is called, and the name of the file, such as
"fsync optimizer.safetensors"; "any" counts every call.
"""

import fcntl
import os
import runpy
import signal
import sys
from pathlib import Path

CALLS = ("mkdir", "pwrite", "ftruncate", "fsync", "rename", "replace")
times, wanted, script, *arguments = sys.argv[1:]
left = int(times)


def counted(name, call):
    def wrapper(target, *args, **options):
        global left
        result = call(target, *args, **options)
        left -= wanted in ("any", f"{name} {name_of(target)}")
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapper


def name_of(target):
    """Return the name of a file, given its path or an open descriptor."""
    if not isinstance(target, int):
        return Path(target).name
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(
            os.fsdecode(fcntl.fcntl(target, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
        ).name
    return Path(f"/proc/self/fd/{target}").readlink().name


for name in CALLS:
    setattr(os, name, counted(name, getattr(os, name)))
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).resolve().parent))
runpy.run_path(script, run_name="__main__")
