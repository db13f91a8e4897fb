"""From text to a token file: train or load a byte-level BPE, encode, write all or nothing."""

import glob
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npydata.dataset.documents import RECORD_SUFFIX, record_documents
from npydata.dataset.token_file import write_tokens
from npydata.dataset.windows import TokenArray
from npydata.errors import NpyDataError
from npydata.system.atomic import replacing
from npydata.system.progress import ProgressBar, human_bytes, printable, warn_caller

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-text token
LARGEST_VOCABULARY = 1 << 24  # the trainer reserves memory for it; the largest in use are 2**18
HEAD_BYTES = 8 << 10
"""A NUL byte within this many first bytes marks a file as binary."""
BLOCK_CHARS = 1 << 20
"""Text is read this many characters at a time."""
BATCH_PIECES = 64
"""Pieces encoded per call: enough work for all cores, and little to hold in memory."""
PIECE_CHARS = 32 << 10
"""The longest stretch of text the tokenizer sees at once; 2 to 32 Ki are equally fast."""
SPAN_BYTES = 64 << 10
"""The training sample is taken in spans of this many bytes."""
PYTHON_CORPUS_SKIPS = ("site-packages", "dist-packages")
"""Folders inside the standard library's that hold third-party packages."""
OUTPUTS = (".npy", ".tokenizer.json", f".npy{RECORD_SUFFIX}")
"""How the files end that ``prepare`` writes."""
WHOLE_WORDS = re.compile(r".*\S(?= \S)|.*\S(?=\s\S)", re.DOTALL)
"""Ends before a space between words, where a byte-level BPE splits anyway: cutting there changes no
token. Where there is none, before a newline or tab."""


class PrepareReport(NamedTuple):
    """What one run of ``prepare`` read and wrote."""

    num_tokens: int
    """Tokens in the file, including the end-of-text tokens."""
    vocab_size: int
    eot_id: int
    """The id of the end-of-text token, for ``PackedDataset(path, seq_len, eot_id=...)``."""
    summary: str
    """One human-readable line."""


def prepare(
    names: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    python_text: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    sample_mb: float = 16,
    row_len: int | None = None,
    documents: bool = False,
    progress: bool = False,
) -> PrepareReport:
    """Tokenise text files into ``out`` (``.npy``) and save the tokenizer beside it.

    ``names`` are files, folders and patterns (see ``list_sources``); ``python_text`` adds the
    ``.py`` files of the standard library and of torch. Every file is one document, followed by one
    ``<|endoftext|>``; the same characters inside a text are ordinary text. Without ``tokenizer`` a
    byte-level BPE of at most ``vocab_size`` tokens is trained on about ``sample_mb`` MB, taken
    evenly from all files. Ids are uint16 when they fit, else uint32. With ``row_len`` the file is
    2-D, and tokens that do not fill the last row are dropped, with a warning. With ``documents``
    the end-of-text id is recorded beside ``out``, so ``PackedDataset(out, T)`` needs no ``eot_id``;
    not with ``row_len``, as rows then count as documents. The same text gives the same bytes.
    Memory does not grow with the text. If the run fails or is killed, ``out`` is what it was
    before; the tokenizer is renamed into place right after ``out``. A tokenizer that puts a space
    before each text (Llama 2's) does so before each 32 Ki characters.

    Raises:
        OSError: A source cannot be read (found before anything is written, except for errors in
            mid-file), or the disk is full.
        NpyDataError: A source is not text, there is no text, or an option is out of range.
    """
    out, names = Path(out), list(names)
    for is_wrong, message in (
        (out.suffix != ".npy", f"{out}: expected a name that ends in .npy"),
        (not out.parent.is_dir(), f"{out.parent}: no such folder to write {out.name} into"),
        (
            not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY,
            f"vocabulary size {vocab_size}: expected {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}",
        ),
        (
            not 1 <= sample_mb * 1e6 < float("inf"),
            f"sample of {sample_mb} MB: expected at least a byte, 0.000001 MB",
        ),
        (documents and row_len, "documents can't be recorded with row_len: each row counts as one"),
    ):
        if is_wrong:
            raise NpyDataError(message)
    saved_tokenizer = out.with_suffix(".tokenizer.json")
    for name in names:
        if os.path.realpath(name) in map(os.path.realpath, (out, saved_tokenizer)):
            raise NpyDataError(f"{os.fspath(name)}: is both a source and what would be written")
    files = list_sources(names)
    if python_text:
        files += list_sources(python_corpus(), suffix=".py", skip_folders=PYTHON_CORPUS_SKIPS)
    if not files:
        raise NpyDataError("no text to read: no file that was named or found holds any")
    if tokenizer is None:
        bpe = train_tokenizer(files, vocab_size, int(sample_mb * 1e6), progress)
    else:
        bpe = load_tokenizer(tokenizer)
    ids = bpe.get_vocab(with_added_tokens=True)
    if END_OF_TEXT not in ids:
        raise NpyDataError(
            f"{tokenizer}: has no token {END_OF_TEXT}, expected one to end each document: add it "
            "with tokenizers' add_special_tokens, or encode the text yourself and use "
            "npydata.write_tokens"
        )
    largest, nbytes = max(ids.values()), sum(file.nbytes for file in files)
    bar = ProgressBar("encode", nbytes, "B", show=progress)
    encoder = Encoder(bpe, ids[END_OF_TEXT], bar)
    with closing(bar), replacing(saved_tokenizer) as file:
        file.write(bpe.to_str(pretty=True).encode())
        dtype = "uint16" if largest < 1 << 16 else "uint32"
        written = write_tokens(out, encoder.encode(files), dtype=dtype, row_len=row_len)
    if documents:
        record_documents(written, encoder.end)
    fewer = tokenizer is None and largest + 1 < vocab_size
    asked = f" ({vocab_size:,} asked; the text has no more)" if fewer else ""
    summary = (
        f"{printable(out)}: {written.num_tokens:,} tokens "
        f"({dtype}, vocabulary {largest + 1:,}{asked}), "
        f"from {len(files):,} file{'s' * (len(files) != 1)}, {human_bytes(nbytes)}, "
        f"end-of-text id {encoder.end}, "
        f"{nbytes / max(1, written.num_tokens):.2f} bytes/token"
    )
    if encoder.replaced:
        summary += f", {encoder.replaced:,} U+FFFD in place of what is not UTF-8"
    return PrepareReport(written.num_tokens, largest + 1, encoder.end, summary)


