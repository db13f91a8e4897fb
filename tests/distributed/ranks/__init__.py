"""Run a test's function on so many ranks; kill some of them; get what the others return.

The ranks are forked from a server that has imported torch, and meet at a store in this process, as
under ``torchrun`` its agent holds it.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

PATIENCE = 120.0
"""Seconds after which ranks that have not ended have hung."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["pytest", "torch._dynamo", "ranks.states", "npydata.distributed.plan"]
)
REAPER = threading.Lock()
"""Held to start or join a rank: who starts one looks how others ended, and two can't hear that."""
runs = itertools.count()
pipes = []
"""In a rank: where its messages go."""


def on_ranks(world_size, work, *args):
    """Return what ``work(*args)`` returns on each rank; what one raises is this test's error."""
    return Ranks(world_size, work, *args).results()


def report(message):
    """Say something to the test while the work goes on."""
    pipes[0].send(("reported", message))


class Ranks:
    """Processes that run ``work(*args)``, a function of a module; ``grouped`` in a gloo group."""

    def __init__(self, world_size, work, *args, grouped=True):
        self.pipes, self.processes = [], []
        place = (the_store().port, next(runs)) if grouped else None
        for rank in range(world_size):
            ours, theirs = SERVER.Pipe(duplex=False)
            self.pipes.append(ours)
            order = theirs, work, args, rank, world_size, place
            self.processes.append(SERVER.Process(target=be_rank, args=order, daemon=True))
            with REAPER:
                self.processes[-1].start()
            theirs.close()

    def next(self, rank):
        """Return the next message of a rank, or None when it has ended."""
        if not self.pipes[rank].poll(PATIENCE):
            self.kill_all()
            raise AssertionError(f"rank {rank} hangs: no word in {PATIENCE} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return None

    def outcome(self, rank):
        """Return ``result``, ``error`` or ``killed``, and what the rank returned or raised."""
        last = None
        while (message := self.next(rank)) is not None:
            last = message
        with REAPER:
            self.processes[rank].join()
        code = self.processes[rank].exitcode
        return ("killed", code) if code < 0 else last

    def results(self):
        """Return what the ranks returned."""
        try:
            found = [self.outcome(rank) for rank in range(len(self.processes))]
        finally:
            self.kill_all()
        for rank, (kind, value) in enumerate(found):
            assert kind == "result", f"rank {rank}: {kind}: {value}"
        return [value for _, value in found]

    def kill_all(self):
        """Kill every rank that is still there."""
        for process in self.processes:
            with REAPER:
                process.kill()
                process.join()


@cache
def the_store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def be_rank(pipe, work, args, rank, world_size, place):
    """Join the group, do the work, tell what came of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks of tests are on the CPU
    torch.set_num_threads(1)
    pipes.append(pipe)
    try:
        if place is not None:
            join(rank, world_size, *place)
        pipe.send(("result", work(*args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def join(rank, world_size, port, run):
    """Join a process group, and wait until all have: gloo fails where one leaves before."""
    patience = timedelta(seconds=60)
    store = dist.PrefixStore(f"run{run}", dist.TCPStore("localhost", port, timeout=patience))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    dist.barrier()
