"""A checkpoint holds what the state was at ``save``, on a device that runs everything too late.

Every save is followed at once by a step, so that what the snapshot copies changes under it wherever
an order is missing. The state that is wanted is computed beside, on a copy of the whole model.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from npydata import (
    AsyncCheckpointer,
    TrainingState,
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    verify_checkpoint,
)
from npydata.checkpointer import device_copy

SNAPSHOTS = ["host", "overlap", "device"]
MEMORY = ["registered", "ring"]


@pytest.fixture(params=MEMORY)
def memory(request, monkeypatch):
    """How the file's memory is filled: pinned as CUDA does it, or through a ring of pinned memory."""
    monkeypatch.setattr(device_copy, "SLOT_BYTES", 512)
    if request.param == "ring":
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
            torch._foreach_lerp_(list(self.average.parameters()), [*self.model.parameters()][:2], 0.1)
            self.scale.mul_(1.5)
        self.optimizer.zero_grad()

    def states(self):
        return self.state_dict(), self.optimizer.state_dict()


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
STEPS = 3


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_cpu(one) for key, one in value.items()}
    return [on_cpu(one) for one in value] if isinstance(value, list | tuple) else value


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.fixture(scope="module")
def expected(_loaded):
    """The states after each number of steps, by device and optimizer, waited for at each step."""
    found = {}

    def of(name, device="sim"):
        if (name, device) not in found:
            _loaded.seed(3)  # runs everything at once
            trained, states = Averaged(device, OPTIMIZERS[name]), []
            for _ in range(STEPS + 1):
                trained.step()
                torch.accelerator.synchronize(device)
                states.append(on_cpu(trained.states()))
            found[name, device] = states
            _loaded.seed(0)
        return found[name, device]

    return of


def save_and_step(folder, name, snapshot, device="sim", stream=None):
    """Step, save and step again at once; return what the checkpoints held, in their order."""
    trained, held = Averaged(device, OPTIMIZERS[name]), []
    with AsyncCheckpointer(snapshot=snapshot, keep_last=1) as keeper:
        keeper.protect(trained.optimizer)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(device))
        with stream or nullcontext():
            trained.step()
            for k in range(STEPS):
                model, optimizer = trained.states()
                keeper.save(folder / str(k), model, optimizer, TrainingState(step=k))
                trained.step()  # at once, while all that was queued is held back
                keeper.wait()
                held.append(load_checkpoint(folder / str(k))[:2])
    return held


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_snapshot_is_the_state_at_the_save(seeds, tmp_path, memory, expected, snapshot):
    for seed in seeds:
        name = list(OPTIMIZERS)[seed // 12 % len(OPTIMIZERS)]  # each meets all policies
        wanted = expected(name)
        sim_seed = torch.sim.simulator.seed
        sim_seed(seed)
        stream = torch.Stream("sim") if seed % 2 else None
        held = save_and_step(tmp_path / str(seed), name, snapshot, stream=stream)
        assert all(map(equal, map(list, held), map(list, wanted))), (seed, name)


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
def test_a_state_on_two_devices(seeds, tmp_path, memory, snapshot):
    for seed in seeds:
        weights = {f"w{k}": torch.full((900,), 1.0, device=f"sim:{k}") for k in range(2)}
        optimizer = torch.optim.SGD(weights.values(), lr=1.0, foreach=False)
        with AsyncCheckpointer(snapshot=snapshot) as keeper:
            keeper.protect(optimizer)
            for weight in weights.values():
                weight.mul_(seed)
                weight.grad = torch.ones_like(weight)
            keeper.save(tmp_path / str(seed), weights)
            optimizer.step()
        held = load_checkpoint(tmp_path / str(seed))[0]
        assert all((one == seed).all() for one in held.values()), seed
        assert all((one.cpu() == seed - 1).all() for one in weights.values()), seed