# Sources


class Source(NamedTuple):
    """One text file."""

    path: Path
    nbytes: int


def list_sources(
    names: Iterable[str | os.PathLike[str]],
    *,
    suffix: str = "",
    skip_folders: Collection[str] = (),
) -> list[Source]:
    """Return the text files that ``names`` (files, folders, patterns) refer to.

    Names keep their order. A folder is read recursively and sorted by path; hidden entries,
    symbolic links and empty files in it are skipped, and so are files with NUL bytes: a warning
    counts them, unless there is a ``suffix``. What ``prepare`` writes is read only if named itself.
    A file named twice is read once. In folders, only names that end in ``suffix`` count, and
    folders named in ``skip_folders`` are not entered.

    Raises:
        OSError: A name does not exist, or any file or folder cannot be read.
        NpyDataError: A pattern matches nothing, or a file given by name is binary.
    """
    seen = set()
    files, binary = [], []
    for name in names:
        if not os.fspath(name):  # Path("") is the current folder, all of it
            raise NpyDataError("an empty name was given, expected a file, folder or pattern")
        roots = [Path(name)]
        if glob.has_magic(os.fspath(name)) and not os.path.lexists(name):
            roots = [Path(match) for match in sorted(glob.glob(os.fspath(name), recursive=True))]
            if not roots:
                raise NpyDataError(f"{os.fspath(name)}: no file matches this pattern")
        for path in chain(*(walk(r, suffix, skip_folders) if r.is_dir() else [r] for r in roots)):
            is_ours = path.name.endswith(OUTPUTS) and path != Path(name)
            if is_ours or (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device never end
                raise NpyDataError(f"{path}: not a regular file, expected a text file or a folder")
            with open(path, "rb") as file:
                nul_at = file.read(HEAD_BYTES).find(b"\0")
            if nul_at < 0:
                if nbytes := path.stat().st_size:
                    files.append(Source(path, nbytes))
            elif path == Path(name):
                raise NpyDataError(f"{path}: byte {nul_at} is NUL, expected UTF-8 text")
            else:
                binary.append(path)
    if binary and not suffix:
        warn_caller(
            f"left out {len(binary)} file{'s' * (len(binary) > 1)} with NUL bytes, such as "
            f"{binary[0]}: expected UTF-8 text"
        )
    return files


def walk(folder: Path, suffix: str, skip_folders: Collection[str]) -> list[Path]:
    """Return a folder's files, recursively, sorted by path."""

    def fail(error: OSError) -> None:  # os.walk would skip a folder that it can't list
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip_folders]
        for name in names:
            path = Path(parent, name)
            if name[0] != "." and name.endswith(suffix) and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return sorted(found)


