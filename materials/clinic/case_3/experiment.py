"""Train, save on the way, and train on from the save: is it the same run?"""

import numpy as np
import torch
from clinic.case_3 import saver

import npydata

SAVE_AT, STEPS = 20, 60


def make_training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train_step(model, optimizer, x, y):
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def batch(data, step):
    return data.fetch(range(8), seed=0, epoch=step)  # the step decides on the windows


def run(data, folder):
    """Train all steps, and save on the way; return the losses."""
    model, optimizer = make_training()
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(train_step(model, optimizer, *batch(data, step)))
        if step == SAVE_AT:
            writing = saver.save(model, optimizer, folder)
    writing.join()
    return losses


def resume(data, folder):
    """Load the checkpoint into a new training, and go on; return the losses."""
    model, optimizer = make_training()
    train_step(model, optimizer, *batch(data, 0))  # makes the optimizer's tensors
    saver.load(model, optimizer, folder)
    return [train_step(model, optimizer, *batch(data, k)) for k in range(SAVE_AT + 1, STEPS + 1)]


def make_data(folder):
    np.save(folder / "tokens.npy", np.random.default_rng(0).zipf(1.5, 20_000).astype("u2") % 64)
    return npydata.NpyTokensDataset(folder / "tokens.npy", seq_len=32)


def reproduce(folder):
    data = make_data(folder)
    losses, resumed = run(data, folder / "step_20"), resume(data, folder / "step_20")
    rows = zip(range(SAVE_AT + 1, STEPS + 1), losses[SAVE_AT:], resumed, strict=True)
    lines = [
        f"step {step}: {loss!r} uninterrupted, {again!r} resumed" for step, loss, again in rows
    ]
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
