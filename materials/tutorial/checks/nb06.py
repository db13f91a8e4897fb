"""Exercises of notebook 06: a zip payload's place, legacy storages, the byte span of a view."""

import struct

from tutorial.grading import Exercise

LOCAL = struct.Struct("<4s5H3I2H")


def local_header(name, extra):
    """The fixed part of a zip file's local header, for a name and an extra field of such lengths.

    Sizes are not zero, and checksum and time are not either, so that a wrong place is noticed.
    """
    return LOCAL.pack(b"PK\x03\x04", 20, 2056, 0, 513, 1541, 0x01020304, 48, 48, name, extra)


def begins(header, at):
    return at + 30 + sum(lengths(header))


def lengths(header, order="little"):
    return int.from_bytes(header[26:28], order), int.from_bytes(header[28:30], order)


def header_cases(rng):
    found = [(10, 0, 0), (12, 13, 0), (14, 47, 598), (300, 256, 64)]
    found += [tuple(int(n) for n in rng.integers(1, (400, 900, 10**6))) for _ in range(8)]
    return [(local_header(name, extra), at) for name, extra, at in found]


def show_header(args):
    header, at = args
    return f"bytes.fromhex('{header.hex(' ')}'), {at}"


def storage_starts(
    at, counts, itemsizes, ahead=8, after=0, bytes_of=lambda count, itemsize: count * itemsize
):
    starts = []
    for count, itemsize in zip(counts, itemsizes, strict=True):
        starts.append(at + ahead)
        at += ahead + bytes_of(count, itemsize) + after
    return starts


def one_count_for_all(at, counts, itemsizes):
    return storage_starts(at + 8, counts, itemsizes, ahead=0)


