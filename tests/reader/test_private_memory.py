"""The memory of tensors: few maps for many, private to each, and given back when it is let go."""

import gc
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import entry, legacy_file, safetensors_file
from pickle_code import call, name, program, storage, value
from safetensors.torch import save_file

from npydata import open_checkpoint
from npydata.reader.files import SMALL_BYTES, OpenFile
from npydata.reader.private_memory import LARGE_BYTES, PAGE
from npydata.reader.private_memory import MANY as WAITING

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts there")
LARGE = SMALL_BYTES // 4 + 300
"""Elements of a float32 tensor that is mapped, and begins and ends within a page."""
FORMATS = pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "shards", "index"])


def save(folder, tensors, kind):
    if kind in ("zip", "legacy"):
        path = folder / "a.pt"
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
        return path
    if kind == "safetensors":
        save_file(tensors, folder / "a.safetensors")
        return folder / "a.safetensors"
    halves = [dict(list(tensors.items())[k::2]) for k in range(2)]
    for k, half in enumerate(halves):
        info = {one: {"saved_offsets": [0] * half[one].ndim} for one in half}
        texts = {"DCP_SHARDING_INFO": json.dumps(info)} if kind == "shards" else None
        save_file(half, folder / f"part{k}.safetensors", texts)
    if kind == "index":
        weight_map = {one: f"part{k}.safetensors" for k, half in enumerate(halves) for one in half}
        (folder / "a.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def numbered(count, numel=LARGE):
    return {f"t{k}": torch.full((numel,), float(k)) for k in range(count)}


def maps():
    return sum(1 for _ in Path("/proc/self/maps").open())


def private_kib():
    """KiB of this process that are no longer, or never were, those of a file."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(next(one for one in rollup.splitlines() if one.startswith("Anonymous:")).split()[1])


@FORMATS
def test_tensors_large_and_small_take_few_maps(tmp_path, kind):
    path = save(tmp_path, numbered(300) | {f"s{k}": torch.ones(3) for k in range(300)}, kind)
    gc.collect()
    before = maps()
    with open_checkpoint(path) as checkpoint:
        tensors = dict(checkpoint)
        assert maps() - before < 64
    assert all(tensors[f"t{k}"].sum() == k * LARGE for k in range(300))
    assert maps() - before < 64


MANY = """
import sys, threading, npydata, npydata.reader.files as files
maps = lambda: sum(1 for _ in open("/proc/self/maps"))
npydata.open_checkpoint
files.SMALL_BYTES = min(files.SMALL_BYTES, int(sys.argv[3]))
before, count = maps(), int(sys.argv[2])
tensors = dict(npydata.open_checkpoint(sys.argv[1]))
assert maps() - before < 256, maps() - before
assert len(tensors) == count
for k in (0, 1, count // 2, count - 1):
    assert tensors[f"t{k}"][0] == k
tensors["t1"][:] = -1
assert tensors["t0"][-1] == 0 and tensors["t2"][0] == 2
thread = threading.Thread(target=print, args=("alive",)); thread.start(); thread.join()
"""
"""Loads all tensors of a file; of more than 65,530 maps a process and its threads would die."""


def sparse_safetensors(path, count, nbytes):
    """Tensors of which only the first element is in the file, if that: the tensor's number.

    They begin on a page, so that tensors of whole pages have no neighbour in theirs.
    """
    header = {f"t{k}": entry("F32", [nbytes // 4], nbytes * k, nbytes * (k + 1))
              for k in range(count)}  # fmt: skip
    text = json.dumps(header).encode()
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    safetensors_file(path, text.ljust(begin - 8))
    with path.open("r+b") as file:
        file.truncate(begin + count * nbytes)
        for k in (1, 2, count // 2, count - 1):
            file.seek(begin + k * nbytes)
            file.write(np.float32(k).tobytes())
    return path


def require_all_loaded(path, count, mapped_from=SMALL_BYTES):
    """``mapped_from`` is how many bytes a tensor must have so that it is mapped and not copied."""
    arguments = [sys.executable, "-c", MANY, path, str(count), str(mapped_from)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_more_mapped_tensors_than_a_process_can_have_maps_are_loaded(tmp_path):
    path = sparse_safetensors(tmp_path / "many.safetensors", 70_000, PAGE)
    require_all_loaded(path, 70_000, mapped_from=PAGE)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@FORMATS
def test_300_000_tensors_of_every_format_are_loaded(tmp_path, kind):
    path = save(tmp_path, numbered(300_000, 4), kind)
    require_all_loaded(path, 300_000)


@FORMATS
def test_a_write_shows_in_no_later_read_of_the_tensor_or_of_a_neighbour(tmp_path, kind):
    wanted = numbered(12)
    with open_checkpoint(save(tmp_path, wanted, kind)) as checkpoint:
        chance, held = random.Random(kind), {}
        for _ in range(400):
            one = f"t{chance.randrange(12)}"
            if one in held:
                assert torch.equal(held.pop(one), torch.full((LARGE,), -1.0))
            else:
                held[one] = checkpoint[one]
                assert torch.equal(held[one], wanted[one])
                held[one].fill_(-1)
        held.clear()
        for one, tensor in checkpoint.items():
            assert torch.equal(tensor, wanted[one])


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_what_was_written_to_is_given_back_while_another_tensor_stays(tmp_path, kind):
    path = save(tmp_path, numbered(46, 1 << 18), kind)
    with open_checkpoint(path) as checkpoint:
        kept = checkpoint["t0"]
        before = private_kib()
        for one in checkpoint:
            if one != "t0":
                checkpoint[one].fill_(7)
        assert private_kib() - before < 8 * 1024
        assert kept[5] == 0


def test_of_many_dropped_slices_few_are_kept_and_those_beside_them_keep_their_writes(tmp_path):
    count, numel = 200, LARGE_BYTES // 8
    path = save(tmp_path, numbered(count, numel), "safetensors")
    with open_checkpoint(path) as checkpoint:
        kept, before = {}, private_kib()
        for k in range(count):
            tensor = checkpoint[f"t{k}"].fill_(-1)
            if k % 8 == 0:
                kept[k] = tensor
            del tensor
        assert private_kib() - before < (len(kept) + 2 * WAITING) * numel * 4 // 1024
        assert all((tensor == -1).all() for tensor in kept.values())
        before = maps()
        for k in set(range(count)) - kept.keys():
            assert (checkpoint[f"t{k}"] == k).all()
        assert maps() - before < WAITING


@FORMATS
def test_tensors_stay_when_file_and_checkpoint_are_gone(tmp_path, kind):
    wanted = numbered(4)
    checkpoint = open_checkpoint(save(tmp_path, wanted, kind))
    tensors = dict(checkpoint)
    tensors["t1"].fill_(5)
    checkpoint.close()
    del checkpoint
    gc.collect()
    assert torch.equal(tensors["t1"], torch.full((LARGE,), 5.0))
    assert all(torch.equal(tensors[one], wanted[one]) for one in ("t0", "t2", "t3"))


def test_threads_that_read_write_and_drop_never_see_each_others_writes(tmp_path):
    wanted, wrong = numbered(6), []
    checkpoint = open_checkpoint(save(tmp_path, wanted, "zip"))
    gate = threading.Barrier(6)

    def work(seed):
        gate.wait()
        for _ in range(150):
            tensor = checkpoint[f"t{seed}"]
            if not torch.equal(tensor, wanted[f"t{seed}"]):
                wrong.append(seed)
            tensor.fill_(-seed - 1)
            del tensor

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_slice_that_somebody_has_is_not_given_to_another(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(40 * PAGE))
    file = OpenFile(path)
    first = file.private(PAGE + 5, 20 * PAGE)
    second = file.private(PAGE + 5, 20 * PAGE)
    first[:] = 1
    assert not np.shares_memory(first, second)
    assert not second.any()


def test_who_is_interrupted_while_taking_a_slice_gives_the_same_to_nobody(tmp_path):
    """A signal's handler, or ``__del__``, may take and drop slices in the middle of it."""
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4 * LARGE_BYTES))
    file = OpenFile(path)
    whole, size = file.whole_file_map(), LARGE_BYTES
    neighbour, dropped = file.private(PAGE + 5 + size, size), [file.private(3 * LARGE_BYTES, size)]
    dropped[0][:] = 1
    file.private(PAGE + 5, size)[:] = 1  # the page where the neighbour begins was written to
    taken = []

    def interrupted(offset, nbytes):
        dropped.clear()
        taken.extend((whole.slice(PAGE + 5, size, file.copy), whole.slice(0, 5, file.copy)))
        return file.copy(offset, nbytes)

    first = whole.slice(PAGE + 5, size, interrupted)
    assert taken == [None, None]  # a map of their own, then
    for memory in (first, neighbour, file.private(3 * LARGE_BYTES, size)):
        assert not memory.any()


