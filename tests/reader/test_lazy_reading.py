"""Slices read no more than they span; threads, descriptors, memory, and bytes in another order."""

import errno
import gc
import os
import random
import re
import struct
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from test_strides import random_index

from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint
from npydata.reader.files import OpenFile
from npydata.reader.private_memory import PAGE
from npydata.reader.tensors import MAX_ADVISED_RANGES
from npydata.system.page_cache import evict, resident_pages

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts there")


def save(folder, value, kind):
    path = folder / f"{kind}.pt"
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file({name: one.contiguous() for name, one in value.items()}, path)
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    return path


FORMATS = pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])


@FORMATS
@pytest.mark.parametrize("seed", range(12))
def test_a_slice_is_what_slicing_the_loaded_tensor_gives(tmp_path, kind, seed):
    rng = random.Random(seed)
    value = {
        "cube": torch.randn(4, 5, 6),
        "bf16": torch.randn(7, 3).bfloat16(),
        "turned": torch.arange(60).reshape(3, 4, 5).permute(2, 0, 1),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "byte": torch.arange(50, dtype=torch.uint8),
    }
    if kind != "safetensors":
        value["complex"] = torch.randn(4, 3, dtype=torch.complex128)
        value["conj"] = torch.randn(3, 4, dtype=torch.complex64).t().conj()
        value["neg"] = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    with open_checkpoint(save(tmp_path, value, kind)) as checkpoint:
        for name in value:
            part = checkpoint.get_slice(name)
            assert (part.shape, part.dtype) == (tuple(value[name].shape), value[name].dtype)
            for _ in range(8):
                index = random_index(rng, value[name].shape)
                assert torch.equal(part[index], checkpoint[name][index].detach())


@FORMATS
def test_a_slice_of_a_parameter_is_a_plain_tensor_of_its_own(tmp_path, kind):
    value = {
        "p": torch.nn.Parameter(torch.ones(4, 4)) if kind != "safetensors" else torch.ones(4, 4)
    }
    with open_checkpoint(save(tmp_path, value, kind)) as checkpoint:
        row = checkpoint.get_slice("p")[1]
        row.zero_()
        assert type(row) is torch.Tensor
        assert torch.equal(checkpoint.get_slice("p")[1], torch.ones(4))


def test_a_dimension_of_one_may_have_any_stride(tmp_path):
    odd = torch.arange(6.0).as_strided((1, 3), (2**61, 2))
    with open_checkpoint(save(tmp_path, {"odd": odd}, "zip")) as checkpoint:
        assert torch.equal(checkpoint["odd"], odd)
        assert torch.equal(checkpoint.get_slice("odd")[:, 1:], odd[:, 1:])


