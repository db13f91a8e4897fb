"""One of two ranks that accelerate connects by gloo: what it gets, before and after a resume."""

import sys

import accelerate
import torch.distributed

from npydata import AsyncDataLoader, MmapDataset

path, state = sys.argv[1:]


def loader_of(accelerator, seed=None):
    """A loader as the page says, made when the ranks are known."""
    dataset = MmapDataset(path, 16, stride=16)
    loader = AsyncDataLoader(dataset, 4, shuffle=True, seed=seed, device=accelerator.device)
    accelerator.register_for_checkpointing(loader)
    return loader


def everybody(values):
    found = [None, None]
    torch.distributed.all_gather_object(found, values)
    return found


accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = loader_of(accelerator)
assert (loader.rank, loader.world_size) == (accelerator.process_index, 2)
batches = [x[:, 0].tolist() for x, _ in loader]
mine, other = everybody([tuple(x.flatten().tolist()) for x, _ in loader])
windows = MmapDataset(path, 16, stride=16)
both = sorted(window[i : i + 16] for window in mine + other for i in range(0, 64, 16))
assert both == sorted(tuple(windows[i][0].tolist()) for i in range(40))
assert len(loader) == len(batches) == 5

iterator = iter(loader)
for _ in range(2):
    next(iterator)
accelerator.save_state(state)
accelerator.wait_for_everyone()
rest = [x.tolist() for x, _ in iterator]
accelerator._custom_objects.clear()  # as in a new process
again = loader_of(accelerator, seed=1)
accelerator.load_state(state)
assert [x.tolist() for x, _ in again] == rest
assert len(rest) == 3
print("rank done")
accelerator.end_training()
