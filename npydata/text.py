"""Text on its way to a token file: which files, in which order, and where they are cut."""

import codecs
import glob
import importlib.util
import os
import re
import stat
import sysconfig
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from npydata.errors import NpyDataError

HEAD_BYTES = 8 * 1024
"""A NUL byte among this many first bytes marks a file as binary."""

BLOCK_BYTES = 1 << 20
"""Text is read this many bytes at a time, so a file larger than memory is no trouble."""

PIECE_CHARS = 32 * 1024
"""The longest stretch of text the tokenizer sees at once; 2 to 32 Ki are equally fast."""

SPAN_BYTES = 64 * 1024
"""The training sample is taken in spans of this many bytes."""

PYTHON_CORPUS_SKIPS = ("site-packages", "dist-packages")
"""Folders inside the standard library's that hold other people's packages."""


@dataclass(frozen=True, slots=True)
class Source:
    """One text file, which becomes one document."""

    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceList:
    """The files to read, in reading order, and how many others were passed over."""

    files: tuple[Source, ...]
    binary: int
    """Files found in a folder or by a pattern that hold a NUL byte near their start."""
    empty: int
    """Files of 0 bytes: they hold no document."""

    @property
    def nbytes(self) -> int:
        """The bytes of all files together."""
        return sum(source.nbytes for source in self.files)


def list_sources(
    names: Iterable[str | os.PathLike[str]],
    *,
    exclude: Iterable[str | os.PathLike[str]] = (),
    suffix: str = "",
    skip_folders: Collection[str] = (),
) -> SourceList:
    """Return the text files that ``names`` (files, folders, patterns) stand for.

    Names keep their order. A folder is read recursively and sorted by path; hidden entries and
    symbolic links in it are passed over, and so are binary files. A file named twice is read once,
    one in ``exclude`` never. ``suffix`` narrows folders and patterns to names with that ending, and
    folders of a name in ``skip_folders`` are not entered.

    Raises:
        OSError: a name does not exist, or any file or folder cannot be read.
        NpyDataError: a pattern matches nothing, or a file given by name is binary.
    """
    seen = {os.path.realpath(path) for path in exclude}
    files, binary, empty = [], 0, 0
    for path, named in _expand_all(names, suffix, skip_folders):
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        nbytes, nul_at = _look_at(path)
        if nul_at >= 0 and named:
            raise NpyDataError(f"{path}: byte {nul_at} is NUL, expected UTF-8 text")
        if nul_at >= 0:
            binary += 1
        elif nbytes == 0:
            empty += 1
        else:
            files.append(Source(path, nbytes))
    return SourceList(tuple(files), binary, empty)


def python_corpus() -> list[Path]:
    """Return the folders whose ``.py`` files every reader has: the standard library and torch."""
    torch = importlib.util.find_spec("torch")  # finds the folder without importing torch
    if torch is None or torch.origin is None:
        raise NpyDataError("torch: not installed, expected the package whose source text is read")
    return [Path(sysconfig.get_path("stdlib")), Path(torch.origin).parent]


