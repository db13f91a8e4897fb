"""Many byte ranges of files, read in order with several large requests in flight.

What is in the page cache is copied from there, straight to where it belongs, in larger pieces: by
reading, as a map would take a page fault for every few pages, and each unmapping an interrupt of
the other processors. Any other is read past the cache, where the file system allows that: the
memory that other files have there stays theirs. It goes straight to where it belongs, if the disk
writes there.
"""

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from tutorial.kept.reader.files import SMALL_BYTES, OpenFile
from tutorial.kept.reader.in_flight import IN_FLIGHT, REQUEST_BYTES, in_parallel, request_buffers
from tutorial.kept.reader.private_memory import PAGE, Bytes
from tutorial.kept.system.page_cache import is_all_cached, is_cached, looks_cached
from tutorial.kept.system.progress import Bar
from tutorial.kept.system.wait_group import WaitGroup

COPIED_BYTES = 1 << 24
"""So much is copied at a time of what is in the page cache: of pieces as large as the processor's
cache, it no longer reads the memory that it writes to."""
GAP_BYTES = 1 << 16
"""So many bytes between two ranges are read along, rather than ending a request there."""
NO_DIRECT = {errno.EFAULT, errno.EINVAL, errno.ENOTSUP}
"""The disk can't, or can't write to memory like this: another device's, say."""


@dataclass(slots=True)
class Read:
    """A range of a file, and the memory that it goes to."""

    file: OpenFile
    offset: int
    target: Bytes

    @property
    def end(self) -> int:
        """The byte of the file behind it."""
        return self.offset + self.target.nbytes

    def part(self, begin: int, end: int) -> "Read":
        """Return the read of a part, from one byte of the file to before another."""
        return Read(self.file, begin, self.target[begin - self.offset : end - self.offset])

    def clipped(self, begin: int, end: int) -> "Read | None":
        """Return the read of what lies between two bytes of the file, if that is anything."""
        begin, end = max(begin, self.offset), min(end, self.end)
        return self.part(begin, end) if begin < end else None


def read_all(reads: Iterable[Read], bar: Bar) -> None:
    """Carry out reads; the first that fails ends it.

    Raises:
        CheckpointError: A file has become shorter.
        OSError: A file can't be read.
    """
    copied: list[Read] = []
    others: list[Read] = []
    for part in chain.from_iterable(map(pieces, reads)):
        (copied if is_copied(part) else others).append(part)
    for nbytes in in_parallel(read_request, finish_request, requests(others)):
        bar.update(nbytes)
    copy_all(copied, bar)


