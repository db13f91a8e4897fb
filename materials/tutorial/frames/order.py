"""Your order: which sample comes when, on any number of ranks, from wherever an epoch was left."""

# ruff: noqa: F401
import math

import numpy as np

from npydata.dataset.hashing import GOLDEN, mix64, stream_key
from npydata.dataset.permutation import Permutation
from npydata.loader.sampler import BatchSampler
from npydata.loader.state import Cursor


class MyPermutation(Permutation):
    """A shuffle of 0 .. n-1 that is computed: the checks are the library's, the rest is yours."""


class MySampler(BatchSampler):
    """How what is left of an epoch is cut into batches, for one rank."""


class MyCursor(Cursor):
    """Where an epoch stands."""
