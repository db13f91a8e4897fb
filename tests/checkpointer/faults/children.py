"""Processes that are forked, told when to go, and killed."""

import gc
import os
import signal
import traceback


class Child:
    """A forked process that runs ``work(report)``; ``lines`` is what it reported, unbuffered."""

    def __init__(self, work, seconds=60):
        read, write = os.pipe()
        gc.freeze()  # a child ends faster if it need not look at torch's objects
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(work, read, write, seconds)
        os.close(write)
        self._read, self._rest, self.code = read, b"", None

    def line(self):
        """Return the next line of its report, or ``None`` when there will be none."""
        while b"\n" not in self._rest:
            chunk = os.read(self._read, 4096)
            if not chunk:
                return None
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def lines(self):
        """Return what is left of its report when it has ended."""
        lines = list(iter(self.line, None))
        self.end()
        return lines

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def end(self):
        """Wait for its end; return its exit code, negative for a signal."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def close(self):
        os.close(self._read)


def run_and_exit(work, read, write, seconds):
    """Run in the child; never return to the caller's frames."""
    code = 70
    try:
        os.close(read)
        signal.alarm(seconds)  # whatever it is stuck in
        work(lambda line: os.write(write, f"{line}\n".encode()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
