"""The manifest finds every change to a checkpoint, names it, and can't itself do harm."""

import json
import os
import re
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from npydata import (
    CheckpointError,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from npydata.checkpointer import writer
from npydata.checkpointer.manifest import (
    FileEntry,
    Manifest,
    check_content,
    read_manifest,
)
from npydata.reader import checksums
from npydata.reader.manifest import is_ours

NAMES = ["model.safetensors", "optimizer.safetensors", "training_state.json", "manifest.json"]
EACH_FILE = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "c"
    model, optimizer = {"w": torch.arange(5.0), "b": torch.ones(3)}, {"state": {0: torch.ones(2)}}
    save_checkpoint(folder, model, optimizer, TrainingState(step=50))
    return folder


def complaint_of(folder):
    """What verifying says."""
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder)
    return str(caught.value)


def test_a_checkpoint_as_it_was_written_verifies(saved):
    manifest = verify_checkpoint(saved)
    assert (manifest.step, manifest.sequence) == (50, 1)
    assert set(manifest.files) == set(NAMES) - {"manifest.json"}


def flipped(path, at, flip):
    """Change one byte of a file in place; doing it again undoes it."""
    with open(path, "r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([old ^ flip]), at)


@pytest.mark.parametrize("flip", [0x01, 0x29, 0xFF])
def test_every_changed_byte_of_the_manifest_is_found(saved, flip):
    path = saved / "manifest.json"
    for at in range(path.stat().st_size):
        flipped(path, at, flip)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_manifest(saved)
        flipped(path, at, flip)
    verify_checkpoint(saved)


@pytest.mark.parametrize("name", NAMES[:3])
def test_every_flipped_bit_of_the_other_files_is_found(saved, name):
    path, manifest = saved / name, read_manifest(saved)
    for at in range(path.stat().st_size):
        flipped(path, at, 1 << at % 8)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            check_content(saved, manifest)
        flipped(path, at, 1 << at % 8)
    verify_checkpoint(saved)


@EACH_FILE
@pytest.mark.parametrize("at", [0, 8, 100, -1])
def test_verifying_names_the_file_with_a_flipped_byte(saved, name, at):
    path = saved / name
    flipped(path, at % path.stat().st_size, 0x10)
    assert str(path) in complaint_of(saved)


@EACH_FILE
@pytest.mark.parametrize("cut", [1, 100])
def test_a_file_that_was_cut_off_is_found_and_named(saved, name, cut):
    path = saved / name
    path.write_bytes(path.read_bytes()[:-cut])
    assert str(path) in complaint_of(saved)


@EACH_FILE
def test_a_file_that_lost_everything_is_found_and_named(saved, name):
    (saved / name).write_bytes(b"")
    assert str(saved / name) in complaint_of(saved)


@EACH_FILE
def test_a_file_that_grew_is_found_and_named(saved, name):
    with open(saved / name, "ab") as file:
        file.write(b" ")
    assert str(saved / name) in complaint_of(saved)


@EACH_FILE
def test_a_file_that_is_missing_is_found_and_named(saved, name):
    (saved / name).unlink()
    assert name in complaint_of(saved)


@EACH_FILE
def test_a_link_in_the_place_of_a_file_is_found_and_named(saved, name):
    shutil.move(saved / name, saved.parent / "elsewhere")
    (saved / name).symlink_to(saved.parent / "elsewhere")
    assert str(saved / name) in complaint_of(saved)


@EACH_FILE
def test_a_link_to_a_file_beside_it_is_refused_without_verifying_too(saved, name):
    (saved / name).rename(saved / "elsewhere")
    (saved / name).symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(saved)


@EACH_FILE
def test_a_folder_in_the_place_of_a_file_is_no_checkpoint(saved, name):
    (saved / name).unlink()
    (saved / name).mkdir()
    with pytest.raises((CheckpointError, OSError), match=name):
        verify_checkpoint(saved)


@EACH_FILE
def test_a_pipe_in_the_place_of_a_file_does_not_make_the_reader_wait(saved, name):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert str(saved / name) in complaint_of(saved)


def test_two_files_that_were_swapped_are_found(saved):
    one, two = saved / "model.safetensors", saved / "optimizer.safetensors"
    one.rename(saved / "x")
    two.rename(one)
    (saved / "x").rename(two)
    assert "model.safetensors" in complaint_of(saved)


def test_a_file_of_another_checkpoint_of_the_same_size_is_found(saved):
    other = saved.parent / "other"
    save_checkpoint(other, {"w": torch.zeros(5), "b": torch.ones(3)})
    shutil.copy(other / "model.safetensors", saved / "model.safetensors")
    assert "model.safetensors: bytes 4,096 to 4,116 are not what was written: 'w'" in complaint_of(
        saved
    )


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", 8192)
    monkeypatch.setattr(writer, "WRITE_BYTES", 16384)
    monkeypatch.setattr(checksums, "PIECE_BYTES", 8192)
    monkeypatch.setattr(checksums, "REQUEST_BYTES", 16384)
    monkeypatch.setattr(Manifest.__init__, "__defaults__", (8192, "", ""))


@pytest.mark.parametrize(
    "at, span, named",
    [
        (3, "0 to 4,096", "its header"),
        (100, "0 to 4,096", "its header"),
        (4096, "4,096 to 8,192", "'a'"),
        (12_288, "8,192 to 16,384", "'a'"),
        (24_095, "16,384 to 24,096", "'a'"),
        (24_096, "24,096 to 24,108", "'b'"),
        (24_108, "24,108 to 24,576", "'c'"),
        (36_863, "32,768 to 40,108", "'c'"),
    ],
)
def test_the_tensor_and_the_bytes_that_changed_are_named(tmp_path, short_pieces, at, span, named):
    state = {"a": torch.ones(5000), "b": torch.ones(3), "c": torch.ones(4000)}
    save_checkpoint(tmp_path / "c", state)
    path = tmp_path / "c" / "model.safetensors"
    flipped(path, at, 1)
    wanted = f"{path}: bytes {span} are not what was written: {named}"
    assert complaint_of(tmp_path / "c") == wanted


@pytest.mark.parametrize("at, span", [(0, "0 to 8,192"), (8191, "0 to 8,192"),
                                      (8192, "8,192 to 9,120")])  # fmt: skip
def test_a_manifest_in_pieces_as_they_were_written_before_names_piece_and_tensors(
    tmp_path, short_pieces, at, span
):
    save_checkpoint(tmp_path / "c", {"a": torch.ones(200), "b": torch.ones(1056)})
    path, old = tmp_path / "c" / "model.safetensors", read_manifest(tmp_path / "c")
    sums = tuple(zlib.crc32(path.read_bytes()[k : k + 8192]) for k in (0, 8192))
    new = replace(old, files=old.files | {path.name: FileEntry(path.stat().st_size, sums)})
    assert json.loads(new.to_json())["version"] == 2
    (tmp_path / "c" / "manifest.json").write_bytes(new.to_json())
    verify_checkpoint(tmp_path / "c")
    flipped(path, at, 1)
    assert f"{path}: bytes {span} are not what was written: " in complaint_of(tmp_path / "c")


@pytest.mark.parametrize(
    "flips", [150, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_a_bit_that_flips_anywhere_is_found_and_the_part_is_named(tmp_path, short_pieces, flips):
    model = {f"w{k}": torch.randn(k, 70) for k in range(1, 25)}
    save_checkpoint(tmp_path / "c", model, {"state": {0: {"m": torch.randn(5000)}}})
    files = sorted(path for path in (tmp_path / "c").iterdir())
    ends = np.cumsum([path.stat().st_size for path in files])
    draw = np.random.default_rng(8)
    for place in draw.integers(0, ends[-1], flips):
        which = int(np.searchsorted(ends, place, side="right"))
        path, at = files[which], int(place - ends[which]) + files[which].stat().st_size
        bit = 1 << int(draw.integers(8))
        with path.open("r+b") as file:
            (old,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([old ^ bit]), at)
            complaint = complaint_of(tmp_path / "c")
            assert path.name in complaint
            assert path.suffix != ".safetensors" or "header" in complaint or "'" in complaint
            os.pwrite(file.fileno(), bytes([old]), at)
    verify_checkpoint(tmp_path / "c")


def test_a_checkpoint_of_several_pieces_verifies(tmp_path, short_pieces):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(5000)})
    entry = verify_checkpoint(tmp_path / "c").files["model.safetensors"]
    assert entry.lengths == (4096, 4096, 8192, 7712)
    assert len(entry.crc32) == 4


def test_loading_says_that_the_content_changed_when_asked_to_verify(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=r"model.safetensors: bytes 4,116 to 4,128.*'b'"):
        load_checkpoint(saved, verify=True)


@EACH_FILE
def test_loading_without_verifying_says_that_a_file_was_cut_off(saved, name):
    (saved / name).write_bytes((saved / name).read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(saved)


def test_loading_without_verifying_still_checks_the_training_state(saved):
    path = saved / "training_state.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 50', b'"step": 51'))
    with pytest.raises(CheckpointError, match=r"training_state.json: bytes 0 to"):
        load_checkpoint(saved)


def test_loading_without_verifying_says_that_a_header_is_damaged(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: does not hold"):
        load_checkpoint(saved)


def forge(folder, name, content):
    """Replace a file and make the manifest agree, as an attacker would."""
    old = read_manifest(folder)
    (folder / name).write_bytes(content)
    entry = FileEntry(len(content), (zlib.crc32(content),) if content else ())
    new = Manifest(old.sequence, old.step, old.files | {name: entry})
    (folder / "manifest.json").write_bytes(new.to_json())


HOSTILE_STATES = {
    "not JSON": b"{",
    "empty": b"",
    "not an object": b"[]",
    "deep": b"[" * 100_000,
    "no model": json.dumps({"training_state": {}, "optimizer": {}}).encode(),
    "no optimizer": json.dumps({"training_state": {}, "model": {}}).encode(),
}
HOSTILE_PARTS = {
    "unknown tensor": {"model": {"a": {"$tensor": "../../etc/passwd"}}},
    "tensor as key": {"model": {"$dict": [[{"$tensor": []}, 1]]}},
    "unknown tag": {"model": {"$object": "os.system"}},
    "model is a number": {"model": 5},
    "model is a text": {"model": "abc"},
    "optimizer is a list": {"optimizer": [1]},
    "deep model": {"model": json.loads("[" * 900 + "]" * 900)},
    "unknown field": {"training_state": {"x": 1}},
    "training state is a list": {"training_state": [1]},
    "field is no name": {"training_state": {"$dict": [[1, 2]]}},
}


@pytest.mark.parametrize("call", [load_checkpoint, verify_checkpoint])
@pytest.mark.parametrize("case", [*HOSTILE_STATES, *HOSTILE_PARTS])
def test_a_training_state_made_to_deceive_is_refused_in_one_way(saved, case, call):
    whole = json.loads((saved / "training_state.json").read_bytes())
    content = HOSTILE_STATES.get(case) or json.dumps(whole | HOSTILE_PARTS.get(case, {})).encode()
    if case == "empty":
        content = b""
    forge(saved, "training_state.json", content)
    with pytest.raises(CheckpointError):
        call(saved)


GOOD = {"format": "npydata checkpoint", "version": 1, "sequence": 1, "step": 0, "piece_bytes": 8,
        "files": {"model.safetensors": {"size": 9, "crc32": [1, 2]},
                  "training_state.json": {"size": 0, "crc32": []}}}  # fmt: skip
ENTRY = {"size": 0, "crc32": []}
HOSTILE = {
    "list": [], "null": None, "text": "x", "number": 5, "empty": {},
    "other format": GOOD | {"format": "x"}, "version 4": GOOD | {"version": 4},
    "no run": GOOD | {"version": 2}, "version as true": GOOD | {"version": True},
    "run as a list": GOOD | {"version": 2, "run": [], "name": "c"},
    "no name": GOOD | {"version": 2, "run": "r", "name": ""},
    "no files": GOOD | {"files": {}}, "files as a list": GOOD | {"files": []},
    "outside": GOOD | {"files": GOOD["files"] | {"../model.safetensors": ENTRY}},
    "absolute": GOOD | {"files": GOOD["files"] | {"/etc/passwd": ENTRY}},
    "itself": GOOD | {"files": GOOD["files"] | {"manifest.json": ENTRY}},
    "long name": GOOD | {"files": GOOD["files"] | {"x" * 100_000: ENTRY}},
    "entry as a list": GOOD | {"files": GOOD["files"] | {"optimizer.safetensors": []}},
    "no crc32": GOOD | {"files": GOOD["files"] | {"optimizer.safetensors": {"size": 0}}},
    "too few sums": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 9, "crc32": [1]}}},
    "too many sums": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 0, "crc32": [1]}}},
    "lengths of another size": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 9, "crc32": [1, 2], "lengths": [8, 2]}}},
    "a length of 0": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 9, "crc32": [1, 2], "lengths": [9, 0]}}},
    "more lengths than sums": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 9, "crc32": [1, 2], "lengths": [4, 4, 1]}}},
    "lengths as text": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 9, "crc32": [1, 2], "lengths": "81"}}},
    "sum as text": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": 3, "crc32": "1"}}},
    "negative size": GOOD | {"files": GOOD["files"] | {
        "optimizer.safetensors": {"size": -1, "crc32": []}}},
    "step as text": GOOD | {"step": "1"}, "step as true": GOOD | {"step": True},
    "step as float": GOOD | {"step": 1.0}, "negative": GOOD | {"sequence": -1},
    "endless sequence": GOOD | {"sequence": 1 << 63}, "piece 0": GOOD | {"piece_bytes": 0},
    "no step": {key: one for key, one in GOOD.items() if key != "step"},
}  # fmt: skip


