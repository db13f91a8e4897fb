"""``npydata bench``: its arguments, and what every bench does around its measurements.

Nothing heavy is imported before a bench runs, so that ``npydata --help`` answers at once. A bench
is a module ``npydata.bench.<name>`` with a function ``measure(args, folder)`` that makes its files
in a folder that is gone afterwards, and returns a report.
"""

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from npydata.errors import NpyDataError

if TYPE_CHECKING:
    from npydata.bench.report import Report

Arguments = Mapping[str, Mapping[str, Any]]
"""The options of ``argparse`` for each argument, by its flags."""


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an argument type: an integer not below ``smallest``."""

    def parse(text: str) -> int:
        if (value := int(text)) < smallest:
            raise argparse.ArgumentTypeError(f"{value}, expected {smallest} or more")
        return value

    parse.__name__ = "integer"  # argparse puts it in its messages
    return parse


COUNT = at_least(1)

TOKENS: Arguments = {
    "--tokens": {"type": Path, "metavar": "FILE",
                 "help": "measure on this file (default: one made for it)"},
    "--dtype": {"help": "dtype of FILE if it is headerless"},
    "--size-mb": {"type": COUNT, "metavar": "MB",
                  "help": "size of the file that is made (default 1024, quick 256)"},
    "--seq-len": {"type": COUNT, "default": 1024, "metavar": "T",
                  "help": "tokens per window (default %(default)s)"},
    "--batch-size": {"type": COUNT, "default": 32, "metavar": "B",
                     "help": "windows per batch (default %(default)s)"},
}  # fmt: skip
PACKING: Arguments = {
    "--tokens": {"type": Path, "metavar": "FILE",
                 "help": "measure on the documents of this file (default: Python's standard "
                         "library)"},
    "--dtype": {"help": "dtype of FILE if it is headerless"},
    "--seq-len": {"type": COUNT, "default": 2048, "metavar": "T",
                  "help": "tokens per row (default %(default)s)"},
    "--batch-size": {"type": COUNT, "default": 16, "metavar": "B",
                     "help": "rows per batch (default %(default)s)"},
}  # fmt: skip
READER: Arguments = {
    "--size-mb": {"type": COUNT, "metavar": "MIB",
                  "help": "MiB of the checkpoint one tensor is read from "
                          "(default 1024, quick 128)"},
    "--convert-mb": {"type": COUNT, "metavar": "MIB",
                     "help": "MiB of the checkpoint that is converted (default 2048, quick 256)"},
}  # fmt: skip
CHECKPOINT: Arguments = {
    "--size-mb": {"type": COUNT, "metavar": "MIB",
                  "help": "MiB of the saved state (default 1024, quick 128)"},
    "--distributed": {"action": "store_true",
                      "help": "many processes save one state, next to "
                              "torch.distributed.checkpoint"},
    "--ranks": {"type": at_least(2), "nargs": "+", "metavar": "N",
                "help": "numbers of processes with --distributed (default 2 4)"},
}  # fmt: skip
LOAD: Arguments = {
    "--size-mb": {"type": COUNT, "metavar": "MIB",
                  "help": "MiB of the checkpoint (default 1024, quick 128)"},
    "--tensor-kb": {"type": at_least(4), "metavar": "KIB",
                    "help": "KiB of each of its tensors (default 16384)"},
}  # fmt: skip
DEVICE: Arguments = {
    "--size-mb": {"type": COUNT, "metavar": "MIB",
                  "help": "MiB of the state on the device (default 4096, quick 256)"},
}  # fmt: skip
SURVIVAL: Arguments = {
    "--saver": {"metavar": "NAME", "help": "attack only savers with this in their name"},
    "--fault": {"metavar": "FAULT", "help": "attack only so (kill, power cut, disk full, "
                                            "fsync fails, reader, fork, signal)"},
    "--loader": {"metavar": "NAME", "help": "resume only loaders with this in their name"},
    "--trials": {"type": at_least(2), "metavar": "N",
                 "help": "at most so many kills a saver, and less of the rest (default 200, "
                         "quick 20)"},
}  # fmt: skip
COMMON: Arguments = {
    "--repeats": {"type": COUNT, "metavar": "N",
                  "help": "measurements per row (default 5, quick 3)"},
    "--quick": {"action": "store_true", "help": "well under a minute, and rougher"},
    "--targets": {"action": "store_true",
                  "help": "also say which of npydata's own targets are met"},
    "--json": {"type": Path, "metavar": "OUT", "help": "write all figures as JSON"},
    "--plot": {"type": Path, "metavar": "OUT.png", "help": "draw the figures"},
    "--dir": {"type": Path, "default": Path(), "metavar": "FOLDER",
              "help": "where files are made: the disk to measure (default .)"},
}  # fmt: skip

BENCHES: dict[str, tuple[str, Arguments]] = {
    "dataset": ("windows per second from a token file, warm and cold", TOKENS),
    "loader": ("what the loader delivers, and what training pays for it", TOKENS),
    "packing": ("rows of whole documents: how full, and tokens per second", PACKING),
    "checkpoint": ("what a save costs training, and when the disk has it", CHECKPOINT),
    "reader": ("one tensor from a checkpoint, and converting one", READER),
    "load": ("a whole checkpoint, from the disk and from the page cache", LOAD),
    "device": ("saves and batches of the accelerator that is there", DEVICE),
    "survival": ("which savers survive kills and power cuts, which loaders resume", SURVIVAL),
}
"""What each bench measures, and its own arguments beside the common ones."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; a missed target is not an error."""
    name = args.bench
    if name == "checkpoint" and args.distributed:
        name = "distributed"
    elif getattr(args, "ranks", None):
        raise NpyDataError("--ranks is for --distributed")
    if args.plot:
        from npydata.bench.plot import require_plotting

        require_plotting(args.plot)
    for path in (args.json, args.plot):
        if path and not path.absolute().parent.is_dir():
            raise NpyDataError(f"{path}: its folder does not exist")
    with TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as folder:
        module = import_module(f"npydata.bench.{name}")
        report: Report = module.measure(args, Path(folder))
    print(report.text(targets=args.targets))
    if args.json:
        from npydata.bench.report import write_json

        write_json(args.json, report.as_json())
    if args.plot:
        from npydata.bench.plot import draw

        getattr(module, "draw", draw)(report, args.plot)
    return 0
