"""What a run of lesson 10 promises, tested in miniature, and cards that break it."""

import random
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import torch

from course.exercises import nb10
from course.grading.observers import files
from course.lab import Card
from npydata import AsyncDataLoader, CheckpointError, TrainingState, restore_rng, save_checkpoint

SETTINGS = {"batch_size": 4}
SAMPLES = 24  # six batches: a run of ten steps needs two epochs


def expect(found, expected, what):
    assert found == expected, f"{what}: {found}, expected {expected}"


class ToyRun:
    """A run in miniature: weights with momentum, noise of every kind, and a real loader."""

    def __init__(self):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loader = AsyncDataLoader(
            list(range(SAMPLES)), batch_size=SETTINGS["batch_size"], prefetch_factor=0, seed=0
        )

    def step(self, batch):
        """Learn something that depends on weights, batch and noise; return it as the loss."""
        noise = random.random() + np.random.randn() + torch.rand(()).item()
        loss = self.model(torch.tensor([float(sum(batch)), noise])).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item() + noise

    def save(self, mine, root, step):
        state = mine.training_state(step, self.loader, SETTINGS)
        states = self.model.state_dict(), self.optimizer.state_dict()
        save_checkpoint(root / f"step-{step}", *states, state)

    def resume(self, mine, root, settings=SETTINGS):
        return mine.resume_from(root, self.model, self.optimizer, self.loader, settings)


def run_until(mine, root, last):
    """Start a run, or go on with the one in `root`; save at the end, and return its losses."""
    run, losses = ToyRun(), []
    mine.keep_training(
        run.resume(mine, root)[0],
        last,
        chain.from_iterable(cycle([run.loader])),
        lambda _, batch: losses.append(run.step(batch)),
        lambda step: run.save(mine, root, step),
        nb10.Asked(),
        every=1000,
    )
    return losses


def a_stopped_run_is_the_run_that_was_not(mine):
    """A run that was stopped goes on with the numbers of one that never was, to the last bit"""
    for stops in ((2, 5), (2, 3, 5), (6, 14)):
        with files():
            whole = run_until(mine, Path("whole"), stops[-1])
            pieces = [loss for stop in stops for loss in run_until(mine, Path("pieces"), stop)]
        same = [a == b for a, b in zip(pieces, whole, strict=False)]
        first = same.index(False) + 1 if False in same else None
        expect(
            first,
            None,
            f"stopped after step {stops[0]}, the first loss that differs",
        )
        expect(len(pieces), len(whole), "steps that were done")


def every_generator_goes_on(mine):
    """Every generator goes on with the numbers that were to come: Python's, numpy's, torch's"""
    nb10.draws()
    state = mine.capture_rng()
    expected = nb10.draws()
    restore_rng(state)
    for whose, found in nb10.draws().items():
        expect(found, expected[whose], f"{whose} numbers after the state was put back")


def other_settings_are_refused(mine):
    """A run with other settings is refused before anything of it is changed"""
    with files():
        run_until(mine, Path("run"), 2)
        run = ToyRun()
        before = [one.clone() for one in run.model.parameters()]
        try:
            run.resume(mine, Path("run"), {"batch_size": 8})
        except CheckpointError:
            same = all(map(torch.equal, before, run.model.parameters()))
            expect(same, True, "the weights are as they were")
        else:
            raise AssertionError("a batch size of 8 went on with 4, expected a CheckpointError")


def the_newest_goes_on(mine):
    """The checkpoint that was saved last is the one that goes on, even if its step is lower"""
    with files():
        for step in (9, 4):
            ToyRun().save(mine, Path("run"), step)
        found = ToyRun().resume(mine, Path("run"))
    expect(found, (4, "step-4"), "steps 9 and 4 were saved, in this order; it goes on with")


def what_lacks_parts_goes_on(mine):
    """A checkpoint of weights alone, from another program, goes on as far as it goes"""
    with files():
        old, run = ToyRun(), ToyRun()
        old.step([1, 2])
        save_checkpoint(Path("run/old"), old.model.state_dict(), None, TrainingState(step=7))
        expect(run.resume(mine, Path("run"))[0], 7, "step")
    same = all(map(torch.equal, old.model.parameters(), run.model.parameters()))
    expect(same, True, "its weights are taken")


def a_request_is_kept(mine):
    """A request to save or to end is answered after its step, and only once"""
    cases = {
        "SIGUSR1": "step 1, step 2, save 2, step 3, step 4, save 4",
        "SIGTERM": "step 1, step 2, save 2",
    }
    for got, expected in cases.items():
        seen = nb10.kept(mine.keep_training, 0, 4, 10, {"step 2": got})
        expect(seen["in order"], expected, f"{got} comes during step 2")


PROMISES = [
    a_stopped_run_is_the_run_that_was_not,
    every_generator_goes_on,
    other_settings_are_refused,
    the_newest_goes_on,
    what_lacks_parts_goes_on,
    a_request_is_kept,
]

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
            "an error: the loader's seed is another one": "the seed is the same; only the place is "
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