@needs_proc
@FORMATS
@pytest.mark.parametrize(
    "index",
    [
        (slice(100, 110),),
        (slice(None), slice(0, 4)),
        (7, 512),
        (slice(0, None, 100), slice(100, 200, 7)),
        (slice(5, 5),),
        (..., 3),
    ],
    ids=str,
)
def test_a_slice_of_a_cold_file_brings_no_page_into_memory_that_it_does_not_span(
    tmp_path, kind, index
):
    tensor = torch.randn(1000, 1024)
    path = save(tmp_path, {"first": torch.zeros(9), "t": tensor}, kind)
    with open_checkpoint(path) as checkpoint:
        info = checkpoint.info("t")
        if evict(path) > 1:
            pytest.skip("this file system keeps its pages in memory")
        before = resident_pages(path)
        part = checkpoint.get_slice("t")[index]
        came = set((resident_pages(path) & ~before).nonzero()[0].tolist())
    places = torch.arange(tensor.numel()).reshape(tensor.shape)[index].flatten() * 4
    firsts = info.file_offset + places
    spanned = {*(firsts // PAGE).tolist(), *((firsts + 3) // PAGE).tolist()}
    assert torch.equal(part, tensor[index])
    assert came <= spanned


@needs_proc
def test_a_slice_with_more_rows_than_are_advised_brings_no_other_page_either(tmp_path):
    rows = MAX_ADVISED_RANGES + 1
    path = save(tmp_path, {"t": torch.ones(rows, 2 * PAGE)}, "zip")
    with open_checkpoint(path) as checkpoint:
        evict(path)
        before = resident_pages(path)
        checkpoint.get_slice("t")[:, 0]
        came = resident_pages(path) & ~before
    assert came.sum() <= rows


@needs_proc
def test_opening_a_large_cold_file_reads_only_headers(tmp_path):
    path = save(tmp_path, {f"t{k}": torch.zeros(1 << 20) for k in range(8)}, "zip")
    if evict(path) > 1:
        pytest.skip("this file system keeps its pages in memory")
    before = resident_pages(path).sum()
    with open_checkpoint(path):
        assert resident_pages(path).sum() - before <= 10  # eight headers, and the directory


@needs_proc
def test_a_touched_page_of_an_exact_map_brings_no_other(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(1000 * PAGE))
    if evict(path):
        pytest.skip("this file system keeps its pages in memory")
    content = OpenFile(path).map(0, 1000 * PAGE, readahead=False)
    assert content[500 * PAGE] == 0
    assert resident_pages(path).nonzero()[0].tolist() == [500]


def test_a_slice_tells_its_shape_as_safetensors_does(tmp_path):
    with open_checkpoint(save(tmp_path, {"t": torch.ones(2, 3)}, "zip")) as checkpoint:
        assert checkpoint.get_slice("t").get_shape() == [2, 3]


@needs_proc
@FORMATS
def test_a_tensor_of_a_large_cold_file_costs_its_own_pages(tmp_path, kind):
    path = save(tmp_path, {f"t{k}": torch.zeros(1 << 16) for k in range(100)}, kind)
    if evict(path) > 1:
        pytest.skip("this file system keeps its pages in memory")
    with open_checkpoint(path) as checkpoint:
        before = resident_pages(path).sum()
        checkpoint["t50"].sum()
        assert resident_pages(path).sum() - before <= 64 + 2


@FORMATS
def test_64_threads_read_the_right_tensors(tmp_path, kind):
    value = {f"t{k}": torch.full((257, 33), float(k)) for k in range(64)}
    wrong = []
    gate = threading.Barrier(64)

    def read(checkpoint, k):
        gate.wait()
        for step in range(20):
            name = f"t{(k + step * 7) % 64}"
            if not torch.equal(checkpoint[name], value[name]):
                wrong.append(name)
            if not torch.equal(checkpoint.get_slice(name)[3:9, ::2], value[name][3:9, ::2]):
                wrong.append(f"slice of {name}")

    with open_checkpoint(save(tmp_path, value, kind)) as checkpoint:
        threads = [threading.Thread(target=read, args=(checkpoint, k)) for k in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


@needs_proc
@FORMATS
def test_two_thousand_opens_leave_no_descriptor(tmp_path, kind):
    path = save(tmp_path, {"t": torch.ones(4)}, kind)
    open_checkpoint(path).close()
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for k in range(2_000):
        checkpoint = open_checkpoint(path)
        if k % 100 == 0:
            checkpoint["t"]
            checkpoint.get_slice("t")[1:]
        if k % 2:
            checkpoint.close()
    del checkpoint
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@needs_proc
def test_a_failed_open_leaves_no_descriptor(tmp_path):
    path = save(tmp_path, {"t": torch.ones(4)}, "zip")
    path.write_bytes(path.read_bytes()[:-1])
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_proc
def test_a_tensor_holds_no_descriptor(tmp_path):
    path = save(tmp_path, {f"t{k}": torch.ones(4) for k in range(200)}, "zip")
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(path) as checkpoint:
        tensors = [checkpoint[name] for name in checkpoint]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(torch.equal(one, torch.ones(4)) for one in tensors)


@needs_proc
def test_a_tensor_that_is_gone_gives_its_memory_back(tmp_path):
    path = save(tmp_path, {"t": torch.ones(1 << 22)}, "zip")

    def dirty():
        """Of each map of the file, how many KiB were written to."""
        maps = re.split(
            r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
        )
        return [
            int(re.search(r"Private_Dirty: +(\d+)", one)[1]) for one in maps if str(path) in one
        ]

    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["t"]
        tensor.zero_()
        assert dirty() >= [1 << 14]
        del tensor
        gc.collect()
        assert dirty() == [0]
    assert dirty() == []


def test_tied_tensors_share_memory_while_they_live(tmp_path):
    weight = torch.ones(8)
    path = save(tmp_path, {"a": weight, "b": weight, "half": weight[4:]}, "zip")
    with open_checkpoint(path) as checkpoint:
        a, b, half = checkpoint["a"], checkpoint["b"], checkpoint["half"]
        a.zero_()
        assert b.sum() == 0
        assert half.sum() == 0
        assert checkpoint.info("a").aliases == ("b",)
        assert checkpoint.info("half").aliases == ()
        assert checkpoint.info("half").storage == checkpoint.info("a").storage


def big_endian(path, dst, widths):
    """The same zip file as a big-endian machine would have written it."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(dst, "w", zipfile.ZIP_STORED) as new:
        for record in old.namelist():
            data = old.read(record)
            key = record.split("/data/")[-1]
            if record.endswith("/byteorder"):
                data = b"big"
            elif key in widths:
                n, width = len(data) // widths[key], widths[key]
                data = b"".join(data[k * width : (k + 1) * width][::-1] for k in range(n))
            new.writestr(record, data)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int16, torch.bfloat16, torch.complex64, torch.uint8, torch.bool,
     torch.uint32, torch.float8_e4m3fn, torch.complex128],
    ids=str,
)  # fmt: skip
def test_a_file_of_a_big_endian_machine_is_turned_around(tmp_path, dtype):
    tensor = torch.tensor([[1, 0, 1], [3, 120, 7]]).to(dtype)
    path = save(tmp_path, {"t": tensor, "turned": tensor.t()}, "zip")
    width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    big_endian(path, tmp_path / "big.pt", {"0": width})
    with open_checkpoint(tmp_path / "big.pt") as checkpoint:
        assert checkpoint.byteorder == "big"
        assert torch.equal(checkpoint["t"].to(torch.complex128), tensor.to(torch.complex128))
        assert torch.equal(checkpoint.load()["t"].to(torch.complex128), tensor.to(torch.complex128))
        turned = checkpoint.get_slice("turned")[1:, ::1]
        assert torch.equal(turned.to(torch.complex128), tensor.t()[1:].to(torch.complex128))
        assert checkpoint["t"].data_ptr() != 0


@needs_proc
def test_reading_one_tensor_of_many_takes_no_more_memory_than_it(tmp_path):
    path = save(tmp_path, {f"t{k}": torch.zeros(1 << 21) for k in range(12)}, "legacy")
    code = """
import sys, torch, npydata
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
npydata.open_checkpoint
with npydata.open_checkpoint(sys.argv[2]) as warm:
    warm["t"].sum()
before = peak()
with npydata.open_checkpoint(sys.argv[1]) as checkpoint:
    checkpoint["t7"].sum()
print(peak() - before)
"""
    import subprocess

    small = save(tmp_path, {"t": torch.zeros(3)}, "zip")
    args = [sys.executable, "-c", code, path, small]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (8 << 20) + (16 << 20)


def test_a_file_that_shrinks_after_opening_is_an_error_and_no_crash(tmp_path):
    path = save(tmp_path, {"t": torch.ones(1 << 18)}, "legacy")
    with open_checkpoint(path) as checkpoint:
        info = checkpoint.info("t")
        if info.file_offset % 4 == 0:
            pytest.skip("this file's tensor happens to be aligned, and is mapped")
        os.truncate(path, 4096)
        with pytest.raises(CheckpointError, match=r"t: (now )?ends at"):
            checkpoint["t"]


def test_a_legacy_storage_lies_behind_its_count(tmp_path):
    value = {"a": torch.arange(5), "b": torch.ones(3, dtype=torch.float64)}
    path = save(tmp_path, value, "legacy")
    with open_checkpoint(path) as checkpoint:
        for name, tensor in value.items():
            at = checkpoint.info(name).file_offset
            raw = path.read_bytes()
            assert struct.unpack("<q", raw[at - 8 : at]) == (tensor.numel(),)
            assert raw[at : at + tensor.nbytes] == tensor.numpy().tobytes()


@pytest.mark.parametrize(
    ("path", "error", "why"),
    [
        ("", FileNotFoundError, "No such file or directory: ''"),
        ("a\0.pt", CheckpointError, r"'a\\x00\.pt' has a null byte"),
        ("n" * 300, OSError, "too long: 'nnn"),
    ],
)
def test_a_path_that_no_file_has_is_named(tmp_path, monkeypatch, path, error, why):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, {"w": torch.ones(3)}, "zip")  # which "" is not the folder of
    with pytest.raises(error, match=why):
        open_checkpoint(path)


def test_a_path_may_be_bytes(tmp_path):
    path = save(tmp_path, {"w": torch.ones(3)}, "zip")
    assert open_checkpoint(os.fsencode(path)).path == path


def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "no room")

    path = save(tmp_path, {"w": torch.ones(3)}, "zip")
    monkeypatch.setattr(OpenFile, "view", refuse)
    with pytest.raises(OSError, match=rf"no room: '{re.escape(str(path))}'"):
        open_checkpoint(path)


class Made:
    """What only code can make."""


def test_what_is_nested_in_a_set_is_no_plain_value(tmp_path):
    value = {
        "tensor": {(torch.ones(2), 1)},
        "object": [{((Made(),),)}],
        "plain": {(1, (2.5, "a"))},
    }
    with open_checkpoint(save(tmp_path, value, "zip")) as checkpoint:
        assert checkpoint.metadata["plain"] == value["plain"]
        for _ in range(2):
            with pytest.raises(UnsafeCheckpointError, match=r"object needs .*\.Made"):
                checkpoint.metadata["object"]
            with pytest.raises(CheckpointError, match="a set that holds a tensor"):
                checkpoint.metadata["tensor"]