def copy_all(reads: Iterable[Read], bar: Bar) -> None:
    """Carry out reads of what is in the page cache: this thread does, and others beside it.

    To have a pool report each to a thread that waits for it would take a tenth longer. The first
    error ends all of it; nothing is written once this has returned or raised.
    """
    if not (portions := list(in_portions(reads))):
        return
    todo = iter(portions)  # that of a list gives each portion to one thread
    group, lock, errors = WaitGroup(), threading.Lock(), list[BaseException]()
    buffers = list(request_buffers(min(IN_FLIGHT, os.cpu_count() or 1, len(portions))))

    def copy(portion: list[Read], buffer: Bytes) -> None:
        nbytes = sum(finish_request([read], read_request([read], buffer)) for read in portion)
        with lock:
            bar.update(nbytes)

    def help() -> None:
        buffer = buffers.pop()
        while True:
            with group.running() as allowed:
                portion = next(todo, None) if allowed else None
                if portion is None:
                    return
                try:
                    copy(portion, buffer)
                except BaseException as error:  # raised by the thread that is helped
                    errors.append(error)
                    group.stopped = True

    try:
        own = buffers.pop()
        helpers = group.start(help, len(buffers), "npydata-copy")
        for portion in todo:
            copy(portion, own)
            if errors:
                break
        group.stop()
    except BaseException:
        group.stop()
        raise
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def requests(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield reads by file, large ones cut, as :func:`runs`."""
    parts: dict[OpenFile, list[Read]] = {}
    for read in reads:
        parts.setdefault(read.file, []).extend(cut(read))
    for its in parts.values():
        yield from runs(its)


def cut(read: Read) -> Iterator[Read]:
    """Yield the parts of a read, cut where the file's requests end: neighbours come together."""
    begin = read.offset
    while begin < read.end:
        end = min(read.end, begin - begin % REQUEST_BYTES + REQUEST_BYTES)
        yield read.part(begin, end)
        begin = end


def pieces(read: Read) -> Iterator[Read]:
    """Yield the parts of a read, cut where the file's pieces of ``COPIED_BYTES`` end."""
    begin = read.offset
    while begin < read.end:
        end = min(read.end, begin - begin % COPIED_BYTES + COPIED_BYTES)
        yield read.part(begin, end)
        begin = end


def in_portions(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield reads, some ``COPIED_BYTES`` at a time: threads then seldom meet in a huge page."""
    some: list[Read] = []
    nbytes = 0
    for read in reads:
        some.append(read)
        nbytes += read.target.nbytes
        if nbytes >= COPIED_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def is_copied(read: Read) -> bool:
    """Whether a read seems to be in the page cache, and is not one of a few bytes."""
    if read.target.nbytes < SMALL_BYTES:
        return False
    descriptor = read.file.no_readahead()
    return looks_cached(descriptor.number, read.offset, read.target.nbytes, is_all_cached)


def runs(reads: Iterable[Read]) -> list[list[Read]]:
    """Return reads of one file in its order, neighbours together: each list is one request.

    A read joins the list before if the gap between them is at most ``GAP_BYTES``, and the request
    stays within ``REQUEST_BYTES``. They may overlap. Built in ``notebooks/06_lazy_checkpoint``.
    """
    found: list[list[Read]] = []
    for read in sorted(reads, key=lambda one: one.offset):
        run = found[-1] if found else [read]
        gap, reach = read.offset - run[-1].end, read.end - run[0].offset
        if found and gap <= GAP_BYTES and reach <= REQUEST_BYTES:
            run.append(read)
        else:
            found.append([read])
    return found


def read_request(request: list[Read], buffer: Bytes) -> Bytes | None:
    """Return the bytes that ranges lie in, read with one request to the disk.

    ``None`` if they are in their places: from the page cache they are copied at once, and what has
    left that since it was cut takes several requests.
    """
    file, begin, end = request[0].file, request[0].offset, max(read.end for read in request)
    file.require_inside(begin, end - begin)
    in_memory = is_in_memory(file, begin, end)
    if in_memory and len(request) == 1:
        file.read_into(request[0].target.data, begin)
        return None
    if end - begin <= REQUEST_BYTES:
        return read_together(file, begin, end, request, buffer, in_memory=in_memory)
    for part in cut(request[0]):
        finish_request([part], read_request([part], buffer))
    return None


def finish_request(request: list[Read], content: Bytes | None, _: object = None) -> int:
    """Put what was brought into its places; return how many bytes."""
    if content is not None:
        distribute(content, request[0].offset, request)
    return sum(read.target.nbytes for read in request)


def read_together(
    file: OpenFile, begin: int, end: int, reads: list[Read], buffer: Bytes, *,
    in_memory: bool | None = None,
) -> Bytes:  # fmt: skip
    """Return a range of a file: in the buffer, or in the one target that has all of it.

    Nobody else changes it there. Whether it is in the page cache is asked once at most: to ask may
    bring a page.
    """
    if in_memory is None:
        in_memory = is_in_memory(file, begin, end)
    if len(reads) == 1 and is_whole(reads[0], begin, end):
        only = reads[0]
        if in_memory:
            file.read_into(only.target.data, begin)
            return only.target
        if read_in_place(only, buffer):
            return only.target
    content = buffer[begin - page_begin(begin) :][: end - begin]
    pages = [buffer[: page_end(end) - page_begin(begin)]]
    if in_memory or not read_direct(file, pages, begin, end):
        file.read_into(content.data, begin)
    return content


def is_whole(read: Read, begin: int, end: int) -> bool:
    """Whether a read is one of exactly these bytes."""
    return (read.offset, read.end) == (begin, end)


def distribute(content: Bytes, begin: int, reads: list[Read]) -> None:
    """Put the bytes of a file from ``begin`` on into their places, if they are not there."""
    for read in reads:
        if not np.may_share_memory(content, read.target):
            read.target[:] = content[read.offset - begin : read.end - begin]


def is_in_memory(file: OpenFile, begin: int, end: int) -> bool:
    """Whether a range is in the page cache: one page may be there by chance."""
    descriptor = file.no_readahead()
    return is_cached(descriptor.number, begin, end - begin)


def read_in_place(read: Read, buffer: Bytes) -> bool:
    """Read straight into memory past the cache; say whether that can be done.

    The pages of the file at the range's ends hold other bytes, too: they come by way of the buffer,
    with the same request. NVMe disks write to memory at multiples of 4 bytes (the specification's
    dwords); of others, many do at those of a block only.
    """
    file, begin, end, target = read.file, read.offset, read.end, read.target
    first, last = page_end(begin), page_begin(end)
    if first >= last or (target.ctypes.data - begin) % file.direct_alignment():
        return False
    head, tail = buffer[: first - page_begin(begin)], buffer[PAGE : PAGE + page_end(end) - last]
    middle = target[first - begin : last - begin]
    if not read_direct(file, [head, middle, tail], begin, end):
        return False
    target[: first - begin] = head[head.nbytes - (first - begin) :]
    target[last - begin :] = tail[: end - last]
    return True


def read_direct(file: OpenFile, memory: list[Bytes], begin: int, end: int) -> bool:
    """Read the pages that a range lies in past the cache; say whether that can be done."""
    descriptor, offset = file.direct(), page_begin(begin)
    while descriptor is not None and offset < end:
        try:
            count = os.preadv(descriptor.number, [part.data for part in memory], offset)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            return False
        if offset + count < end and (count % PAGE or not count):  # the file ends here
            raise file.cut_off(offset + count)
        memory, offset = behind(memory, count), offset + count
    return descriptor is not None


def behind(memory: list[Bytes], count: int) -> list[Bytes]:
    """Return what is left of memory when its first bytes are filled."""
    left = []
    for part in memory:
        left.append(part[count:])
        count = max(0, count - part.nbytes)
    return left


def page_begin(offset: int) -> int:
    """Return where the page of a byte begins."""
    return offset - offset % PAGE


def page_end(offset: int) -> int:
    """Return where the page of the byte before ends."""
    return page_begin(offset + PAGE - 1)
