"""Checksums of files: what each of them covers, and reads that compare them with what they bring.

They are CRC-32 as zlib has it, and find accidents, not attacks. ISA-L (the extra ``checksums``)
computes the same numbers many times as fast: either verifies what the other has written.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.containers import read_container
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.in_flight import REQUEST_BYTES, in_parallel
from tutorial.kept.reader.parallel_read import Read, distribute, read_together
from tutorial.kept.reader.private_memory import Bytes
from tutorial.kept.system.progress import Bar

PIECE_BYTES = REQUEST_BYTES
"""What one checksum covers at most; 64 MiB in versions before, which is written down."""


def fastest_crc32() -> Callable[[Any, int], int]:
    """Return ISA-L's CRC-32 where it is installed, and else zlib's."""
    with suppress(ImportError):
        from isal.isal_zlib import crc32

        found: Callable[[Any, int], int] = crc32
        return found
    return zlib.crc32


FASTEST_CRC32 = fastest_crc32()
"""Found here: a child forked while a thread that verifies imports it would wait for ever."""


def crc32(content: Any, value: int = 0) -> int:
    """Return the CRC-32 of bytes that follow those with the CRC-32 ``value``."""
    return FASTEST_CRC32(content, value)


class Covered(NamedTuple):
    """A range of a file, and its checksum."""

    begin: int
    end: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of one file."""

    size: int
    """In bytes."""
    crc32: tuple[int, ...]
    """Of each range, in the order of the file."""
    lengths: tuple[int, ...] = ()
    """How long each range is: none has bytes of two tensors. Without them, all are pieces of the
    manifest's ``piece_bytes``, the last one shorter."""

    def ranges(self, piece_bytes: int) -> list[Covered]:
        """Return the file's ranges and their checksums."""
        pieces = [*range(piece_bytes, self.size, piece_bytes), self.size]
        ends = [*accumulate(self.lengths)] or pieces
        begins = [0, *ends[:-1]]
        return [Covered(*one) for one in zip(begins, ends, self.crc32, strict=bool(self.crc32))]


def lengths_up_to(ends: Iterable[int]) -> tuple[int, ...]:
    """Return the lengths of ranges up to each of these ends, cut where the file's pieces end.

    Neighbours then come with one request of whole pages.
    """
    lengths, begin = [], 0
    for end in ends:
        while begin < end:
            stop = min(end, begin - begin % PIECE_BYTES + PIECE_BYTES)
            lengths.append(stop - begin)
            begin = stop
    return tuple(lengths)


def ends_of(extents: Iterable[Extent], size: int) -> list[int]:
    """Return where tensors begin and end in a file of ``size`` bytes, and where that ends."""
    ends = {end for one in extents for end in (one.offset, one.offset + one.nbytes)}
    return sorted(ends | {size})


def crc32_of(content: memoryview, lengths: Iterable[int]) -> Iterator[int]:
    """Yield the checksums of ranges of these lengths, one behind the other, up to the end."""
    at = 0
    for length in lengths:
        if at >= len(content):
            break
        yield crc32(content[at : at + length])
        at += length


@dataclass(frozen=True, slots=True)
class Vouched:
    """A file, and what its manifest says of it."""

    ranges: list[Covered]
    always: int
    """So many bytes are compared whether they are wanted or not: those before its first tensor."""
    extents: Callable[[], Mapping[str, Extent]]
    """Where its tensors lie, asked to say which one is damaged."""


@dataclass(slots=True)
class Comparison:
    """Ranges of a file that are read at once, and where their bytes go."""

    file: OpenFile
    ranges: list[Covered]
    reads: list[Read]
    """Parts of what is to be read; none, if it is only compared."""

    @property
    def nbytes(self) -> int:
        """How much is read."""
        return self.ranges[-1].end - self.ranges[0].begin

    def may_have(self, one: Covered) -> bool:
        """Whether a range lies behind these, and is read with the same request to the disk."""
        follows = self.ranges[-1].end == one.begin
        return follows and one.end - self.ranges[0].begin <= REQUEST_BYTES

    def read(self, buffer: Bytes) -> Bytes:
        """Return the bytes of these ranges; of a long range alone, those of its first request."""
        return self.request(self.ranges[0].begin, buffer)

    def request(self, begin: int, buffer: Bytes) -> Bytes:
        """Return the bytes from ``begin`` on, as far as one request reaches."""
        end = min(begin + REQUEST_BYTES, self.ranges[-1].end)
        return read_together(self.file, begin, end, self.inside(begin, end), buffer)

    def inside(self, begin: int, end: int) -> list[Read]:
        """Return the reads of what lies between two bytes of the file."""
        clipped = (read.clipped(begin, end) for read in self.reads)
        return [part for part in clipped if part is not None]

    def checksums(self, content: Bytes, buffer: Bytes) -> list[int]:
        """Put what was read into its places, and return the checksum of each range."""
        begin, end = self.ranges[0].begin, self.ranges[-1].end
        found = [0] * len(self.ranges)
        while True:
            upto = begin + content.nbytes
            for k, one in enumerate(self.ranges):
                part = content[max(one.begin, begin) - begin : one.end - begin]
                found[k] = crc32(part.data, found[k])
            distribute(content, begin, self.inside(begin, upto))
            if upto == end:
                return found
            begin, content = upto, self.request(upto, buffer)

    def first_difference(self, content: Bytes, buffer: Bytes) -> Covered | None:
        """Compare what was read; return the first range that is not what was written."""
        both = zip(self.ranges, self.checksums(content, buffer), strict=True)
        return next((one for one, found in both if one.crc32 != found), None)


