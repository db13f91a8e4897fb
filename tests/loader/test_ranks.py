"""Several processes: one seed, one cursor, equally many batches each."""

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from loader_tools import Numbers, values

from npydata import AsyncDataLoader, LoaderError
from npydata.loader.ranks import rank_and_world_size, shared_seed

WORLD = 2


def test_without_a_process_group_there_is_one_rank():
    assert rank_and_world_size(AsyncDataLoader(Numbers(9)).config) == (0, 1)


def test_without_a_seed_and_without_a_process_group_several_ranks_are_an_error():
    with pytest.raises(LoaderError, match="seed=None with world_size=2 and no process group"):
        AsyncDataLoader(Numbers(9), rank=0, world_size=2)
    assert AsyncDataLoader(Numbers(9), rank=0, world_size=1).seed is not None
    assert AsyncDataLoader(Numbers(9), rank=0, world_size=2, seed=0).seed == 0


def test_drawn_seeds_are_not_alike():
    assert len({shared_seed(None, 1) for _ in range(20)}) == 20


def one_rank(rank, folder):
    """Draw a seed with the others, deliver half an epoch, go on from a state; tell what came."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD
    )
    loader = AsyncDataLoader(Numbers(103), batch_size=8)
    iterator = iter(loader)
    given = [values(next(iterator)) for _ in range(3)]
    resumed = AsyncDataLoader(Numbers(103), batch_size=8)
    resumed.load_state_dict(loader.state_dict())
    given += [values(batch) for batch in resumed]
    alone = AsyncDataLoader(Numbers(103), batch_size=8, rank=0, world_size=1)
    found = {
        "ranks": (loader.rank, loader.world_size, alone.world_size),
        "state": loader.state_dict(),
        "given": given,
        "alone": alone.seed,
    }
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_of_a_process_group_agree_on_a_seed_and_share_the_epoch(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=WORLD)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD))
    assert (one["ranks"], two["ranks"]) == ((0, 2, 1), (1, 2, 1))
    assert one["state"] == two["state"]
    assert one["state"]["samples"] == 48
    assert len(one["given"]) == len(two["given"])
    given = sorted(value for rank in (one, two) for batch in rank["given"] for value in batch)
    assert len(given) == len(set(given)) == 102
    assert one["alone"] != two["alone"]
