"""Loops that people write themselves, after nanoGPT's and torchtitan's, and a compiled step."""

import pytest
import torch

from clients.tools import SEQ_LEN, Tiny, same_bits, tokens
from npydata import (
    AsyncCheckpointer,
    AsyncDataLoader,
    MmapDataset,
    NpyTokensDataset,
    TrainingState,
    capture_rng,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
)

__all__ = ["tokens"]
pytestmark = pytest.mark.clients


def compiled(model):
    try:
        step = torch.compile(model)
        step(torch.zeros(4, SEQ_LEN, dtype=torch.int64), torch.zeros(4, SEQ_LEN, dtype=torch.int64))
    except Exception as error:  # it needs a C++ compiler, which not every machine has
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    return step


def nanogpt(path, root, steps, begin=0, wrap=None):
    """``get_batch`` in a loop over steps, with accumulation; saved every 3 steps."""
    data = NpyTokensDataset(path, SEQ_LEN)
    loader = AsyncDataLoader(data, 4, seed=1337, shuffle=False)
    model, micro_steps = Tiny(), 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = latest_checkpoint(root) if begin else None
    batches = None
    if found:
        weights, moments, now = load_checkpoint(found)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        loader.load_state_dict(now.loader)
        assert now.step == begin
    step_of = wrap(model) if wrap else model
    torch.manual_seed(5)
    if found:
        restore_rng(now.rng)
    batches, seen = endless(loader), []
    with AsyncCheckpointer() as checkpointer:
        for step in range(begin, steps):
            for _ in range(micro_steps):
                x, y = next(batches)
                loss = step_of(x, y) / micro_steps
                loss.backward()
                seen.append((x.tolist(), loss.item()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % 3 == 0:
                now = TrainingState(step=step + 1, loader=loader.state_dict(), rng=capture_rng())
                checkpointer.save(root / f"step-{step + 1}", model.state_dict(),
                                  optimizer.state_dict(), now)  # fmt: skip
    return seen, model.state_dict()


def torchtitan(path, root, steps, begin=0, wrap=None):
    """Parts with ``state_dict`` in one dictionary, and epochs without an end."""
    loader = AsyncDataLoader(MmapDataset(path, SEQ_LEN, stride=SEQ_LEN), 4, shuffle=True, seed=2)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "dataloader": loader}
    step_of = wrap(model) if wrap else model
    torch.manual_seed(5)
    if begin:
        weights, rest, now = load_checkpoint(root / f"step-{begin}")
        for name, part in parts.items():
            part.load_state_dict(weights if name == "model" else rest[name])
        restore_rng(now.rng)
    batches, seen = endless(loader), []
    with AsyncCheckpointer() as checkpointer:
        for step in range(begin, steps):
            x, y = next(batches)
            loss = step_of(x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append((x.tolist(), loss.item()))
            if (step + 1) % 3 == 0:
                rest = {name: part.state_dict() for name, part in parts.items() if name != "model"}
                checkpointer.save(root / f"step-{step + 1}", model.state_dict(), rest,
                                  TrainingState(step=step + 1, rng=capture_rng()))  # fmt: skip
    return seen, model.state_dict()


def endless(loader):
    while True:
        yield from loader


@pytest.mark.parametrize("wrap", [None, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("loop, per_step", [(nanogpt, 2), (torchtitan, 1)])
@pytest.mark.parametrize("stop, begin", [(8, 6), (14, 12)])
def test_a_loop_that_was_cut_off_goes_on_to_the_bit(
    tokens, tmp_path, loop, per_step, stop, begin, wrap
):
    whole, weights = loop(tokens, tmp_path / "whole", 20, wrap=wrap)
    first, _ = loop(tokens, tmp_path / "run", stop, wrap=wrap)
    second, resumed = loop(tokens, tmp_path / "run", 20, begin, wrap)
    assert first[: begin * per_step] + second == whole
    assert same_bits(resumed, weights)
