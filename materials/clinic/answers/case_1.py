"""Answers to case 1. Do your own ten minutes first: `case_1.md` beside this file has the words."""

import time
from itertools import pairwise

import numpy as np
import torch
from clinic.case_1.train import Renumbered
from course.play.nb03 import counted_beside  # noqa: F401 - as in lesson 03

from npydata.system.page_cache import bytes_read, resident_pages


def wait_shares(trace):
    """The shares of the time in which the consumer, and the one worker, stood between batches."""
    consumer = sum(after[3] - before[4] for before, after in pairwise(trace))
    worker = sum(after[1] - before[2] for before, after in pairwise(trace))
    return consumer / (trace[-1][4] - trace[0][3]), worker / (trace[-1][2] - trace[0][1])


def diagnose(trace):
    """What a trace says of a run, as in lesson 04."""
    consumer, worker = wait_shares(trace)
    if consumer <= 0.1:
        return "fed"
    return "no room" if worker > 0.1 else "too slow"


def batches_per_s(trace):
    return len(trace) / (trace[-1][4] - trace[0][3])


def step_s(step, count=10):
    """Seconds that a step takes with a batch in memory, at its best: nobody else is at work."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step(None, None)
        times.append(time.perf_counter() - begin)
    return min(times)


def disk_work(data, path):
    """Pages of the file that are not in memory, and bytes that the disk delivers for a batch."""
    missing, before = int((~resident_pages(path)).sum()), bytes_read()
    data.fetch(range(64))
    return missing, bytes_read() - before


class Mended(Renumbered):
    """The vocabulary as an array, and a batch renumbered by one gather."""

    def __init__(self, path, vocabulary):
        super().__init__(path, vocabulary)
        self.table = np.zeros(1 + max(map(int, self.numbers)), np.int64)
        self.table[[int(old) for old in self.numbers]] = list(self.numbers.values())

    def renumber(self, ids):
        return torch.from_numpy(self.table[ids.numpy()])
