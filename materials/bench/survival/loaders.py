"""Who resumes exactly? A loader is killed twice, resumed twice, and its run is finished.

The samples are the numbers of one shuffled epoch. What was seen in all is compared with the epoch
of a loader that nobody stopped. Each function opens a loader, with a state when it resumes, and
returns the batches that are left, and what gives the state after the last one that was taken.
``pip install torchdata`` adds that of others.
"""

import os
import pickle
import random
import signal
from collections import Counter
from functools import partial
from itertools import chain, islice, zip_longest

from torch.utils.data import DataLoader, DistributedSampler
from trials import start

from npydata import AsyncDataLoader

NUMBERS, SEED = range(960), 7
SETTING = {"workers": 2, "batch_size": 8, "rank": 0, "world_size": 1}
CASES = {
    "as it was": {},
    "2 to 0 workers": {"workers": 0},
    "batch of 8 to 12": {"batch_size": 12},
    "1 to 2 ranks": {"world_size": 2},
}


def ours(state, workers, **setting):
    loader = AsyncDataLoader(NUMBERS, num_workers=workers, seed=SEED, **setting)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def stock(state, workers, batch_size, rank, world_size, *, skips):
    """A seeded sampler; what was seen is skipped, or seen again."""
    sampler = DistributedSampler(NUMBERS, world_size, rank, seed=SEED)
    loader = DataLoader(NUMBERS, batch_size, sampler=sampler, num_workers=workers)
    taken = [state or 0]

    def batches():
        for batch in islice(loader, taken[0] if skips else 0, None):
            taken[0] += 1
            yield batch

    return batches(), lambda: taken[0]


def torchdata(state, workers, batch_size, rank, world_size):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(NUMBERS, world_size, rank, seed=SEED)
    loader = StatefulDataLoader(NUMBERS, batch_size, sampler=sampler, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


LOADERS = {
    "ours, AsyncDataLoader": ("npydata", ours),
    "DataLoader, begins again": ("torch", partial(stock, skips=False)),
    "DataLoader, skips batches": ("torch", partial(stock, skips=True)),
    "torchdata, StatefulDataLoader": ("torchdata", torchdata),
}


def resumed_twice(loader, folder, changed, kills):
    """Return what becomes of the samples over some runs that are killed and resumed twice."""
    whole = run(loader, folder, None, SETTING)
    chance, total = random.Random(SEED), Counter()
    for _ in range(kills):
        seen, state = [], None
        for _ in range(2):
            seen += run(loader, folder, state, SETTING, chance.randrange(5, 35))
            state = pickle.loads((folder / "state").read_bytes())
        setting = SETTING | changed
        ranks = [
            run(loader, folder, state, setting | {"rank": rank})
            for rank in range(setting["world_size"])
        ]
        seen = list(chain(*seen, *chain(*zip_longest(*ranks, fillvalue=[]))))
        expected = list(chain(*whole))
        total["lost"] += len(set(expected) - set(seen))
        total["repeated"] += len(seen) - len(set(seen))
        total["in another order"] += sorted(seen) == sorted(expected) and seen != expected
    return ", ".join(f"{what} {count}" for what, count in total.items() if count) or "exact"


def run(loader, folder, state, setting, stop=None):
    """Return the batches of a process, which keeps its state and is killed at ``stop``."""
    kept, taken = folder / "state", folder / "taken"
    taken.unlink(missing_ok=True)

    def take(report):
        try:
            left, state_of = loader(state, **setting)
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
