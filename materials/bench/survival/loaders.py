"""Who resumes exactly? A loader is killed twice, resumed twice, and its run is finished.

The samples are the numbers of one shuffled epoch. What was seen in all is compared with the epoch
of a loader that nobody stopped. ``pip install torchdata grain litdata`` adds those of others.
"""

import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from attacks import start
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from npydata import AsyncDataLoader

SAMPLES, SEED = 960, 7


@dataclass(frozen=True)
class Setting:
    """How a loader is set up."""

    workers: int = 2
    batch_size: int = 8
    rank: int = 0
    world_size: int = 1


CASES = {
    "as it was": {},
    "2 to 0 workers": {"workers": 0},
    "batch of 8 to 12": {"batch_size": 12},
    "1 to 2 ranks": {"world_size": 2},
}
Opened = tuple[Iterator[Any], Callable[[], Any]]
"""The batches that are left, and what a checkpoint would hold after the last one taken."""


class Numbers(Dataset[int]):
    """Samples that are their own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return int(index)


def ours(setting: Setting, state: Any) -> Opened:
    loader = AsyncDataLoader(
        Numbers(),
        batch_size=setting.batch_size,
        seed=SEED,
        num_workers=setting.workers,
        rank=setting.rank,
        world_size=setting.world_size,
    )
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def stock(setting: Setting, state: Any, *, skips: bool) -> Opened:
    """A seeded sampler; what was seen is skipped, or seen again."""
    sampler = DistributedSampler(Numbers(), setting.world_size, setting.rank, seed=SEED)
    loader = DataLoader(Numbers(), setting.batch_size, sampler=sampler, num_workers=setting.workers)
    taken = [state or 0]

    def batches():
        for batch in islice(loader, taken[0] if skips else 0, None):
            taken[0] += 1
            yield batch

    return batches(), lambda: taken[0]


def begins_again(setting: Setting, state: Any) -> Opened:
    return stock(setting, state, skips=False)


def skips_batches(setting: Setting, state: Any) -> Opened:
    return stock(setting, state, skips=True)


def torchdata(setting: Setting, state: Any) -> Opened:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(Numbers(), setting.world_size, setting.rank, seed=SEED)
    loader = StatefulDataLoader(
        Numbers(), setting.batch_size, sampler=sampler, num_workers=setting.workers
    )
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def grain(setting: Setting, state: Any) -> Opened:
    from absl import flags
    from grain import python as pygrain

    flags.FLAGS.mark_as_parsed()  # its worker processes ask for them
    shards = pygrain.ShardOptions(setting.rank, setting.world_size)
    sampler = pygrain.IndexSampler(
        SAMPLES, shard_options=shards, shuffle=True, num_epochs=1, seed=SEED
    )
    batches = iter(
        pygrain.DataLoader(
            data_source=pygrain.RangeDataSource(0, SAMPLES, 1),
            sampler=sampler,
            shard_options=shards,
            worker_count=setting.workers,
            operations=[pygrain.Batch(setting.batch_size, drop_remainder=False)],
        )
    )
    if state is not None:
        batches.set_state(state)
    return batches, batches.get_state


LOADERS = {
    "ours, AsyncDataLoader": ("npydata", ours),
    "DataLoader, begins again": ("torch", begins_again),
    "DataLoader, skips batches": ("torch", skips_batches),
    "torchdata, StatefulDataLoader": ("torchdata", torchdata),
    "Grain, DataLoader": ("grain", grain),
}


def resumed_twice(open_loader, folder: Path, changed: dict[str, int], kills: int) -> str:
    """Return what becomes of the samples over some runs that are killed and resumed twice."""
    whole = list(chain(*run(open_loader, Setting(), None, folder)))
    chance, total = random.Random(SEED), Counter()
    for _ in range(kills):
        seen, state, setting = [], None, Setting()
        for _ in range(2):
            stop = chance.randrange(5, 35)
            seen += chain(*run(open_loader, setting, state, folder, stop))
            state = pickle.loads((folder / "state").read_bytes())
        setting = replace(setting, **changed)
        ranks = [
            run(open_loader, replace(setting, rank=rank), state, folder)
            for rank in range(setting.world_size)
        ]
        seen += chain(*chain(*zip_longest(*ranks, fillvalue=[])))
        total["lost"] += len(set(whole) - set(seen))
        total["repeated"] += len(seen) - len(set(seen))
        total["in another order"] += sorted(seen) == sorted(whole) and seen != whole
    return ", ".join(f"{what} {count}" for what, count in total.items() if count) or "exact"


def run(open_loader, setting, state, folder: Path, stop: int | None = None) -> list[list[int]]:
    """Return the batches of a process, which keeps its state and is killed at ``stop``."""
    kept, taken = folder / "state", folder / "taken"
    taken.unlink(missing_ok=True)

    def take(report) -> None:
        try:
            left, state_of = open_loader(setting, state)
            batches = [[int(sample) for sample in batch] for batch in islice(left, stop)]
            kept.write_bytes(pickle.dumps(state_of()))
            taken.write_bytes(pickle.dumps(batches))
        except BaseException as error:
            report(" ".join(f"{type(error).__name__}: {error}".split()))
        os.kill(os.getpid(), signal.SIGKILL)

    child = start(take)
    said = child.lines()
    child.close()
    if not taken.exists():
        raise RuntimeError((said or ["it died"])[0])
    return pickle.loads(taken.read_bytes())
