"""Answers to case 2. Do your own ten minutes first: `case_2.md` beside this file has the words."""

import numpy as np
from clinic.case_2.train_two import BATCH, DOCUMENTS, SEED, WORLD_SIZE

import npydata


def summary(*ranks):
    """Documents that these ranks were given never, once, twice, ... in an epoch."""
    return np.bincount(np.bincount(np.concatenate(ranks), minlength=DOCUMENTS)).tolist()


def fixed_loaders(data):
    """One seed, and so one order, of which each rank takes its slice."""
    return [
        npydata.AsyncDataLoader(
            data, batch_size=BATCH, shuffle=True, seed=SEED, rank=rank, world_size=WORLD_SIZE
        )
        for rank in range(WORLD_SIZE)
    ]
