"""The level below tensors: storages by key, whole or in ranges of bytes."""

import os
import threading
from itertools import permutations

import pytest
import torch
from checkpoint_files import (
    SMALL,
    checkpoint_records,
    entry,
    payload,
    safetensors_file,
    small_legacy,
    small_safetensors,
    small_tar,
    small_zip,
    stored_zip,
)
from pickle_code import program, storage, tensor, value

from npydata import CheckpointError, LazyDataSource
from npydata.reader.files import OpenFile

OPEN = {
    "zip": LazyDataSource.from_zip,
    "legacy": LazyDataSource.from_legacy_multi_storage,
    "tar": LazyDataSource.from_tar,
    "safetensors": LazyDataSource.from_safetensors,
}
KEYS = {"zip": ["0", "1"], "legacy": ["0", "1"], "tar": ["10", "11"],
        "safetensors": ["weight", "bias"]}  # fmt: skip
BYTES = {"zip": [16, 24], "legacy": [16, 24], "tar": [16, 32], "safetensors": [16, 6]}
FORMS = list(OPEN)


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def source(form, tmp_path):
    with OPEN[form](SMALL[form](tmp_path / "small.pt")) as opened:
        yield opened


@pytest.fixture
def counted(tmp_path):
    """A zip file whose one storage holds 0, 1, 2 and so on."""
    content = {"a": tensor(storage("0", 64, "ByteStorage"), 0, (64,))}
    records = checkpoint_records(program(value(content)), {"0": bytes(range(64))})
    with LazyDataSource.from_zip(stored_zip(tmp_path / "counted.pt", records)) as opened:
        yield opened


def test_keys_are_those_of_the_storages(form, source):
    assert source.keys() == KEYS[form]


def test_a_storage_has_as_many_bytes_as_in_the_file(form, source):
    assert [source.nbytes(key) for key in source.keys()] == BYTES[form]  # noqa: SIM118


def test_a_storage_is_read_whole(form, source):
    assert [source.read(key) for key in KEYS[form]] == [payload(count) for count in BYTES[form]]


def test_what_torch_saved_is_read(tmp_path):
    one, two = torch.arange(5), torch.arange(6.0)
    for modern, opener in ((True, OPEN["zip"]), (False, OPEN["legacy"])):
        path = tmp_path / f"{modern}.pt"
        torch.save({"a": one, "b": two[2:]}, path, _use_new_zipfile_serialization=modern)
        with opener(path) as source:
            found = {source.read(key) for key in source.keys()}  # noqa: SIM118
        assert found == {one.numpy().tobytes(), two.numpy().tobytes()}


@pytest.mark.parametrize("key", ["0", "data/0", "archive/data/0"])
def test_a_storage_of_a_zip_file_has_three_spellings(tmp_path, key):
    with LazyDataSource.from_zip(small_zip(tmp_path / "a.pt")) as source:
        assert source.contains(key)
        assert source.read(key) == payload(16)
        assert source.read_range(key, 4, 4) == payload(4)
        assert source.nbytes(key) == 16


def test_the_full_name_begins_with_the_folder_that_torch_chose(tmp_path):
    torch.save(torch.zeros(2), tmp_path / "chosen.pt")
    with LazyDataSource.from_zip(tmp_path / "chosen.pt") as source:
        assert source.contains("chosen/data/0")
        assert not source.contains("archive/data/0")


@pytest.mark.parametrize("key", ["2", "data/2", "other/data/0", "xdata/0", "archive/0", "data/",
                                 "", "archive/data.pkl", "data/data/0", "/0", "0/"])  # fmt: skip
def test_no_other_spelling_means_a_storage(tmp_path, key):
    with LazyDataSource.from_zip(small_zip(tmp_path / "a.pt")) as source:
        assert not source.contains(key)
        for read in (source.read, source.nbytes, lambda key: source.read_range(key, 0, 0)):
            with pytest.raises(KeyError, match="no storage"):
                read(key)


def test_a_tensor_called_like_a_spelling_is_itself(tmp_path):
    header = {"a": entry("U8", [1], 0, 1), "data/a": entry("U8", [1], 1, 2)}
    path = safetensors_file(tmp_path / "a.safetensors", header, b"\1\2")
    with LazyDataSource.from_safetensors(path) as source:
        assert (source.read("a"), source.read("data/a")) == (b"\1", b"\2")


@pytest.mark.parametrize("offset, length", [(0, 64), (0, 1), (63, 1), (10, 20), (5, 0), (64, 0)])
def test_a_range_is_those_bytes(counted, offset, length):
    assert counted.read_range("0", offset, length) == bytes(range(64))[offset : offset + length]


@pytest.mark.parametrize(
    "offset, length",
    [(0, 65), (64, 1), (65, 0), (-1, 2), (0, -1), (10, -5), (2**63, 1), (1, 2**63)],
)
def test_a_range_that_leaves_the_storage_is_refused(counted, offset, length):
    with pytest.raises(CheckpointError, match=r"counted\.pt: storage '0': .* of a storage of 64"):
        counted.read_range("0", offset, length)