def python_corpus() -> list[Path]:
    """Return the folders whose ``.py`` files every user has: the standard library and torch."""
    import torch

    return [Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent]


# The tokenizer


def train_tokenizer(
    files: Sequence[Source], vocab_size: int, budget: int, progress: bool
) -> "Tokenizer":
    """Train a byte-level BPE on about ``budget`` bytes.

    The sample is every n-th span of all files, so each file has a share in proportion to its size.
    """
    tokenizers = import_tokenizers()
    total, span = sum(file.nbytes for file in files), min(SPAN_BYTES, budget)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress and sys.stderr.isatty(),
    )
    places = ((one.path, at) for one in files for at in range(0, one.nbytes, span))
    sample = islice(places, 0, None, -(-total // budget))
    bpe.train_from_iterator((read_span(path, at, span) for path, at in sample), trainer=trainer)
    return as_encoder(bpe)


def read_span(path: Path, at: int, nbytes: int) -> str:
    """Return the text of a part of a file, without characters cut off at its ends."""
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(nbytes).decode("utf-8", "ignore")


def load_tokenizer(path: str | os.PathLike[str]) -> "Tokenizer":
    """Load a ``tokenizer.json``.

    Raises:
        NpyDataError: The file is not a tokenizer.
    """
    tokenizers, data = import_tokenizers(), Path(path).read_bytes()
    try:
        return as_encoder(tokenizers.Tokenizer.from_buffer(data))
    except Exception as error:  # the package raises bare Exception
        raise NpyDataError(
            f"{path}: not a tokenizer.json of the tokenizers package: {error}"
        ) from None


def import_tokenizers() -> Any:
    """Return the package, or raise an error that says what to install."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise NpyDataError("prepare needs the tokenizers package: pip install tokenizers") from None
    return tokenizers


def as_encoder(bpe: "Tokenizer") -> "Tokenizer":
    """Switch off what would drop, add or merge tokens: a token file holds the text, all of it."""
    bpe.encode_special_tokens = True  # "<|endoftext|>" written in a text does not end a document
    bpe.no_truncation()
    bpe.no_padding()
    return bpe


# Encoding


class Encoder:
    """Turns files into ids, a batch of text pieces at a time, and counts each U+FFFD."""

    def __init__(self, bpe: "Tokenizer", end: int, bar: ProgressBar) -> None:
        self.bpe, self.end, self.bar = bpe, end, bar
        self.replaced = 0

    def encode(self, files: Iterable[Source]) -> Iterator[TokenArray]:
        """Yield the ids of all files, the end-of-text id after each."""
        pieces = chain.from_iterable(text_pieces(self.read(file.path)) for file in files)
        while batch := list(islice(pieces, BATCH_PIECES)):
            try:
                texts = [text for text, _ in batch]
                encodings = self.bpe.encode_batch_fast(texts, add_special_tokens=False)
            except Exception as error:  # a vocabulary without an unknown token
                raise NpyDataError(f"the tokenizer cannot encode every text: {error}") from None
            parts = [
                encoding.ids + [self.end] * is_last
                for encoding, (_, is_last) in zip(encodings, batch, strict=True)
            ]
            yield np.fromiter(chain(*parts), np.uint32)

    def read(self, path: Path) -> Iterator[str]:
        """Yield a file's text a block at a time; invalid UTF-8 becomes U+FFFD."""
        with open(path, "rb") as raw, TextIOWrapper(raw, "utf-8", "replace", "") as file:
            read = 0
            while text := file.read(BLOCK_CHARS):
                self.replaced += text.count("\ufffd")
                before, read = read, raw.tell()
                self.bar.update(read - before)
                yield text


def text_pieces(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut a text into pieces of at most ``PIECE_CHARS`` characters, between words if there are any.

    Yields each piece, and whether it is the last. Joined, the pieces are the text; where they are
    cut does not depend on the size of the blocks.
    """
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > PIECE_CHARS:
            words = WHOLE_WORDS.match(rest, 0, PIECE_CHARS + 1)
            cut = words.end() if words else PIECE_CHARS
            yield rest[:cut], False
            rest = rest[cut:]
    yield rest, True
