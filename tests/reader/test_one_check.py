"""Hostile things put before one check alone: elsewhere another would refuse them as well."""

import json
import pickle
import struct
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_files import checkpoint_records, entry, safetensors_file, stored_zip
from safetensors.torch import load_file

from npydata import CheckpointError, open_checkpoint
from npydata.reader.containers import (
    containers,
    legacy,
    require_one_reading,
    safetensors,
    tar,
    zip,
)
from npydata.reader.files import OpenFile
from npydata.reader.keys import Keys
from npydata.reader.manifest import FORMAT, RECORD_FORMAT, Manifest, Record
from npydata.reader.numpy_values import ARRAY
from npydata.reader.open import blob_store
from npydata.reader.pickle_names import may_name
from npydata.reader.plain_calls import require_attributes
from npydata.reader.stored import Global, Storage
from npydata.reader.torch_rebuild import Rebuilder, dense_tensor

FLOATS, DOUBLES = Global("torch", "FloatStorage"), Global("torch", "DoubleStorage")
FOUR = ("storage", FLOATS, "0", "cpu", 4)
LINK = tarfile.TarInfo("a")
LINK.type = tarfile.SYMTYPE


def a_file(content):
    return SimpleNamespace(size=len(content), read=lambda at, count: content[at : at + count])


def listed(flags=0, packed=4, disk=0, attributes=0):
    """A record of four bytes in a zip file's directory."""
    name = b"a/data/0"
    return zip.ENTRY.pack(b"PK\1\2", 0, 0, flags, zip.STORED, 0, 0, 0, packed, 4, len(name), 0, 0,
                          disk, 0, attributes, 0) + name  # fmt: skip


def two_ends(count, count_64):
    """Two end records of an empty directory, with their numbers of records."""
    return (
        zip.END_64.pack(b"PK\6\6", 44, 0, 0, 0, 0, count_64, count_64, 0, 0)
        + zip.END_64_LOCATOR.pack(b"PK\6\7", 0, 0, 1)
        + zip.END.pack(b"PK\5\6", 0, 0, count, count, 0, 0, 0)
    )


def two_of_one():
    """What a tar file says of two tensors that are both called 7."""
    said = iter([2, (7, "s", "a type"), (7, "s", "a type")])
    numbers = {"<2i": (0, 0), "<1q": (0,)}
    return SimpleNamespace(pickle=said.__next__, numbers=numbers.__getitem__)


def loaded(*ids):
    rebuilder = Rebuilder(1000)
    for one in ids:
        rebuilder.persistent_load(one)


def conjugate_of(dtype, flags):
    return dense_tensor(Storage("0", dtype, 1), None, 0, (1,), (1,), False, None, flags)


def read_as(format, start, path=None):
    return require_one_reading(path and OpenFile(path), start, containers()[format])


