"""The ``npydata`` command: prepare, inspect, convert, verify, trace.

On bad input a command prints one line on stderr and exits with 2; after Ctrl-C the exit code is
130. Either way no file is left half-written. Each command imports what it needs.
"""

import argparse
import io
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from npydata import __version__
from npydata.errors import CheckpointError, NpyDataError
from npydata.system.progress import MESSAGE_LENGTH, harmless, human_bytes, human_rate, printable

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_ONLY_OLDER = 3
"""From ``verify``: the newest checkpoint is incomplete, but an older one is complete."""
PLAIN_WARNING = warnings.showwarning


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where to find help, and exit."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        if run is not run_trace and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            code = run(args)
        with suppress(AttributeError, ValueError):  # there is no stdout, or a script closed it
            sys.stdout.flush()
    except SystemExit as stop:  # argparse has printed its message
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except KeyboardInterrupt:
        return fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return leave_closed_pipe()
    except (NpyDataError, OSError) as error:
        return fail(one_line(error), EXIT_BAD_INPUT)
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, as the tables below describe them."""
    parser = OneLineParser(
        prog="npydata",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"npydata {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for flags, options in command.arguments.items():
            own.add_argument(*flags.split(), **options)
        own.set_defaults(run=command.run)
    return parser


@dataclass(frozen=True, slots=True)
class Command:
    """What the parser needs to know about a command."""

    run: Callable[[argparse.Namespace], int]
    summary: str
    """A line in the list of commands."""
    description: str
    arguments: Mapping[str, Mapping[str, Any]]
    """Keyword arguments of ``add_argument`` for each argument, by its flags."""
    examples: str = ""


def one_line(error: Exception) -> str:
    """Return an error as a single line that names the file and is safe to print on a terminal."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        message = as_options(str(error)) or type(error).__name__
    return harmless(" ".join(message.split()), MESSAGE_LENGTH)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning on stderr in one line, without the source line that raised it."""
    said = as_options(" ".join(str(message).split()))
    print(f"npydata: warning: {harmless(said, MESSAGE_LENGTH)}", file=sys.stderr)


def as_options(message: str) -> str:
    """Rewrite the Python arguments in a message as command-line options."""
    return re.sub(r'\bdtype="(\w+)"', r"--dtype \1", message)


def fail(message: str, code: int) -> int:
    """Print on stderr why the command ends, and return its exit code."""
    print(f"npydata: {message}", file=sys.stderr)
    return code


def print_safely(line: str) -> None:
    """Print a line with names in it that may hold anything."""
    print(harmless(printable(line), MESSAGE_LENGTH))


def leave_closed_pipe() -> int:
    """End quietly when the reader of our output (``| head``) has gone."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return EXIT_BROKEN_PIPE


def run_prepare(args: argparse.Namespace) -> int:
    """Make a token file and print one line about what went into it."""
    from npydata.dataset.prepare import prepare

    if not args.text and not args.corpus:
        raise NpyDataError("nothing to read: name a TEXT, or --corpus python")
    if args.tokenizer and args.vocab_size is not None:
        raise NpyDataError(f"--vocab-size {args.vocab_size}: {args.tokenizer} has its own")
    report = prepare(
        args.text,
        args.output,
        python_text=args.corpus == "python",
        tokenizer=args.tokenizer,
        vocab_size=8192 if args.vocab_size is None else args.vocab_size,
        sample_mb=args.sample_mb,
        row_len=args.row_len,
        documents=args.documents,
        progress=not args.quiet,
    )
    print(report.summary)
    return EXIT_OK


