"""The compressed records of a zip file, each unpacked when it is first read.

They go into a temporary file without a name (in ``TMPDIR``), of which nobody else knows: so they
are mapped, sliced and copied as what lies in the checkpoint itself.
"""

import os
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.files import Descriptor, OpenFile
from tutorial.kept.reader.private_memory import PAGE
from tutorial.kept.system.fork import lock_of

CHUNK_BYTES = 1 << 20
MAX_GROWTH = 128
"""How many times larger than the file what is unpacked of it may be."""


@dataclass(slots=True)
class Packed:
    """One compressed record."""

    extent: Extent
    """Where its bytes lie in the zip file."""
    begin: int
    """Where they are unpacked to."""
    nbytes: int
    checksum: int
    done: bool = False


class UnpackedFile(OpenFile):
    """A temporary file with the content of compressed records; they are added before any is read.

    A range of it is unpacked when it is asked for, by whoever is first.
    """

    in_checkpoint = False

    def __init__(self, source: OpenFile) -> None:
        self.path, self.size = source.path, 0
        self._source, self._packed = source, list[Packed]()
        self._no_readahead = self._direct = self._map = None
        self._no_maps = None
        self._out: IO[bytes] | None = None
        self._lock = lock_of(self)

    def add(self, extent: Extent, nbytes: int, checksum: int) -> Extent:
        """Return where a record will lie: at the beginning of a page."""
        begin = -(-self.size // PAGE) * PAGE
        self.size = begin + nbytes
        if self.size > MAX_GROWTH * self._source.size + PAGE * (len(self._packed) + 1):
            raise CheckpointError(
                f"its compressed records would take {self.size:,} bytes, which is more than "
                f"{MAX_GROWTH} times the file: unpack it and zip it without compression (zip -0)"
            )
        self._packed.append(Packed(extent, begin, nbytes, checksum))
        return Extent(self, begin, nbytes)

    def require_inside(self, offset: int, nbytes: int) -> None:
        """Refuse a range that is not in the file; unpack the records that it reaches."""
        super().require_inside(offset, nbytes)
        at = max(0, bisect_right(self._packed, offset, key=lambda packed: packed.begin) - 1)
        while at < len(self._packed) and self._packed[at].begin < offset + nbytes:
            with self._lock:
                if not self._packed[at].done:
                    self._unpack(self._packed[at])
            at += 1

    def require_unchanged(self) -> None:
        """Refuse a checkpoint that was written to since it was opened."""
        self._source.require_unchanged()

    def readahead(self) -> Descriptor:
        """Return the descriptor of the temporary file, which there is from now on."""
        self._source.readahead()  # says so if the checkpoint is closed
        with self._lock:
            if self._out is None:
                out = tempfile.TemporaryFile()  # noqa: SIM115
                out.truncate(self.size)
                descriptor = Descriptor.of(out.fileno())
                if self._out is None:  # else a signal's handler made one meanwhile
                    self._out, self._readahead = out, descriptor
        return super().readahead()

    def _unpack(self, packed: Packed) -> None:
        out, at, checksum = self.readahead(), 0, 0
        for chunk in inflated(packed.extent, packed.nbytes):
            checksum = zlib.crc32(chunk, checksum)
            at += os.pwrite(out.number, chunk, packed.begin + at)
        if at != packed.nbytes or checksum != packed.checksum:
            raise CheckpointError(
                f"a compressed record has {at:,} bytes and checksum {checksum:08x}, expected "
                f"{packed.nbytes:,} and {packed.checksum:08x}"
            )
        packed.done = True


def inflated(extent: Extent, most: int) -> Iterator[bytes]:
    """Yield what a deflated record holds; one byte too many ends it, as does one behind its end."""
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    for begin in range(0, extent.nbytes, CHUNK_BYTES):
        part = extent.part(begin, min(CHUNK_BYTES, extent.nbytes - begin))
        left = part.file.read(part.offset, part.nbytes)
        chunk = b""
        while (left or len(chunk) == CHUNK_BYTES) and not machine.eof:  # full: it may hold more
            try:
                chunk = machine.decompress(left, CHUNK_BYTES)
            except zlib.error as error:
                raise CheckpointError(f"a compressed record is damaged: {error}") from None
            left, most = machine.unconsumed_tail, most - len(chunk)
            if most < 0:
                raise CheckpointError("a compressed record is longer than the file says")
            yield chunk
        if machine.eof and (machine.unused_data or part.offset + part.nbytes < end_of(extent)):
            raise CheckpointError("bytes follow the end of a compressed record")
    if not machine.eof:
        raise CheckpointError("a compressed record is cut off")


def end_of(extent: Extent) -> int:
    """Return the byte behind some bytes."""
    return extent.offset + extent.nbytes