def comparisons(
    file: OpenFile, vouched: Vouched, wanted: Iterable[Read | Extent] = ()
) -> list[Comparison]:
    """Return what is to be read of a file: every range with a byte of its header or of ``wanted``.

    Of an :class:`Extent` nothing is kept: its ranges are only compared.
    """
    made: list[Comparison] = []
    waiting = sorted(wanted, key=lambda one: -one.offset)
    here: list[Read | Extent] = []
    for one in vouched.ranges:
        begun = []
        while waiting and waiting[-1].offset < one.end:
            begun.append(waiting.pop())
        here = [each for each in here + begun if each.offset + size_of(each) > one.begin]
        if not here and one.begin >= vouched.always:
            continue
        if made and made[-1].may_have(one):
            made[-1].ranges.append(one)
            made[-1].reads += reads_of(begun)  # it has the others: they reach into this range
        else:
            made.append(Comparison(file, [one], reads_of(here)))
    return made


def reads_of(wanted: Iterable[Read | Extent]) -> list[Read]:
    """Return what is to be read, and not only compared."""
    return [each for each in wanted if isinstance(each, Read)]


def size_of(wanted: Read | Extent) -> int:
    """Return how many bytes are wanted."""
    return wanted.target.nbytes if isinstance(wanted, Read) else wanted.nbytes


def read_compared(todo: Sequence[tuple[Comparison, Vouched]], bar: Bar) -> None:
    """Carry out reads, and compare what they bring while it is in the processor's cache.

    Raises:
        CheckpointError: The first range that is not what was written, or a file has become shorter.
    """

    def read(one: tuple[Comparison, Vouched], buffer: Bytes) -> Bytes:
        return one[0].read(buffer)

    def compare(one: tuple[Comparison, Vouched], content: Bytes, buffer: Bytes) -> int:
        comparison, vouched = one
        if (differs := comparison.first_difference(content, buffer)) is not None:
            begin, end, _ = differs
            what = what_lies_in(vouched.extents(), begin, end)
            raise CheckpointError(f"{comparison.file.path}: bytes {begin:,} to {end:,} are not "
                                  f"what was written: {what}")  # fmt: skip
        return comparison.nbytes

    with closing(in_parallel(read, compare, todo)) as done:
        for nbytes in done:
            bar.update(nbytes)


def compare_file(file: OpenFile, entry: FileEntry, piece_bytes: int, bar: Bar) -> None:
    """Read a whole file and compare its checksums.

    Raises:
        CheckpointError: The first range that differs, and what lies in it.
    """
    vouched = Vouched(entry.ranges(piece_bytes), file.size, partial(extents_in, file))
    read_compared([(one, vouched) for one in comparisons(file, vouched)], bar)


def checksums_of(file: OpenFile, lengths: tuple[int, ...], bar: Bar) -> tuple[int, ...]:
    """Read a whole file and return the checksums of ranges of these lengths."""
    unknown = FileEntry(file.size, (0,) * len(lengths), lengths)
    todo = comparisons(file, Vouched(unknown.ranges(PIECE_BYTES), file.size, dict))
    found: list[int] = []
    for one in in_parallel(Comparison.read, Comparison.checksums, todo):
        found += one
        bar.update(sum(lengths[len(found) - len(one) : len(found)]))
    return tuple(found)


def extents_in(file: OpenFile) -> Mapping[str, Extent]:
    """Return where the tensors of a file lie, if its header still says so."""
    try:
        return read_container(OpenFile(file.path, file.readahead())).extents
    except CheckpointError:
        return {}


def what_lies_in(extents: Mapping[str, Extent], begin: int, end: int) -> str:
    """Return what a range of a file holds, in words: its header, or some of its tensors."""
    if not extents:
        return "its header" if begin == 0 else "its content"
    names = [key for key, one in extents.items()
             if one.offset < end and begin < one.offset + one.nbytes]  # fmt: skip
    header = ["the header"] if all(begin < one.offset for one in extents.values()) else []
    return ", ".join([*header, *map(repr, names[:3])]) + (", ..." if len(names) > 3 else "")
