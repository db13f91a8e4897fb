"""What a piece of work takes in memory: measured in a process of its own."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from npydata.bench.measure import MIB
from npydata.errors import NpyDataError
from npydata.system.page_cache import PAGE_SIZE

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def extra_memory(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> tuple[float, float]:
    """Prepare and do a piece of work in a fresh process; return MiB at the peak, and anonymous.

    Both are what came on top of the prepared process; the second is what was no page of a file
    when the work was done. Pages of a file that are mapped count in the first: the kernel can take
    them back, but they are not free.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(memory_of, prepare, *arguments).result()
    except Exception as error:
        what = prepare.__name__.replace("_", " ")
        raise NpyDataError(f"measuring the memory of {what} failed: {error}") from error


def memory_of(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> tuple[float, float]:
    work = prepare(*arguments)
    int(torch.zeros(PAGE_SIZE, dtype=torch.uint8).sum())  # torch's threads and buffers are there
    CLEAR_REFS.write_text(RESET_PEAK)
    before = counters()
    result = work()  # held until the counters are read
    after = counters()
    del result
    return after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"]


def counters() -> dict[str, float]:
    """Return what the kernel counts for this process, in MiB: resident memory, kinds and peak."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) / MIB for line in lines if line[-1] == "kB"}
