"""A process that forks the ranks that a test asks for.

It has imported torch once and never does anything with it, so a fork is fast and clean. It ends
when the test's process does.
"""

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import coverage
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp

import npydata.distributed.save  # noqa: F401

PYPROJECT = str(Path(__file__).resolve().parents[3] / "pyproject.toml")
LENGTH = struct.Struct("<Q")
COVERAGE_DATA = "NPYDATA_COVERAGE_DATA"
"""Names the file beside which ranks put what they ran, if the tests are measured."""
LONGEST_S = 300
"""Seconds after which a rank that still runs is ended, whatever it is stuck in."""


@dataclass(frozen=True, slots=True)
class Order:
    """One rank that a test wants to have."""

    work: Any
    """A function of the test's module, which the rank calls with ``args``."""
    args: tuple[Any, ...]
    rank: int
    world_size: int
    meet: str
    """``HOST:PORT/NAME`` of a store that the test's process holds; or where rank 0 shall hold one:
    ``tcp://HOST:PORT``. Empty: no process group."""
    output: str
    """The file that takes what the rank prints."""


def sent(descriptor: int, message: Any) -> None:
    """Write one message into a pipe."""
    content = pickle.dumps(message)
    view = memoryview(LENGTH.pack(len(content)) + content)
    while view:
        view = view[os.write(descriptor, view) :]


pipes: list[int] = []
"""In a rank: where what it says goes."""


def report(message: Any) -> None:
    """Say something to the test while the work goes on."""
    for pipe in pipes:
        sent(pipe, ("reported", message))


def main() -> None:
    """Serve the socket that is our standard input."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=os.dup(0))
    warm_up()
    gc.collect()
    gc.freeze()
    while header := received(server, LENGTH.size):
        message, descriptors = header
        (length,) = LENGTH.unpack(message)
        order = pickle.loads(received(server, length)[0])
        if isinstance(order, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(order, 0)[1])
        else:
            answer = fork(order, descriptors[0], server)
            os.close(descriptors[0])
        server.sendall(struct.pack("<q", answer))


def warm_up() -> None:
    """Import what an optimizer does at its first step; without autograd, which can't be forked."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.optim.AdamW([weight]).step()


def received(server: socket.socket, length: int) -> tuple[bytes, list[int]] | None:
    """Return the next bytes, and the descriptors that came with them."""
    content, descriptors = b"", []
    while len(content) < length:
        more, fds, *_ = socket.recv_fds(server, length - len(content), 1)
        if not more:
            return None
        content += more
        descriptors += fds
    return content, descriptors


def fork(order: Order, pipe: int, server: socket.socket) -> int:
    """Start a rank; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        server.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(LONGEST_S)
        output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        with measured():
            code = work(order, pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


@contextmanager
def measured() -> Iterator[None]:
    """Count the lines that run here, if those of the tests are counted."""
    if not (data_file := os.environ.get(COVERAGE_DATA)):
        yield
        return
    counter = coverage.Coverage(data_file, data_suffix=True, config_file=PYPROJECT, messages=False)
    counter.start()
    try:
        yield
    finally:
        counter.stop()
        counter.save()


def work(order: Order, pipe: int) -> int:
    """Be a rank: join the group, do the work, tell what came of it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipes.append(pipe)
    try:
        join(order)
        result = order.work(*order.args)
        sent(pipe, ("result", result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        sent(pipe, ("error", f"{type(error).__name__}: {error}"))
        return 1
    return 0


def join(order: Order) -> None:
    """Join the process group, and wait until all have: gloo fails where one leaves before."""
    if not order.meet:
        return
    if order.meet.startswith("tcp://"):
        dist.init_process_group(
            "gloo", init_method=order.meet, rank=order.rank, world_size=order.world_size
        )
    else:
        join_at_store(order)
    dist.barrier()


def join_at_store(order: Order) -> None:
    """Join the process group at a store that another process holds."""
    place, name = order.meet.split("/")
    host, port = place.split(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=order.rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=60),
    )
