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
pytestmark = pytest.mark.clients


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def loader_of(path, **options):
    return AsyncDataLoader(MmapDataset(path, SEQ_LEN, stride=SEQ_LEN), 4, seed=9, **options)


def prepared(accelerator, path, **options):
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, loader_of(path, **options))


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


def test_prepare_returns_the_loader_itself(accelerator, tokens):
    loader = loader_of(tokens)
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare_data_loader(loader) is loader
    assert accelerator._dataloaders == [loader]


@pytest.mark.parametrize("options", [{}, {"sampler": range(40)}, {"num_workers": 0}])
def test_gradients_are_not_held_back_at_the_end_of_an_epoch(accelerator, tokens, options):
    model, optimizer, loader = prepared(accelerator, tokens, **options)
    for _ in range(2):
        found = [synced for *_, synced in train(accelerator, model, optimizer, loader)]
        assert found == [False, False, False, True, False, False, False, True, False, True]
    assert accelerator.gradient_state.active_dataloader is None


def test_the_end_of_a_stream_that_has_no_length_is_seen_too(accelerator):
    loader = accelerator.prepare(AsyncDataLoader(iter(range(10)), 4))
    assert [accelerator.gradient_state.end_of_dataloader for _ in loader] == [False, False, True]


def test_an_epoch_that_is_left_early_is_forgotten(accelerator, tokens):
    loader = accelerator.prepare(loader_of(tokens))
    with iter(loader) as batches:
        next(batches)
        assert accelerator.gradient_state.active_dataloader is loader
    assert accelerator.gradient_state.active_dataloader is None
    for _ in loader:
        break
    del batches
    assert accelerator.gradient_state.active_dataloader is None


def test_batches_are_where_the_accelerator_wants_them(tokens):
    loader = loader_of(tokens)
    loader._join(torch.device("meta"))  # the only other one that every machine has
    assert loader._transfer().device == loader.device_wanted == torch.device("meta")
    own = loader_of(tokens, device="cpu")
    own._join(torch.device("meta"))
    assert own.device_wanted == "cpu"
    loader._join(torch.device("cpu"))
    assert not loader._transfer().moves


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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               RANKS, tokens, tmp_path / "state"]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("rank done") == 2, run.stdout
