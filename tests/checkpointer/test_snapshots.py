"""What a checkpoint holds is what the state was when ``save`` was called, whatever comes next."""

import gc
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch
from children import run_child
from faults.saving import PATIENCE

from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint

pytestmark = pytest.mark.timeout(120)

IN_PLACE = """
import sys, tempfile
import torch
from npydata import AsyncCheckpointer, load_checkpoint

torch.set_num_threads(2)
times, elements = int(sys.argv[1]), 300_000
weights = {"w": torch.zeros(elements), "t": torch.zeros(300, 700).t(), "b": torch.zeros(9)}
with tempfile.TemporaryDirectory() as folder, AsyncCheckpointer(keep_last=1) as keeper:
    for step in range(times):
        for tensor in weights.values():
            tensor.fill_(step)
        keeper.save(f"{folder}/{step % 2}", weights)
        while not keeper.done():
            for tensor in weights.values():
                tensor.add_(1)
        keeper.wait()
        model, _, _ = load_checkpoint(f"{folder}/{step % 2}")
        for name, tensor in model.items():
            assert (tensor == step).all(), (name, step)
"""


@pytest.mark.parametrize(
    "times", [10, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_weights_changed_right_after_save_never_reach_the_file(times):
    child = run_child(IN_PLACE, times, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr


@pytest.fixture
def trained():
    """A weight and an optimizer that takes a step's length off it."""
    weight = torch.nn.Parameter(torch.zeros(5000))
    weight.grad = torch.ones(5000)
    return weight, torch.optim.SGD([weight], lr=1.0)


@pytest.fixture
def overlapping(trained):
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(trained[1])
    return keeper


def test_a_protected_step_waits_for_the_copies(tmp_path, trained, overlapping, copy_gate):
    weight, optimizer = trained
    overlapping.save(tmp_path / "a", {"w": weight})
    copy_gate.wait()
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(0.05)
    assert stepped.is_alive()
    assert not weight.any(), "the step did not wait"
    copy_gate.open()
    stepped.join(PATIENCE)
    assert (weight == -1).all()
    overlapping.wait()
    assert not load_checkpoint(tmp_path / "a")[0]["w"].any()


def test_nothing_is_committed_before_the_thread_that_trains_has_compared(
    tmp_path, trained, overlapping
):
    weight, optimizer = trained
    overlapping.save(tmp_path / "a", {"w": weight})
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:  # it has long been written
        assert not overlapping.done()
        assert not (tmp_path / "a").exists()
    optimizer.step()
    overlapping.wait()
    assert not load_checkpoint(tmp_path / "a")[0]["w"].any()


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
def test_a_save_that_is_done_keeps_nothing_of_the_state(tmp_path, trained, snapshot):
    """The next call may be far."""
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper.protect(optimizer)
    gathered = torch.zeros(5000)
    known = weakref.ref(gathered)
    keeper.save(tmp_path / "a", {"w": weight, "gathered": gathered})
    optimizer.step()
    end = time.monotonic() + PATIENCE
    while not keeper.done() and time.monotonic() < end:
        pass
    del gathered
    gc.collect()
    assert known() is None


def test_buffers_are_copied_before_save_returns(tmp_path, copy_gate):
    model = torch.nn.BatchNorm1d(3000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with AsyncCheckpointer(snapshot="overlap") as keeper:
        keeper.protect(optimizer)
        keeper.save(tmp_path / "a", model.state_dict())
        model(torch.randn(16, 3000) * 9)
        copy_gate.open()
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert not torch.equal(model.running_mean, wanted["running_mean"])
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_overlap_without_a_protected_optimizer_is_refused_and_saves_nothing(tmp_path):
    keeper = AsyncCheckpointer(snapshot="overlap")
    with pytest.raises(CheckpointError, match="protect"):
        keeper.save(tmp_path / "a", {"w": torch.zeros(3)})
    assert keeper.done()
    assert list(tmp_path.iterdir()) == []


def save_and_step(keeper, folder, weight, optimizer):
    keeper.save(folder, {"w": weight})
    optimizer.step()
    keeper.wait()


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
@pytest.mark.parametrize("what", ["a copy", "a thread's start"])
def test_what_fails_in_a_save_is_raised_once_and_the_next_one_works(
    tmp_path, trained, copy_gate, monkeypatch, snapshot, what
):
    weight, optimizer = trained
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper.protect(optimizer)
    copy_gate.open()
    failed = MemoryError("no room")
    with monkeypatch.context() as patch:
        if what == "a copy":
            copy_gate.error = failed
        else:
            patch.setattr(threading.Thread, "start", Mock(side_effect=failed))
        with pytest.raises((CheckpointError, MemoryError), match=r"no room|not completed"):
            save_and_step(keeper, tmp_path / "a", weight, optimizer)
    copy_gate.error = None
    assert list(tmp_path.iterdir()) == []
    optimizer.step()
    keeper.wait()
    save_and_step(keeper, tmp_path / "a", weight, optimizer)
    assert (load_checkpoint(tmp_path / "a")[0]["w"] == weight + 1).all()


def renormed_embedding():
    """Renormed in the forward pass, which takes a while: torch counts it when it ends."""
    embedding = torch.nn.Embedding(4000, 500, max_norm=0.1)
    return embedding, lambda: embedding(torch.arange(4000))


def buffer_over_a_parameter():
    """A buffer that shares its storage with a parameter, and changes in the forward pass."""
    layer = torch.nn.Linear(500, 1)
    layer.register_buffer("row", layer.weight.data[0])
    return layer, lambda: layer.row.add_(1)


def swapped_weights():
    layer = torch.nn.Linear(500, 1)
    average = {name: tensor + 1 for name, tensor in layer.state_dict().items()}
    return layer, lambda: layer.load_state_dict(average)


CHANGES = [renormed_embedding, buffer_over_a_parameter, swapped_weights]


@pytest.mark.parametrize("make", CHANGES)
@pytest.mark.parametrize("when", ["while copying", "when all is written"])
def test_a_change_outside_of_the_protected_step_fails_the_save_by_name(
    tmp_path, copy_gate, make, when
):
    model, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    keeper.save(tmp_path / "a", model.state_dict())
    if when == "when all is written":
        copy_gate.open()
    else:
        copy_gate.wait()
    change()
    copy_gate.open()
    optimizer.step()
    changed = f"{tmp_path / 'a'}: ({'|'.join(model.state_dict())}): was changed"
    with pytest.raises(CheckpointError, match=changed):
        keeper.wait()
    assert list(tmp_path.iterdir()) == []
    keeper.save(tmp_path / "a", model.state_dict())
    keeper.wait()
    held, _, _ = load_checkpoint(tmp_path / "a")
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
