"""From text to a token file: train or load a byte-level BPE, encode, write all or nothing."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npydata.dataset.documents import index_path, indexed_ends
from npydata.dataset.text import (
    PIECE_CHARS,
    PYTHON_CORPUS_SKIPS,
    Source,
    SourceList,
    lines_of,
    list_sources,
    python_corpus,
    read_text,
    sample_text,
    text_pieces,
)
from npydata.dataset.token_file import write_tokens
from npydata.errors import NpyDataError
from npydata.system.atomic import replacing
from npydata.system.progress import Bar, human_bytes, human_rate, printable, progress_bar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|begin_of_text|>"
DOCUMENTS = ("file", "line")
"""What may be a document; of lines those with text."""
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-text token
LARGEST_VOCABULARY = 1 << 24  # the trainer reserves memory for it; the largest in use are 2**18
BATCH_CHARS = 1 << 20
"""Characters encoded per call: work for all cores, little to hold; 4 Mi is no faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What one run of ``prepare`` read and wrote."""

    path: Path
    tokenizer_path: Path
    files: int
    documents: int
    """Files, or lines: each is followed by one end-of-text token."""
    binary_files: int
    """Files passed over because they hold a NUL byte in their first 8 KiB."""
    nbytes: int
    """Bytes of text read."""
    num_tokens: int
    """Tokens in the file, the end-of-text tokens among them."""
    dropped_tokens: int
    """Tokens at the end that did not fill a row (only with ``row_len``)."""
    vocab_size: int
    dtype: str
    eot_id: int
    """The id of the end-of-text token, for ``PackedDataset(path, seq_len, eot_id=...)``."""
    replaced: int
    """U+FFFD in the text, which stand for what was not UTF-8."""
    train_seconds: float
    encode_seconds: float

    def __str__(self) -> str:
        ids = f"{self.dtype}, vocabulary {self.vocab_size:,}"
        parts = [
            f"{printable(self.path)}: {self.num_tokens:,} tokens ({ids})",
            f"from {self.files:,} file{'s' * (self.files != 1)}, {human_bytes(self.nbytes)}",
            *[f"{self.documents:,} documents"] * (self.documents != self.files),
            f"end-of-text id {self.eot_id}",
            f"{self.nbytes / max(1, self.num_tokens):.2f} bytes/token",
            human_rate(self.num_tokens / max(self.encode_seconds, 1e-9), "tok"),
        ]
        if self.replaced:
            parts.append(f"{self.replaced:,} U+FFFD in place of what is not UTF-8")
        if self.binary_files:
            parts.append(f"{self.binary_files:,} binary files passed over")
        if self.dropped_tokens:
            parts.append(f"{self.dropped_tokens:,} tokens dropped that did not fill a row")
        return ", ".join(parts)


def prepare(
    names: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    python_text: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    sample_mb: float = 16,
    row_len: int | None = None,
    documents: str | None = None,
    begin: bool = False,
    progress: bool = False,
) -> PrepareReport:
    """Tokenise text files into ``out`` (``.npy``) and save the tokenizer beside it.

    ``names`` are files, folders and patterns (see ``list_sources``); ``python_text`` adds the
    ``.py`` files of the standard library and of torch. Every file is one document, followed by one
    ``<|endoftext|>``; the same characters inside a text are ordinary text. Without ``tokenizer`` a
    byte-level BPE of at most ``vocab_size`` tokens is trained on about ``sample_mb`` MB, taken
    evenly from all files. Ids are uint16 when they fit, else uint32. With ``row_len`` the file is
    2-D, and tokens that do not fill the last row are dropped. With ``documents`` an index says
    where they end: ``PackedDataset(out, T)`` finds it, and needs no ``eot_id`` (but where
    ``row_len`` makes rows, which are documents otherwise); ``"line"`` makes every line with text a
    document, without its line end. With ``begin`` a ``<|begin_of_text|>`` is put before each
    document.

    The same text gives the same bytes. Memory does not grow with the text. When the run fails or is
    killed, ``out`` is what it was before; the tokenizer follows ``out`` by one rename.

    Raises:
        OSError: a source cannot be read (found out before anything is written, but for errors that
            show up in mid-file), or the disk is full.
        NpyDataError: a source is not text, there is no text, or an option is out of range.
    """
    out = Path(out)
    _check_options(out, vocab_size, sample_mb, row_len, documents)
    saved_tokenizer = out.with_suffix(".tokenizer.json")
    sources = _sources(names, python_text, out, saved_tokenizer)
    started = time.perf_counter()
    if tokenizer is None:
        special = [END_OF_TEXT, *[BEGIN_OF_TEXT] * begin]
        bpe = train_tokenizer(sources.files, vocab_size, int(sample_mb * 1e6), progress=progress,
                              special=special)  # fmt: skip
    else:
        bpe = load_tokenizer(tokenizer)
    trained = time.perf_counter()
    marks = _Marks(_id_of(bpe, END_OF_TEXT), _id_of(bpe, BEGIN_OF_TEXT) if begin else None)
    tally = _Tally(row_len, by_line=documents == "line")
    bar = progress_bar("encode", sources.nbytes, "B", show=progress)
    with closing(bar), replacing(saved_tokenizer) as file:
        file.write(bpe.to_str(pretty=True).encode())
        chunks = tally.whole_rows(_encode(bpe, sources.files, marks, tally, bar))
        written = write_tokens(out, chunks, dtype=_dtype(bpe), row_len=row_len)
    if documents is not None:
        indexed_ends(written, marks.end)
    return PrepareReport(
        path=out,
        tokenizer_path=saved_tokenizer,
        files=len(sources.files),
        documents=tally.documents,
        binary_files=sources.binary,
        nbytes=sources.nbytes,
        num_tokens=written.num_tokens,
        dropped_tokens=tally.num_tokens - written.num_tokens,
        vocab_size=_id_bound(bpe),
        dtype=str(written.dtype),
        eot_id=marks.end,
        replaced=tally.replaced,
        train_seconds=trained - started,
        encode_seconds=time.perf_counter() - trained,
    )


def train_tokenizer(
    sources: Sequence[Source],
    vocab_size: int,
    sample_bytes: int,
    *,
    progress: bool = False,
    special: Sequence[str] = (END_OF_TEXT,),
) -> "Tokenizer":
    """Train a byte-level BPE on an even sample of the sources; ``special`` are its first ids."""
    tokenizers = _import_tokenizers()
    if progress:
        size = human_bytes(min(sample_bytes, sum(source.nbytes for source in sources)))
        print(f"training a byte-level BPE of {vocab_size:,} tokens on {size}", file=sys.stderr)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress and sys.stderr.isatty(),
    )
    spans, text = sample_text(sources, sample_bytes)
    bpe.train_from_iterator(text, trainer=trainer, length=spans)
    return _as_encoder(bpe)


def load_tokenizer(path: str | os.PathLike[str]) -> "Tokenizer":
    """Load a ``tokenizer.json`` that has an end-of-text token.

    Raises:
        NpyDataError: the file is not a tokenizer, or has no ``<|endoftext|>``.
    """
    tokenizers = _import_tokenizers()
    data = Path(path).read_bytes()
    try:
        bpe = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises bare Exception
        raise NpyDataError(
            f"{path}: not a tokenizer.json of the tokenizers package: {_folded(error)}"
        ) from None
    if bpe.token_to_id(END_OF_TEXT) is None:
        raise NpyDataError(f"{path}: has no token {END_OF_TEXT}, expected one to end each document")
    return _as_encoder(bpe)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise NpyDataError(
            "prepare needs the tokenizers package: pip install 'npydata[prepare]'"
        ) from None
    return tokenizers


def _as_encoder(bpe: "Tokenizer") -> "Tokenizer":
    """Switch off what would drop, add or merge tokens: a token file holds the text, all of it."""
    bpe.encode_special_tokens = True  # "<|endoftext|>" written in a text does not end a document
    bpe.no_truncation()
    bpe.no_padding()
    return bpe


def _check_options(
    out: Path, vocab_size: int, sample_mb: float, row_len: int | None, documents: str | None
) -> None:
    if documents is not None and documents not in DOCUMENTS:
        raise NpyDataError(f"documents={documents!r}, expected {' or '.join(DOCUMENTS)}")
    if out.suffix != ".npy":
        raise NpyDataError(
            f"{out}: a token file's name ends in .npy, found {out.suffix or 'none'!r}"
        )
    if not out.parent.is_dir():
        raise NpyDataError(f"{out.parent}: no such folder to write {out.name} into")
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise NpyDataError(
            f"vocabulary size {vocab_size}: expected {SMALLEST_VOCABULARY:,} to "
            f"{LARGEST_VOCABULARY:,}"
        )
    if not 1 <= sample_mb * 1e6 < float("inf"):
        raise NpyDataError(f"sample of {sample_mb} MB: expected at least a byte, 0.000001 MB")
    if row_len is not None and row_len < 1:
        raise NpyDataError(f"row length {row_len}: expected 1 or more tokens")


def _sources(
    names: Iterable[str | os.PathLike[str]], python_text: bool, out: Path, saved_tokenizer: Path
) -> SourceList:
    names = list(names)
    for name in names:
        if not os.fspath(name):  # Path("") is the current folder, all of it
            raise NpyDataError("an empty name was given, expected a file, folder or pattern")
        if os.path.realpath(name) in map(os.path.realpath, (out, saved_tokenizer)):
            raise NpyDataError(f"{os.fspath(name)}: is both a source and what would be written")
    found = list_sources(names, exclude=(out, saved_tokenizer, index_path(out)))
    if python_text:
        code = list_sources(python_corpus(), suffix=".py", skip_folders=PYTHON_CORPUS_SKIPS)
        found = SourceList(found.files + code.files, found.binary + code.binary)
    if not found.files:
        raise NpyDataError(
            f"no text to read: {found.binary} binary files, and none that holds text"
        )
    return found


@dataclass(slots=True)
class _Tally:
    """Counts what passes by while the text streams from the files into the token file."""

    row_len: int | None
    by_line: bool
    num_tokens: int = 0
    documents: int = 0
    replaced: int = 0
    started: float = field(default_factory=time.perf_counter)

    def read(self, source: Source, bar: Bar) -> Iterator[str]:
        for text in read_text(source.path):
            self.replaced += text.count("\ufffd")
            bar.update(len(text.encode()))
            yield text

    def texts(self, source: Source, bar: Bar) -> Iterator[Iterable[str]]:
        """Yield the documents of a file, each as it arrives."""
        if not self.by_line:
            self.documents += 1
            yield self.read(source, bar)
            return
        for line in lines_of(self.read(source, bar)):
            self.documents += 1
            yield [line]

    def whole_rows(self, chunks: Iterable[NDArray[np.uint32]]) -> Iterator[NDArray[np.uint32]]:
        """Pass the chunks on in whole rows; what is left at the end fills none and is dropped."""
        row_len = self.row_len or 1
        rest = np.empty(0, np.uint32)
        for chunk in chunks:
            self.num_tokens += len(chunk)
            chunk = np.concatenate([rest, chunk])
            whole = len(chunk) // row_len * row_len
            yield chunk[:whole]
            rest = chunk[whole:]
        if self.num_tokens < row_len:
            raise NpyDataError(f"{self.num_tokens} tokens of text do not fill a row of {row_len}")


@dataclass(frozen=True, slots=True)
class _Marks:
    """The tokens around a document."""

    end: int
    begin: int | None


def _encode(
    bpe: "Tokenizer", sources: Sequence[Source], marks: _Marks, tally: _Tally, bar: Bar
) -> Iterator[NDArray[np.uint32]]:
    """Yield the ids of all documents, a batch of pieces at a time."""
    for batch in _batches(_pieces(sources, marks, tally, bar)):
        yield _encode_batch(bpe, batch)
        rate = tally.num_tokens / (time.perf_counter() - tally.started)
        bar.set_postfix_str(human_rate(rate, "tok"), refresh=False)


def _pieces(
    sources: Sequence[Source], marks: _Marks, tally: _Tally, bar: Bar
) -> Iterator[str | int]:
    """Yield every document in pieces, and the tokens around it."""
    for source in sources:
        for text in tally.texts(source, bar):
            if marks.begin is not None:
                yield marks.begin
            yield from text_pieces(text, PIECE_CHARS)
            yield marks.end


def _batches(pieces: Iterable[str | int]) -> Iterator[list[str | int]]:
    batch: list[str | int] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece) if isinstance(piece, str) else 1
        if held >= BATCH_CHARS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _encode_batch(bpe: "Tokenizer", batch: Sequence[str | int]) -> NDArray[np.uint32]:
    texts = [piece for piece in batch if isinstance(piece, str)]
    encodings = iter(_encodings(bpe, texts))
    parts = [
        np.array(next(encodings).ids if isinstance(piece, str) else [piece], np.uint32)
        for piece in batch
    ]
    return np.concatenate(parts)


def _id_of(bpe: "Tokenizer", token: str) -> int:
    ids = bpe.get_vocab(with_added_tokens=True)
    if token not in ids:
        raise NpyDataError(f"the tokenizer has no token {token}, expected one for each document")
    return ids[token]


def _encodings(bpe: "Tokenizer", texts: Sequence[str]) -> Any:
    try:
        return bpe.encode_batch_fast(list(texts), add_special_tokens=False)
    except Exception as error:  # again a bare one, of a vocabulary without a token for the unknown
        raise NpyDataError(f"the tokenizer cannot encode every text: {_folded(error)}") from None


def _folded(error: Exception) -> str:
    return " ".join(str(error).split())


def _id_bound(bpe: "Tokenizer") -> int:
    """One more than the largest id: a loaded tokenizer's ids may have gaps."""
    return max(bpe.get_vocab(with_added_tokens=True).values()) + 1


def _dtype(bpe: "Tokenizer") -> np.dtype[Any]:
    return np.dtype("<u2" if _id_bound(bpe) <= 1 << 16 else "<u4")
