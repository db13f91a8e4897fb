"""What the learner's training must keep, and one-line changes that break it."""

import random
import signal
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from npydata import AsyncDataLoader, CheckpointError, TrainingState, restore_rng, save_checkpoint
from tutorial.mutation import Card
from tutorial.promised import expect

SETTINGS = {"batch_size": 4}
SAMPLES = 24  # six batches: a run of ten steps needs two epochs


class Momentum:
    """An optimizer in miniature: a running average of the gradients of each weight."""

    def __init__(self, model):
        self.weights = dict(model.named_parameters())
        self.moments = {name: torch.zeros_like(one) for name, one in self.weights.items()}

    @torch.no_grad()
    def step(self, gradient):
        """Move all weights, each a little further than the one before."""
        for number, (name, moment) in enumerate(self.moments.items(), start=1):
            moment.mul_(0.9).add_(number * gradient)
            self.weights[name].sub_(0.01 * moment)

    def state_dict(self):
        return self.moments

    def load_state_dict(self, state):
        for name, moment in self.moments.items():
            moment.copy_(state[name])


class ToyRun:
    """A run in miniature: weights, their momentum, noise of every kind, and a real loader."""

    def __init__(self):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = Momentum(self.model)
        self.loader = AsyncDataLoader(
            list(range(SAMPLES)), batch_size=SETTINGS["batch_size"], prefetch_factor=0, seed=0
        )

    def states(self):
        return self.model.state_dict(), self.optimizer.state_dict()

    def step(self, batch):
        """Learn something that depends on weights, batch and noise; return it as the loss."""
        noise = random.random() + np.random.randn() + torch.rand(()).item()
        data = float(sum(batch)) / SAMPLES
        loss = float(sum(one.detach().sum() for one in self.model.parameters())) + noise + data
        self.optimizer.step(loss)
        return loss


def run_until(mine, root, step):
    """Start a run, or go on with the one in `root`; save at the end, and return its losses."""
    run = ToyRun()
    first, _ = mine.resume_from(root, run.model, run.optimizer, run.loader, SETTINGS)
    losses = [run.step(batch) for batch in islice(mine.epochs(run.loader), step - first)]
    state = mine.training_state(step, run.loader, SETTINGS)
    save_checkpoint(root / f"step-{step}", *run.states(), state)
    return losses


@contextmanager
def folder():
    with TemporaryDirectory() as name:
        yield Path(name)


def same_losses(mine, root, *stops):
    """Compare a run that was stopped after these steps with one that went through."""
    whole = run_until(mine, root / "whole", stops[-1])
    after = " and ".join(f"step {stop}" for stop in stops[:-1])
    pieces = chain.from_iterable([run_until(mine, root / "pieces", stop) for stop in stops])
    for step, (found, expected) in enumerate(zip_longest(pieces, whole), start=1):
        expect(found, expected, f"stopped after {after}, the loss of step {step}")


def a_stopped_run_is_the_run_that_was_not(mine):
    """A run that was stopped goes on with the numbers of one that never was, to the last bit"""
    for stops in ((2, 5), (2, 3, 5)):
        with folder() as root:
            same_losses(mine, root, *stops)


def an_epoch_is_followed_by_the_next(mine):
    """Behind an epoch the next one comes, in another order, whether the run stopped there or not"""
    given = [tuple(map(int, batch)) for batch in islice(mine.epochs(ToyRun().loader), 12)]
    expect(len(given), 12, "batches of two epochs")
    expect(given[:6] == given[6:], False, "the second epoch has the order of the first")
    with folder() as root:
        same_losses(mine, root, 6, 14)


def every_generator_goes_on(mine):
    """Every generator goes on with the numbers that were to come: Python's, numpy's, torch's"""
    draws = {"Python's": lambda: [random.random(), random.gauss(0, 1)],
             "numpy's": lambda: [np.random.rand(), np.random.randn()],
             "torch's": lambda: torch.rand(3).tolist()}  # fmt: skip
    for name, draw in draws.items():
        draw()
        state = mine.capture_rng()
        expected = draw()
        restore_rng(state)
        expect(draw(), expected, f"{name} numbers after the state was put back")


