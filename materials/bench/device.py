"""What a save and a batch cost on the accelerator that torch finds.

A state on the device is saved in each of the three ways, and followed at once by a step that
changes all of it. Training stands still by what save and step take longer, up to the moment that
the device has done the step, than a step alone. Beside it stands the device's own copy of as many
bytes into pinned memory. Batches come from a file in memory, by the loader and by hand.

    python materials/bench/device.py --quick
"""

import shutil
import sys
from functools import cache
from itertools import islice
from statistics import median

import torch
from harness import MIB, Bench, limit, main, milliseconds, ours, peer
from model_states import make_state
from tokens import make_file

from npydata import AsyncCheckpointer, AsyncDataLoader, NpyDataError, NpyTokensDataset

BATCH_SIZE, SEQ_LEN, BATCHES = 32, 1024, 512


def prepare(args):
    if not torch.accelerator.is_available():
        raise NpyDataError("torch finds no accelerator, expected one")
    make_file(args.folder, 64)


@cache
def state_of(size_mb):
    device = torch.accelerator.current_accelerator()
    state = make_state(size_mb * MIB, device=device)
    return {name: tensor.detach() for name, tensor in state.items()}


@cache
def checkpointer_of(snapshot, size_mb):
    checkpointer = AsyncCheckpointer(snapshot=snapshot)
    optimizer = torch.optim.SGD(state_of(size_mb).values(), lr=1.0)
    checkpointer.protect(optimizer)
    return checkpointer, optimizer


def step(args):
    """Change everything, and wait for that; copies on other streams may go on."""
    torch._foreach_add_(list(state_of(args.size_mb).values()), 1.0)
    torch.accelerator.current_stream().synchronize()


def save(args, *, snapshot):
    """Save once with a step after it."""
    checkpointer, optimizer = checkpointer_of(snapshot, args.size_mb)
    took = []

    def save_and_step():
        took.append(
            milliseconds(lambda: checkpointer.save(args.folder / "saved", state_of(args.size_mb)))
        )
        optimizer.step()  # without gradients: only what waits for copies
        step(args)

    alone = median(milliseconds(lambda: step(args)) for _ in range(3))
    both = milliseconds(save_and_step)
    rest = milliseconds(checkpointer.wait)
    shutil.rmtree(args.folder / "saved")
    return {"returned": took[0], "stall": max(0.0, both - alone), "durable": both - alone + rest}


@cache
def flat(size_mb):
    source = torch.cat([one.flatten() for one in state_of(size_mb).values()])
    return source, torch.empty_like(source, device="cpu").pin_memory()


def copy(args):
    """Copy the state to pinned memory as fast as the device does it."""
    source, target = flat(args.size_mb)

    def work():
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    return {"stall": milliseconds(work)}


def batches(args, **options):
    """Return the Mtok/s that arrive on the device."""
    device = torch.accelerator.current_accelerator()
    loader = AsyncDataLoader(
        NpyTokensDataset(args.folder / "made.npy", SEQ_LEN, seed=0),
        batch_size=BATCH_SIZE,
        **dict.fromkeys(options, device),
    )

    batches = iter(loader)

    def consume(count):
        for x, y in islice(batches, count):
            x.to(device).sum().add_(y.to(device).sum())
        torch.accelerator.synchronize()

    consume(32)  # pinned memory, streams and threads are there then
    return {
        "batches": BATCH_SIZE * SEQ_LEN * BATCHES / milliseconds(lambda: consume(BATCHES)) / 1e3
    }


ROWS = [
    *(ours("saves", "ours", f'snapshot="{one}"', save, snapshot=one)
      for one in ("host", "overlap", "device")),
    limit("saves", "copy into pinned memory", "", copy),
    ours("batches", "ours", "device=", batches, device=True),
    peer("batches", "ours", ".to(device)", batches),
]  # fmt: skip


BENCH = Bench(
    name="device",
    about=__doc__,
    rows=ROWS,
    prepare=prepare,
    turn=lambda row, args: row.work(args, **row.options),
    options={"size_mb": (4096, 256)},
    groups={
        "returned": ("Until save returns", "ms"),
        "stall": ("Training stands still for a save", "ms"),
        "durable": ("Until the disk has it", "ms"),
        "batches": ("Batches on the device, file in memory", "Mtok/s"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
