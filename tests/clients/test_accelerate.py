"""accelerate: ``prepare`` takes the loader as it is; its ends, its state and its ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npydata import AsyncDataLoader, MmapDataset

accelerate = pytest.importorskip("accelerate")

from clients.tools import SEQ_LEN, Tiny, same_bits, tokens  # noqa: E402

__all__ = ["tokens"]


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def loader_of(path, **options):
    dataset = MmapDataset(path, SEQ_LEN, stride=SEQ_LEN)
    return AsyncDataLoader(dataset, 4, shuffle=True, seed=9, **options)


def prepared(accelerator, path, **options):
    """Model, optimizer and loader as the page says: the loader is registered, not prepared."""
    model = Tiny()
    accelerator._custom_objects.clear()  # as in a new process
    loader = loader_of(path, device=accelerator.device, **options)
    accelerator.register_for_checkpointing(loader)
    return *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01)), loader


def train(accelerator, model, optimizer, batches, steps=None):
    """Return the losses of so many steps, each with whether the optimizer really stepped."""
    found = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append((x.tolist(), loss.item(), accelerator.sync_gradients))
        if len(found) == steps:
            break
    return found


def test_prepare_leaves_the_loader_as_it_is(accelerator, tokens):
    loader = loader_of(tokens)
    assert accelerator.prepare(loader) is loader


@pytest.mark.parametrize("stop", [6, 10, 13])
def test_save_state_and_load_state_resume_to_the_bit(accelerator, tokens, tmp_path, stop):
    model, optimizer, loader = prepared(accelerator, tokens)
    whole = train(accelerator, model, optimizer, endless(loader), 20)
    wanted = {name: one.clone() for name, one in model.state_dict().items()}
    accelerator.free_memory()
    accelerator.step = 0
    model, optimizer, loader = prepared(accelerator, tokens)
    first = train(accelerator, model, optimizer, endless(loader), stop)
    accelerator.save_state(tmp_path / "state")
    gradients = [p.grad for p in model.parameters()]
    accelerator.free_memory()
    model, optimizer, loader = prepared(accelerator, tokens)
    accelerator.load_state(tmp_path / "state")
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient  # half of an accumulation, which save_state leaves out
    second = train(accelerator, model, optimizer, endless(loader), 20 - stop)
    assert first + second == whole
    assert same_bits(model.state_dict(), wanted)


def endless(loader):
    while True:
        yield from loader


RANKS = Path(__file__).with_name("two_ranks.py")


def test_two_ranks_share_an_epoch_and_resume_it(tokens, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        RANKS,
        tokens,
        tmp_path / "state",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("rank done") == 2, run.stdout
