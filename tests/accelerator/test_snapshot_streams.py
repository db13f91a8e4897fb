"""A checkpoint holds what the state was at ``save``, on a device that runs everything too late.

Every save is followed at once by a step, so that what the snapshot copies changes under it wherever
an order is missing. The state that is wanted is computed beside, on a copy of the whole model.
"""

import gc
import threading
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from checkpoint_tools import bitwise
from device_cases import OPTIMIZERS, SNAPSHOTS

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    TrainingState,
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    verify_checkpoint,
)
from npydata.checkpointer.snapshot import Copy

MEMORY = ["registered", "allocated"]


@pytest.fixture(params=MEMORY)
def memory(request, monkeypatch):
    """How the staging buffer is pinned: our own pages, as CUDA can, or those torch gives."""
    if request.param == "allocated":
        monkeypatch.delattr(torch.sim, "cudart")
    return request.param


class Averaged(torch.nn.Module):
    """A model with statistics that change in the forward pass, and a moving average beside it."""

    def __init__(self, device, make):
        super().__init__()
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(24, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 4, bias=False)
        ).to(device)
        self.average = torch.nn.Linear(24, 24).to(device)
        self.scale = torch.nn.Buffer(torch.ones((), device=device))
        self.optimizer = make(self.model.parameters())
        self.data = torch.randn(4, 24, generator=torch.Generator().manual_seed(2)).to(device)

    def step(self):
        """Forward, backward, the optimizer, then the average and a scaler's factor."""
        (self.model(self.data).tanh().mean() * self.scale).backward()
        self.optimizer.step()
        with torch.no_grad():
            weights = [*self.model.parameters()][:2]
            torch._foreach_lerp_(list(self.average.parameters()), weights, 0.1)
            self.scale.mul_(1.5)
        self.optimizer.zero_grad()

    def states(self):
        return self.state_dict(), self.optimizer.state_dict()


STEPS = 2


@pytest.fixture(scope="module")
def expected(_loaded):
    """The states after each number of steps, by optimizer, from a run without any save."""
    found = {}

    def of(name):
        if name not in found:
            trained, found[name] = Averaged("sim", OPTIMIZERS[name]), []
            for _ in range(STEPS):
                trained.step()
                found[name].append(bitwise(trained.states()))
        return found[name]

    return of


