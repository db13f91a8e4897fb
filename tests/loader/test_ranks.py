"""Ranks of torch.distributed take their slices and agree on a seed, without being told."""

from children import run_child

RANKS = """
import socket, torch, torch.distributed as dist, torch.multiprocessing as mp

def run(rank, port):
    from loader_cases import Fetched, values
    from npydata import AsyncDataLoader, LoaderError
    early = AsyncDataLoader(Fetched(40))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    try:
        iter(early)
        raise SystemExit("every rank would have had every sample")
    except LoaderError as error:
        assert "make it after init_process_group" in str(error)
    loader = AsyncDataLoader(Fetched(40), batch_size=5)
    found, states = [None, None], [None, None]
    dist.all_gather_object(found, [values(batch) for batch in loader])
    dist.all_gather_object(states, loader.state_dict())
    assert states[0] == states[1]
    whole = [v for batch in AsyncDataLoader(Fetched(40), 10, seed=loader.seed, rank=0,
             world_size=1) for v in values(batch)]
    assert [v for pair in zip(*found) for batch in pair for v in batch] == whole
    dist.destroy_process_group()

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
mp.start_processes(run, (port,), nprocs=2, start_method="fork")
print("agreed")
"""


def test_ranks_of_a_process_group_share_an_epoch():
    child = run_child(RANKS, seconds=90)
    assert (child.returncode, child.stdout) == (0, "agreed\n"), child.stderr