def test_a_range_never_reaches_into_the_next_storage(form, source):
    for key, count in zip(KEYS[form], BYTES[form], strict=True):
        with pytest.raises(CheckpointError):
            source.read_range(key, count - 1, 2)


def test_many_threads_read_right_bytes_at_once(counted):
    start, wrong = threading.Barrier(16), []

    def read(number):
        start.wait()
        for turn in range(300):
            at = (7 * number + turn) % 60
            if counted.read_range("0", at, 4) != bytes(range(at, at + 4)):
                wrong.append(at)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_source_reads_no_more(form, source):
    source.close()
    with pytest.raises(CheckpointError, match="closed"):
        source.read(KEYS[form][0])
    with pytest.raises(CheckpointError, match="closed"):
        source.read_range(KEYS[form][0], 0, 1)


def test_a_source_may_be_closed_twice(source):
    source.close()
    source.close()


def test_closing_gives_the_file_back(tmp_path):
    path = small_zip(tmp_path / "a.pt")

    def held():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link) == str(path) for link in links)

    with LazyDataSource.from_zip(path) as source:
        source.read("0")
        assert held() > 0
    assert held() == 0


def test_an_archive_is_not_opened_again_for_a_read(counted):
    path = counted._archive.file.path
    os.rename(path, path.with_name("elsewhere"))  # noqa: PTH104
    assert counted.read_range("0", 3, 2) == b"\3\4"


def test_a_source_that_is_cut_off_meanwhile_is_an_error(counted):
    os.truncate(counted._archive.file.path, 10)
    with pytest.raises(CheckpointError, match="ends at byte"):
        counted.read("0")


@pytest.mark.parametrize("one, other", list(permutations(FORMS, 2)))
def test_a_file_of_another_format_is_refused(one, other, tmp_path):
    with pytest.raises(CheckpointError, match=r"small\.pt: "):
        OPEN[one](SMALL[other](tmp_path / "small.pt"))


def legacy_place(path):
    """Where the first storage's count is, and how much of the file follows."""
    size = path.stat().st_size
    return size - (8 + 16 + 8 + 24), 8 + 16 + 8 + 24


def test_a_legacy_file_may_be_opened_with_the_place_that_others_need_to_be_told(tmp_path):
    path = small_legacy(tmp_path / "a.pt")
    offset, size = legacy_place(path)
    with LazyDataSource.from_legacy_multi_storage(path, offset, size) as source:
        assert source.read("1") == payload(24)


@pytest.mark.parametrize("error", [-8, -1, 1, 8])
def test_a_place_that_is_not_the_files_own_is_refused(tmp_path, error):
    path = small_legacy(tmp_path / "a.pt")
    offset, size = legacy_place(path)
    with pytest.raises(CheckpointError, match=f"data_offset is {offset}, not the given"):
        LazyDataSource.from_legacy_multi_storage(path, offset + error)
    with pytest.raises(CheckpointError, match=f"data_size is {size}, not the given"):
        LazyDataSource.from_legacy_multi_storage(path, data_size=size + error)


def test_a_legacy_file_without_storages_has_no_keys(tmp_path):
    torch.save({"step": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    size = (tmp_path / "a.pt").stat().st_size
    with LazyDataSource.from_legacy_multi_storage(tmp_path / "a.pt", size, 0) as source:
        assert source.keys() == []


def test_a_file_that_is_missing_is_named(form, tmp_path):
    with pytest.raises(FileNotFoundError) as refused:
        OPEN[form](tmp_path / "missing")
    assert refused.value.filename == str(tmp_path / "missing")


def test_a_path_may_be_text(tmp_path):
    for opener, build in ((OPEN["tar"], small_tar), (OPEN["safetensors"], small_safetensors)):
        assert opener(str(build(tmp_path / "a"))).keys()


def test_no_way_to_read_leaves_the_file(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    file = OpenFile(tmp_path / "a")
    for read in (file.read, file.copy, file.private, file.map):
        for offset, nbytes in ((-1, 5), (0, -1), (99, 2), (200, 1)):
            with pytest.raises(CheckpointError, match="are not in the file, which has 100"):
                read(offset, nbytes)


def test_a_read_that_comes_in_pieces_is_put_together(tmp_path, monkeypatch):
    content, real = bytes(range(100)), os.preadv
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(os, "preadv", lambda fd, to, at, *flags: real(fd, [to[0][:7]], at, *flags))
    assert OpenFile(tmp_path / "a").copy(3, 50).tobytes() == content[3:53]


def test_a_path_is_told_the_constructors(tmp_path):
    with pytest.raises(TypeError, match=r"a PosixPath, expected LazyDataSource\.from_zip\(path\)"):
        LazyDataSource(tmp_path / "a.pt")
