"""Answers to case 3. Do your own ten minutes first: `case_3.md` beside this file has the words."""

import json
import zlib

import numpy as np
import torch
from clinic.case_3 import experiment, saver


def steps_in(folder):
    """The step at which each parameter's moments were written, by the optimizer's own counter."""
    files = sorted(folder.glob("optimizer.*.step.npy"))
    return {int(path.name.split(".")[1]): int(np.load(path)) for path in files}


def shared_with_training(model, optimizer, take=saver.snapshot):
    """Names in a snapshot whose memory is that of the running training."""
    live = {tensor.data_ptr() for tensor in (*model.parameters(), *saver.flat(optimizer).values())}
    return sorted(name for name, one in take(model, optimizer).items() if one.data_ptr() in live)


def damaged(folder):
    """Files whose bytes are not those that were written."""
    checksums = json.loads((folder / "list.json").read_text())
    return sorted(
        n for n in checksums if zlib.crc32((folder / f"{n}.npy").read_bytes()) != checksums[n]
    )


class Watched:
    """A dataset that remembers which windows it gave."""

    def __init__(self, data, late=0):
        self.data, self.late, self.given = data, late, []

    def fetch(self, indices, *, seed, epoch):
        x, y = self.data.fetch(indices, seed=seed, epoch=epoch + self.late)
        self.given.append(x)
        return x, y


def same_batches(uninterrupted, resumed):
    """Whether the resumed run was given what the other one was, after the save."""
    after_the_save = uninterrupted.given[experiment.SAVE_AT :]
    after_loading = resumed.given[1:]  # the first one only made the optimizer's tensors
    pairs = zip(after_the_save, after_loading, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def weights_at(data, step):
    """The weights of a training that saves nothing, after some step."""
    model, optimizer = experiment.make_training()
    for k in range(1, step + 1):
        experiment.train_step(model, optimizer, *experiment.batch(data, k))
    return model.state_dict()


def weights_are_of(data, folder, step):
    """Whether the saved weights are all of one step."""
    return all(
        np.array_equal(np.load(folder / f"model.{name}.npy"), weight.numpy())
        for name, weight in weights_at(data, step).items()
    )


def mended_snapshot(model, optimizer):
    """The tensors of this step, all of them copied."""
    weights = {f"model.{name}": weight.clone() for name, weight in model.state_dict().items()}
    moments = {f"optimizer.{name}": value.clone() for name, value in saver.flat(optimizer).items()}
    return moments | weights
