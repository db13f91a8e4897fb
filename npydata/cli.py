"""The ``npydata`` command: prepare, inspect, bench.

A command that meets bad input says so in one line on stderr and exits with 2; after Ctrl-C the
exit code is 130. Either way no file is left half-written. Modules are imported by the command that
needs them, so that ``npydata --help`` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from npydata import __version__
from npydata.errors import NpyDataError

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DESCRIPTION = """\
Feed and save language-model training: make token files, look into them, measure how fast they
can be read."""

EPILOG = """\
examples:
  npydata prepare book.txt -o book.npy     turn a text into a token file
  npydata inspect book.npy --seq-len 512   what is in it, and how many samples it gives
  npydata bench dataset                    how fast this machine reads samples

Every command has its own help: npydata prepare --help
"""

PREPARE_HELP = """\
Turn text into a token file that npydata, and every tool that reads .npy, can train from.

TEXT is a file, a folder (read recursively and in sorted order; hidden entries, symbolic links and
binary files are passed over) or a pattern such as 'data/*.txt'. Every file is one document, and
the token <|endoftext|> follows each. The tokenizer is saved beside the token file.

The text may be larger than memory. A byte that is not UTF-8 becomes U+FFFD, and the last line says
how many there were. The same text always gives the same file. If the run fails or is killed, the
token file is what it was before."""

PREPARE_EPILOG = """\
examples:
  npydata prepare shakespeare.txt -o shakespeare.npy
  npydata prepare notes/ 'books/*.txt' -o all.npy --vocab-size 16384
  npydata prepare val.txt -o val.npy --tokenizer all.tokenizer.json
  npydata prepare --corpus python -o python.npy
"""

INSPECT_HELP = """\
Say what is in a token file: format, dtype, shape, how many tokens, the smallest and the largest
id (the whole file is read for these), the first ids, and with --seq-len how many samples it
gives."""

INSPECT_EPILOG = """\
examples:
  npydata inspect train.npy --seq-len 1024
  npydata inspect train.bin --dtype uint16 --json

formats: npy, raw (headerless .bin), llm.c, megatron, datatrove, and olmo (headerless .npy)
"""


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit."""
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = build_parser(argv).parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse has said all there is to say
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return _leave_closed_pipe()
    except (NpyDataError, OSError) as error:
        return _fail(one_line(error), EXIT_BAD_INPUT)
    return code


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; ``bench``, which needs torch, is complete only when it is asked for."""
    parser = OneLineParser(
        prog="npydata",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"npydata {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    _add_prepare(commands)
    _add_inspect(commands)
    if argv and argv[0] == "bench":
        _add_bench(commands)
    else:
        commands.add_parser("bench", help="measure how fast this machine reads samples")
    return parser


def one_line(error: Exception) -> str:
    """Return what went wrong as a single line that names the file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{os.fsdecode(error.filename)}: {error.strerror}"
    else:
        message = str(error) or type(error).__name__
    return " ".join(message.split())


def run_prepare(args: argparse.Namespace) -> int:
    """Make a token file and say in one line what went into it."""
    from npydata.prepare import prepare

    if not args.text and not args.corpus:
        raise NpyDataError("nothing to read: name a TEXT, or --corpus python")
    report = prepare(
        args.text,
        args.output,
        python_text=args.corpus == "python",
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        sample_mb=args.sample_mb,
        row_len=args.row_len,
        progress=not args.quiet,
    )
    print(report)
    return EXIT_OK


def run_inspect(args: argparse.Namespace) -> int:
    """Print a report on a token file."""
    from npydata.inspect_tokens import inspect_tokens

    report = inspect_tokens(
        args.file,
        format=args.format,
        dtype=args.dtype,
        seq_len=args.seq_len,
        progress=True,
    )
    print(report.to_json() if args.json else report.to_table())
    return EXIT_OK


def _add_prepare(commands: Any) -> None:
    parser = commands.add_parser(
        "prepare",
        help="turn text into a token file",
        description=PREPARE_HELP,
        epilog=PREPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("text", nargs="*", metavar="TEXT", help="files, folders or patterns")
    add("-o", "--output", required=True, metavar="FILE.npy", help="the token file to write")
    add("--corpus", choices=["python"], help="also read text this machine already has: the .py "
        "files of Python's standard library and of torch, sorted")  # fmt: skip
    add("--tokenizer", metavar="FILE.json", help="use this tokenizer instead of training one")
    add("--vocab-size", type=int, default=8192, metavar="N",
        help="train a byte-level BPE of this many tokens (default: %(default)s); up to 65,536 are "
        "stored in 2 bytes, more in 4")  # fmt: skip
    add("--sample-mb", type=float, default=16, metavar="MB",
        help="train on at most this much text, spread evenly (default: %(default)s)")  # fmt: skip
    add("--row-len", type=int, metavar="N", help="write a 2-D file with rows of N tokens; a short "
        "last row is left out")  # fmt: skip
    add("-q", "--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_prepare)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what is in a token file",
        description=INSPECT_HELP,
        epilog=INSPECT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="the token file")
    add("--seq-len", type=int, metavar="T", help="count the samples of T tokens")
    add("--format", default="auto", metavar="F", help="how the file is laid out (default: by its "
        "content and name)")  # fmt: skip
    add(
        "--dtype",
        metavar="D",
        help="the ids of a headerless file, such as uint16 (default: uint32)",
    )
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_inspect)


def _add_bench(commands: Any) -> None:
    from npydata import bench

    bench.add_arguments(commands)
    commands.choices["bench"].set_defaults(run=bench.main)


def _fail(message: str, code: int) -> int:
    print(f"npydata: {message}", file=sys.stderr)
    return code


def _leave_closed_pipe() -> int:
    """End quietly when the reader of our output (``| head``) has gone."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return EXIT_BROKEN_PIPE