def run_inspect(args: argparse.Namespace) -> int:
    """Print a report on a token file or a checkpoint."""
    from npydata.dataset import inspect as of_tokens
    from npydata.reader import inspect as of_checkpoints

    is_tokens = args.format != "auto" or args.dtype is not None or args.eot_id is not None
    why = None if is_tokens else of_checkpoints.why_checkpoint(args.file)
    if why is None:
        report = of_tokens.inspect_tokens(
            args.file, format=args.format, dtype=args.dtype, eot_id=args.eot_id, progress=True
        )
        lines = of_tokens.as_table(report)
    else:
        try:
            report = of_checkpoints.inspect_checkpoint(args.file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (taken for a checkpoint: {why})") from None
        lines = of_checkpoints.as_table(report)
    print(json.dumps(report) if args.json else "\n".join(lines))
    return EXIT_OK


def run_convert(args: argparse.Namespace) -> int:
    """Write a checkpoint as safetensors and print one line about what was written."""
    from npydata.reader.open import open_checkpoint

    shard_size = None if args.shard_size is None else parsed_size(args.shard_size)
    if (shard_size is None) != args.output.endswith(".safetensors"):
        raise NpyDataError(
            f"{args.output}: expected a name that ends in .safetensors, or the name "
            "of a new folder and --shard-size"
        )
    begin = time.perf_counter()
    with open_checkpoint(args.file) as checkpoint:
        done = checkpoint.to_safetensors(
            args.output, prefix=args.prefix, shard_size=shard_size, progress=not args.quiet
        )
    seconds = time.perf_counter() - begin
    how = "read by npydata, or by safetensors' load_model"
    ties = f" ({done.ties:,} tied: {how})" if done.ties else ""
    left = ", ".join(harmless(name) for name in done.left_out[:5])
    more = ", ..." if len(done.left_out) > 5 else ""
    left_out = f"; left out {len(done.left_out):,} values: {left}{more}" if left else ""
    print(
        f"{harmless(printable(args.output), MESSAGE_LENGTH)}: {done.tensors:,} tensors{ties}, "
        f"{human_bytes(done.nbytes)} in {seconds:.2f} s "
        f"({human_rate(done.nbytes / seconds, 'B')}){left_out}"
    )
    return EXIT_OK


def parsed_size(text: str) -> int:
    """Return a size such as ``5GB``, ``500MB``, ``2GiB`` or a plain number in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(i?)B?", text.strip(), flags=re.IGNORECASE)
    nbytes = 0
    if found and (found[2] or not found[3]):
        power = " KMGT".index(found[2].upper() or " ")
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if nbytes < 1:
        raise NpyDataError(f"--shard-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    return nbytes


def run_verify(args: argparse.Namespace) -> int:
    """Compare an npydata checkpoint with its checksums, or scan a folder of any checkpoints."""
    from npydata.checkpointer.load import verify_checkpoint
    from npydata.checkpointer.scan import scan
    from npydata.reader.formats.training import MANIFEST, TRAINING

    is_ours = all((Path(args.path) / name).is_file() for name in (MANIFEST, TRAINING))
    if is_ours and not args.json:
        manifest = verify_checkpoint(args.path, progress=not args.quiet)
        size = human_bytes(sum(entry.size for entry in manifest.files.values()))
        print_safely(f"ok: step {manifest.step:,}, {size}, verified ({args.path})")
        return EXIT_OK
    found = scan(args.path)
    if is_ours and found and found[0].kind == "npydata" and found[0].complete:
        try:
            verify_checkpoint(args.path, progress=not args.quiet)
        except CheckpointError as error:
            found[0].why = one_line(error)
    newest = next((one for one in found if one.complete), None)
    if args.json:
        print(json.dumps([one.to_json() for one in found], indent=1))
    else:
        for one in found:
            step = "-" if one.step is None else f"{one.step:,}"
            what = [one.kind, f"step {step}", human_bytes(one.nbytes), one.why or "complete"]
            print_safely("  ".join([str(one.path), *what]))
        said = f"resume from {newest.path}" if newest else "no complete checkpoint"
        said += f" ({len(found)} found; bytes not compared)"
        print_safely(said)
    if newest is None:
        return EXIT_BAD_INPUT
    # Of ours without a sequence only the time is known: a newer one may be a later step.
    unknown = (one for one in found if one.kind == "npydata" and not one.sequence)
    if newest is not found[0] or any(one.changed > newest.changed for one in unknown):
        return EXIT_ONLY_OLDER
    return EXIT_OK


def run_trace(args: argparse.Namespace) -> int:
    """Run a script and report where its time went."""
    from npydata import trace

    warnings.showwarning = PLAIN_WARNING  # the script's warnings are its own
    return trace.run(args.script, args.args, out=args.out, steps=args.steps)


# The commands: names, help and arguments

DESCRIPTION = """\
Feed and save language-model training: make token files, look into them and into checkpoints,
convert checkpoints without running what is in them, say where a script's time goes and which
checkpoint to resume from."""

EPILOG = """\
examples:
  npydata prepare book.txt -o book.npy     turn a text into a token file
  npydata inspect book.npy                 how many tokens, and which ids
  npydata inspect model.pt                 the tensors of a checkpoint
  npydata convert model.pt out.safetensors the same tensors, in a file that holds no code
  npydata verify runs/                     which checkpoint training can be resumed from
  npydata trace train.py                   where the time of a training script goes

Every command has its own help: npydata prepare --help
"""

QUIET: Mapping[str, Any] = {"action": "store_true", "help": "no progress bar"}

PREPARE = Command(
    run_prepare,
    "turn text into a token file",
    description="""\
Turn text into a token file that npydata, and every tool that reads .npy, can train from.

TEXT is a file, a folder (read recursively and in sorted order; hidden entries, symbolic links and
what prepare wrote are skipped) or a pattern such as 'data/*.txt'. A warning counts the files in
them that hold NUL bytes, which are left out. Every file is one document, and the token
<|endoftext|> follows each. The tokenizer is saved beside the token file.

The text may be larger than memory. A byte that is not UTF-8 becomes U+FFFD, and the last line says
how many there were. The same text always gives the same file. If the run fails or is killed, the
token file is what it was before.""",
    arguments={
        "text": {"nargs": "*", "metavar": "TEXT", "help": "files, folders or patterns"},
        "-o --output": {"required": True, "metavar": "FILE.npy", "help": "the token file to write"},
        "--corpus": {
            "choices": ["python"],
            "help": "also read text this machine already has: the .py files of Python's "
            "standard library and of torch, sorted",
        },
        "--tokenizer": {
            "metavar": "FILE.json",
            "help": "use this tokenizer instead of training one; it must have <|endoftext|>",
        },
        "--vocab-size": {
            "type": int,
            "metavar": "N",
            "help": "train a byte-level BPE of this many tokens (default: "
            "8192); up to 65,536 are stored in 2 bytes, more in 4",
        },
        "--sample-mb": {
            "type": float,
            "default": 16,
            "metavar": "MB",
            "help": "train on at most this much text, spread evenly (default: %(default)s)",
        },
        "--row-len": {
            "type": int,
            "metavar": "N",
            "help": "write a 2-D file with rows of N tokens; a short last row is left out",
        },
        "--documents": {
            "action": "store_true",
            "help": "record beside the token file which token ends its documents, so "
            "that PackedDataset needs no eot_id; not with --row-len",
        },
        "-q --quiet": QUIET,
    },
    examples="""\
examples:
  npydata prepare shakespeare.txt -o shakespeare.npy
  npydata prepare notes/ 'books/*.txt' -o all.npy --vocab-size 16384
  npydata prepare val.txt -o val.npy --tokenizer all.tokenizer.json
  npydata prepare --corpus python -o python.npy
""",
)

INSPECT = Command(
    run_inspect,
    "say what is in a token file or a checkpoint",
    description="""\
Say what is in a token file or a checkpoint, told apart by their content.

For a token file: format, dtype, shape, how many tokens, the smallest and the largest id (the whole
file is read for these), and the first ids. Where it is known where documents end, by the format or
by --eot-id: how many there are, and how long.

For a checkpoint: a tree of its tensors and other values, with shape, dtype and size; '= NAME'
stands for a tensor that is tied to another. No tensor is read, and nothing in the file is run; a
warning names what would have been.""",
    arguments={
        "file": {"metavar": "FILE", "help": "the file, its URL, or the folder of a checkpoint"},
        "--eot-id": {"type": int, "metavar": "ID", "help": "the token that ends each document"},
        "--format": {
            "default": "auto",
            "metavar": "F",
            "help": "how the file is laid out (default: by its content and name)",
        },
        "--dtype": {
            "metavar": "D",
            "help": "the ids of a headerless file, such as uint16 (default: uint32)",
        },
        "--json": {"action": "store_true", "help": "print one JSON object"},
    },
    examples="""\
examples:
  npydata inspect train.npy
  npydata inspect train.bin --dtype uint16 --json
  npydata inspect model.pt
  npydata inspect model.safetensors.index.json --json

tokens:      npy, raw (headerless .bin; OLMo's .npy with --dtype), llm.c, megatron, datatrove
checkpoints: torch's zip, legacy and tar files, safetensors, *.index.json, a folder with these, one
             of torch.distributed.checkpoint (.metadata and *.distcp), or one that npydata's
             checkpointer wrote
""",
)

CONVERT = Command(
    run_convert,
    "write a checkpoint as safetensors",
    description="""\
Write the tensors of any checkpoint as one safetensors file, without running anything in it; or
with --shard-size as a folder that Hugging Face's from_pretrained opens, once config.json is there.

Memory stays small, however large the file. Tied tensors are written once, and npydata restores the
ties; numbers, texts and other plain values go into the file's metadata. What only code could make
is left out, and named. If the run fails or is killed, OUT is what it was before.""",
    arguments={
        "file": {
            "metavar": "FILE",
            "help": "a checkpoint, its URL, an index, or a folder with one",
        },
        "output": {
            "metavar": "OUT",
            "help": "the file to write, whose name ends in .safetensors: "
            "an old one is replaced; or a new folder",
        },
        "--prefix": {
            "metavar": "P",
            "default": "",
            "help": "write only tensors whose names begin with P, without it: 'model.' of "
            "a training checkpoint",
        },
        "--shard-size": {
            "metavar": "SIZE",
            "help": "write a folder of files with tensors of at most SIZE (5GB, 500MB, 2GiB; a "
            "larger one gets its own), named as Hugging Face does, with their index",
        },
        "-q --quiet": QUIET,
    },
    examples="""\
examples:
  npydata convert pytorch_model.bin model.safetensors
  npydata convert run/step-001000 model.safetensors --prefix model.
  npydata convert run/step-001000 gpt/ --prefix model. --shard-size 2GB
""",
)

VERIFY = Command(
    run_verify,
    "say which checkpoint of a folder can be resumed from",
    description="""\
Look for checkpoints in a folder and the folders in it, the newest first: those of the HF Trainer,
accelerate, Lightning, torch.distributed.checkpoint, torch.save, safetensors and npydata. Each is
complete, or the line says why not. Only headers, sizes, indexes and zip directories are read;
nothing in them is run, and bytes that changed are not noticed.

Given one of npydata's own checkpoints, it compares every byte with the checksums.

The exit code is 0 if the newest is complete, 3 if only an older one is, 2 if none is.""",
    arguments={
        "path": {"metavar": "PATH", "help": "a folder of checkpoints, or one checkpoint"},
        "--json": {"action": "store_true", "help": "print a list for a program to read"},
        "-q --quiet": QUIET,
    },
    examples="""\
examples:
  npydata verify runs/
  npydata verify runs/step_1000
  npydata verify --json outputs/ | jq '.[] | select(.complete) | .path'
""",
)

TRACE = Command(
    run_trace,
    "run a training script and say where its time goes",
    description="""\
Run a Python script and say on stderr where its time went: start-up, waiting for data, steps, saves,
loads, the rest, with the slowest line of each, and what to write instead.

The script's output and its exit code are its own. --out writes a trace that https://ui.perfetto.dev
and chrome://tracing open.""",
    arguments={
        "--out": {"type": Path, "metavar": "trace.json", "help": "write the trace there, too"},
        "--steps": {
            "type": int,
            "metavar": "N",
            "help": "end the script after N optimizer steps, as sys.exit() would",
        },
        "script": {"type": Path, "metavar": "SCRIPT", "help": "a Python file"},
        "args": {
            "nargs": argparse.REMAINDER,
            "metavar": "ARGS",
            "help": "arguments of the script; if the first is --, write it twice",
        },
    },
    examples="""\
examples:
  npydata trace train.py --lr 1e-3
  npydata trace --out trace.json --steps 200 train.py
""",
)

COMMANDS = {"prepare": PREPARE, "inspect": INSPECT, "convert": CONVERT,
            "verify": VERIFY, "trace": TRACE}  # fmt: skip
