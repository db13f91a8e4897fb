"""Scripts in children with a time limit."""

import subprocess
import sys


def run_child(script, *arguments, seconds=60, before=()):
    """Run a script in a fresh interpreter that dumps its threads and ends if it hangs.

    ``before`` is the command of a tracer that runs it.
    """
    guard = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    # A shell in the background ignores SIGINT, and children inherit that.
    guard += "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [*map(str, before), sys.executable, "-c", guard + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds + 30,
    )
