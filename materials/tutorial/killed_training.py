"""Run a training script, and kill it as `kill -9` does, right after a call that a save makes.

    python killed_training.py TIMES CALL SCRIPT [ARGUMENTS...]

The script dies after the call was made so many times.  A call is what it does and to which file,
such as "fsync optimizer.safetensors"; "any" counts all of them.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tutorial.killed_writer import after_each_call


def main(times: str, call: str, script: str, *arguments: str) -> None:
    left = int(times)

    def count(made: str) -> None:
        nonlocal left
        left -= call in ("any", made)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    after_each_call(count)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
