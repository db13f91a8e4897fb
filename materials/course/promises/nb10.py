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

SETTINGS = {"batch_size": 4}
SAMPLES = 24  # six batches: a run of ten steps needs two epochs


def run_until(mine, root, last):
    # Start a miniature run, or go on with the one in `root`; save at the end, return its losses.
    # Its steps depend on weights, momentum, batch and noise of every kind.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model, losses = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = AsyncDataLoader(list(range(SAMPLES)), batch_size=4, prefetch_factor=0, seed=0)

    def do_step(step, batch):
        noise = random.random() + np.random.randn() + torch.rand(()).item()
        loss = model(torch.tensor([float(sum(batch)), noise])).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def save(step):
        state = mine.training_state(step, loader, SETTINGS)
        save_checkpoint(root / f"{step}", model.state_dict(), optimizer.state_dict(), state)

    first, _ = mine.resume_from(root, model, optimizer, loader, SETTINGS)
    batches = chain.from_iterable(repeat(loader))
    mine.keep_training(first, last, batches, do_step, save, nb10.Asked(), every=1000)
    return losses


def a_stopped_run_is_the_run_that_was_not(mine):
    """A run that was stopped goes on with the numbers of one that never was, to the last bit"""
    for stops in ((2, 5), (2, 3, 5), (6, 14)):
        whole = run_until(mine, Path(f"whole-{stops}"), stops[-1])
        pieces = [loss for stop in stops for loss in run_until(mine, Path(f"{stops}"), stop)]
        both = enumerate(zip_longest(pieces, whole), 1)
        differ = [step for step, (a, b) in both if a != b]
        expect(differ, [], f"stopped after step {stops[0]}, the losses that differ")


def every_generator_goes_on(mine):
    """Every generator goes on with the numbers that were to come: Python's, numpy's, torch's"""
    seen = nb10.captured(mine.capture_rng, 3)
    expect([name for name, one in seen.items() if one is False], [], "not so")


def other_settings_are_refused(mine):
    """A run with other settings is refused before anything of it is changed"""
    seen = nb10.gone_on(mine.resume_from, [2], batch_size=8)
    expect(seen.get("raised"), "a CheckpointError", "a batch size of 8 goes on with 4")
    expect(seen["the model got"], "nothing", "the model got")


def a_request_is_kept(mine):
    """A request to save or to end is answered after its step, and only once"""
    cases = {
        "SIGUSR1": "step 1, step 2, save 2, step 3, step 4, save 4",
        "SIGTERM": "step 1, step 2, save 2",
    }
    for got, expected in cases.items():
        seen = nb10.kept(mine.keep_training, 0, 4, 10, {"step 2": got})
        expect(seen["in order"], expected, f"{got} comes during step 2")


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
    "the place stays behind": Card(
        nb10.RESTORE,
        "loader.load_state_dict(state.loader) >> pass",
        a_stopped_run_is_the_run_that_was_not,
        {
            "the first batches of the epoch are trained on again, the last ones maybe never": "",
            "the same batches come, in another order": "the order is computed from seed and epoch, "
            "and both are the same as before",
            "an error: the loader's seed is different": "the seed is the same; only the place is "
            "lost",
        },
    ),
    "a request forgotten": Card(
        nb10.KEEP_TRAINING,
        "is_last or asked.save or >> step == last or",
        a_request_is_kept,
        {
            "a cluster asks for its machine, and the steps since the last save are lost": "",
            "the run trains on after SIGTERM": "`is_last` still ends the loop; it only isn't saved",
            "no checkpoint is written at all": "every so many steps one is, and after the very "
            "last step",
        },
    ),
}