def test_what_is_dropped_while_a_slice_is_taken_is_discarded_after_it(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4 * LARGE_BYTES))
    file = OpenFile(path)
    whole, size = file.whole_file_map(), LARGE_BYTES
    neighbour = [file.private(PAGE + 5 + size, size)]

    class Interrupted(dict):
        def get(self, page):
            if found := super().get(page):  # the last slice in it goes
                neighbour.clear()
            return found

    whole._shared_pages = Interrupted(whole._shared_pages)
    file.private(PAGE + 5, size)[:] = 1
    assert not neighbour
    assert (whole._live, whole._shared_pages) == (set(), {})


def test_where_a_whole_file_cannot_be_mapped_a_range_is_or_else_copied(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(40 * PAGE))

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("npydata.reader.files.WholeFileMap", refuse)
    assert not OpenFile(path).private(5, 20 * PAGE).any()
    monkeypatch.setattr("npydata.reader.files.PrivateMap", refuse)
    assert not OpenFile(path).private(5, 20 * PAGE).any()


def misaligned_legacy(path):
    """Two tensors of different dtypes over one storage, which begins at an odd byte."""
    raw = storage("0", 40_000 * 4, "UntypedStorage", "cpu", None)

    def over(dtype, size):
        function = name("torch._utils", "_rebuild_tensor_v3")
        hooks = call(name("collections", "OrderedDict"))
        return call(function, raw, 0, (size,), (1,), False, hooks, name("torch", dtype))

    data = np.arange(40_000, dtype="<i4").tobytes()
    for padding in range(8):
        items = {"bytes": over("uint8", 160_000), "ints": over("int32", 40_000), "x": "y" * padding}
        legacy_file(path, program(value(items)), [("0", len(data), data)])
        with open_checkpoint(path) as checkpoint:
            if checkpoint.info("ints").file_offset % 2:
                return path
    raise AssertionError


@pytest.mark.parametrize("order", [["bytes", "ints"], ["ints", "bytes"]])
def test_tensors_of_two_dtypes_over_a_misaligned_storage_are_aligned_and_share_it(tmp_path, order):
    with open_checkpoint(misaligned_legacy(tmp_path / "a.pt")) as checkpoint:
        tensors = {one: checkpoint[one] for one in order}
        assert tensors["ints"].data_ptr() % 4 == 0
        assert tensors["ints"].tolist() == list(range(40_000))
        tensors["ints"][0] = -1
        assert tensors["bytes"][:4].tolist() == [255] * 4
