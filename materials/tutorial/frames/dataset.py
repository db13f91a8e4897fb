"""Your dataset: random windows of token files, gathered through a memory map, a batch at a time."""

# ruff: noqa: F401
import mmap

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from npydata import NpyTokensDataset, TokenFileError
from npydata.dataset.access import ACCESS, MappedAccess
from npydata.dataset.datasets import fresh_seed
from npydata.dataset.hashing import hash_of
from npydata.dataset.token_windows import require_vocabulary


class MyAccess(MappedAccess):
    """How the tokens of a file are read."""


class MyDataset(NpyTokensDataset):
    """Random windows: opening and checking the files is the library's, the rest is yours."""

    def __init__(self, paths, seq_len, **options):
        super().__init__(paths, seq_len, access="mine", **options)


ACCESS["mine"] = MyAccess
