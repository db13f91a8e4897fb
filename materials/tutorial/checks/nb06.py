"""What lesson 06 lets the learner build, and the wrong answers that people give."""

import struct
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

import numpy as np
import torch

from npydata.errors import CheckpointError
from tutorial.building import Build, ChangedInPlaceError
from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.containers.legacy import require_count, require_end, scan_storages
from tutorial.kept.reader.containers.safetensors import check_no_gaps
from tutorial.kept.reader.containers.zip import LOCAL, payload_begin
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.parallel_read import GAP_BYTES, REQUEST_BYTES, Read, runs
from tutorial.kept.reader.stored import Storage
from tutorial.kept.reader.strides import byte_span, element_span
from tutorial.kept.reader.tensors import view
from tutorial.promised.reader import FILE_CARDS as CARDS  # noqa: F401
from tutorial.promised.reader import FILE_PROMISES as PROMISES  # noqa: F401

PART = "reader"


# Where an entry's bytes begin


def header_of(name, extra):
    return LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, name, extra)


def begins_as(header, at, name=(26, 28), extra=(28, 30), order="little", fixed=30):
    parts = (int.from_bytes(header[slice(*place)], order) for place in (name, extra))
    return at + fixed + sum(parts)


PAYLOAD_BEGIN = Build(
    name="payload_begin",
    reference=payload_begin,
    cases=[
        (header_of(name, extra), at)
        for name, extra, at in [(4, 0, 0), (12, 22, 64), (300, 5, 1000), (7, 513, 2**33)]
    ],
    show=lambda case: (
        f"payload_begin(header, {case[1]})  # a name of {LOCAL.unpack(case[0])[-2]} bytes, "
        f"an extra field of {LOCAL.unpack(case[0])[-1]}"
    ),
    wrong={
        "You forget the extra field: the padding is in it.": partial(begins_as, extra=(0, 0)),
        "You forget the name, which lies behind the fixed part.": partial(begins_as, name=(0, 0)),
        "The low byte comes first: little-endian.": partial(begins_as, order="big"),
        "You count from the header's beginning, not from the file's.": (
            lambda header, at: begins_as(header, 0)
        ),
        "You round up to 64: only torch pads so, and the padding is in the extra field.": (
            lambda header, at: -(-begins_as(header, at, extra=(0, 0)) // 64) * 64
        ),
        "The fixed part itself has 30 bytes.": partial(begins_as, fixed=0),
        "You count the fixed part twice: it has 30 bytes, and `header` is it.": partial(
            begins_as, fixed=60
        ),
        "Two lengths stand there, side by side; you read one number of four bytes.": partial(
            begins_as, name=(26, 30), extra=(0, 0)
        ),
        "One byte counts to 255; a length has two.": partial(
            begins_as, name=(26, 27), extra=(28, 29)
        ),
        "The second byte of a length counts 256s: two bytes are no sum.": (
            lambda header, at: at + 30 + sum(header[26:30])
        ),
        "`header` is the header alone: its byte 26 is there, wherever it lies in the file.": (
            lambda header, at: begins_as(header, at, (at + 26, at + 28), (at + 28, at + 30))
        ),
    },
)


# A tensor over bytes


def view_seen(answer, numbers, dtype, seen):
    """A tensor over memory, and whether it is that memory."""
    memory = np.frombuffer(np.array(numbers, np.int32).tobytes(), np.uint8).copy()
    made = answer(memory, dtype, seen)
    kind = type(made).__name__
    if not isinstance(made, torch.Tensor):
        return {"it is": kind}
    values = made.tolist()
    if made.numel():
        made.flatten()[0] if made.is_contiguous() else None
        first = seen[2] * dtype.itemsize
        memory[first] ^= 1
    changed = made.numel() and made.tolist() != values
    return {"it is": kind, "values": values, "dtype": str(made.dtype), "shape": tuple(made.shape),
            "stride": made.stride(), "the same memory": bool(changed)}  # fmt: skip


def over_the_array(memory, dtype, seen):
    return torch.from_numpy(memory).view(dtype).as_strided(*seen)


def counts_bytes(memory, dtype, seen):
    shape, stride, offset = seen
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset * dtype.itemsize, shape, stride)


def view_as(memory, dtype, seen, offset=True, stride=True, copy=False):
    """A tensor made in a way that may be wrong."""
    shape, steps, begin = seen
    flat = torch.from_numpy(memory.copy() if copy else memory).view(dtype)
    begin = begin if offset else 0
    if not stride:
        return flat[begin : begin + int(np.prod(shape))].reshape(shape)
    return flat.as_strided(shape, steps, begin)


