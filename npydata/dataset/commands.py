"""What ``npydata prepare`` and ``npydata mix`` take, and what ``mix`` prints.

Nothing heavy is imported before a command runs.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npydata.errors import NpyDataError

Arguments = Mapping[str, Mapping[str, Any]]
"""The options of ``argparse`` for each argument, by its flags."""

FIRST_SHOWN = 48
"""Samples whose sources are printed."""

PREPARE: Arguments = {
    "text": {"nargs": "*", "metavar": "TEXT", "help": "files, folders or patterns"},
    "-o --output": {"required": True, "metavar": "FILE.npy", "help": "the token file to write"},
    "--corpus": {"choices": ["python"],
                 "help": "also read text this machine already has: the .py files of Python's "
                         "standard library and of torch, sorted"},
    "--tokenizer": {"metavar": "FILE.json",
                    "help": "use this tokenizer instead of training one"},
    "--vocab-size": {"type": int, "default": 8192, "metavar": "N",
                     "help": "train a byte-level BPE of this many tokens (default: "
                             "%(default)s); up to 65,536 are stored in 2 bytes, more in 4"},
    "--sample-mb": {"type": float, "default": 16, "metavar": "MB",
                    "help": "train on at most this much text, spread evenly (default: "
                            "%(default)s)"},
    "--row-len": {"type": int, "metavar": "N",
                  "help": "write a 2-D file with rows of N tokens; a short last row is left "
                          "out"},
    "--documents": {"choices": ["file", "line"],
                    "help": "what is a document (default: a file), and write an index of where "
                            "they end beside the token file"},
    "--begin": {"action": "store_true",
                "help": "put the token <|begin_of_text|> before each document"},
    "-q --quiet": {"action": "store_true", "help": "no progress bar"},
}  # fmt: skip

MIX_DESCRIPTION = """\
Say what a run over a mixture of token files would see: of each source the samples, tokens and
epochs, and which source each of the first samples comes from. Nothing is drawn: the same weights
always give the same order. No token is a target twice in a source's epoch.

  npydata mix web.npy code.npy --weights 0.7 0.3 --steps 10000 --batch-size 256"""

MIX: Arguments = {
    "file": {"nargs": "+", "metavar": "FILE", "help": "a token file for each source"},
    "--weights": {"nargs": "+", "required": True, "metavar": "W",
                  "help": "a number for each source, in their order; only ratios count"},
    "--steps": {"type": int, "required": True, "metavar": "N", "help": "batches of the run"},
    "--batch-size": {"type": int, "default": 32, "metavar": "B",
                     "help": "samples per batch, over all ranks (default %(default)s)"},
    "--seq-len": {"type": int, "default": 1024, "metavar": "T",
                  "help": "tokens per sample (default %(default)s)"},
    "--dtype": {"help": "dtype of headerless files"},
}  # fmt: skip


def run_mix(args: argparse.Namespace) -> int:
    """Print what a run would see of each source."""
    from npydata.dataset.datasets import NpyTokensDataset
    from npydata.dataset.mixture import MixtureDataset

    for name, value in (("steps", args.steps), ("batch size", args.batch_size)):
        if value < 1:
            raise NpyDataError(f"{name} {value}: expected 1 or more")
    sources = {
        name: NpyTokensDataset(path, args.seq_len, dtype=args.dtype, seed=0,
                               without_replacement=True)
        for name, path in zip(names_of(args.file), args.file, strict=True)
    }  # fmt: skip
    samples = args.steps * args.batch_size
    try:
        mixture = MixtureDataset(sources, args.weights, num_samples=samples)
    except ValueError as error:
        raise NpyDataError(str(error)) from None
    shares, progress = mixture.weights, mixture.progress(0, samples)
    width = max(map(len, sources))
    for name, one in progress.items():
        print(f"{name:<{width}}  share {float(shares[name]):7.2%}  {one.samples:>12,} samples  "
              f"{one.tokens or 0:>15,} tokens  {one.epochs:9.3f} epochs")  # fmt: skip
    order = mixture.sources_of(range(min(samples, FIRST_SHOWN)))[0].tolist()
    print(f"first samples: {' '.join(str(k + 1) for k in order)}")
    return 0


def names_of(files: list[str]) -> list[str]:
    """Return a name for each file: its own, or its whole path where two are alike."""
    names = [Path(file).name for file in files]
    names = names if len(set(names)) == len(names) else list(files)
    if len(set(names)) < len(names):
        raise NpyDataError("a file is given twice, expected another one for each source")
    return names
