"""Lesson 06: the bytes of a tensor in its file."""

import struct
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from opcodes import Storage

from course.grading.exercise import Exercise
from course.lesson import solution
from npydata import CheckpointError
from npydata.reader.tensor import byte_span


def judged(answer, *case):
    try:
        answer(*case)
    except CheckpointError:
        return "refused with a CheckpointError"
    return "accepted"


def sizes_add_up(places, begin, end):
    if sum(stop - first for first, stop in places) != end - begin:
        raise CheckpointError


CHECK_NO_GAPS = Exercise(
    solution("06", "check_no_gaps"),
    [
        ([(8, 16)], 8, 16),
        ([], 8, 8),
        ([], 8, 9),
        ([(8, 16)], 8, 17),
        ([(8, 16)], 8, 12),
        ([(9, 16)], 8, 16),
        ([(16, 20), (8, 16)], 8, 20),
        ([(8, 4)], 8, 8),
        ([(8, 16), (8, 16)], 8, 16),
        ([(8, 16), (8, 8)], 8, 16),
        ([(8, 16), (18, 20)], 8, 20),
        ([(8, 16), (12, 20), (24, 28)], 8, 28),
    ],
    judged,
    others={"Sizes that add up are not enough: an overlap and a hole cancel out.": sizes_add_up},
    misconceptions="""
sorted(places) >> places | The header may list tensors in any order.
sorted(places) >> sorted(places, key=min) | An empty tensor may be listed after the one that begins at the same byte.
first != at >> first < at | Bytes before a tensor that belong to none: something can hide there.
first != at >> first > at | Two tensors share bytes, and you accept them.
at != end >> at > end | Bytes after the last tensor: a second file can hide there.
at != end >> at < end | A tensor that reaches beyond the end of the file is accepted.
at = begin >> at = 0 | The tensors' part begins at `begin`, after the header.
""",
)


def header_of(name, extra):
    return b"PK\x03\x04" + bytes(22) + struct.pack("<HH", name, extra)


PAYLOAD_BEGIN = Exercise(
    solution("06", "payload_begin"),
    [(header_of(4, 0), 0), (header_of(9, 22), 64), (header_of(300, 40_000), 2**33)],
    show=lambda header, at: "payload_begin(header, {})  # name: {} bytes, extra field: {}".format(
        at, *struct.unpack("<HH", header[26:])
    ),
    misconceptions="""
+ extra_length >> | You forget the extra field: the padding is in it.
+ name_length >> | You forget the name, which stands right after the fixed part.
name_length = >> header = header[at:]; name_length = | `header` begins at its own byte 0; `at` is its place in the file.
at + 30 >> 30 | You count from the header's beginning, not from the file's.
at + 30 >> at | The fixed part itself has 30 bytes.
name_length + extra_length >> header[26] + header[28] | You take one byte of each length; it has two.
name_length + extra_length >> int.from_bytes(header[26:28], "big") + int.from_bytes(header[28:30], "big") | The low byte comes first.
return >> return -(-(at + 30 + name_length) // 64) * 64; return | You round up to 64: only torch pads so, and by the extra field.
""",
)


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = [draw(st.integers(0, 9)) for _ in shape]
    return (tuple(shape), tuple(stride), draw(st.integers(0, 9))), draw(st.sampled_from([1, 4, 8]))


BYTE_SPAN = Exercise(
    byte_span,
    views(),
    others={
        "A view may span far more elements than it holds.": lambda view, itemsize: (
            view[2] * itemsize,
            (view[2] + torch.Size(view[0]).numel()) * itemsize,
        ),
    },
    misconceptions="""
0 in shape >> False | A view without elements touches no byte.
(size - 1) * step >> size * step | From the first of three to the last it is two steps.
(last + 1) * itemsize >> last * itemsize | The last element has bytes, too: stop after it.
last = offset + >> last = | You count the last element from the view's first, not from the storage's.
offset * itemsize, (last + 1) * itemsize >> offset, last + 1 | You count elements; files count bytes.
""",
)


def scanned(answer, there, told):
    """Scan storages that begin at byte 24; the file and the pickle may not agree."""
    dtypes = [torch.float32, torch.int64, torch.int16]
    data, reads = bytes(24), []
    for count, dtype in zip(there, dtypes, strict=False):
        data += struct.pack("<q", count) + bytes([7]) * count * dtype.itemsize

    def read(at, nbytes):
        reads.append(nbytes)
        return data[at : at + nbytes]

    storages = [Storage(f"k{i}", dtypes[i], count) for i, count in enumerate(told)]
    try:
        found = answer(SimpleNamespace(read=read), 24, storages)
    except CheckpointError:
        return "refused with a CheckpointError"
    return {"returned": found, "bytes read": sum(reads)}


SCAN_STORAGES = Exercise(
    solution("06", "scan_storages"),
    [([], []), ([3], [3]), ([3], [2]), ([3, 0, 5], [3, 0, 5]), ([2, 4], [4, 2])],
    scanned,
    show=(
        "scan_storages(file, 24, storages)  # elements of k0, k1, ...: {}; the pickle: {}".format
    ),
    misconceptions="""
first = at + 8 >> first = at | The elements begin after the count.
count * storage.dtype.itemsize >> count | An element has several bytes.
count != storage.numel >> False | The file's count and the pickle's differ, and you believe one of them.
at = first + >> at = at + | Each storage has a count before it: 8 bytes more.
= first, at >> = first, at - first | The second number is where the elements stop, not how many bytes they are.
""",
)
