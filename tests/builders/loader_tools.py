"""What the tests of the loader share: small datasets, counted threads, children with a time-out."""

import subprocess
import sys
import threading
import time

import numpy as np
import torch

PATIENCE = 20.0
"""Seconds after which a test that waits for an event has failed."""


class Numbers(torch.utils.data.Dataset):
    """Sample ``i`` is the number ``i``."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Fetched(Numbers):
    """Numbers that come a batch at a time."""

    def fetch(self, indices):
        return torch.from_numpy(np.array(indices))


def values(batch):
    """Return the sample numbers in a batch of numbers, or the first tokens in one of windows."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch[0][:, 0].tolist()


def workers_alive():
    """Return the loader's threads that are still there."""
    return [t for t in threading.enumerate() if t.name.startswith("npydata-worker") and t.ident]


def all_workers_end(besides=()):
    """Wait until no thread of any loader is left; return whether that came true."""
    deadline = time.monotonic() + PATIENCE
    for thread in workers_alive():
        if thread not in besides:
            thread.join(max(0.0, deadline - time.monotonic()))
    return set(workers_alive()) <= set(besides)


def run_child(script, *arguments, seconds=60, before=()):
    """Run a script in a fresh interpreter that dumps its threads and ends if it hangs.

    ``before`` is the command of a tracer that runs it.
    """
    guard = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    # A shell that starts tests in the prefetcher has SIGINT ignored, and children inherit that.
    guard += "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.run(
        [*map(str, before), sys.executable, "-c", guard + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds + 30,
    )
