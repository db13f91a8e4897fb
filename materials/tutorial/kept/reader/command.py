"""``npydata convert``: what it takes, what it does, and the line that it ends with.

Nothing heavy is imported before it runs, so that ``npydata --help`` answers at once.
"""

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from npydata.errors import NpyDataError
from tutorial.kept.system.progress import (
    MESSAGE_LENGTH,
    harmless,
    human_bytes,
    human_rate,
    printable,
)

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
NAMES_SHOWN = 5

DESCRIPTION = """\
Write the tensors of any checkpoint as one safetensors file, without running anything in it; or
with --shard-size as a folder that Hugging Face's from_pretrained opens, once config.json is there.

Memory stays small, however large the file. Tied tensors are written once, and npydata restores the
ties; numbers, texts and other plain values go into the file's metadata. What only code could make
is left out, and named; of a folder, all values are. If the run fails or is killed, OUT is what it
was before."""

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "file": {"metavar": "FILE", "help": "a checkpoint, an *.index.json, or a folder with one"},
    "output": {"metavar": "OUT", "help": "the file to write, whose name ends in .safetensors: "
                                         "an old one is replaced; or a new folder"},
    "--shard-size": {"metavar": "SIZE",
                     "help": "write a folder of files of at most SIZE (5GB, 500MB, 2GiB), "
                             "named as Hugging Face does, with their index"},
    "--prefix": {"metavar": "P",
                 "help": "into the folder, write only tensors whose names begin with P, "
                         "without it: 'model.' of a training checkpoint"},
    "--dtype": {"choices": FLOATS, "metavar": "D",
                "help": f"write tensors of floating point as D: {', '.join(FLOATS)} (default: "
                        "as they are)"},
    "--allow-larger": {"action": "store_true",
                       "help": "write out expanded tensors, however large the file becomes"},
}  # fmt: skip

EXAMPLES = """\
examples:
  npydata convert pytorch_model.bin model.safetensors
  npydata convert checkpoint.pt half.safetensors --dtype float16
  npydata convert model.safetensors.index.json model.safetensors
  npydata convert run/step-001000 gpt/ --prefix model. --shard-size 2GB
"""


def convert_file(args: argparse.Namespace) -> str:
    """Write a checkpoint as safetensors and return a line that says what was written."""
    as_folder = args.shard_size is not None or args.prefix is not None
    if as_folder == args.output.endswith(".safetensors"):
        wanted = ("a name for a folder: --shard-size and --prefix make one" if as_folder else
                  "a name that ends in .safetensors, or --shard-size for a folder")  # fmt: skip
        raise NpyDataError(f"{args.output}: expected {wanted}")
    shard_size = None if args.shard_size is None else parsed_size(args.shard_size)
    import torch

    from tutorial.kept.reader.hugging_face import SHARD_BYTES
    from tutorial.kept.reader.open import open_checkpoint

    begin = time.perf_counter()
    options: dict[str, Any] = {
        "dtype": None if args.dtype is None else getattr(torch, args.dtype),
        "progress": not args.quiet,
        "allow_larger": args.allow_larger,
    }
    if as_folder:
        options |= {"shard_size": shard_size or SHARD_BYTES, "prefix": args.prefix or ""}
    with open_checkpoint(args.file) as checkpoint:
        write = checkpoint.to_hugging_face if as_folder else checkpoint.to_safetensors
        done = write(args.output, **options)
    seconds = time.perf_counter() - begin
    ties = f" ({done.ties:,} tied)" if done.ties else ""
    return (
        f"{harmless(printable(args.output), MESSAGE_LENGTH)}: {done.tensors:,} tensors{ties}, "
        f"{human_bytes(done.nbytes)} in {seconds:.2f} s ({human_rate(done.nbytes / seconds, 'B')})"
        f"{left_out(done.left_out, 'values' if as_folder else 'without plain values')}"
    )


def left_out(names: Sequence[str], what: str) -> str:
    """Return what the new file lacks, by name, if it lacks anything."""
    shown = [harmless(name) for name in names[:NAMES_SHOWN]]
    if len(names) > NAMES_SHOWN:
        shown.append(f"and {len(names) - NAMES_SHOWN:,} more")
    return f"; left out {len(names):,} {what}: {', '.join(shown)}" if shown else ""


def parsed_size(text: str) -> int:
    """Return how many bytes are meant by ``5GB``, ``500MB``, ``2GiB`` or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    if not found or (found[3] and not found[2]):
        raise NpyDataError(f"--shard-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    power = " KMGT".index(found[2].upper() or " ")
    nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if nbytes < 1:
        raise NpyDataError(f"--shard-size {text}: expected 1 byte or more")
    return nbytes
