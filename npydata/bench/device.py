"""``npydata bench device``: what a save and a batch cost on the accelerator that torch finds.

A state on the device is saved in each of the three methods, and followed at once by a step that
changes all of it. Training stands still by what save and step take longer, up to the moment that
the device has done the step, than a step alone. Beside it stands the device's own copy of as many
bytes into pinned memory. Batches come from a file in memory, by the loader and by hand.
"""

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from npydata.bench.machine import machine_facts, require_space
from npydata.bench.measure import MIB, Row, asked_for, interleave, milliseconds
from npydata.bench.report import Report
from npydata.bench.states import TENSOR_BYTES, State, name_of
from npydata.bench.tokens import make_file
from npydata.checkpointer.checkpointer import SNAPSHOTS, AsyncCheckpointer
from npydata.checkpointer.staging import StagingBuffer
from npydata.dataset.datasets import NpyTokensDataset
from npydata.errors import NpyDataError
from npydata.loader.loader import AsyncDataLoader
from npydata.system.accelerator import with_streams
from npydata.system.progress import human_bytes

TITLES = {
    "returned": "Until save returns",
    "stall": "Training stands still for a save",
    "durable": "Until the disk has it",
    "copy": "The device's own copy of as many bytes",
    "batches": "Batches on the device, file in memory",
}
BATCH_SIZE, SEQ_LEN, BATCHES = 32, 1024, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to save and how often to measure."""

    size_mb: int
    repeats: int


FULL, QUICK = Plan(size_mb=4096, repeats=5), Plan(size_mb=256, repeats=3)


def measure(args: argparse.Namespace, folder: Path) -> Report:
    device = with_streams()
    if device is None:
        raise NpyDataError("bench device: torch finds no accelerator with streams, expected one")
    plan = asked_for(args, FULL, QUICK)
    require_space(folder, 4 * plan.size_mb * MIB, "--dir or --size-mb")
    state = device_state(plan.size_mb * MIB, device)
    rows = [*measure_saves(state, folder, plan), *measure_copies(state, plan)]
    del state
    rows += measure_batches(make_file(folder / "tokens.npy", 64 * MIB), device, plan)
    return Report(benchmark="device", titles=TITLES,
                  machine=machine_facts(folder) | {"device": device_name(device)},
                  conditions=f"a state of {human_bytes(plan.size_mb * MIB)} on {device}",
                  settings={"state_bytes": plan.size_mb * MIB, "repeats": plan.repeats},
                  rows=rows, verdicts=[])  # fmt: skip


def device_name(device: torch.device) -> str:
    """Return the name of the first device, if torch tells it."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(0)) if hasattr(module, "get_device_name") else device.type


def device_state(nbytes: int, device: torch.device) -> State:
    """Return float32 tensors of so many bytes in all, of a layer's size."""
    each = min(nbytes, TENSOR_BYTES)
    return {name_of(k): torch.randn(each // 4, device=device) for k in range(nbytes // each)}


def step(state: State) -> None:
    """Change everything, and wait until the device has done it."""
    torch._foreach_add_(list(state.values()), 1.0)
    torch.accelerator.synchronize()


def measure_saves(state: State, folder: Path, plan: Plan) -> list[Row]:
    """Save in each way, in turn."""
    keepers = {one: AsyncCheckpointer(snapshot=one) for one in SNAPSHOTS}
    optimizer = torch.optim.SGD(state.values(), lr=1.0)
    for keeper in keepers.values():
        keeper.protect(optimizer)
    methods = {one: partial(save, keepers[one], state, optimizer, folder) for one in SNAPSHOTS}
    taken = interleave("saves", methods, plan.repeats)
    return [
        Row(name="npydata", setting=f'snapshot="{one}"', group=group, role="ours", unit="ms",
            rates=tuple(each[group] for each in taken[one]))
        for group in ("returned", "stall", "durable") for one in SNAPSHOTS
    ]  # fmt: skip


def save(
    keeper: AsyncCheckpointer, state: State, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, float]:
    """Save once with a step behind it; return the milliseconds of each group."""

    def save_and_step() -> None:
        took.append(milliseconds(partial(keeper.save, folder / "saved", state)))
        optimizer.step()  # without gradients: only what waits for copies
        step(state)

    took: list[float] = []
    alone = median(milliseconds(partial(step, state)) for _ in range(3))
    both = milliseconds(save_and_step)
    rest = milliseconds(keeper.wait)
    shutil.rmtree(folder / "saved")
    return {"returned": took[0], "stall": max(0.0, both - alone), "durable": both - alone + rest}


def measure_copies(state: State, plan: Plan) -> list[Row]:
    """Copy the state to the host as fast as the device does it: one copy, pinned memory."""
    flat = torch.cat(list(state.values())).view(torch.uint8)
    buffer = StagingBuffer()
    memory = buffer.reserve(len(flat), pin=True, touch=True)

    def copy() -> None:
        memory.copy_(flat, non_blocking=True)
        torch.accelerator.synchronize()

    taken = interleave("copies", {"copy": partial(milliseconds, copy)}, plan.repeats)["copy"]
    kind = "into pinned memory" if buffer.pinned else "into memory that isn't pinned"
    return [Row(name="copy", setting=kind, group="copy", role="limit", unit="ms",
                rates=tuple(taken))]  # fmt: skip


def measure_batches(path: Path, device: torch.device, plan: Plan) -> list[Row]:
    """Bring batches to the device: by the loader, and from a loader of the host by hand."""
    dataset = NpyTokensDataset(path, SEQ_LEN, seed=0)
    methods: dict[str, Callable[[], AsyncDataLoader]] = {
        "device=": lambda: AsyncDataLoader(dataset, batch_size=BATCH_SIZE, device=device),
        ".to(device)": lambda: AsyncDataLoader(dataset, batch_size=BATCH_SIZE),
    }

    def rate(make: Callable[[], AsyncDataLoader]) -> float:
        def consume() -> None:
            for (x, y), _ in zip(make(), range(BATCHES), strict=False):
                x.to(device).sum().add_(y.to(device).sum())
            torch.accelerator.synchronize()

        return BATCH_SIZE * SEQ_LEN * BATCHES / milliseconds(consume) / 1e3

    taken = interleave("batches", {name: partial(rate, make) for name, make in methods.items()},
                       plan.repeats)  # fmt: skip
    return [
        Row(name="AsyncDataLoader", setting=name, group="batches", rates=tuple(rates),
            role="ours" if name == "device=" else "common")
        for name, rates in taken.items()
    ]  # fmt: skip