def save_and_step(folder, name, snapshot, stream):
    """Step, save and step again at once; return what the checkpoints held, in their order."""
    trained, held = Averaged("sim", OPTIMIZERS[name]), []
    with AsyncCheckpointer(snapshot=snapshot, keep_last=1) as keeper:
        if snapshot == "overlap":
            keeper.protect(trained.optimizer)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream or nullcontext():
            trained.step()
            for k in range(STEPS):
                model, optimizer = trained.states()
                keeper.save(folder / str(k), model, optimizer, TrainingState(step=k))
                trained.step()  # at once, while all that was queued is held back
                keeper.wait()
                held.append(load_checkpoint(folder / str(k), mmap=False)[:2])
    return held


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_snapshot_is_the_state_at_the_save(few_seeds, memory_folder, memory, expected, snapshot):
    wanted = {name: expected(name) for name in OPTIMIZERS}
    for seed in few_seeds:
        name = list(OPTIMIZERS)[seed % 4 ^ seed // 4 % 4]
        stream = torch.Stream("sim") if seed % 2 else None
        held = save_and_step(memory_folder, name, snapshot, stream)
        assert [*map(bitwise, held)] == wanted[name], (seed, name)


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_state_on_two_devices(few_seeds, memory_folder, memory, snapshot):
    for seed in few_seeds:
        weights = {f"w{k}": torch.full((900,), 1.0, device=f"sim:{k}") for k in range(2)}
        optimizer = torch.optim.SGD(weights.values(), lr=1.0, foreach=False)
        with AsyncCheckpointer(snapshot=snapshot) as keeper:
            if snapshot == "overlap":
                keeper.protect(optimizer)
            for weight in weights.values():
                weight.mul_(seed)
                weight.grad = torch.ones_like(weight)
            keeper.save(memory_folder / "a", weights)
            optimizer.step()
            for device in weights.values():
                torch.accelerator.current_stream(device.device).synchronize()
        held = load_checkpoint(memory_folder / "a", mmap=False)[0]
        assert all((one == seed).all() for one in held.values()), seed
        assert all((one.cpu() == seed - 1).all() for one in weights.values()), seed


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_state_that_is_let_go_after_the_save_is_not_reused_before_it_was_read(
    few_seeds, memory_folder, memory, snapshot
):
    """Also where it was made on another stream, which waits for nothing."""
    other = torch.Stream("sim")
    for seed in few_seeds:
        weight = torch.full((900,), float(seed), device="sim")
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with AsyncCheckpointer(snapshot=snapshot) as keeper:
            keeper.protect(optimizer)
            other.wait_stream(torch.accelerator.current_stream())
            with other:
                twice = (weight * 2).half()
            torch.accelerator.current_stream().wait_stream(other)
            keeper.save(memory_folder / "a", {"half": weight / 2, "twice": twice})
            del twice
            others = [torch.full((900,), -1.0, device="sim") for _ in range(4)]
            with other:
                others += [torch.full((900,), -1.0, device="sim").half() for _ in range(4)]
            other.synchronize()
        held = load_checkpoint(memory_folder / "a", mmap=False)[0]
        assert (held["half"] == seed / 2).all(), seed
        assert (held["twice"] == seed * 2).all(), seed
        del others


def test_strided_conjugated_empty_and_tied_tensors_arrive_as_they_are(sim, tmp_path, memory):
    values = torch.randn(30, 50, dtype=torch.complex64, device="sim")
    state = {
        "t": values.t(),
        "c": values.conj(),
        "s": values.real[::2],
        "n": values.conj().imag,
        "b": values.real.bfloat16(),
        "0": values[:0],
        "tied": values.real[::2],
        "one": torch.tensor(True, device="sim"),
    }
    for snapshot in ("host", "device"):
        with AsyncCheckpointer(snapshot=snapshot) as keeper:
            keeper.save(tmp_path / snapshot, state)
        held, _, _ = load_checkpoint(tmp_path / snapshot, verify=True)
        assert bitwise(dict(held)) == bitwise(state)


def test_memory_is_unpinned_before_it_goes_back_to_the_system(sim, tmp_path):
    """Else copies into what comes to stand at its address go where the old memory was."""
    pinned = torch.sim.cudart().pinned
    before = set(pinned)
    with AsyncCheckpointer() as keeper:
        keeper.save(tmp_path / "a", {"w": torch.ones(900, device="sim")})
    assert pinned.keys() - before
    del keeper
    gc.collect()
    assert not pinned.keys() - before


def test_the_host_waits_for_a_save_only_in_the_background(sim, tmp_path):
    state = {f"w{k}": torch.ones(900, device="sim") for k in range(9)}
    with AsyncCheckpointer() as keeper:
        keeper.prepare(state)
        keeper.save(tmp_path / "a", state)
        keeper.wait()
        assert sim.host_waits() == {"event.synchronize": 1}
        assert sim.executed()["copy to host"] == 9


def test_a_full_device_falls_back_to_the_host(few_seeds, sim, tmp_path, memory):
    for seed in islice(few_seeds, 4):
        weight = torch.full((9000,), float(seed), device="sim")
        with AsyncCheckpointer(snapshot="device") as keeper, sim.capacity(sim.live_bytes() + 5000):
            with pytest.warns(RuntimeWarning, match="no memory for a copy on the device"):
                keeper.save(tmp_path / "a", {"w": weight})
            weight.sub_(1)
        assert (load_checkpoint(tmp_path / "a", mmap=False)[0]["w"] == seed).all()


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_an_error_on_the_device_is_raised_once_and_the_last_checkpoint_stays(
    sim, tmp_path, memory, snapshot
):
    weight = torch.ones(900, device="sim")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper.protect(optimizer)
    keeper.save(tmp_path / "a", {"w": weight})
    keeper.wait()
    sim.fail_next("copy to host")

    def save_and_wait():
        keeper.save(tmp_path / "b", {"w": weight * 2})
        keeper.wait()

    with pytest.raises((RuntimeError, CheckpointError)) as raised:
        save_and_wait()
    causes = f"{raised.value!r} {raised.value.__cause__!r}"
    assert "made to fail" in causes
    keeper.wait()
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    verify_checkpoint(tmp_path / "a")
    keeper.save(tmp_path / "b", {"w": weight * 3})
    keeper.wait()
    assert (load_checkpoint(tmp_path / "b")[0]["w"] == 3).all()


def failing_start(monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def failing_copy(monkeypatch):
    whole, calls = Copy.run, []

    def run(self, **options):
        if calls:
            raise RuntimeError("can't start new thread")
        calls.append(self)
        whole(self, **options)

    monkeypatch.setattr(Copy, "run", run)


@pytest.mark.parametrize("fail", [failing_start, failing_copy])
def test_a_save_that_stops_halfway_leaves_no_copy_under_way(sim, tmp_path, monkeypatch, fail):
    """The next save has the same memory; a late copy would tear it."""
    keeper = AsyncCheckpointer()
    on_device = {f"w{k}": torch.full((900,), -1.0, device="sim") for k in range(3)}
    with monkeypatch.context() as patched:
        fail(patched)
        with pytest.raises(RuntimeError, match="new thread"):
            keeper.save(tmp_path / "a", on_device)
    ran = sim.executed()["copy to host"]
    torch.accelerator.synchronize()  # or a copy would meet memory that is gone with the keeper
    assert ran == (3 if fail is failing_start else 1)
    keeper.save(tmp_path / "a", {f"w{k}": torch.ones(900) for k in range(3)})
    keeper.wait()
    assert all((one == 1).all() for one in load_checkpoint(tmp_path / "a")[0].values())


def test_the_devices_random_numbers_are_captured_and_restored(sim):
    state = capture_rng()
    wanted = [torch.rand(9, device=f"sim:{k}").cpu() for k in range(2)]
    restore_rng(state)
    assert all(torch.equal(torch.rand(9, device=f"sim:{k}").cpu(), wanted[k]) for k in range(2))
