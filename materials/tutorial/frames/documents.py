"""Your part of documents: ends, positions, bounds, the mask; and which source comes when."""

# ruff: noqa: F401, F821 - the builds follow below
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

import npydata
from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import stream_key
from tutorial.blending import Interleaving, Run

sys.path.append(str(Path(npydata.__file__).parents[1] / "examples"))


class MyRun(Run):
    """Samples whose sources follow a pattern, over and over."""


class MyMixture:
    """For each sample of a run: its source, the epoch of that source, and its sample there.

    `schedule` gives other weights from a sample on. A loader can take it as a dataset.
    """

    def __init__(self, lengths, weights, schedule=None, num_samples=400, seed=0):
        self.lengths, self.num_samples, self.seed = lengths, num_samples, seed
        self.runs = [
            MyRun(*(getattr(run, one.name) for one in fields(Run)))
            for run in Interleaving(weights, schedule).runs
        ]

    def __len__(self):
        return self.num_samples

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i}, expected 0 to {len(self) - 1}")
        source, rank = self.source_of(i)
        own = shuffled_samples(np.array([rank]), self.lengths[source], self.seed + source)
        return torch.tensor([source, *(int(part[0]) for part in own)])

    def source_of(self, i):
        """A sample's source, and how many of that source's samples came before it."""
        return [int(part[0]) for part in self.run_at(i).sources_at(np.array([i]))]

    def run_at(self, i):
        """The run that a sample lies in."""
        return next(run for run in reversed(self.runs) if run.begin <= i)

    def given(self, samples):
        """How many of the first samples come from each source."""
        return self.run_at(max(0, samples - 1)).counts_at(samples)
