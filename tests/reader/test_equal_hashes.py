"""Keys that a file chooses so that all have one hash: to find one, Python would look at each."""

import itertools
import json
import time
from contextlib import nullcontext, suppress

import pytest
from checkpoint_files import (
    checkpoint_records,
    entry,
    legacy_file,
    payload,
    safetensors_file,
    stored_zip,
    tar_file,
    tar_members,
)
from pickle_code import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    FALSE,
    MARK,
    NEWOBJ,
    NO_HOOKS,
    POP,
    SETITEMS,
    Code,
    build,
    get,
    name,
    program,
    put,
    storage,
    unicode,
    value,
)

from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import inspect_checkpoint
from npydata.reader.typed_json import MAX_ALIKE

PRIME = 2**61 - 1
"""The modulus of Python's hashes of numbers."""
TIMES = 6
"""Each of these took 20 to 300 times as long as the same file with hashes that differ."""


def said(*codes):
    """Put values into the memo, from number 0 on."""
    return b"".join(put(code, number) + POP for number, code in enumerate(codes))


def alike(count, first):
    """Tuples of ten numbers that have one hash, of which 0 is number ``first`` in the memo."""
    for chosen in itertools.islice(itertools.product(range(4), repeat=10), count):
        yield MARK + b"".join(get(first + one) for one in chosen) + b"t"


def multiples(factor):
    return [value(k * factor) for k in range(4)]


def strides(folder, factor):
    """Of tensors of one element, which may have any."""
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    before = said(rebuild, storage("0", 4), value((1,) * 10), NO_HOOKS, *multiples(factor))
    tensors = b"".join(
        unicode(f"{k:x}")
        + (get(0) + MARK + get(1) + b"K\0" + get(2) + stride + FALSE + get(3) + b"tR")
        for k, stride in enumerate(alike(14_000, 4))
    )  # fmt: skip
    code = program(before, EMPTY_DICT, MARK, tensors, SETITEMS)
    return stored_zip(folder / "a.pt", checkpoint_records(code, {"0": payload(16)}))


def offsets(folder, factor):
    """Of chunks in a folder of torch.distributed.checkpoint."""
    module = "torch.distributed.checkpoint.metadata"
    info = name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": 0}
    before = said(
        name(module, "MetadataIndex"), build(Code(info + b")" + NEWOBJ), place),
        *map(unicode, ("fqn", "offset", "w")), *multiples(factor),
    )  # fmt: skip
    places = b"".join(
        get(0) + b")" + NEWOBJ + EMPTY_DICT + MARK + get(2) + get(4) + get(3) + offset
        + SETITEMS + BUILD + get(1) for offset in alike(14_000, 5)
    )  # fmt: skip
    told = {"state_dict_metadata": {}, "planner_data": None,
            "storage_data": Code(EMPTY_DICT + MARK + places + SETITEMS)}  # fmt: skip
    made = build(Code(name(module, "Metadata") + b")" + NEWOBJ), told)
    (folder / ".metadata").write_bytes(program(before, made))
    (folder / "__0_0.distcp").write_bytes(b"x")
    return folder


def noted(tag, member=lambda number: number):
    """Return a writer of a value in the note of our own safetensors files."""

    def write(folder, factor, count=40_000):
        tagged = {tag: [member(k * factor) for k in range(count)]}
        notes = json.dumps({"values": {"v": tagged}})
        header = {"__metadata__": {"npydata": notes}, "w": entry("U8", [1], 0, 1)}
        return safetensors_file(folder / "a.safetensors", header, payload(1))

    return write


VIEWS = range(100, 20_000)


def views_in_tar(folder, factor):
    views = [(key * factor, 10, 0, 1) for key in VIEWS]
    parts = [(10, "FloatStorage", 4, payload(16))]
    return tar_file(folder / "a.tar", tar_members(program(value(1)), parts, [], views=views))


def views_in_legacy(folder, factor):
    before = said(*map(unicode, ("storage", "0", "cpu")), name("torch", "FloatStorage"))
    code = b"".join(
        MARK + get(0) + get(3) + get(1) + get(2) + b"K\4" + value((key * factor, 0, 1)) + b"tQ"
        for key in VIEWS
    )
    code = program(before, EMPTY_LIST, MARK, code, APPENDS)
    return legacy_file(folder / "a.pt", code, [("0", 4, payload(16))])


WRITERS = {
    "strides": strides,
    "offsets_of_chunks": offsets,
    "set": noted("$set"),
    "frozenset": noted("$frozenset"),
    "dict": noted("$dict", lambda number: [number, 0]),
    "views_in_tar": views_in_tar,
    "views_in_legacy": views_in_legacy,
}
READABLE = "strides", "offsets_of_chunks"


def seconds(path):
    begin = time.process_time()
    with suppress(CheckpointError):
        inspect_checkpoint(path)
    return time.process_time() - begin


@pytest.mark.parametrize("which", WRITERS)
def test_keys_of_one_hash_take_no_time(tmp_path, which):
    spread = seconds(WRITERS[which](tmp_path, 1))
    alike = WRITERS[which](tmp_path, PRIME)
    assert seconds(alike) < TIMES * spread + 0.1
    with nullcontext() if which in READABLE else pytest.raises(CheckpointError):
        open_checkpoint(alike)


def test_a_few_keys_of_one_hash_are_a_set_as_any(tmp_path):
    path = noted("$set")(tmp_path, PRIME, MAX_ALIKE)
    assert open_checkpoint(path).metadata["v"] == {k * PRIME for k in range(MAX_ALIKE)}
