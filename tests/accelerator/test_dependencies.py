"""Every wait of the library is needed: without it, some adversary tears bits.

One line is taken out of one function, and its proof is run until it fails. A wait whose absence
no adversary notices would be a wait for nothing.
"""

import inspect
import textwrap
from contextlib import contextmanager
from functools import partial

import pytest
import test_loader_streams as loading
import test_snapshot_streams as snapshots
import torch
from conftest import SEEDS, each_seed

from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint
from npydata.checkpointer.checkpointer import AsyncCheckpointer as Saver
from npydata.checkpointer.checkpointer import Save
from npydata.checkpointer.device import DeviceCopier, PendingCopies
from npydata.loader.device import Transfer

TRIES = max(400, len(SEEDS))
"""The first that tears ends them; a machine on which threads seldom meet needs more."""


@contextmanager
def without(function, line):
    """Let a function lack one line while the block runs."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{function.__qualname__}: {line!r} is not there once"
    made = {}
    exec(
        compile(source.replace(line, "pass"), function.__qualname__, "exec"),
        function.__globals__,
        made,
    )
    whole = function.__code__
    function.__code__ = made[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = whole


def proof(test, snapshot):
    """Return a proof that is a test of snapshots, of one kind."""
    return lambda seeds, folder, _: test(seeds, folder, None, snapshot)


# A state that is freed behind the save, and whose memory is used again.
let_go = partial(
    proof,
    snapshots.test_a_state_that_is_let_go_after_the_save_is_not_reused_before_it_was_read,
)
# A step that comes at once behind the save, on two devices.
stepped = partial(proof, snapshots.test_a_state_on_two_devices)


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
    loading.test_batches_that_are_let_go_at_once_are_read_whole(
        seeds, loading.windows_in(folder), {"num_workers": 1}
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
    "function, line, proved_by",
    MUTANTS,
    ids=[f"{function.__qualname__}-{line[:50]}" for function, line, _ in MUTANTS],
)
def test_without_this_line_an_adversary_tears_bits(
    sim, tmp_path, monkeypatch, function, line, proved_by
):
    with without(function, line), pytest.raises(CAUGHT):
        proved_by(each_seed(sim, range(TRIES)), tmp_path, monkeypatch)