CHECKS = {
    "flag of encryption": (lambda: zip.read_entry(listed(flags=1), 0), "is encrypted"),
    "stored in fewer bytes": (lambda: zip.read_entry(listed(packed=3), 0), "has 3 bytes of 4"),
    "another disk": (lambda: zip.read_entry(listed(disk=1), 0), "is on disk 1"),
    "a folder with bytes": (lambda: zip.read_entry(listed(attributes=16), 0), "of a folder"),
    "a name that climbs": (lambda: zip.record_name(b"a/../b"), "not a plain relative path"),
    "a gap behind the directory": (
        lambda: zip.find_directory(
            a_file(bytes(50) + zip.END.pack(b"PK\5\6", 0, 0, 1, 1, 46, 0, 0))
        ),
        "expected the directory to end at byte 50",
    ),
    "two counts": (lambda: zip.find_directory(a_file(two_ends(2, 1))), "do not agree"),
    "another folder": (
        lambda: zip.find_prefix(["arc/data.pkl", "arch/data/0"]),
        "is not in the folder 'arc'",
    ),
    "a record longer than its storage": (
        lambda: zip.check_sizes({"0": SimpleNamespace(nbytes=17)}, [Storage("0", torch.float, 4)]),
        "has 17 bytes, its storage 16",
    ),
    "a long header": (
        lambda: safetensors.header_length(
            SimpleNamespace(size=1 << 40, read=lambda *_: struct.pack("<Q", 100_000_001))
        ),
        "a header of 100,000,001 bytes",
    ),
    "a version of a later day": (
        lambda: zip.check_version(SimpleNamespace(file=a_file(b"99"), offset=0, nbytes=2)),
        "version b'99' of the format",
    ),
    "a storage that is not listed": (
        lambda: legacy.in_file_order(["0"], dict.fromkeys("01")),
        "'1' is in the list or in the object, not in both",
    ),
    "a link in a tar file": (
        lambda: list(tar.walk_members(a_file(LINK.tobuf() + bytes(512)))),
        "is of type b'2', expected a file",
    ),
    "an array's class that is called": (
        lambda: Rebuilder(1000).reduce(ARRAY, ((0,),)),
        "calls numpy.ndarray",
    ),
    "a tensor's number for two": (
        lambda: tar.read_tensors(two_of_one(), {"'s'": Storage("s", torch.float, 1)}),
        "called 7",
    ),
    "a count too small": (
        lambda: legacy.require_count(Storage("0", torch.float, 4), 3),
        "has 3 elements, 4 by the pickle",
    ),
    "a tar header": (
        lambda: read_as("safetensors", tarfile.TarInfo("a").tobuf()),
        "like a safetensors file and like a tar file",
    ),
    "another length of a storage": (lambda: loaded(FOUR, (*FOUR[:4], 5)), "16 bytes and 20"),
    "another dtype of a storage": (
        lambda: loaded(FOUR, ("storage", DOUBLES, "0", "cpu", 2)),
        "dtype torch.float32 and torch.float64",
    ),
    "a view beyond its storage": (
        lambda: loaded((*FOUR, ("v", 2, 3))),
        "elements 2 to 5 of storage '0', which has 4",
    ),
    "two views of one name": (
        lambda: loaded((*FOUR, ("v", 0, 2)), (*FOUR, ("v", 2, 2))),
        "two views of a storage are called 'v'",
    ),
    "a flag that is off": (lambda: conjugate_of(torch.cfloat, {"conj": False}), "that are on"),
    "a conjugate of floats": (lambda: conjugate_of(torch.float, {"conj": True}), "the conjugate"),
    "an attribute of tensors": (lambda: require_attributes({"data": 1}), "attribute 'data'"),
}


@pytest.mark.parametrize("refused", CHECKS)
def test_what_one_check_is_for_is_refused_by_it(refused):
    attempt, why = CHECKS[refused]
    with pytest.raises(CheckpointError, match=why):
        attempt()


HEADERS = {
    "-0 is no count": b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}',
    "NaN is not JSON": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}',
    "expected dtype, shape": b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"more":1}}',
    "and 1 elements of 4 bytes": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,16]}}',
    "a tensor begins at byte": b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
                               b'"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}',
}  # fmt: skip


@pytest.mark.parametrize("why", HEADERS)
def test_a_header_that_readers_could_take_in_two_ways_is_refused(tmp_path, why):
    data = b"" if b"[0,0]" in HEADERS[why] else bytes(16)
    path = safetensors_file(tmp_path / "a.safetensors", HEADERS[why], data)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(path)


def test_a_pickle_that_says_names_is_read_as_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="like a pickle that says names"):
        read_as("safetensors", b"cos\nsystem\n.", tmp_path / "a")


@pytest.mark.parametrize("length", [0x2E88, 0x12E88, 0x8088, 0x888, 0x863])
def test_a_length_that_is_a_pickle_as_well_says_no_names(tmp_path, length):
    header = json.dumps({"w": entry("U8", [40], 0, 40)}).encode().ljust(length)
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + b"a\nb\n." * 8)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["w"], load_file(path)["w"])


