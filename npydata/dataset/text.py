"""Text on its way to a token file: which files, in which order, and where they are cut."""

import glob
import importlib.util
import os
import stat
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from npydata.errors import NpyDataError

HEAD_BYTES = 8 * 1024
"""A NUL byte among this many first bytes marks a file as binary."""

BLOCK_CHARS = 1 << 20
"""Text is read this many characters at a time: a file larger than memory is no trouble."""

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

    Names keep their order. A folder is read recursively and sorted by path; hidden entries,
    symbolic links, empty and binary files in it are passed over. A file named twice is read once,
    one in ``exclude`` never. Of folders and patterns only names that end in ``suffix``
    count, and folders of a name in ``skip_folders`` are not entered.

    Raises:
        OSError: a name does not exist, or any file or folder cannot be read.
        NpyDataError: a pattern matches nothing, or a file given by name is binary.
    """
    seen = {os.path.realpath(path) for path in exclude}
    files, binary = [], 0
    for name in names:
        for path in expand(name, suffix, skip_folders):
            real = os.path.realpath(path)
            if real in seen:
                continue
            seen.add(real)
            nbytes, nul_at = look_at(path)
            if nul_at >= 0 and path == Path(name):
                raise NpyDataError(f"{path}: byte {nul_at} is NUL, expected UTF-8 text")
            if nul_at >= 0:
                binary += 1
            elif nbytes:
                files.append(Source(path, nbytes))
    return SourceList(tuple(files), binary)


def python_corpus() -> list[Path]:
    """Return the folders whose ``.py`` files every reader has: the standard library and torch."""
    torch = importlib.util.find_spec("torch")  # finds the folder without importing torch
    if torch is None or torch.origin is None:
        raise NpyDataError("torch: not installed, expected the package whose source text is read")
    return [Path(sysconfig.get_path("stdlib")), Path(torch.origin).parent]


def read_text(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a file's text a block at a time; each fault in its UTF-8 becomes U+FFFD."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while block := file.read(BLOCK_CHARS):
            yield block


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that arrives in parts, without line ends; blank ones are left out.

    A line ends at a line feed, with or without a carriage return before it.
    """
    rest: list[str] = []
    for text in texts:
        *whole, last = text.split("\n")
        for line in whole:
            found, rest = "".join([*rest, line]).removesuffix("\r"), []
            if found.strip():
                yield found
        rest.append(last)
    if (found := "".join(rest).removesuffix("\r")).strip():
        yield found


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
    line_end = last_between_text(text, "\n", start, limit)
    if line_end >= 0:
        return line_end + 1
    space = last_between_text(text, " ", start, limit)
    if space >= 0:
        return space
    return text.rfind("\n", start, limit) + 1 or limit


def sample_text(sources: Sequence[Source], budget: int) -> tuple[int, Iterator[str]]:
    """Return about ``budget`` bytes of text as a number of spans, and the spans.

    They are every so many-th of all files' spans, so every file has a share in proportion to its
    size. Everything is taken if it fits the budget.
    """
    total = sum(source.nbytes for source in sources)
    span = min(SPAN_BYTES, budget)
    places = ((one.path, at) for one in sources for at in range(0, one.nbytes, span))
    taken = list(islice(places, 0, None, -(-total // budget)))
    return len(taken), (read_span(path, at, span) for path, at in taken)


def read_span(path: Path, at: int, nbytes: int) -> str:
    """Return the text of a part of a file, without characters that its ends cut."""
    with open(path, "rb") as file:
        file.seek(at)
        return file.read(nbytes).decode("utf-8", "ignore")


def expand(
    name: str | os.PathLike[str], suffix: str, skip_folders: Collection[str]
) -> Iterator[Path]:
    """Yield the files that a name stands for: its own, a folder's, or those a pattern matches."""
    path, pattern = Path(name), os.fspath(name)
    if path.is_dir():
        yield from walk(path, suffix, skip_folders)
    elif os.path.lexists(path) or not glob.has_magic(pattern):
        yield path
    else:
        matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise NpyDataError(f"{pattern}: no file matches this pattern")
        for match in map(Path, matches):
            if match.is_dir():
                yield from walk(match, suffix, skip_folders)
            elif match.name.endswith(suffix):
                yield match


def walk(folder: Path, suffix: str, skip_folders: Collection[str]) -> list[Path]:
    """Return a folder's files, recursively, sorted by path."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip_folders]
        for path in (Path(parent, name) for name in names):
            visible = path.name[0] != "." and path.name.endswith(suffix)
            if visible and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return sorted(found)  # part by part, so that a folder's files stay together


def raise_error(error: OSError) -> None:
    """Let a folder that cannot be listed be an error; ``os.walk`` would pass it over."""
    raise error


def look_at(path: Path) -> tuple[int, int]:
    """Return a file's size and where its first NUL byte is (-1: not in its head)."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, a device never end
        raise NpyDataError(f"{path}: not a regular file, expected a text file or a folder")
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, file.read(HEAD_BYTES).find(b"\0")


def last_between_text(text: str, mark: str, start: int, limit: int) -> int:
    """Return the last ``mark`` in the range that has no white space beside it, or -1."""
    at = text.rfind(mark, start + 1, limit)
    while at >= 0 and (text[at - 1].isspace() or text[at + 1].isspace()):
        at = text.rfind(mark, start + 1, at)
    return at