def read_blocks(path: str | os.PathLike[str], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield a file's bytes in order, at most ``block_bytes`` at a time."""
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            yield block


def decode_blocks(blocks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """Decode UTF-8 block by block; yield each text and how many bytes in it were not UTF-8.

    Each such byte becomes one U+FFFD. A character cut by a block's end is put together again.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for block in blocks:
        yield _count_and_replace(decoder.decode(block))
    yield _count_and_replace(decoder.decode(b"", final=True))


def text_pieces(texts: Iterable[str], piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cut a text that arrives in parts into pieces of at most ``piece_chars`` characters.

    Joined, the pieces are the text; where they are cut does not depend on how it arrived.
    """
    rest = ""
    for text in texts:
        rest += text
        start = 0
        while len(rest) - start > piece_chars:
            cut = cut_point(rest, start, start + piece_chars)
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def cut_point(text: str, start: int, limit: int) -> int:
    """Return where to end the piece that begins at ``start``; at most ``limit`` < len(text).

    Best is where a byte-level BPE splits anyway, so that cutting changes no token: after a line
    end, or else before a space, with text on both sides. Then any line end; then any character.
    """
    line_end = _last_between_text(text, "\n", start, limit)
    if line_end >= 0:
        return line_end + 1
    space = _last_between_text(text, " ", start, limit)
    if space >= 0:
        return space
    return text.rfind("\n", start, limit) + 1 or limit


def sample_spans(
    sizes: Sequence[int], budget: int, span: int = SPAN_BYTES
) -> list[tuple[int, int, int]]:
    """Return ``(file, start, length)`` spans of at most ``budget`` bytes, spread evenly.

    The files are laid end to end and spans taken at equal distances, so every file has a share in
    proportion to its size. Everything is taken when it fits the budget.
    """
    total = sum(sizes)
    if total <= budget:
        return [(index, 0, size) for index, size in enumerate(sizes) if size]
    span = min(span, budget)
    count = budget // span
    ends = list(accumulate(sizes))
    spans: list[tuple[int, int, int]] = []
    for k in range(count):
        spans += _split_at_files(k * total // count, span, sizes, ends)
    return spans


def read_span(path: str | os.PathLike[str], start: int, length: int) -> str:
    """Return a span of a file as text, without the broken lines at its ends."""
    with open(path, "rb") as file:
        file.seek(start)
        data = file.read(length)
        cut_short = bool(file.read(1))
    text = data.decode("utf-8", "ignore")
    if start:
        text = text[text.find("\n") + 1 :]
    if cut_short:
        text = text[: text.rfind("\n") + 1] or text
    return text


def _expand_all(
    names: Iterable[str | os.PathLike[str]], suffix: str, skip_folders: Collection[str]
) -> Iterator[tuple[Path, bool]]:
    """Yield every file behind the names, and whether it was given by its own name."""
    for name in names:
        path, pattern = Path(name), os.fspath(name)
        if path.is_dir():
            yield from ((found, False) for found in _walk(path, suffix, skip_folders))
        elif os.path.lexists(path) or not glob.has_magic(pattern):
            yield path, True
        else:
            yield from ((found, False) for found in _match(pattern, suffix, skip_folders))


def _match(pattern: str, suffix: str, skip_folders: Collection[str]) -> Iterator[Path]:
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not matches:
        raise NpyDataError(f"{pattern}: no file matches this pattern")
    for match in matches:
        if match.is_dir():
            yield from _walk(match, suffix, skip_folders)
        elif match.name.endswith(suffix):
            yield match


def _walk(folder: Path, suffix: str, skip_folders: Collection[str]) -> list[Path]:
    """Return a folder's files, recursively, sorted by path."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip_folders]
        for path in (Path(parent, name) for name in names):
            visible = path.name[0] != "." and path.name.endswith(suffix)
            if visible and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return sorted(found)  # part by part, so that a folder's files stay together


def _raise(error: OSError) -> None:
    raise error


def _look_at(path: Path) -> tuple[int, int]:
    """Return a file's size and where its first NUL byte is (-1: not in its head)."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device never end
        raise NpyDataError(f"{path}: not a regular file, expected a text file or a folder")
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, file.read(HEAD_BYTES).find(b"\0")


_ESCAPED = re.compile("[\udc80-\udcff]")  # how the decoder hands on a byte that is not UTF-8


def _count_and_replace(text: str) -> tuple[str, int]:
    return (text, 0) if text.isascii() else _ESCAPED.subn("\ufffd", text)


def _last_between_text(text: str, mark: str, start: int, limit: int) -> int:
    """Return the last ``mark`` in the range that has no white space beside it, or -1."""
    at = text.rfind(mark, start + 1, limit)
    while at >= 0 and (text[at - 1].isspace() or text[at + 1].isspace()):
        at = text.rfind(mark, start + 1, at)
    return at


def _split_at_files(
    start: int, length: int, sizes: Sequence[int], ends: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Turn a span of the files laid end to end into spans of single files."""
    index = bisect_right(ends, start)
    while length > 0 and index < len(sizes):
        begin = start - (ends[index] - sizes[index])
        taken = min(length, sizes[index] - begin)
        if taken:
            yield index, begin, taken
        start, length, index = start + taken, length - taken, index + 1