def padded(at, counts, itemsizes):
    starts = []
    for count, itemsize in zip(counts, itemsizes, strict=True):
        starts.append(-(-(at + 8) // 64) * 64)
        at = starts[-1] + count * itemsize
    return starts


def storage_cases(rng):
    found = [(0, [3], [4]), (0, [3, 2], [4, 4]), (100, [6, 2], [4, 8]), (7, [0, 5, 1], [2, 1, 8])]
    for size in (2, 3, 4, 6):
        counts = rng.integers(0, 50, size).tolist()
        itemsizes = rng.choice([1, 2, 4, 8], size).tolist()
        found.append((int(rng.integers(1, 2000)), counts, itemsizes))
    return found


def touched(shape, stride, offset, itemsize):
    if 0 in shape:
        return offset * itemsize, offset * itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize


def product(shape):
    total = 1
    for size in shape:
        total *= size
    return total


def span_cases(rng):
    found = [
        ((), (), 3, 4), ((4,), (1,), 0, 4), ((4,), (1,), 2, 2), ((3,), (2,), 0, 4),
        ((2, 3), (6, 1), 7, 4), ((2, 3), (6, 2), 6, 4), ((4, 1), (6, 1), 5, 8),
        ((3, 2), (1, 6), 0, 2), ((5,), (0,), 4, 4), ((0, 3), (3, 1), 2, 4), ((2, 0), (9, 9), 5, 8),
    ]  # fmt: skip
    for _ in range(8):
        dims = int(rng.integers(1, 4))
        shape = tuple(rng.integers(1, 6, dims).tolist())
        stride = tuple(rng.integers(0, 30, dims).tolist())
        found.append((shape, stride, int(rng.integers(0, 40)), int(rng.choice([1, 2, 4, 8]))))
    return found


EXERCISES = [
    Exercise(
        "payload_starts",
        begins,
        header_cases,
        {
            "You pass over the name, but not over the extra field with the padding in it.": (
                lambda header, at: at + 30 + lengths(header)[0]
            ),
            "You pass over the extra field, but not over the name.": (
                lambda header, at: at + 30 + lengths(header)[1]
            ),
            "You read one byte of each length, but a length has two.": (
                lambda header, at: at + 30 + header[26] + header[28]
            ),
            "You count from the header's begin, but the question is where in the file.": (
                lambda header, at: 30 + sum(lengths(header))
            ),
            "You leave out the 30 bytes that you were given.": (
                lambda header, at: at + sum(lengths(header))
            ),
            "You read the lengths with the large byte first.": (
                lambda header, at: at + 30 + sum(lengths(header, "big"))
            ),
            "You round up to 64, but the padding is counted in the extra field already.": (
                lambda header, at: -(-begins(header, at) // 64) * 64
            ),
            "You add the entry's size: that is where its bytes end.": (
                lambda header, at: begins(header, at) + int.from_bytes(header[22:26], "little")
            ),
        },
        show=show_header,
    ),
    Exercise(
        "storage_starts",
        storage_starts,
        storage_cases,
        {
            "You give the place of each count; the elements come behind it.": (
                lambda at, counts, itemsizes: [
                    start - 8 for start in storage_starts(at, counts, itemsizes)
                ]
            ),
            "You know of one count, before the first storage; each storage has its own.": (
                one_count_for_all
            ),
            "You leave out the counts: these are places as if storages lay side by side.": (
                lambda at, counts, itemsizes: storage_starts(at, counts, itemsizes, ahead=0)
            ),
            "You pass over as many bytes as there are elements; an element has several.": (
                lambda at, counts, itemsizes: storage_starts(
                    at, counts, itemsizes, bytes_of=lambda count, itemsize: count
                )
            ),
            "You pad to 64 bytes as the zip files do; these files have no padding.": padded,
            "You give where the elements of each storage end, but asked is where they begin.": (
                lambda at, counts, itemsizes: [
                    start + count * itemsize
                    for start, count, itemsize in zip(
                        storage_starts(at, counts, itemsizes), counts, itemsizes, strict=True
                    )
                ]
            ),
            "You forget where the first count lies, and begin at 0.": (
                lambda at, counts, itemsizes: storage_starts(0, counts, itemsizes)
            ),
        },
    ),
    Exercise(
        "span",
        touched,
        span_cases,
        {
            "You take as many bytes as the view has; with strides it reaches further than that.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize, (offset + product(shape)) * itemsize
                )
            ),
            "You stop where the last element begins, and cut it off.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize,
                    touched(shape, stride, offset, itemsize)[1] - itemsize * (0 not in shape),
                )
            ),
            "From the first of n elements to the last it is one step less than n.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize,
                    (offset + sum(a * b for a, b in zip(shape, stride, strict=True))) * itemsize,
                )
            ),
            "You go one step too far in every dimension, before you add the last element.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize, touched(shape, stride, offset, itemsize)[1]
                    + itemsize * sum(stride) * (0 not in shape),
                )
            ),
            "You begin at the storage's first byte, but the view begins at its offset.": (
                lambda shape, stride, offset, itemsize: (
                    0, touched(shape, stride, offset, itemsize)[1]
                )
            ),
            "You give how long the span is, but asked is where it ends.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize, touched(shape, stride, 0, itemsize)[1]
                )
            ),
            "You give the last byte that the view touches, but asked is the one after it.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize,
                    touched(shape, stride, offset, itemsize)[1] - (0 not in shape),
                )
            ),
            "You cut off the last element, and a view without elements reaches back or forward.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize,
                    (offset + sum((a - 1) * b for a, b in zip(shape, stride, strict=True)))
                    * itemsize,
                )
            ),
            "Your offset counts bytes, but the one you are given counts elements.": (
                lambda shape, stride, offset, itemsize: tuple(
                    place + offset for place in touched(shape, stride, 0, itemsize)
                )
            ),
            "You count elements; a span is in bytes.": (
                lambda shape, stride, offset, itemsize: touched(shape, stride, offset, 1)
            ),
            "A view without elements touches nothing, but you reach back or forward for it.": (
                lambda shape, stride, offset, itemsize: (
                    offset * itemsize,
                    (offset + 1 + sum((a - 1) * b for a, b in zip(shape, stride, strict=True)))
                    * itemsize,
                )
            ),
        },
    ),
]  # fmt: skip
