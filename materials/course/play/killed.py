"""Run a script that dies, as by `kill -9`, right after it has synced a file of some name.

    python killed.py TIMES "fsync NAME" SCRIPT [ARGUMENTS...]

It dies once a file of that name, such as optimizer.safetensors, was synced so many times; with
"any" in place of the second, whatever was.
"""

import fcntl
import os
import runpy
import signal
import sys
from pathlib import Path

times, wanted, script, *arguments = sys.argv[1:]
left, sync = int(times), os.fsync


def counted(file):
    global left
    sync(file)
    left -= wanted in ("any", f"fsync {name_of(file)}")
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def name_of(descriptor):
    """Return the name of an open file."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        path = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
        return Path(os.fsdecode(path)).name
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


os.fsync = counted
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).resolve().parent))
runpy.run_path(script, run_name="__main__")
