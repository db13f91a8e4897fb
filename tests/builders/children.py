"""Scripts in children with a time limit, and functions that answer there what may crash or hang."""

import faulthandler
import json
import subprocess
import sys
from importlib import import_module

HANG_SECONDS = 90
"""By the clock on the wall, after which a child that answers is ended."""


def run_child(script, *arguments, seconds=60):
    """Run a script in a fresh interpreter that dumps its threads and ends if it hangs."""
    guard = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    # A shell in the background ignores SIGINT, and children inherit that.
    guard += "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [sys.executable, "-c", guard + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds + 30,
    )


def answers(module, function, questions):
    """What a function says of each line of text, in one child.

    The answer to a question that crashes the child is ``{"end": "crashed"}``; a fresh child goes
    on after it.
    """
    found = []
    while len(found) < len(questions):
        left = "".join(f"{one}\n" for one in questions[len(found) :])
        command = [sys.executable, __file__, module, function]
        child = subprocess.run(command, input=left, capture_output=True, text=True)
        found += map(json.loads, child.stdout.splitlines())
        if len(found) < len(questions):
            why = f"exit status {child.returncode}: {child.stderr[-2000:]}"
            found.append({"end": "crashed", "why": why})
    return found


if __name__ == "__main__":
    answer = getattr(import_module(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        print(json.dumps(answer(line.rstrip("\n"))), flush=True)
        faulthandler.cancel_dump_traceback_later()
