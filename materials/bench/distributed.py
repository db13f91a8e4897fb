"""Many processes save one state, in step: ours beside torch.distributed.checkpoint.

The processes run on this machine, with a gloo group on its loopback; each figure is that of the
slowest. A state is spread over them, or is the same on each (then it is a quarter of the size).

    python materials/bench/distributed.py --quick
"""

import os
import shutil
import sys
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from checkpoint import (
    LIMITS,
    REUSED,
    Saver,
    dcp_saver,
    our_saver,
    save_twice,
)
from disk import sync_folder
from harness import MIB, Bench, Row, Target, main, milliseconds, ours, peer
from model_states import LAYER, make_state

from npydata import AsyncCheckpointer, ShardingConfig

RANKS, KINDS = (2, 4), ("sharded", "replicated")
CASES = [f"{ranks} processes, {kind}" for ranks, kind in product(RANKS, KINDS)]


def our_ranks(state, **options):
    sharding = ShardingConfig(timeout_s=600)
    return our_saver(state, save=AsyncCheckpointer.save_distributed, sharding=sharding, **options)


def dcp_ranks(state, *, threads=0, safetensors=False, **options):
    """Save with DCP, and flush the folders that torch leaves to the system."""

    def writer(folder):
        if safetensors:
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            return HuggingFaceStorageWriter(str(folder), save_distributed=True)
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(folder, thread_count=threads) if threads else None

    alone = dcp_saver(state, writer=writer, **options)

    def finish(folder):
        alone.finish(folder)
        if dist.get_rank() == 0:
            sync_folder(folder)
            sync_folder(folder.parent)

    return Saver(alone.save, finish, alone.close)


ROWS = [
    row
    for case in CASES
    for row in (
        ours(case, "ours", "", our_ranks),
        ours(case, "ours, overlap", "", our_ranks, snapshot="overlap"),
        ours(case, "ours, not prepared", "", our_ranks, prepared=False),
        *(peer(case, "dcp.save", f"{n} threads", dcp_ranks, threads=n) for n in (1, 2, 4)),
        peer(case, "dcp.save, safetensors", "", dcp_ranks, safetensors=True),
        peer(case, "dcp.async_save", "", dcp_ranks, background=True),
        peer(case, "dcp.async_save, reused stager", "", dcp_ranks, **REUSED),
        *(Row(case, one.name, "", "limit", one.work, one.options) for one in LIMITS),
    )
]
TARGETS = [
    Target(f"{case}: {claim}", f"{what}, {case} | {name}", f"{what}, {case} | dcp*", 2)
    for case in CASES
    for what, name, claim in (
        ("stall", "ours", "a save stalls training {} less than torch's best"),
        ("stall", "ours, overlap", "with overlap, {} less than torch's best"),
        ("durable", "ours", "the disk has it {} as fast as with torch's best"),
    )
]


def join(rank, count, store):
    """Become one process of a group."""
    for output in (1, 2):  # gloo says whom it met
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
    meeting = dist.FileStore(str(store), count)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=count)


@cache
def state_of(case, nbytes):
    torch.manual_seed(0)
    each = min(LAYER, nbytes // 8)
    if case.endswith("replicated"):
        return make_state(nbytes, each)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: torch.nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)]))
        for name, tensor in make_state(nbytes, each).items()
    }


def turn(row, args):
    """Measure in step with the other ranks."""
    case, nbytes = row.section, args.size_mb * MIB
    if case.endswith("replicated"):
        nbytes //= 4
    root = args.folder / "saved"
    root.mkdir(exist_ok=True)
    if row.role == "limit":
        work = row.work(nbytes // dist.get_world_size(), root)
        dist.barrier()
        return {f"{row.options['group']}, {case}": milliseconds(work)}

    def remove(folder):
        """Refuse to time what did not save everything, and make room for the next."""
        dist.barrier()
        if dist.get_rank() == 0:
            found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            assert found >= nbytes, f"{found} bytes were saved, expected {nbytes}"
            shutil.rmtree(folder)
            (folder.parent / "latest").unlink(missing_ok=True)
        dist.barrier()

    saver = row.work(state_of(case, nbytes), **row.options)
    rates = save_twice(saver, root, dist.barrier, remove)
    return {f"{group}, {case}": value for group, value in rates.items()}


TITLES = {
    "stall": "training stands still for a later save",
    "durable": "until the disk has a later save",
    "first stall": "training stands still for the first save",
    "first durable": "until the disk has the first save",
}
BENCH = Bench(
    name="distributed",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    turn=turn,
    options={"size_mb": (1024, 128)},
    groups={
        f"{what}, {case}": (f"{case}: {title}", "ms")
        for case in CASES
        for what, title in TITLES.items()
    },
    workers=lambda case: int(case.split()[0]),
    join=join,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
