"""Small files, arguments and rows for the tests of ``npydata bench``."""

import argparse

import numpy as np

from npydata import write_tokens
from npydata.bench.measure import Row
from npydata.bench.tokens import Task
from npydata.cli import build_parser


def parse(*argv: str) -> argparse.Namespace:
    """The arguments of a bench as the command line gives them."""
    return build_parser().parse_args(["bench", *argv])


def row(group="warm", name="ours", value=20.0, *, rates=(), **rest) -> Row:
    """A row of a table."""
    rest = {"setting": "", "role": "ours", **rest}
    return Row(name=name, group=group, rates=tuple(rates) or (value,), **rest)


def make_task(folder, **rest) -> Task:
    """A small token file, to be read in windows of 16."""
    write_tokens(folder / "tokens.npy", [np.arange(60_000, dtype=np.uint16)])
    options = {"path": folder / "tokens.npy", "dtype": None, "seq_len": 16, "batch_size": 4}
    return Task(**options | rest)