def from_buffer(memory, dtype, seen):
    shape, stride, offset = seen
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride, offset)


def from_buffer_at(memory, dtype, seen):
    shape, stride, offset = seen
    return torch.frombuffer(memory, dtype=dtype, offset=offset).as_strided(shape, stride)


def laid_over(memory, seen, dtype=None, shuffle=lambda *seen: seen):
    """A tensor over the whole storage, which gets what `shuffle` makes of its place."""
    shape, stride, offset = shuffle(*seen)
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def shown_view(case):
    numbers, dtype, seen = case
    bytes_of = f"{numbers[0]} to {numbers[-1]}, each an int32" if numbers else "no bytes at all"
    odd = "" if seen[0] and numbers else "; as of a tensor without elements or dimensions"
    return f"view(memory, {dtype}, {seen})  # memory: {bytes_of}{odd}"


RANGE = list(range(24))
VIEW = Build(
    name="view",
    reference=view,
    cases=[
        (RANGE[:6], torch.int32, ((2, 3), (3, 1), 0)),
        (RANGE, torch.int32, ((2, 3), (6, 2), 6)),
        (RANGE, torch.int64, ((3, 2), (1, 3), 2)),
        (RANGE, torch.int16, ((), (), 4)),
        ([], torch.float32, ((0, 3), (3, 1), 5)),
    ],
    observe=view_seen,
    show=shown_view,
    wrong={
        "You begin at the first byte; the offset says where.": partial(view_as, offset=False),
        "The elements need not lie in order: the strides say how.": partial(view_as, stride=False),
        "You copy. The tensor should lie over these very bytes.": partial(view_as, copy=True),
        "An offset counts elements, not bytes.": counts_bytes,
        "An array without bytes can't be seen as another type; a storage has none.": over_the_array,
        "`torch.frombuffer` refuses memory without bytes; a storage may have none.": from_buffer,
        "`torch.frombuffer` counts its offset in bytes, and yours is in elements.": from_buffer_at,
        "You leave out `dtype`: torch reads the bytes as the float32 that it takes by itself.": (
            lambda memory, dtype, seen: laid_over(memory, seen)
        ),
        "You leave out `dtype`: each byte is an element of its own.": (
            lambda memory, dtype, seen: torch.from_numpy(memory).as_strided(*seen)
        ),
        "`to` makes a number of each byte; several bytes are one element of `dtype`.": (
            lambda memory, dtype, seen: torch.from_numpy(memory).to(dtype).as_strided(*seen)
        ),
        "The sizes come before the strides; yours have changed places.": (
            lambda memory, dtype, seen: laid_over(
                memory, seen, dtype, lambda shape, stride, offset: (stride, shape, offset)
            )
        ),
        "`seen` begins with the shape, `set_` asks for the offset first.": (
            lambda memory, dtype, seen: torch.empty(0, dtype=dtype).set_(
                torch.from_numpy(memory).untyped_storage(), *seen
            )
        ),
        "A clone has memory of its own; the tensor should lie over these very bytes.": (
            lambda memory, dtype, seen: laid_over(memory, seen, dtype).clone()
        ),
        "Where elements lie scattered you copy them; the strides alone would do.": (
            lambda memory, dtype, seen: laid_over(memory, seen, dtype).contiguous()
        ),
    },
)


# Storages from before 2020