EVIL = b'cos\nsystem\n(S"true"\ntR.'
WALKED = {
    "a name": b"",
    "a place in the memo beyond the file": b"K\1r\xff\xff\xff\0",
    "a place in other digits": b"K\1p007\n",
    "a place behind a space": b"K\1p0\ng 0\n",
    "a list with a key": b"](K\1eK\0K\2s",
    "bytes that are appended to": b"\x96\1\0\0\0\0\0\0\0a(K\1e",
    "an opcode that is not read here": b"C\1a\x98",
    "a number in hexadecimal": b"I0x10\n",
    "a number behind a space": b"L 7L\n",
    "a float with a sign": b"F+1\n",
    "a long number": b"\x8b" + struct.pack("<i", 70_000) + b"\1" * 70_000,
    "a number of many digits": b"L" + b"7" * 3000 + b"L\n",
    "a long text": b"V" + b"a" * 9000 + b"\n",
    "a text too long to be looked through": b"V" + b"Z" * (2 << 20) + b"\n",
    "a number too long for that": b"L" + b"7" * (2 << 20) + b"L\n",
    "a key of tuples": b"})" + b"\x85" * 900 + b"K\1s",
    "a frame": b"\x80\4\x95" + struct.pack("<Q", len(EVIL)),
    "more opcodes than are walked": b"N0" * 40_000,
    "torch's magic number": pickle.dumps(legacy.MAGIC_NUMBER, protocol=0),
    "that number as bytes": pickle.dumps(legacy.MAGIC_NUMBER, protocol=4),
}
NAMED = {
    "a module above one with a zero byte": b"cthis.\0\na\n.",
    "the same from the stack": b"\x80\4\x8c\x08this.x\0y\x8c\1a\x93.",
    "an instance": b'(S"true"\nios\nsystem\n.',
    "an object": b'(cos\nsystem\nS"true"\no.',
}


@pytest.mark.parametrize("kind", WALKED)
def test_what_hides_a_name_from_nobody_but_us_hides_it_from_nobody(kind):
    assert may_name(WALKED[kind] + EVIL)


@pytest.mark.parametrize("kind", NAMED)
def test_a_name_is_seen_however_it_is_said(kind):
    assert may_name(NAMED[kind])


def test_honest_headers_say_no_names():
    """Those that end where writers pad them to; behind them come weights."""
    draw = np.random.default_rng(5)
    entries = b"".join(b'"model.layers.%d.mlp.gate_proj.weight":{"dtype":"BF16","shape":[32],' % k
                       for k in range(900))  # fmt: skip
    for length in range(104, 60_000, 8):
        header = (b"{" + entries)[:length]
        assert not may_name(length.to_bytes(8, "little") + header + draw.bytes(4096))


def test_what_follows_the_pickle_of_a_zip_file_is_refused(tmp_path):
    path = stored_zip(tmp_path / "a.pt", checkpoint_records(b"}.N.", {}))
    with pytest.raises(CheckpointError, match="2 bytes follow the pickle"):
        open_checkpoint(path)


ENTRY = {"size": 8, "crc32": [1], "lengths": [8]}


@pytest.mark.parametrize("data, why", [
    ({"files": {"model.safetensors": {**ENTRY, "lengths": [4]}}}, "has ranges of 4 bytes"),
    ({"files": {"model.safetensors": {**ENTRY, "crc32": [1, 2]}}}, "has 2 checksums"),
    ({"files": {"../model.safetensors": ENTRY}}, "names the file '../model"),
])  # fmt: skip
def test_a_manifest_of_what_no_checkpoint_has_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        Manifest.from_json({"format": FORMAT, "version": 3, "piece_bytes": 4096, **data})


def test_a_record_of_a_file_elsewhere_is_refused():
    data = {"format": RECORD_FORMAT, "version": 1, "piece_bytes": 8, "files": {"../a": ENTRY}}
    with pytest.raises(ValueError, match="expected one beside it"):
        Record.from_json(data)


@pytest.mark.parametrize("key", [
    2**80, ((1, 2), ("a", (3.5, None))), 1 + 2j, tuple(range(31)), frozenset({1, (2, 3)}), b"a",
])  # fmt: skip
def test_keys_of_any_kind_can_be_found(key):
    assert Keys().safe(key) is key


def test_links_lead_to_a_store_only_from_beside_it():
    assert blob_store(Path("/models/snapshots/1")) == Path("/models/blobs")
    assert blob_store(Path("/models/others/1")) == Path("/models/others/1")
