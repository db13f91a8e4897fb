"""Small datasets, and the threads that a loader leaves."""

import threading
import time

import numpy as np
import torch
from torch.utils.data import IterableDataset

PATIENCE = 20.0
"""Seconds after which a test that waits for an event has failed."""


class Numbers(torch.utils.data.Dataset):
    """Sample ``i`` is the number ``first + i``."""

    def __init__(self, length, first=0):
        self.length, self.first = length, first

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(self.first + index)


class Fetched(Numbers):
    """Numbers that come a batch at a time."""

    def fetch(self, indices):
        return torch.from_numpy(self.first + np.array(indices))


class OneBuffer(Fetched):
    """Numbers that come in one buffer again and again, as from many hand-written loaders."""

    buffer = None

    def fetch(self, indices):
        if self.buffer is None:
            self.buffer = torch.empty(self.length, dtype=torch.int64)
        batch = self.buffer[: len(indices)]
        for k, index in enumerate(indices):  # slowly, for another thread to come in between
            batch[k] = self.first + index
        return batch


class Failing(Fetched):
    """Numbers of which one can't be read."""

    def __init__(self, length, bad, error=ValueError):
        super().__init__(length)
        self.bad, self.error = bad, error

    def fetch(self, indices):
        if self.bad in indices:
            raise self.error(f"sample {self.bad} is bad")
        return super().fetch(indices)


class Stream(IterableDataset):
    """Numbers that can only be gone through."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from range(self.length)


class StatefulStream(Stream):
    """The same, which knows how to stand somewhere, and counts what it was asked for."""

    def __init__(self, length):
        super().__init__(length)
        self.at, self.asked = 0, 0

    def __iter__(self):
        at, self.at = self.at, 0
        for number in range(at, self.length):
            self.next = number + 1
            self.asked += 1
            yield number
        self.next = self.length

    def state_dict(self):
        return {"next": getattr(self, "next", self.at)}

    def load_state_dict(self, state):
        self.at = state["next"] % self.length


def values(batch):
    """Return the sample numbers of a batch of numbers, or the first tokens of windows."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch[0][:, 0].tolist()


def flat(batches):
    """Return the sample numbers of several batches in one list."""
    return [value for batch in batches for value in values(batch)]


def take(loader, count):
    """Begin an iterator, and return it with the values of its next ``count`` batches."""
    iterator = iter(loader)
    return iterator, [values(next(iterator)) for _ in range(count)]


def workers_alive():
    """Return the loader's threads that are still there."""
    return [t for t in threading.enumerate() if t.name.startswith("npydata-worker") and t.ident]


def all_workers_end(besides=()):
    """Wait until no other thread of any loader is left; False if one stays."""
    deadline = time.monotonic() + PATIENCE
    for thread in workers_alive():
        if thread not in besides:
            thread.join(max(0.0, deadline - time.monotonic()))
    return set(workers_alive()) <= set(besides)
