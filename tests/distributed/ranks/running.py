"""Run a test's function on so many ranks; kill some of them; get what the others return."""

import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import coverage
import torch.distributed as dist

from ranks.nursery import COVERAGE_DATA, LENGTH, Order

PATIENCE = 120.0
"""Seconds after which ranks that have not ended have hung."""
runs = itertools.count()
first = threading.Lock()


def on_ranks(world_size, work, *args):
    """Return what ``work(*args)`` returns on each rank; what one raises is this test's error."""
    ranks = Ranks(world_size, work, *args)
    try:
        return [ranks.result(rank) for rank in range(world_size)]
    finally:
        ranks.kill_all()


class Nursery:
    """The process that forks ranks."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        counter = coverage.Coverage.current()
        counting = {COVERAGE_DATA: str(Path(counter.config.data_file).resolve())} if counter else {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from ranks.nursery import main; main()"],
            stdin=theirs,
            env={**os.environ, **counting, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        theirs.close()
        self.socket, self.turn = ours, threading.Lock()
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory()

    def ask(self, message, descriptors=()):
        """Send an order, or the number of a process to wait for; return the answer."""
        content, answer = pickle.dumps(message), b""
        with self.turn:
            socket.send_fds(self.socket, [LENGTH.pack(len(content))], [*descriptors])
            self.socket.sendall(content)
            while len(answer) < 8:
                more = self.socket.recv(8 - len(answer))
                assert more, "the process that forks ranks is gone"
                answer += more
        return struct.unpack("<q", answer)[0]


@cache
def the_nursery():
    return Nursery()


def nursery():
    """Return the one process that forks for all tests, whichever thread asks first."""
    with first:
        return the_nursery()


class Ranks:
    """Processes that run ``work(*args)``, a function of a module.

    ``meet`` is where they meet: by default at a store in this process, as under ``torchrun`` its
    agent holds it; ``tcp://HOST:PORT`` lets rank 0 hold it; an empty text makes no group.
    """

    def __init__(self, world_size, work, *args, meet=None):
        home, number = nursery(), next(runs)
        if meet is None:
            meet = f"localhost:{home.store.port}/run{number}"
        self.outputs = [Path(home.folder.name) / f"{number}.{k}" for k in range(world_size)]
        self.pids, self.pipes, self.codes = [], [], {}
        self.rest = dict.fromkeys(range(world_size), b"")
        for rank, output in enumerate(self.outputs):
            read, write = os.pipe()
            order = Order(work, args, rank, world_size, meet, str(output))
            self.pids.append(home.ask(order, [write]))
            os.close(write)
            self.pipes.append(read)

    def next(self, rank, patience=PATIENCE):
        """Return the next message of a rank, or ``None`` when it has ended."""
        end = time.monotonic() + patience
        while True:
            held = self.rest[rank]
            if len(held) >= LENGTH.size:
                (length,) = LENGTH.unpack(held[: LENGTH.size])
                if len(held) >= LENGTH.size + length:
                    self.rest[rank] = held[LENGTH.size + length :]
                    return pickle.loads(held[LENGTH.size : LENGTH.size + length])
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.pipes[rank]], [], [], left)[0]:
                printed = self.printed(rank)
                self.kill_all()
                raise AssertionError(f"rank {rank} hangs: no word in {patience} s\n{printed}")
            more = os.read(self.pipes[rank], 1 << 20)
            if not more:
                return None
            self.rest[rank] += more

    def reported(self, rank, patience=PATIENCE):
        """Return what a rank says next with ``report``."""
        message = self.next(rank, patience)
        assert (message or ["nothing"])[0] == "reported", (rank, message, self.printed(rank))
        return message[1]

    def outcome(self, rank, patience=PATIENCE):
        """Return ``result``, ``error`` or ``killed``, and what the rank returned or raised."""
        last = None
        while (message := self.next(rank, patience)) is not None:
            last = message
        code = self.end(rank)
        if code < 0:
            return "killed", code
        assert (last or ["reported"])[0] != "reported", (last, code, self.printed(rank))
        return last

    def result(self, rank, patience=PATIENCE):
        """Return what a rank returned."""
        kind, value = self.outcome(rank, patience)
        assert kind == "result", f"rank {rank}: {kind}: {value}\n{self.printed(rank)}"
        return value

    def kill(self, rank):
        """Kill a rank."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def kill_all(self):
        """Kill every rank that is still there."""
        for rank in range(len(self.pids)):
            if rank not in self.codes:
                with suppress(ProcessLookupError):
                    self.kill(rank)
                self.end(rank)

    def end(self, rank):
        """Wait for a rank's end; return its exit code, negative for a signal."""
        if rank not in self.codes:
            self.codes[rank] = nursery().ask(self.pids[rank])
            os.close(self.pipes[rank])
        return self.codes[rank]

    def printed(self, rank):
        """Return what a rank has printed."""
        path = self.outputs[rank]
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""
