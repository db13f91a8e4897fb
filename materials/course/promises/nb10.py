"""What a run of lesson 10 promises, tested in miniature, and cards that break it."""

import random
from itertools import chain, repeat, zip_longest
from pathlib import Path

import numpy as np
import torch

from course.exercises import nb10
from course.lab import Card
from course.promises import expect
from npydata import AsyncDataLoader, save_checkpoint

SAMPLES = 24  # six batches: a run of ten steps needs two epochs


def run_until(mine, root, stop):
    # Start a miniature run, or go on with the one in `root`, until it is asked to end; return its
    # losses. Its steps depend on weights, momentum, batch and noise of every kind.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model, losses, asked = torch.nn.Linear(2, 1), [], mine.Asked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = AsyncDataLoader(list(range(SAMPLES)), batch_size=4, prefetch_factor=0, seed=0)

    def do_step(step, batch):
        noise = random.random() + np.random.randn() + torch.rand(()).item()
        loss = model(torch.tensor([float(sum(batch)), noise])).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        asked.save = asked.end = step == stop

    def save(step):
        state = mine.training_state(step, loader)
        save_checkpoint(root / f"{step}", model.state_dict(), optimizer.state_dict(), state)

    first, _ = mine.resume_from(root, model, optimizer, loader)
    mine.keep_training(first, 99, chain.from_iterable(repeat(loader)), do_step, save, asked, 100)
    return losses


def a_stopped_run_is_the_run_that_was_not(mine):
    """A run that is asked to end goes on with the numbers of one that never was, to the last bit"""
    for stops in ((2, 5), (2, 3, 5), (6, 14)):
        whole = run_until(mine, Path(f"whole-{stops}"), stops[-1])
        pieces = [loss for stop in stops for loss in run_until(mine, Path(f"{stops}"), stop)]
        both = enumerate(zip_longest(pieces, whole), 1)
        differ = [step for step, (a, b) in both if a != b]
        expect(differ, [], f"stopped after step {stops[0]}, the losses that differ")


CARDS = {
    "the moments stay behind": Card(
        nb10.RESTORE,
        "optimizer.load_state_dict(moments) >> pass",
        a_stopped_run_is_the_run_that_was_not,
        {
            "the first step after each start agrees; from the second on it is another run": "",
            "the loss jumps to where it began": "the weights are put back, and the first loss is "
            "computed from them alone",
            "nothing: AdamW makes its moments anew from the weights": "a moment is an average over "
            "earlier gradients, and they are gone",
        },
    ),
}
