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
from npydata.checkpointer import device_copy
from npydata.checkpointer.checkpointer import AsyncCheckpointer as Saver
from npydata.checkpointer.device_copy import DeviceCopier, RingCopy, empty_slot
from npydata.checkpointer.overlap import Overlap
from npydata.checkpointer.staging import PendingCopies, StagingTask
from npydata.distributed.replicas import Samples
from npydata.loader.device import Transfer

TRIES = max(400, len(SEEDS))
"""The first that tears ends them; a machine on which threads seldom meet needs more."""


@contextmanager
def without(function, line, instead="pass"):
    """Let a function lack one line while the block runs."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__}: {line!r} is not there once"
    made = {}
    exec(compile(source.replace(line, instead), function.__qualname__, "exec"),
         function.__globals__, made)  # fmt: skip
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


def samples(seeds, *_):
    snapshots.test_samples_of_replicas_are_read_when_their_stream_has_made_them(seeds)


BEHIND = "side.wait_stream(self.streams.current_stream(device))"
MUTANTS = [
    (Transfer.send, "done.synchronize()", batches, ""),
    (Transfer.receive, "tensor.record_stream(current)", batches, ""),
    (DeviceCopier._behind_training, BEHIND, stepped("host"), ""),
    (DeviceCopier._behind_training, BEHIND, stepped("device"), "ring"),
    (DeviceCopier._start_on, "pending.held.extend(copy.source for copy in copies)",
     let_go("host"), ""),
    (DeviceCopier._start_on, "pending.held.extend(copy.source for copy in copies)",
     let_go("device"), ""),
    (DeviceCopier.through_ring, "original.source if clones", let_go("device"), "ring"),
    (DeviceCopier._start_on, "self.streams.current_stream(device).wait_event(read or arrived)",
     stepped("device"), ""),
    (DeviceCopier.through_ring, "self.streams.current_stream(device).wait_stream(side)",
     stepped("device"), "ring"),
    (DeviceCopier.start, "side.synchronize()", stopped(snapshots.failing_copy), ""),
    (RingCopy.run, "self.streams.stream(self.side)", on_own_stream("overlap"), "ring"),
    (empty_slot, "arrived.synchronize()", stepped("host"), "ring"),
    (PendingCopies.wait, "event.synchronize()", written, ""),
    (PendingCopies.order, "streams.current_stream(device).wait_event(event)", stepped("host"), ""),
    (Saver._begin_on_device, "pending.order(self._copier.streams)", stepped("host"), ""),
    (Overlap.wait, "staging.pending.order(self._streams)", stepped("overlap"), ""),
    (Overlap.wait, "staging.copied.wait()", stepped("overlap"), "ring"),
    (StagingTask.settle, "self.pending.wait()", stopped(snapshots.failing_start), ""),
    (Samples.checksums, "wait()", samples, ""),
]  # fmt: skip
CAUGHT = AssertionError, CheckpointError  # a loader or a reader may notice first
INSTEAD = {
    "original.source if clones": "torch.empty(0) if clones",
    "self.streams.stream(self.side)": "__import__('contextlib').nullcontext()",
}


@pytest.mark.parametrize(
    "function, line, proof, memory", MUTANTS,
    ids=[f"{function.__qualname__}-{line[:50]}-{memory}" for function, line, _, memory in MUTANTS],
)  # fmt: skip
def test_without_this_line_an_adversary_tears_bits(
    sim, tmp_path, monkeypatch, function, line, proof, memory
):
    monkeypatch.setattr(device_copy, "SLOT_BYTES", 512)
    if memory == "ring":
        monkeypatch.delattr(torch.sim, "cudart")
    with without(function, line, INSTEAD.get(line, "pass")), pytest.raises(CAUGHT):
        proof(each_seed(sim, range(TRIES)), tmp_path, monkeypatch)
