"""Every wait of the library is needed: without it, some adversary tears bits.

One line is taken out of one function, and its proof is run until it fails. A wait whose absence
no adversary notices would be a wait for nothing.
"""

import inspect
import textwrap
from contextlib import contextmanager

import numpy as np
import pytest
import test_loader_streams as loading
import test_snapshot_streams as snapshots
import torch
from conftest import SEEDS, each_seed

from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint, write_tokens
from npydata.checkpointer.checkpointer import AsyncCheckpointer as Saver
from npydata.checkpointer.checkpointer import Save
from npydata.checkpointer.device import DeviceCopier, PendingCopies
from npydata.loader.device import Transfer

TRIES = max(400, len(SEEDS))
"""The first that tears ends them; a machine on which threads seldom meet needs more."""


@contextmanager
def without(function, line, instead="pass"):
    """Let a function lack one line while the block runs."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__}: {line!r} is not there once"
    made = {}
    exec(
        compile(source.replace(line, instead), function.__qualname__, "exec"),
        function.__globals__,
        made,
    )
    whole = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = whole


def let_go(snapshot):
    """A state that is freed behind the save, and whose memory is used again."""

    def proof(seeds, folder, _):
        snapshots.test_a_state_that_is_let_go_after_the_save_is_not_reused_before_it_was_read(
            seeds, folder, None, snapshot
        )

    return proof


def stepped(snapshot):
    """A step that comes at once behind the save, on two devices."""

    def proof(seeds, folder, _):
        snapshots.test_a_state_on_two_devices(seeds, folder, None, snapshot)

    return proof


def written(seeds, folder, _):
    """A save beside which nobody else waits for the device: a step might be quicker than it."""
    for seed in seeds:
        weight = torch.full((900,), seed + 1.0, device="sim")
        keeper = AsyncCheckpointer()
        keeper.save(folder / "a", {"w": weight})
        keeper.wait()
        torch.accelerator.synchronize()  # before the memory goes that it copies to
        held = load_checkpoint(folder / "a", mmap=False)[0]
        assert (held["w"] == seed + 1).all(), seed


def on_own_stream(snapshot):
    """Training on a stream of its own, where no default order helps."""

    def proof(seeds, folder, _):
        for seed in seeds:
            with torch.Stream("sim"):
                weight = torch.full((900,), float(seed), device="sim")
                optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)
                weight.grad = torch.ones_like(weight)
                with AsyncCheckpointer(snapshot=snapshot) as keeper:
                    keeper.protect(optimizer)
                    keeper.save(folder / "a", {"w": weight})
                    optimizer.step()
                held = load_checkpoint(folder / "a", mmap=False)[0]
                assert (held["w"] == seed).all(), seed

    return proof


def stopped(fail):
    """A save that stops halfway, and the next one into the same memory."""

    def proof(seeds, folder, monkeypatch):
        for _ in seeds:
            torch.sim.simulator.reset_counts()
            snapshots.test_a_save_that_stops_halfway_leaves_no_copy_under_way(
                torch.sim.simulator, folder, monkeypatch, fail
            )

    return proof


def batches(seeds, folder, _):
    write_tokens(folder / "a.npy", [np.arange(loading.STEPS * 4 * 65, dtype=np.uint16)])
    loading.test_batches_that_are_let_go_at_once_are_read_whole(
        seeds, folder / "a.npy", {"num_workers": 1}
    )


READ = "training.wait_event(read or pending.events[device])"
ORDER = "torch.accelerator.current_stream(device).wait_event(event)"
MUTANTS = [
    (Transfer.send, "done.synchronize()", batches),
    (Transfer.receive, "tensor.record_stream(current)", batches),
    (DeviceCopier.start, "side.wait_stream(training)", stepped("host")),
    (DeviceCopier.start, "side.wait_stream(training)", stepped("device")),
    (DeviceCopier.start, "pending.sources += [copy.source for copy in its]", let_go("host")),
    (DeviceCopier.start, "pending.sources += [copy.source for copy in its]", let_go("device")),
    (DeviceCopier.start, READ, stepped("host")),
    (DeviceCopier.start, READ, stepped("device")),
    (DeviceCopier.start, "side.synchronize()", stopped(snapshots.failing_copy)),
    (PendingCopies.make_training_wait, ORDER, stepped("overlap")),
    (PendingCopies.wait, "self.events[device].synchronize()", written),
    (Saver._start, "snapshot.join()", stopped(snapshots.failing_start)),
    (Save.judge, "self.snapshot.pending.make_training_wait()", stepped("overlap")),
]
CAUGHT = AssertionError, CheckpointError  # a loader or a reader may notice first


@pytest.mark.parametrize(
    "function, line, proof",
    MUTANTS,
    ids=[f"{function.__qualname__}-{line[:50]}" for function, line, _ in MUTANTS],
)
def test_without_this_line_an_adversary_tears_bits(
    sim, tmp_path, monkeypatch, function, line, proof
):
    with without(function, line), pytest.raises(CAUGHT):
        proof(each_seed(sim, range(TRIES)), tmp_path, monkeypatch)
