"""``npydata bench``: what the parts reach on this machine, next to common ways and its limits.

Only arguments live here, so that ``npydata --help`` imports neither torch nor matplotlib; a bench
is the module ``npydata.bench.<name>`` with a function ``run(args)``.
"""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_arguments(subparsers: "Subparsers") -> None:
    """Add ``bench`` and its benches to a command line; each sets ``run`` to :func:`main`."""
    parser = subparsers.add_parser("bench", help="measure this machine", description=__doc__)
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (summary, add_options) in BENCHES.items():
        bench = benches.add_parser(name, help=summary, description=summary)
        add_options(bench)
        add_common_options(bench)
        bench.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Import the bench that was asked for, run it and return its exit code."""
    result: int = import_module(f"npydata.bench.{args.bench}").run(args)
    return result


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add what the benches over a token file take."""
    parser.add_argument("--tokens", type=Path, metavar="FILE",
                        help="measure on this file (default: one made for it)")  # fmt: skip
    parser.add_argument("--dtype", help="dtype of FILE if it is headerless")
    parser.add_argument("--size-mb", type=at_least(1), metavar="MB",
                        help="size of the file that is made (default 1024, quick 256)")  # fmt: skip
    parser.add_argument("--seq-len", type=at_least(1), default=1024, metavar="T",
                        help="tokens per window (default 1024)")  # fmt: skip
    parser.add_argument("--batch-size", type=at_least(1), default=32, metavar="B",
                        help="windows per batch (default 32)")  # fmt: skip


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add what the bench of the checkpoint reader takes."""
    parser.add_argument("--size-mb", type=at_least(1), metavar="MIB",
                        help="MiB of the checkpoint one tensor is read from "
                             "(default 1024, quick 128)")  # fmt: skip
    parser.add_argument("--convert-mb", type=at_least(1), metavar="MIB",
                        help="MiB of the checkpoint that is converted "
                             "(default 2048, quick 256)")  # fmt: skip


def add_save_options(parser: argparse.ArgumentParser) -> None:
    """Add what the bench of the checkpointer takes."""
    parser.add_argument("--size-mb", type=at_least(1), metavar="MIB",
                        help="MiB of the saved state (default 1024, quick 128)")  # fmt: skip
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="many processes save one state, next to torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        nargs="+",
        metavar="N",
        help="numbers of processes with --distributed (default 2 4)",
    )


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add what every bench takes."""
    parser.add_argument("--repeats", type=at_least(1), metavar="N",
                        help="measurements per row (default 5, quick 3)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="well under a minute, and rougher")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the figures")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="FOLDER",
                        help="where files are made: the disk to measure (default .)")  # fmt: skip


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an argument type: an integer not below ``smallest``."""

    def parse(text: str) -> int:
        if (value := int(text)) < smallest:
            raise argparse.ArgumentTypeError(f"{value}, expected {smallest} or more")
        return value

    parse.__name__ = "integer"  # argparse puts it in its messages
    return parse


BENCHES: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "dataset": ("windows per second from a token file, warm and cold", add_file_options),
    "loader": ("what the loader delivers, and what training pays for it", add_file_options),
    "checkpoint": ("what a save costs training, and when the disk has it", add_save_options),
    "reader": ("one tensor from a checkpoint, and converting one", add_checkpoint_options),
}
