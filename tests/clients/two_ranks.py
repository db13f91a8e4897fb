"""One of two ranks that accelerate connects by gloo: what it gets, before and after a resume."""

import sys

import accelerate
import torch.distributed

from npydata import AsyncDataLoader, MmapDataset

path, state = sys.argv[1:]


def loader_of(seed=None):
    """A loader that is older than the accelerator's ranks are, if it is the first."""
    return AsyncDataLoader(MmapDataset(path, 16, stride=16), 4, seed=seed)


def everybody(values):
    found = [None, None]
    torch.distributed.all_gather_object(found, values)
    return found


early = loader_of()  # before there are ranks: it drew a seed for itself alone
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = accelerator.prepare(early)
assert loader is early
assert (loader.rank, loader.world_size) == (accelerator.process_index, 2)
batches = [x[:, 0].tolist() for x, _ in loader]
ends = [accelerator.gradient_state.end_of_dataloader for _ in loader]
assert ends == [False] * 4 + [True], ends
mine, other = everybody([tuple(x.flatten().tolist()) for x, _ in loader])
windows = MmapDataset(path, 16, stride=16)
both = sorted(window[i : i + 16] for window in mine + other for i in range(0, 64, 16))
assert both == sorted(tuple(windows[i][0].tolist()) for i in range(40))
assert len(loader) == len(batches) == 5

iterator = iter(loader)
for _ in range(2):
    next(iterator)
accelerator.save_state(state)
rest = [x.tolist() for x, _ in iterator]
accelerator.free_memory()
again = accelerator.prepare(loader_of(seed=1))
accelerator.load_state(state)
assert [x.tolist() for x, _ in again] == rest
assert len(rest) == 3
print("rank done")
accelerator.end_training()