def test_the_manifest_the_hostile_ones_are_made_of_is_good():
    assert Manifest.from_json(GOOD).files["model.safetensors"] == FileEntry(9, (1, 2))


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_of_wrong_types_is_refused(case):
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        Manifest.from_json(HOSTILE[case])


@pytest.mark.parametrize("content", [
    *(json.dumps(one).encode() for one in HOSTILE.values()), b"[" * 200_000, b"\xff\xfe", b"",
    b'{"format": NaN}', b"9" * 10_000, b'{"a":' * 100_000,
], ids=[*HOSTILE, "deep", "not text", "no bytes", "NaN", "digits", "deep objects"])  # fmt: skip
def test_a_hostile_manifest_is_refused_in_one_short_message(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


def test_a_manifest_too_long_to_be_one_is_not_read(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="expected a file of at most"):
        load_checkpoint(tmp_path)


def test_a_manifest_that_was_edited_is_not_ours(saved):
    path = saved / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 50', b'"step": 51'))
    assert not is_ours(saved)


def test_a_root_passes_over_a_damaged_manifest(saved):
    save_checkpoint(saved.parent / "d", {})
    (saved.parent / "d" / "manifest.json").write_bytes(b"[" * 10_000)
    assert latest_checkpoint(saved.parent) == saved


def test_verifying_reads_a_little_at_a_time_and_everything_once(saved, monkeypatch):
    monkeypatch.setattr(checksums, "REQUEST_BYTES", 100)
    real, read, counted = checksums.read_together, [], []

    def noted(file, begin, end, reads, buffer):
        read.append(end - begin)
        return real(file, begin, end, reads, buffer)

    class Bar:
        def update(self, n):
            counted.append(n)

    monkeypatch.setattr(checksums, "read_together", noted)
    manifest = read_manifest(saved)
    check_content(saved, manifest, Bar())
    assert max(read) == 100
    assert sum(counted) == sum(read) == sum(entry.size for entry in manifest.files.values())
