"""Starting a training under watch: its environment, its signals, its exit code."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from npydata.errors import NpyDataError

HOOKS = Path(__file__).parent / "inside"
SAMPLE_EVERY_S = 0.25
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def environment(folder: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment whose interpreters watch themselves and write into ``folder``."""
    path = given.get("PYTHONPATH")
    return {
        **given,
        "NPYDATA_DOCTOR": folder,
        "PYTHONPATH": os.pathsep.join([str(HOOKS), *([path] if path else [])]),
    }


def start(command: Sequence[str], folder: str) -> subprocess.Popen[bytes]:
    """Start a command under watch; it has our terminal and our output.

    Raises:
        OSError: There is no such command.
        NpyDataError: It is a file that is not to be executed.
    """
    if shutil.which(command[0]) is None and (script := Path(command[0])).is_file():
        is_python = script.suffix == ".py"
        here = "" if os.sep in command[0] else "./"
        run = ["python", *command] if is_python else [here + command[0], *command[1:]]
        how = "write" if is_python else "make it executable and write"
        raise NpyDataError(
            f"{command[0]}: is not a command; {how}: npydata doctor -- {shlex.join(run)}"
        )
    return subprocess.Popen(list(command), env=environment(folder))


@contextmanager
def passing_on_signals(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Let the child decide what a signal ends; we end after it.

    Ctrl-C in a terminal reaches the child by itself, and is not sent twice.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(child: "subprocess.Popen[bytes]", seconds: float = SAMPLE_EVERY_S) -> bool:
    """Wait a moment; return whether the child is over."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def exit_code(child: "subprocess.Popen[bytes]") -> int:
    """Return the child's exit code as a shell has it: 128 and the signal that ended it."""
    code = child.wait()
    return 128 - code if code < 0 else code


def seconds_since(begin: float) -> float:
    """Return the seconds since a moment of ``time.monotonic``."""
    return time.monotonic() - begin