def other_settings_are_refused(mine):
    """A run with other settings is refused before anything of it is changed"""
    with folder() as root:
        run_until(mine, root, 2)
        run = ToyRun()
        before = [one.clone() for one in run.model.parameters()]
        try:
            mine.resume_from(root, run.model, run.optimizer, run.loader, {"batch_size": 8})
        except CheckpointError:
            same = all(map(torch.equal, before, run.model.parameters()))
            expect(same, True, "the weights are as they were")
        else:
            raise AssertionError("a batch size of 8 went on with 4, expected a CheckpointError")


def the_newest_goes_on(mine):
    """The checkpoint that was saved last is continued, also where its step is lower"""
    with folder() as root:
        for step in (9, 4):
            run = ToyRun()
            state = mine.training_state(step, run.loader, SETTINGS)
            save_checkpoint(root / f"step-{step}", *run.states(), state)
        run = ToyRun()
        found = mine.resume_from(root, run.model, run.optimizer, run.loader, SETTINGS)
        expect(found, (4, "step-4"), "steps 9 and 4 were saved, in this order; it goes on with")


def what_lacks_parts_is_continued(mine):
    """A checkpoint with weights only, from another program, is continued as far as it goes"""
    with folder() as root:
        old, run = ToyRun(), ToyRun()
        old.step([1, 2])
        save_checkpoint(root / "old", old.model.state_dict(), None, TrainingState(step=7))
        expect(mine.resume_from(root, run.model, run.optimizer, run.loader, SETTINGS)[0], 7, "step")
        same = all(map(torch.equal, old.model.parameters(), run.model.parameters()))
        expect(same, True, "its weights are taken")


def an_end_is_not_called_off(mine):
    """After SIGTERM a run saves and ends, whatever signal follows"""
    asked = mine.MyAsked()
    expect((asked.save, asked.end), (False, False), "asked for at first")
    asked.note(signal.SIGUSR1, None)
    expect((asked.save, asked.end), (True, False), "asked for by SIGUSR1")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        asked.note(number, None)
        expect((asked.save, asked.end), (True, True), "asked for since SIGTERM")


PROMISES = [
    a_stopped_run_is_the_run_that_was_not,
    an_epoch_is_followed_by_the_next,
    every_generator_goes_on,
    other_settings_are_refused,
    the_newest_goes_on,
    what_lacks_parts_is_continued,
    an_end_is_not_called_off,
]

CARDS = [
    Card(
        name="the moments stay behind",
        symbol="examples.train.restore",
        line="optimizer.load_state_dict(moments)",
        mutant="pass",
        promise=a_stopped_run_is_the_run_that_was_not,
        symptoms=(
            "The loss jumps to where it began, and everybody sees it.",
            "The first step after each start agrees. From the second on it is another run.",
            "Nothing: AdamW computes its moments anew from the weights.",
        ),
        right=2,
        reasons={
            1: "The weights are put back, and the first loss is computed from them alone.",
            3: "A moment is an average over earlier gradients, and they are gone.",
        },
    ),
    Card(
        name="the loader begins again",
        symbol="examples.train.restore",
        line="loader.load_state_dict(state.loader)",
        mutant="pass",
        promise=a_stopped_run_is_the_run_that_was_not,
        symptoms=(
            "An error: the loader's seed is another one.",
            "The first batches of the epoch are trained on again, the last ones maybe never.",
            "The same batches come, in another order.",
        ),
        right=2,
        reasons={
            1: "Nobody compares seeds here, and the seed is the same: only the place is lost.",
            3: "The order hangs on seed and epoch, and both are the same as before.",
        },
    ),
    Card(
        name="who spoke last",
        symbol="examples.train.Asked.note",
        line="self.end |= number == signal.SIGTERM",
        mutant="self.end = number == signal.SIGTERM",
        promise=an_end_is_not_called_off,
        symptoms=(
            "SIGTERM ends the run without a last checkpoint.",
            "SIGUSR1 ends the run.",
            "The machine is taken away from a run that was told to end, and went on.",
        ),
        right=3,
        reasons={
            1: "`save` is set before, by either signal.",
            2: "SIGUSR1 sets `end` to False, and can't end anything.",
        },
    ),
]
