"""What lesson 09 starts. Its ranks are forked, and outlive no time-out."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import npydata
from course.grading.child import in_child
from course.lab import scratch


def start(ranks, work):
    """Run `work(rank, ranks)` in so many processes that find each other, as torchrun does."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:

        def be(rank):
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(f"{folder}/store", ranks)  # no server: a fork may hang with one
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            dist.barrier()  # all are connected before one of them ends
            return work(rank, ranks)

        return list(pool.map(lambda rank: in_child(lambda: be(rank)), range(ranks)))


def spread(ranks):
    """Return the shards of each rank, `(name, first_row, rows)`: some of the 10 rows of `up`, and
    whole copies."""
    each = -(-10 // ranks)
    copies = [("mean", 0, 8), ("scale", 0, 2), ("table", 0, 9)]
    return [[("up", at, min(each, 10 - at)), *copies] for at in range(0, 10, each)]


def state_of(rank, ranks):
    """Return a rank's shards; every element says which row of which tensor it is in."""
    return {
        (name, at, n): ord(name[0]) + torch.arange(8.0 * (at + n)).reshape(-1, 8)[at:]
        for name, at, n in spread(ranks)[rank]
    }


def save_on(ranks, write_share):
    """Have each rank write its share; print what is in the files, and return their folder."""
    folder = scratch()
    start(ranks, lambda rank, _: write_share(folder, rank, ranks, state_of(rank, ranks)))
    for path in sorted(folder.iterdir()):
        with npydata.open_checkpoint(path) as file:
            print(f"{path.name}:", *(f"{key} {[*file.info(key).shape]}" for key in sorted(file)))
    return folder


def load_on(ranks, load, folder):
    """Have each of so many ranks load its rows; say what it has, and whether that is right."""

    def work(rank, ranks):
        state = state_of(rank, ranks)
        found = load(folder, {name: range(at, at + n) for name, at, n in state})
        right = all(torch.equal(found[name], rows) for (name, _, _), rows in state.items())
        (_, first, rows), *_ = state
        return f"has rows {first} to {first + rows} of up; every bit is right: {right}"

    for rank, end in enumerate(start(ranks, work)):
        print(f"rank {rank} of {ranks}", end.why or end.value)


def killed_in_a_save(save, patience):
    """Save step 1 on two ranks; rank 1 dies in the save of step 2. Return what rank 0 gets."""
    root = scratch()

    def work(rank, ranks):
        state, store = state_of(rank, ranks), dist.distributed_c10d._get_default_store()
        save(root, 1, rank, ranks, state, store, patience)
        if rank == 1:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        save(root, 2, rank, ranks, state, store, patience)

    survivor, _ = start(2, work)
    print("rank 0:", survivor.why)
    print("in the folder:", *sorted(path.name for path in root.iterdir()))
    return "an error that names rank 1" if "1" in (survivor.why or "") else "nothing"
