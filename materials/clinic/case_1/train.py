"""Train on windows of a token file, with its ids renumbered for a smaller vocabulary."""

import json
import threading
import time

import numpy as np
import torch
from torch.utils.data import Dataset

import npydata

BATCH, SEQ_LEN, STEP_S = 64, 512, 0.005


class Renumbered(Dataset):
    """Windows in which every id is replaced by its number in the new vocabulary."""

    def __init__(self, path, vocabulary):
        self.windows = npydata.MmapDataset(path, SEQ_LEN)
        self.numbers = json.loads(vocabulary.read_text())  # old id -> new id
        self.made = {}  # batch -> worker, begun, made
        self.computed = {}  # batch -> seconds of a processor, however many others want one

    def __len__(self):
        return len(self.windows)

    def renumber(self, ids):
        return torch.tensor([[self.numbers[str(i)] for i in row] for row in ids.tolist()])

    def fetch(self, indices):
        begun, before = time.perf_counter(), time.thread_time()
        x, y = self.windows.fetch(indices)
        batch = self.renumber(x), self.renumber(y)
        worker, number = threading.current_thread().name, int(indices[0]) // BATCH
        self.made[number] = worker, begun, time.perf_counter()
        self.computed[number] = time.thread_time() - before
        return batch


def gpu_step(x, y):
    """Wait for the GPU, as `loss.item()` does."""
    time.sleep(STEP_S)


def train(data, workers=1, prefetch=2, steps=12):
    """Return (worker, begun, made, taken, done) of every batch, in seconds.

    And the seconds of a processor that a batch took its worker, at its best.
    """
    options = {"batch_size": BATCH, "num_workers": workers, "prefetch_factor": prefetch}
    loader = npydata.AsyncDataLoader(data, shuffle=False, **options)  # the file is shuffled
    taken = []
    with iter(loader) as batches:
        for x, y in batches:
            begin = time.perf_counter()
            gpu_step(x, y)
            taken.append((begin, time.perf_counter()))
            if len(taken) == steps:
                break
    trace = [(*data.made[k], *times) for k, times in enumerate(taken)]
    return trace, min(data.computed[k] for k in range(len(trace)))


def make_data(folder):
    """A token file of 5,000 different ids, and their new numbers."""
    rng = np.random.default_rng(0)
    np.save(folder / "tokens.npy", rng.integers(0, 5000, 1 << 20, dtype=np.uint16))
    numbers = {str(old): new for old, new in enumerate(rng.permutation(5000).tolist())}
    (folder / "vocabulary.json").write_text(json.dumps(numbers))
    return folder / "tokens.npy", folder / "vocabulary.json"


def reproduce(folder):
    """Measure three settings in turn, three times; keep the quickest run of each."""
    data = Renumbered(*make_data(folder))
    settings = [(1, 2), (4, 2), (1, 16)]
    runs = [[train(data, *setting) for setting in settings] for _ in range(3)]
    log = []
    for (workers, prefetch), turns in zip(settings, zip(*runs, strict=True), strict=True):
        trace, _ = min(turns, key=lambda run: run[0][-1][-1] - run[0][0][1])
        name = f"trace_{workers}_workers_prefetch_{prefetch}.json"
        (folder / name).write_text(json.dumps(trace, indent=0))
        crew = "1 worker" if workers == 1 else f"{workers} workers"
        computed_ms = 1000 * min(computed for _, computed in turns)
        log.append(
            f"{crew}, prefetch {prefetch}: a batch takes its worker {computed_ms:.0f} ms of a "
            f"processor, a step takes the GPU {1000 * STEP_S:.0f} ms\n"
        )
    (folder / "log.txt").write_text("".join(log))