def scanned(answer, sizes, said, behind):
    """The places of storages in a file, or the error."""
    content = bytes(24)
    for numel, itemsize in sizes:
        content += struct.pack("<q", numel) + bytes([7]) * numel * itemsize
    storages = [
        Storage(str(number), {2: torch.int16, 4: torch.float32, 8: torch.int64}[itemsize], numel)
        for number, (numel, itemsize) in enumerate(said)
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tail"
        path.write_bytes(content + bytes(behind))
        given, file = list(storages), Noting(path)
        seen = {} if sizes != said or behind else {"bytes read": file.noted}
        try:
            found = answer(file, 24, given)
        except CheckpointError:
            return seen | {"raised": "CheckpointError"}
        if given != storages:
            raise ChangedInPlaceError("storages")
    return seen | {"raised": "nothing", "returned": places_in(found)}


class Noting(OpenFile):
    """A file that notes what is read of it."""

    def __init__(self, path):
        super().__init__(path)
        self.noted = []

    def read(self, offset, nbytes):
        self.noted.append(f"{offset} to {offset + nbytes}")
        return super().read(offset, nbytes)


def places_in(found):
    """The offset and the bytes of each extent by its key, or what came in place of them."""
    if not isinstance(found, dict):
        return None if found is None else f"a {type(found).__name__}"
    return {
        key: (one.offset, one.nbytes) if isinstance(one, Extent) else f"a {type(one).__name__}"
        for key, one in found.items()
    }


def scan_as(file, at, storages, step=8, in_bytes=True, checked=True, ended=True, of=None,
            moves=True):  # fmt: skip
    """A scan that may be wrong; `of` is what an element counts for the next place."""
    extents = {}
    for storage in storages:
        count = int.from_bytes(file.read(at, 8), "little", signed=True)
        if checked:
            require_count(storage, count)
        nbytes = count * storage.dtype.itemsize
        extents[storage.key] = Extent(file, at + 8, nbytes if in_bytes else count)
        at += (step + (count * of if of else nbytes)) if moves else 0
    if ended:
        require_end(file, at)
    return extents


def keeps_the_bytes(file, at, storages):
    for storage in storages:
        require_count(storage, file.read(at, 8))
    require_end(file, at)
    return {}


def reads_the_elements(file, at, storages):
    extents = {}
    for storage in storages:
        count = int.from_bytes(file.read(at, 8), "little", signed=True)
        require_count(storage, count)
        content = file.read(at + 8, count * storage.dtype.itemsize)
        extents[storage.key] = Extent(file, at + 8, len(content))
        at += 8 + len(content)
    require_end(file, at)
    return extents


def ends_after_each(file, at, storages):
    extents = {}
    for storage in storages:
        extents |= scan_as(file, at, [storage])
        at += 8 + extents[storage.key].nbytes
    return extents


def reads_no_count(file, at, storages):
    extents = {}
    for storage in storages:
        nbytes = storage.numel * storage.dtype.itemsize
        extents[storage.key] = Extent(file, at + 8, nbytes)
        at += 8 + nbytes
    require_end(file, at)
    return extents


def reads_the_whole(file, at, storages):
    moved = scan_as(file, at, storages)
    return {key: Extent(file, one.offset - 8, one.nbytes + 8) for key, one in moved.items()}


def takes_them_out(file, at, storages):
    extents = {}
    while storages:
        storage = storages.pop(0)
        extents |= scan_as(file, at, [storage], ended=False)
        at += 8 + extents[storage.key].nbytes
    require_end(file, at)
    return extents


def begins_at_the_count(file, at, storages):
    moved = scan_as(file, at, storages)
    return {key: Extent(file, one.offset - 8, one.nbytes) for key, one in moved.items()}


def scanned_into(make):
    """A right scan whose places are returned in another way."""
    return lambda file, at, storages: make(scan_as(file, at, storages), storages)


def shown_scan(case):
    there, said, behind = case
    both = f"{there} in the file, {said} by the pickle" if there or said else (
        "no storage in the file, and none by the pickle"
    )  # fmt: skip
    return f"scan_storages(file, 24, storages)  # (elements, bytes each): {both}, {behind} behind"


SIZES = [(3, 4), (0, 2), (5, 8), (1, 4)]
SCAN_STORAGES = Build(
    name="scan_storages",
    reference=scan_storages,
    cases=[
        (SIZES[:1], SIZES[:1], 0),
        (SIZES[2:], SIZES[2:], 0),
        (SIZES, SIZES, 0),
        (SIZES[:1], [(2, 4)], 0),
        (SIZES[:2], [(3, 4), (-1, 2)], 0),
        ([(2, 4), (4, 4)], [(4, 4), (2, 4)], 0),
        (SIZES[:1], SIZES[:1], 3),
        ([], [], 0),
    ],
    observe=scanned,
    show=shown_scan,
    wrong={
        "Each storage has its count before it: 8 bytes more to the next.": partial(scan_as, step=0),
        "A count is of elements; an extent has bytes.": partial(scan_as, in_bytes=False),
        "The file's count and the pickle's differ, and you believe one of them.": partial(
            scan_as, checked=False
        ),
        "You never read the counts: two storages may have changed their places.": reads_no_count,
        "Behind the last storage something follows, and you don't look.": partial(
            scan_as, ended=False
        ),
        "The elements begin behind the count.": begins_at_the_count,
        "The count is no part of the elements.": reads_the_whole,
        "You take them out of the caller's list; a loop needs no `pop`.": takes_them_out,
        "The extents are asked for by the keys of their storages; a list has none.": scanned_into(
            lambda found, storages: list(found.values())
        ),
        "An extent's key is its storage's `key`, not the storage.": scanned_into(
            lambda found, storages: {one: found[one.key] for one in storages}
        ),
        "An `Extent` is asked for: a pair of numbers doesn't say in which file.": scanned_into(
            lambda found, storages: {key: (one.offset, one.nbytes) for key, one in found.items()}
        ),
        "The last number of an extent is how many bytes it has, not where it ends.": scanned_into(
            lambda found, storages: {
                key: Extent(one.file, one.offset, one.offset + one.nbytes)
                for key, one in found.items()
            }
        ),
        "You pass over a byte for each element; an element has several.": partial(scan_as, of=1),
        "You read every count at the same place.": partial(scan_as, moves=False),
        "You read the elements, too; their count says how many bytes to pass over.": (
            reads_the_elements
        ),
        "The file ends behind its last storage; you ask after each.": ends_after_each,
        "`read` gives bytes; a count is the number that they stand for.": keeps_the_bytes,
    },
)


# Slices


def view_cases(rng):
    small = [((4,), (1,), 0), ((2, 3), (3, 1), 0), ((2, 3), (6, 2), 6), ((), (), 5),
             ((3, 0), (1, 1), 7), ((0,), (2,), 0), ((4,), (0,), 2),
             ((5, 1), (7, 9), 1)]  # fmt: skip
    sizes = [rng.integers(1, 9, (2, dims)).tolist() for dims in (1, 2, 3) * 5]
    return small + [(tuple(a), tuple(b), int(rng.integers(0, 50))) for a, b in sizes]


def span_as(shape, stride, offset, empty=True, end=1, steps=lambda size: size - 1):
    if empty and 0 in shape:
        return offset, offset
    last = offset + sum(steps(size) * step for size, step in zip(shape, stride, strict=True))
    return offset, last + end


def span_of_one(shape, stride, offset, empty=True, none=None, of=max):
    """A span that takes one dimension for all: the longest, or the first."""
    if empty and 0 in shape:
        return offset, offset
    reaches = [size * step for size, step in zip(shape, stride, strict=True)]
    if not reaches and none is not None:
        return offset, offset + none
    return offset, offset + of(reaches)


def longest_alone(shape, stride, offset, empty=True, none=0):
    if empty and 0 in shape:
        return offset, offset
    reaches = [(size - 1) * step for size, step in zip(shape, stride, strict=True)]
    return offset, offset + (max(reaches) if reaches or none is None else none) + 1


def named_span(name, case):
    """A call, and what is odd about its view."""
    shape, stride, *_ = case
    odd = {
        "a view without dimensions: one element": not shape,
        "a view without elements": 0 in shape,
        "one element, seen several times": any(step == 0 for step in stride),
    }
    words = "".join(f"  # {one}" for one, holds in odd.items() if holds)
    return f"{name}({', '.join(map(str, case))}){words}"


OF_ONE = {
    "To the last element it is some steps along each dimension, not along one alone.": (
        longest_alone
    ),
    "There may be no dimension; of several, each has its steps to the last element.": partial(
        longest_alone, none=None
    ),
    "Size times stride is one step too many, and each dimension has its steps.": partial(
        span_of_one, none=1
    ),
    "There may be no dimension; of several, each has its steps, one fewer than its size.": (
        span_of_one
    ),
    "You look at the first dimension: each has its steps, and there may be none.": partial(
        span_of_one, of=lambda reaches: reaches[0]
    ),
}
FORGETS_THE_EMPTY = {
    f"A view may have no elements; {sentence[0].lower()}{sentence[1:]}": partial(made, empty=False)
    for sentence, made in OF_ONE.items()
}

ELEMENT_SPAN = Build(
    name="element_span",
    reference=element_span,
    cases=view_cases,
    show=partial(named_span, "element_span"),
    wrong=OF_ONE
    | FORGETS_THE_EMPTY
    | {
        "How many elements a view holds says nothing of how far it reaches.": (
            lambda shape, stride, offset: (offset, offset + int(np.prod(shape)))
        ),
        "From the first to the last of n there are n - 1 steps.": partial(
            span_as, steps=lambda size: size
        ),
        "The end is one after the last.": partial(span_as, end=0),
        "It is n - 1 steps from the first to the last of n, and one further to the end.": partial(
            span_as, steps=lambda size: size, end=0
        ),
        "A view without elements touches none.": partial(span_as, empty=False),
        "You count from the first element of the view, not of the storage.": (
            lambda shape, stride, offset: tuple(
                one - offset for one in span_as(shape, stride, offset)
            )
        ),
        "You return where it begins and how far it reaches; its end counts from the storage.": (
            lambda shape, stride, offset: (
                offset,
                span_as(shape, stride, offset)[1] - offset,
            )
        ),
        "Sizes and strides don't multiply together: each dimension has its own steps.": (
            lambda shape, stride, offset: (
                offset,
                offset + int(np.prod(shape) * np.prod(stride)),
            )
        ),
        "A view without elements lies at its offset, too: it begins and ends there.": (
            lambda shape, stride, offset: (0, 0) if 0 in shape else span_as(shape, stride, offset)
        ),
    },
)


def bytes_as(shape, stride, offset, itemsize, first=1, end=1):
    a, b = element_span(shape, stride, offset)
    return a * (itemsize if first else 1), b * (itemsize if end else 1)


BYTE_SPAN = Build(
    name="byte_span",
    reference=byte_span,
    cases=lambda rng: [(*case, itemsize) for case in view_cases(rng) for itemsize in (2, 8)],
    show=partial(named_span, "byte_span"),
    wrong={
        "An element has itemsize bytes: these are elements.": partial(bytes_as, first=0, end=0),
        "The first one is still counted in elements.": partial(bytes_as, first=0),
        "You multiply the strides only; the last element has its bytes, too.": (
            lambda shape, stride, offset, itemsize: element_span(
                shape, [step * itemsize for step in stride], offset * itemsize
            )
        ),
        "You return where it begins and how long it is.": lambda *case: (
            bytes_as(*case)[0],
            bytes_as(*case)[1] - bytes_as(*case)[0],
        ),
        "Strides, offset and the last element are all counted in elements.": lambda *case: (
            element_span(case[0], [step * case[3] for step in case[1]], case[2])
        ),
        "A tuple times a number is the tuple, repeated.": lambda *case: (
            element_span(*case[:3]) * case[3]
        ),
        "The end is the byte after the last, not the last byte.": lambda *case: (
            bytes_as(*case)[0],
            bytes_as(*case)[1] - 1,
        ),
        "The last element has bytes, too: the end lies behind them.": lambda *case: (
            bytes_as(*case)[0],
            bytes_as(*case)[1] - case[3],
        ),
    },
)


# All of it, in the order of the file


def runs_seen(answer, places):
    """The reads of each list, by their letters."""
    reads = [Read(None, begin, np.empty(end - begin, np.uint8)) for begin, end in places]
    letters = {id(read): letter for read, letter in zip(reads, ascii_lowercase, strict=False)}
    given = list(reads)
    found = answer(given)
    if [*map(id, given)] != [*map(id, reads)]:
        raise ChangedInPlaceError("reads")

    def named(one):
        if isinstance(one, Iterator):
            return "a generator, or another iterator"
        if isinstance(one, list | tuple):
            return [named(each) for each in one]
        return letters.get(id(one), "no read")

    return None if found is None else named(found)


def in_file_order(reads):
    return sorted(reads, key=lambda one: one.offset)


def runs_as(reads, ordered=in_file_order, joins=None):
    """Runs that may be wrong."""
    found = []
    for read in ordered(reads):
        if found and (joins or fits)(read, found[-1]):
            found[-1].append(read)
        else:
            found.append([read])
    return found


def fits(read, run, gap=GAP_BYTES, reach=REQUEST_BYTES):
    near = read.offset - run[-1].end <= gap
    return near and read.end - run[0].offset <= reach


def reaches_from_the_last(read, run):
    return fits(read, run[-1:])


def touches(read, run):
    return read.offset == run[-1].end and fits(read, run)


def never_overlaps(read, run):
    return read.offset >= run[-1].end and fits(read, run)


def takes_an_overlap_for_a_gap(read, run):
    return abs(read.offset - run[-1].end) <= GAP_BYTES and fits(read, run)


def counts_what_is_wanted(read, run):
    return fits(read, run, reach=1 << 62) and size_of([*run, read]) <= REQUEST_BYTES


def size_of(reads):
    return sum(one.end - one.offset for one in reads)


def counts_from_begin_to_begin(read, run):
    return read.offset - run[-1].offset <= GAP_BYTES and fits(read, run)


def counts_from_the_first(read, run):
    return read.offset - run[0].end <= GAP_BYTES and fits(read, run)


def forgets_the_last(reads):
    return runs_as(reads)[:-1]


def drops_what_does_not_fit(reads):
    found, run = [], []
    for read in in_file_order(reads):
        if run and not fits(read, run):
            found.append(run)
            run = []
        else:
            run.append(read)
    return [*found, run] if run else found


def never_asks_whether_there_are_any(reads):
    in_order = in_file_order(reads)
    in_order[0]
    return runs_as(in_order)


def looks_at_a_list_before_the_first(reads):
    found = []
    for read in in_file_order(reads):
        found[-1].append(read)
    return found


def hands_over_and_empties(reads):
    found, run = [], []
    for read in in_file_order(reads):
        if run and not fits(read, run):
            found.append(run)
            run.clear()
        run.append(read)
    return [*found, run]


def one_of_both_will_do(read, run):
    return fits(read, run, gap=1 << 62) or fits(read, run, reach=1 << 62)


def begins_with_an_empty_one(reads):
    return runs_as(reads) or [[]]


def sorts_the_callers(reads):
    reads.sort(key=lambda one: one.offset)
    return runs_as(reads)


def lies(place, letter):
    return f"{letter}: {place[0]:,} to {place[1]:,}"


FAR = 10 * REQUEST_BYTES
RUNS = Build(
    name="runs",
    reference=runs,
    cases=[
        ([],),
        ([(100, 150)],),
        ([(100, 150), (150, 400)],),
        ([(150, 400), (100, 150)],),
        ([(FAR, FAR + 80), (100, 150), (150, 400)],),
        ([(0, 100), (100 + GAP_BYTES, 200 + GAP_BYTES)],),
        ([(0, 100), (200, 300)],),
        ([(0, 9), (9, GAP_BYTES), (GAP_BYTES + 10, GAP_BYTES + 12)],),
        ([(0, 100), (101 + GAP_BYTES, 200 + GAP_BYTES)],),
        ([(0, GAP_BYTES), (2 * GAP_BYTES, 2 * GAP_BYTES + 9)],),
        ([(500, 1000), (1000, 500 + REQUEST_BYTES)],),
        ([(500, 1000), (1000, 501 + REQUEST_BYTES)],),
        ([(0, REQUEST_BYTES - 9), (REQUEST_BYTES - 8, REQUEST_BYTES + 1), (FAR, FAR + 9)],),
        ([(0, 600), (600, REQUEST_BYTES // 2), (REQUEST_BYTES // 2, REQUEST_BYTES + 1)],),
        ([(40, 90), (0, 100), (90, 300)],),
        ([(0, 2 * GAP_BYTES), (9, 9 + 2 * GAP_BYTES)],),
    ],  # a gap to the furthest end is right, too: its requests are fewer, and still in order
    observe=runs_seen,
    show=lambda case: (
        "runs(reads)  # " + (", ".join(map(lies, case[0], ascii_lowercase)) or "none")
    ),
    wrong={
        "You take them in the order of the list; the disk has them in that of the file.": partial(
            runs_as, ordered=list
        ),
        "Every read stays alone: neighbours can come with one request.": partial(
            runs_as, joins=lambda read, run: False
        ),
        "You never begin a second list: all that lies between would be read, too.": partial(
            runs_as, joins=lambda read, run: True
        ),
        "What you collected last is not in what you return.": forgets_the_last,
        "A gap of exactly `GAP_BYTES` is read along, too.": partial(
            runs_as, joins=partial(fits, gap=GAP_BYTES - 1)
        ),
        "A request may have exactly `REQUEST_BYTES`.": partial(
            runs_as, joins=partial(fits, reach=REQUEST_BYTES - 1)
        ),
        "A small gap is no reason for a request of its own: up to `GAP_BYTES` are read along.": (
            partial(runs_as, joins=partial(fits, gap=0))
        ),
        "Reads that touch are not all: `GAP_BYTES` and `REQUEST_BYTES` say what comes together.": (
            partial(runs_as, joins=lambda read, run: read.offset == run[-1].end)
        ),
        "You join only what touches: a small gap is read along, up to `GAP_BYTES`.": partial(
            runs_as, joins=touches
        ),
        "Reads may overlap: there is no gap then, and one request brings both.": partial(
            runs_as, joins=never_overlaps
        ),
        "Where reads overlap there is no gap, however much they share.": partial(
            runs_as, joins=takes_an_overlap_for_a_gap
        ),
        "A list of lists is asked for: a generator is empty once somebody went through it.": (
            lambda reads: iter(runs_as(reads))
        ),
        "However far the next one lies, you read along what is between.": partial(
            runs_as, joins=partial(fits, gap=1 << 62)
        ),
        "Your requests grow without end, as long as the next one is near.": partial(
            runs_as, joins=partial(fits, reach=1 << 62)
        ),
        "A request reaches from the first of its reads to the end of this one.": partial(
            runs_as, joins=reaches_from_the_last
        ),
        "A request brings the gaps, too: they count for its size.": partial(
            runs_as, joins=counts_what_is_wanted
        ),
        "A gap begins where the one before ends, not where it begins.": partial(
            runs_as, joins=counts_from_begin_to_begin
        ),
        "You look how far it is from the first read of the list; the last one is nearer.": partial(
            runs_as, joins=counts_from_the_first
        ),
        "The read that does not fit any more begins the next list; yours lacks it.": (
            drops_what_does_not_fit
        ),
        "A list of lists is asked for; also a read that comes alone lies in one.": in_file_order,
        "The lists hold the reads themselves, not their places.": (
            lambda reads: [[(one.offset, one.end) for one in run] for run in runs_as(reads)]
        ),
        "Of no reads, no requests: yours is an empty one.": begins_with_an_empty_one,
        "`At most` allows the number itself.": partial(
            runs_as, joins=partial(fits, gap=GAP_BYTES - 1, reach=REQUEST_BYTES - 1)
        ),
        "You sort the list of the caller; `sorted` makes a new one.": sorts_the_callers,
        "Reads have no order of their own: by what should they be sorted?": partial(
            runs_as, ordered=sorted
        ),
        "The order of the file is that of where reads begin, not of where they end.": partial(
            runs_as, ordered=lambda reads: sorted(reads, key=lambda one: one.end)
        ),
        "Both must hold: the gap is small, and the request not too large.": partial(
            runs_as, joins=one_of_both_will_do
        ),
        "There may be nothing to read.": never_asks_whether_there_are_any,
        "When the first read comes, there is no list to look at.": looks_at_a_list_before_the_first,
        "You empty a list after handing it over: it is still the same list.": (
            hands_over_and_empties
        ),
    },
)


# Every byte belongs to one tensor


def gaps_seen(answer, places, begin, end):
    extents = [Extent(None, a, b - a) for a, b in places]
    given = list(extents)
    try:
        answer(given, begin, end)
        raised = "nothing"
    except CheckpointError:
        raised = "CheckpointError"
    if given != extents:
        raise ChangedInPlaceError("extents")
    return {"raised": raised}


def from_to(*place):
    return "from {} to {}".format(*place)


def gaps_as(extents, begin, end, ordered=True, first=True, last=True, inner="both"):
    """A check that may be wrong."""
    at = begin if first else min((one.offset for one in extents), default=begin)
    key = (lambda one: (one.offset, one.nbytes)) if ordered else (lambda one: 0)
    for one in sorted(extents, key=key):
        wrong = {"both": one.offset != at, "overlaps": one.offset < at, "holes": one.offset > at}
        if wrong[inner]:
            raise CheckpointError("a gap")
        at = max(at, one.offset + one.nbytes) if inner != "both" else one.offset + one.nbytes
    if last and at != end:
        raise CheckpointError("more")


def looks_for_holes(extents, begin, end, last=lambda at, end: at != end):
    at = begin
    for one in sorted(extents, key=lambda one: (one.offset, one.nbytes)):
        if one.offset > at:
            raise CheckpointError("a gap")
        at += one.nbytes
    if last(at, end):
        raise CheckpointError("more")


def leaves_out_the_empty(extents, begin, end):
    gaps_as([one for one in extents if one.nbytes], begin, end)


def refuses_no_tensors(extents, begin, end):
    if not extents:
        raise CheckpointError("none")
    gaps_as(extents, begin, end)


def passes_no_tensors(extents, begin, end):
    if extents:
        gaps_as(extents, begin, end)


def compares_neighbours(extents, begin, end):
    in_order = sorted(extents, key=lambda one: one.offset)
    for one, other in pairwise(in_order):
        if one.offset + one.nbytes > other.offset:
            raise CheckpointError("an overlap")
    sums_up(extents, begin, end)


def sorts_by_place_alone(extents, begin, end):
    in_order = sorted(extents, key=lambda one: one.offset)
    gaps_as(in_order, begin, end, ordered=False)


def sorts_in_place(extents, begin, end):
    extents.sort(key=lambda one: (one.offset, one.nbytes))
    gaps_as(extents, begin, end)


def sums_up(extents, begin, end):
    if begin + sum(one.nbytes for one in extents) != end:
        raise CheckpointError("the sizes don't add up")


def looks_too_far(extents, begin, end):
    gaps_as(extents, begin, end, last=False)
    if any(one.offset + one.nbytes > end for one in extents):
        raise CheckpointError("behind the end")


def raises_another(extents, begin, end, kind=ValueError):
    try:
        gaps_as(extents, begin, end)
    except CheckpointError as error:
        raise kind from error


def takes_the_first(extents, begin, end):
    sorted(extents, key=lambda one: one.offset)[0]
    gaps_as(extents, begin, end)


def refuses_the_empty(extents, begin, end):
    if any(one.nbytes == 0 for one in extents):
        raise CheckpointError("no bytes")
    gaps_as(extents, begin, end)


def returns_a_verdict(extents, begin, end):
    try:
        gaps_as(extents, begin, end)
    except CheckpointError:
        return False
    return True


PLACES = [
    [(10, 50)], [(30, 50), (10, 30)], [(30, 50), (10, 30), (50, 50)],
    [(10, 30), (31, 50)], [(10, 31), (30, 50)], [(10, 30)], [(11, 50)], [], [(10, 51)],
    [(10, 30), (10, 30)], [(10, 20), (25, 45), (45, 50)], [(10, 50), (20, 30)],
    [(10, 30), (40, 60)], [(10, 50), (10, 10)], [(5, 50)], [(30, 30), (10, 50)],
]  # fmt: skip
CHECK_NO_GAPS = Build(
    name="check_no_gaps",
    reference=check_no_gaps,
    cases=[*((places, 10, 50) for places in PLACES), ([], 10, 10)],
    observe=gaps_seen,
    show=lambda case: (
        f"check_no_gaps(extents, {case[1]}, {case[2]})  # tensors: "
        + (", ".join(from_to(*place) for place in case[0]) or "none")
    ),
    wrong={
        "The sizes add up, and yet two tensors overlap and leave a hole.": sums_up,
        "The header lists tensors in any order: sort them by place first.": partial(
            gaps_as, ordered=False
        ),
        "Bytes behind the last tensor belong to none.": partial(gaps_as, last=False),
        "The tensors end too early, and something else may lie there.": looks_too_far,
        "Between the header and the first tensor there may be no hole either.": partial(
            gaps_as, first=False
        ),
        "Two tensors that share bytes are refused as well.": partial(gaps_as, inner="holes"),
        "A hole between two tensors is refused as well.": partial(gaps_as, inner="overlaps"),
        "A tensor that begins too early shares bytes with the one before.": looks_for_holes,
        "Of two that begin at the same byte, the one without bytes comes first.": (
            sorts_by_place_alone
        ),
        "You sort the caller's own list; `sorted` makes another.": sorts_in_place,
        "You return whether it is right, and nobody looks at that: raise where it isn't.": (
            returns_a_verdict
        ),
        "Who reads a file catches a CheckpointError, and no ValueError.": raises_another,
        "An `assert` is left out under `python -O`: raise a CheckpointError.": partial(
            raises_another, kind=AssertionError
        ),
        "There may be no tensor at all.": takes_the_first,
        "No tensors fill no bytes: such a file is right.": refuses_no_tensors,
        "Without a tensor nobody owns the bytes from `begin` to `end`.": passes_no_tensors,
        "None overlap and the sizes add up, and yet there is a hole: the last ends too late.": (
            compares_neighbours
        ),
        "A tensor without bytes shares none, and yet it may not lie inside another: each begins "
        "where the one before ends.": leaves_out_the_empty,
        "A tensor may have no bytes: it leaves no hole, and shares nothing.": refuses_the_empty,
        "Extents have no order of their own: by what should they be sorted?": (
            lambda extents, begin, end: gaps_as(sorted(extents), begin, end)
        ),
        "The first tensor lies at byte `begin`: an offset counts from the file's first byte.": (
            lambda extents, begin, end: gaps_as(extents, 0, end - begin)
        ),
        "`end` is the byte after the last, as in a slice.": (
            lambda extents, begin, end: gaps_as(extents, begin, end + 1)
        ),
    },
)

BUILDS = [
    PAYLOAD_BEGIN,
    VIEW,
    SCAN_STORAGES,
    ELEMENT_SPAN,
    BYTE_SPAN,
    RUNS,
    CHECK_NO_GAPS,
]
