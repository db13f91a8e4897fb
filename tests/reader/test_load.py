"""Whole checkpoints: what ``load`` reads is what reading one by one gives, wherever it goes."""

import copy
import errno
import gc
import os
import pickle
import threading
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import small_legacy, small_tar, small_zip
from checkpoint_tools import bits
from loader_tools import run_child
from safetensors.torch import save_file, save_model

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from npydata.reader import (
    checksums,
    convert,
    files,
    hugging_face,
    in_flight,
    parallel_read,
    private_memory,
    tensors,
)
from npydata.reader import load as loading
from npydata.reader.files import OpenFile
from npydata.reader.record import write_record
from npydata.system import page_cache
from npydata.system.file_system import read_lease
from npydata.system.page_cache import bytes_read, evict, resident_pages
from npydata.system.progress import NoBar

STATE = {
    "large": torch.arange(1 << 18, dtype=torch.int32).reshape(1 << 8, -1),
    "half": torch.randn(700, 301).to(torch.bfloat16),
    "odd": torch.arange(100_003, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "complex": torch.randn(33, dtype=torch.complex64),
    **{f"small.{k}": torch.full((k,), float(k)) for k in range(1, 40)},
}


def written_as(kind, folder):
    path = folder / "checkpoint"
    if kind == "safetensors":
        save_file(STATE, path)
    elif kind == "sharded":
        path = folder / "model.safetensors.index.json"
        halves = [dict(list(STATE.items())[k::2]) for k in range(2)]
        for k, half in enumerate(halves):
            save_file(half, folder / f"{k}.safetensors")
        names = ", ".join(
            f'"{n}": "{k}.safetensors"' for k, half in enumerate(halves) for n in half
        )
        path.write_text('{"weight_map": {' + names + "}}")
    elif kind == "folder":
        with AsyncCheckpointer() as saver:
            saver.save(path, STATE)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip")
    return path


KINDS = ["zip", "legacy", "safetensors", "sharded", "folder"]


def in_memory(patch, planned, found):
    """Say that all is in the page cache, or nothing: when reads are cut, and when they are made."""
    patch.setattr(parallel_read, "is_all_cached", lambda *_: planned)
    patch.setattr(parallel_read, "is_cached", lambda *_: found)


def writes_anywhere(patch):
    """Have direct reads take any memory, as those of an NVMe disk take what holds numbers."""
    in_memory(patch, False, False)
    patch.setattr(OpenFile, "direct", OpenFile.readahead)
    patch.setattr(OpenFile, "direct_alignment", lambda self: 1)
    patch.setattr(parallel_read, "REQUEST_BYTES", 1 << 14)


WAYS = {
    "past the page cache": lambda patch: in_memory(patch, False, False),
    "from the page cache": lambda patch: in_memory(patch, True, True),
    "evicted meanwhile": lambda patch: in_memory(patch, True, False),
    "brought meanwhile": lambda patch: in_memory(patch, None, True),
    "no direct reads here": lambda patch: (
        in_memory(patch, False, False),
        patch.setattr(OpenFile, "direct", lambda self: None),
    ),
    "a disk that writes to any memory": writes_anywhere,
}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(parallel_read, "REQUEST_BYTES", 1 << 16)
    WAYS[request.param](monkeypatch)


def expected(checkpoint):
    return {name: checkpoint[name] for name in checkpoint}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_load_is_what_reading_one_by_one_gives(tmp_path, kind, way):
    with open_checkpoint(written_as(kind, tmp_path)) as checkpoint:
        loaded, one_by_one = checkpoint.load(), expected(checkpoint)
    assert list(loaded) == list(one_by_one)
    assert all(bits(loaded[name]) == bits(one_by_one[name]) for name in loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_into_tensors_fills_these_very_ones(tmp_path, kind, way):
    with open_checkpoint(written_as(kind, tmp_path)) as checkpoint:
        ours = {name: torch.zeros_like(checkpoint[name]) for name in checkpoint}
        versions = {name: tensor._version for name, tensor in ours.items()}
        loaded = checkpoint.load(into=ours)
        assert all(bits(ours[name]) == bits(checkpoint[name]) for name in ours)
    assert all(loaded[name] is ours[name] for name in ours)
    assert all(ours[name]._version > versions[name] for name in ours)


def test_what_torch_cannot_compute_with_is_filled_too(tmp_path):
    """Numbers of ``bits8``, and tensors of inference mode."""
    bits8 = torch.arange(12, dtype=torch.uint8).view(torch.bits8)
    torch.save({"a": bits8, "b": torch.arange(3.0)}, tmp_path / "c.pt")
    with torch.inference_mode():
        into = {"a": torch.zeros(12, dtype=torch.uint8).view(torch.bits8), "b": torch.zeros(3)}
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        checkpoint.load(into=into)
    assert into["a"].view(torch.uint8).tolist() == list(range(12))
    assert into["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("verify", [False, True])
def test_a_disk_that_writes_to_any_memory_fills_a_model_without_a_copy(
    tmp_path, monkeypatch, verify
):
    """But for the requests in which two tensors meet."""
    writes_anywhere(monkeypatch)
    request, distribute, copied = parallel_read.REQUEST_BYTES, parallel_read.distribute, []

    def noted(content, begin, reads):
        copied.extend(one.target.nbytes for one in reads
                      if not np.may_share_memory(content, one.target))  # fmt: skip
        distribute(content, begin, reads)

    for module in (parallel_read, checksums):
        monkeypatch.setattr(module, "distribute", noted)
    for size in ("REQUEST_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(checksums, size, request)
    state = {f"w{k}": torch.randn(100_005) for k in range(3)}
    with AsyncCheckpointer() as saver:
        saver.save(tmp_path / "c", state)
    into = {f"model.{name}": torch.zeros(100_006)[1:] for name in state}
    with open_checkpoint(tmp_path / "c") as checkpoint:
        checkpoint.load(into=into, verify=verify)
    assert all(torch.equal(into[f"model.{name}"], one) for name, one in state.items())
    assert sum(copied) <= (len(state) + 1) * request


@pytest.mark.parametrize("alignment", [1, parallel_read.PAGE])
def test_short_reads_are_carried_on(tmp_path, monkeypatch, alignment):
    """As a signal may end one."""
    path, whole = written_as("safetensors", tmp_path), os.preadv
    writes_anywhere(monkeypatch)
    monkeypatch.setattr(OpenFile, "direct_alignment", lambda self: alignment)

    def short(descriptor, memory, offset, *flags):
        left, clipped = 3 * parallel_read.PAGE, []
        for part in memory:
            clipped.append(memoryview(part)[:left])
            left -= clipped[-1].nbytes
        return whole(descriptor, clipped, offset, *flags)

    monkeypatch.setattr(os, "preadv", short)
    with open_checkpoint(path) as checkpoint:
        into = {name: torch.zeros_like(one) for name, one in STATE.items()}
        checkpoint.load(into=into)
    assert all(bits(into[name]) == bits(STATE[name]) for name in STATE)


@pytest.mark.parametrize("error", [errno.EFAULT, errno.EINVAL])
def test_memory_that_the_disk_refuses_is_filled_by_way_of_a_buffer(tmp_path, monkeypatch, error):
    path, whole, refused = written_as("safetensors", tmp_path), os.preadv, []
    writes_anywhere(monkeypatch)

    def refusing(descriptor, memory, offset, *flags):
        if len(memory) > 1:
            refused.append(offset)
            raise OSError(error, os.strerror(error))
        return whole(descriptor, memory, offset, *flags)

    monkeypatch.setattr(os, "preadv", refusing)
    with open_checkpoint(path) as checkpoint:
        into = {name: torch.zeros_like(one) for name, one in STATE.items()}
        checkpoint.load(into=into)
    assert refused
    assert all(bits(into[name]) == bits(STATE[name]) for name in STATE)


INDEXES = [
    np.s_[0:128],
    np.s_[5:7, :10],
    np.s_[::3, 1],
    np.s_[3],
    np.s_[-1, 4:9],
    ...,
    (),
    np.s_[9:9],
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_slices_reads_what_get_slice_does(tmp_path, kind, way):
    with open_checkpoint(written_as(kind, tmp_path)) as checkpoint:
        name = next(name for name in checkpoint if name.endswith("large"))
        for index in INDEXES:
            wanted = checkpoint.get_slice(name)[index]
            assert bits(checkpoint.load({name: index})[name]) == bits(wanted)
            target = torch.zeros_like(wanted)
            checkpoint.load({name: index}, into={name: target, "another": torch.zeros(1)})
            assert bits(target) == bits(wanted)


def test_tensors_that_share_a_storage_share_memory_and_views_keep_their_strides(tmp_path, way):
    whole = torch.arange(60_000.0).reshape(200, 300)
    torch.save({"whole": whole, "turned": whole.T, "row": whole[7]}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        loaded = checkpoint.load()
        assert loaded["turned"].stride() == (1, 300)
        loaded["row"].fill_(-1)
        assert (loaded["whole"][7] == -1).all()
        assert (loaded["turned"][:, 7] == -1).all()
        target = torch.zeros(300, 200)
        checkpoint.load(["turned"], into={"turned": target})
        assert torch.equal(target, whole.T)


def test_a_part_is_a_part_also_of_a_storage_that_another_name_wants_whole(tmp_path):
    whole = torch.arange(600.0).reshape(20, 30)
    torch.save({"a": whole, "b": whole, "none": torch.empty(0, 3)}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        loaded = checkpoint.load({"a": ..., "b": np.s_[2:4, 1], "none": np.s_[:, 1]})
    assert torch.equal(loaded["a"], whole)
    assert torch.equal(loaded["b"], whole[2:4, 1])
    assert loaded["none"].shape == (0,)


def test_of_a_large_storage_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    whole = torch.zeros(1 << 20)
    torch.save({"whole": whole, "row": whole[4:10]}, tmp_path / "c.pt")
    read = []
    real = loading.read_all
    monkeypatch.setattr(
        loading, "read_all", lambda reads, bar: (read.extend(reads), real(reads, bar))
    )
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert checkpoint.load(["row"])["row"].untyped_storage().nbytes() == 24
    assert [one.target.nbytes for one in read] == [24]


@pytest.mark.parametrize("make", [small_zip, small_legacy, small_tar])
def test_files_written_byte_by_byte_load_as_they_read(tmp_path, make):
    with open_checkpoint(make(tmp_path / "f")) as checkpoint:
        loaded = checkpoint.load()
        assert all(bits(loaded[name]) == bits(checkpoint[name]) for name in checkpoint)


def test_flags_are_kept_and_another_dtype_is_converted(tmp_path):
    z = torch.randn(50, dtype=torch.complex64)
    state = {"p": torch.nn.Parameter(torch.randn(9)), "g": torch.randn(3, requires_grad=True),
             "conj": z.conj()}  # fmt: skip
    torch.save(state, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        loaded = checkpoint.load()
        assert isinstance(loaded["p"], torch.nn.Parameter)
        assert loaded["g"].requires_grad
        assert loaded["conj"].is_conj()
        assert torch.equal(loaded["conj"], z.conj())
        target = {"p": torch.zeros(9, dtype=torch.float64), "conj": torch.zeros_like(z)}
        checkpoint.load(["p", "conj"], into=target)
        assert torch.equal(target["p"].float(), state["p"])
        assert torch.equal(target["conj"], z.conj())


@pytest.mark.parametrize(("saved", "wanted"), [
    (torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float32, torch.float64),
])  # fmt: skip
def test_a_negative_view_keeps_its_sign_in_another_dtype(tmp_path, saved, wanted):
    """Between float16 and float32, torch's ``copy_`` forgets that a contiguous view is negative."""
    numbers = torch.arange(1.0, 9.0, dtype=saved)
    state = {"strided": torch._neg_view(numbers)[::2], "whole": torch._neg_view(numbers),
             "plain": numbers}  # fmt: skip
    torch.save(state, tmp_path / "n.pt")
    targets = {name: torch.zeros(one.shape, dtype=wanted) for name, one in state.items()}
    targets["plain"] = torch._neg_view(targets["plain"])
    with open_checkpoint(tmp_path / "n.pt") as checkpoint:
        filled = checkpoint.load(into=targets)
    assert {name: one.tolist() for name, one in filled.items()} == {
        "strided": [-1, -3, -5, -7], "whole": (-numbers).tolist(), "plain": numbers.tolist()
    }  # fmt: skip


def test_a_module_and_an_optimizer_are_filled(tmp_path):
    def trained(steps):
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.randn(4, 30)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (other, second) = trained(3), trained(1)
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()["state"]}, tmp_path / "c.pt")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        checkpoint.load(into=other)
    assert str(other.state_dict()) == str(model.state_dict())
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        checkpoint.load(into={"m": other, "o": second.state_dict()["state"]})
    assert str(second.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"a": torch.zeros(3)}, "into has no 'b'"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "has no 'c', which into"),
        (
            {"a": torch.zeros(3), "b": torch.zeros(3)},
            r"b: into has shape \(3,\), the checkpoint \(2,\)",
        ),
    ],
)
def test_tensors_to_fill_that_do_not_fit_are_refused_before_any_is_written(tmp_path, into, words):
    torch.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "c.pt")
    checkpoint = open_checkpoint(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(into=into)
    assert not any(tensor.any() for tensor in into.values())


@pytest.mark.parametrize(
    ("index", "error", "why"),
    [
        (3, IndexError, "index 3 is out of range"),
        ((0, 0), IndexError, "2 indices"),
        ([0, 1], TypeError, "not list"),
        (np.s_[::-1], ValueError, "steps by -1"),
    ],
)
def test_a_part_that_a_tensor_has_not_is_refused_with_its_name(tmp_path, index, error, why):
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "c.pt")
    target = torch.zeros(3)
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        for into in (None, {"a": target, "b": target}):
            with pytest.raises(error, match=f"c.pt: b: .*{why}"):
                checkpoint.load({"a": ..., "b": index}, into=into)
        with pytest.raises(error, match=f"c.pt: b: .*{why}"):
            checkpoint.get_slice("b")[index]
    assert not target.any()


@pytest.mark.parametrize(("saved", "into"), [("module.", ""), ("", "_orig_mod."), ("a.", "b.")])
def test_names_of_a_wrapped_module_are_told_from_its_own(tmp_path, saved, into):
    layer = torch.nn.Linear(3, 2).state_dict()
    torch.save({saved + name: one for name, one in layer.items()}, tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as checkpoint:
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(into={into + name: one for name, one in layer.items()})
        with pytest.raises(CheckpointError, match=r"into has no .*, which the checkpoint has$"):
            checkpoint.load(into={f"{into}weight": layer["weight"]})
    hints = {"module.": "'module.' here", "": "'_orig_mod.' there"}
    assert (f"begin with {hints.get(saved)}" in str(refused.value)) == (saved in hints)


@pytest.mark.parametrize("when", ["before it is read", "when it was"])
@pytest.mark.parametrize("read", [
    lambda one, folder: one.load(),
    lambda one, folder: one.load(into={"w": torch.zeros(1 << 20, dtype=torch.float64)}),
    lambda one, folder: one.to_safetensors(folder / "b.safetensors"),
    lambda one, folder: one.to_hugging_face(folder / "b"),
])  # fmt: skip
@pytest.mark.parametrize("deflated", [False, True])
def test_a_file_that_is_written_anew_in_place_is_an_error(
    tmp_path, monkeypatch, read, when, deflated
):
    def write(value):
        written = torch.full((1 << 20,), value)
        torch.save({"w": written}, path := tmp_path / "a.pt")
        return zipped_again(path) if deflated else path

    def then_writes(read):
        return lambda *args: (read(*args), write(2.0))

    path = write(1.0)
    with open_checkpoint(path) as checkpoint:
        if when == "when it was":
            for module, name in ((loading, "read_all"), (convert, "write_slot"),
                                 (hugging_face, "write_slot")):  # fmt: skip
                monkeypatch.setattr(module, name, then_writes(getattr(module, name)))
        else:
            write(2.0)
        with pytest.raises(CheckpointError, match=r"a\.pt: (was replaced|a compressed record)"):
            read(checkpoint, tmp_path)
    assert not [*tmp_path.glob("b*")]


@pytest.mark.parametrize("read", [lambda one: one["w"], lambda one: one.get_slice("w")[2:9]])
@pytest.mark.parametrize("numel", [30, 1 << 20], ids=["read", "mapped"])
@pytest.mark.parametrize("happens", ["anew", "cut off"])
def test_one_tensor_of_a_file_that_has_changed_is_an_error(tmp_path, read, numel, happens):
    """To touch a map of what was cut off would kill the process."""
    torch.save({"w": torch.zeros(numel)}, path := tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint:
        if happens == "anew":
            torch.save({"w": torch.ones(numel)}, path)
        else:
            os.truncate(path, 500)
        with pytest.raises(CheckpointError, match=r"a\.pt: (was replaced|ends at byte \d+ now)"):
            read(checkpoint)


def test_a_device_beside_tensors_that_have_one_is_refused(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "c.pt")
    target = {"a": torch.zeros(3)}
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        with pytest.raises(CheckpointError, match="device=meta, but into= has a place"):
            checkpoint.load(into=target, device="meta")
        assert not target["a"].any()
        checkpoint.load(into=target, device=torch.device("cpu", 0))
    assert target["a"].all()


def test_files_open_and_load_where_there_is_no_proc(tmp_path, monkeypatch, way):
    opened = os.open

    def without_proc(path, *arguments, **options):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return opened(path, *arguments, **options)

    path = written_as("zip", tmp_path)
    monkeypatch.setattr(os, "open", without_proc)
    with open_checkpoint(path) as checkpoint:
        for found in (checkpoint.load(), dict(checkpoint)):
            assert all(bits(found[name]) == bits(STATE[name]) for name in STATE)


def test_a_name_that_is_not_there_and_a_kind_that_cannot_be_read_are_refused(tmp_path):
    torch.save({"a": torch.ones(3), "s": torch.eye(3).to_sparse()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        with pytest.raises(KeyError, match="no tensor 'b'"):
            checkpoint.load(["b"])
        with pytest.raises(CheckpointError, match="sparse"):
            checkpoint.load()
        assert checkpoint.load([]) == {}


def test_a_file_that_was_cut_off_meanwhile_is_an_error_that_names_it(tmp_path, way):
    path = written_as("safetensors", tmp_path)
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=f"{path}.*ends at byte"):
            checkpoint.load()


CUT_OFF_WHILE_COPIED = """
import os, sys, threading
from npydata import open_checkpoint
from npydata.reader import tensors
from npydata.reader.containers import zip

path, reads = sys.argv[1:]
cutter = threading.Thread(target=os.truncate, args=(path, 0))

def while_cut(module, name):
    before = getattr(module, name)
    def now(*given):
        if not cutter.ident:
            cutter.start()
            cutter.join(0.3)
        return before(*given)
    setattr(module, name, now)

if reads == "opening":
    while_cut(zip, "read_pickle")
with open_checkpoint(path) as checkpoint:
    while_cut(tensors, "gather")
    if reads == "slice":
        print(int(checkpoint.get_slice("w")[::2].sum()))
    print(list(checkpoint))
cutter.join()
print(os.path.getsize(path))
"""


@pytest.mark.parametrize(("reads", "read"), [("opening", []), ("slice", [1 << 18])])
def test_who_cuts_a_file_off_waits_until_what_is_mapped_is_copied(tmp_path, reads, read):
    """Without a lease of the file, the process would be killed in both of these."""
    torch.save({"w": torch.ones(1 << 19)}, path := tmp_path / "c.pt")
    with open(path, "rb") as file, read_lease(file.fileno()) as held:
        if not held:
            pytest.skip("this file system gives no leases")
    child = run_child(CUT_OFF_WHILE_COPIED, path, reads)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [*map(str, read), "['w']", "0"]


CUT_OFF_BEFORE = """
import os, sys
from npydata import CheckpointError, open_checkpoint

with open_checkpoint(sys.argv[1]) as checkpoint:
    os.truncate(sys.argv[1], 8000)
    try:
        checkpoint.get_slice("w")[::2]
    except CheckpointError as error:
        print(error)
"""


def test_a_slice_of_a_file_that_was_cut_off_is_an_error_and_no_crash(tmp_path):
    torch.save({"w": torch.ones(1 << 19)}, path := tmp_path / "c.pt")
    child = run_child(CUT_OFF_BEFORE, path)
    assert child.returncode == 0, child.stderr
    assert "ends at byte 8,000 now" in child.stdout


@pytest.mark.parametrize("cached", [True, False])
def test_a_load_maps_nothing_so_nobody_who_cuts_a_file_off_kills_it(tmp_path, monkeypatch, cached):
    path = written_as("safetensors", tmp_path)
    in_memory(monkeypatch, cached, cached)
    monkeypatch.setattr(OpenFile, "map", None)
    monkeypatch.setattr(OpenFile, "private", None)
    with open_checkpoint(path) as checkpoint:
        loaded = checkpoint.load()
    assert all(bits(loaded[name]) == bits(STATE[name]) for name in STATE)


@pytest.mark.parametrize("kernel", ["with cachestat", "without"])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_cold_load_reads_each_byte_once_and_leaves_the_page_cache_alone(
    tmp_path, monkeypatch, kind, kernel
):
    """To ask whether a page is in memory must not bring it, or be believed when it has."""
    state = {f"w{k}": torch.full((5 << 18,), float(k)) for k in range(6)}
    path = tmp_path / "x"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    if evict(path) or OpenFile(path).direct() is None:
        pytest.skip("this file system keeps its pages in memory")
    if kernel == "without":
        monkeypatch.setattr(page_cache, "SYSCALL", None)
    with open_checkpoint(path) as checkpoint:
        checkpoint.load()  # brings the code that it runs
        evict(path)
        for into in (None, {name: torch.zeros_like(one) for name, one in state.items()}):
            before, pages = bytes_read(), resident_pages(path).sum()
            loaded = checkpoint.load(into=into)
            requests = path.stat().st_size / parallel_read.REQUEST_BYTES + 1
            assert resident_pages(path).sum() - pages <= requests + 2
            assert (
                bytes_read() - before <= path.stat().st_size + (requests + 2) * parallel_read.PAGE
            )
            assert all(torch.equal(loaded[name], one) for name, one in state.items())
            evict(path)


def test_an_error_of_one_read_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_read, "REQUEST_BYTES", 1 << 14)
    begun = []

    def failing(request, buffer):
        begun.append(request)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(parallel_read, "read_request", failing)
    checkpoint = open_checkpoint(written_as("zip", tmp_path))
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.load()
    assert len(begun) <= 3 * in_flight.IN_FLIGHT


def test_reading_goes_on_while_what_was_read_is_handled():
    """A disk that has nothing to do is the dearest part of a load."""
    begun, reading, all_begun = [], [], threading.Event()

    def read(job, buffer):
        begun.append(job)
        reading.append(job)
        time.sleep(0.01)
        assert len(reading) <= in_flight.IN_FLIGHT
        reading.remove(job)
        if len(begun) > in_flight.IN_FLIGHT + 1:
            all_begun.set()
        return -job

    def handle(job, brought, buffer):
        assert all_begun.wait(10), f"only {len(begun)} reads were begun while none was handled"
        return job, brought

    found = list(in_flight.in_parallel(read, handle, range(50)))
    assert found == [(job, -job) for job in range(50)]


def test_requests_are_large_in_file_order_and_take_small_neighbours_together(tmp_path):
    (tmp_path / "f").write_bytes(bytes(100))
    file = OpenFile(tmp_path / "f")
    size = parallel_read.REQUEST_BYTES

    def read(offset, nbytes):
        return parallel_read.Read(file, offset, np.empty(nbytes, np.uint8))

    reads = [read(3 * size, 5), read(10, 20), read(100, 2 * size), read(3 * size - 70_000, 5)]
    found = [
        (group[0].offset, group[-1].end, len(group)) for group in parallel_read.requests(reads)
    ]
    page = parallel_read.PAGE
    assert found == [
        (10, size // page * page, 2),
        (size, 2 * size, 1),
        (2 * size, 2 * size + 100, 1),
        (3 * size - 70_000, 3 * size - 69_995, 1),
        (3 * size, 3 * size + 5, 1),
    ]


def test_what_is_in_the_page_cache_is_copied_in_larger_pieces(tmp_path, monkeypatch):
    size, begun, made = parallel_read.COPIED_BYTES, [], parallel_read.read_request
    with (tmp_path / "f").open("wb") as whole:
        whole.truncate(3 * size + 10)
    file = OpenFile(tmp_path / "f")

    def noted(request, buffer):
        begun.append(request[0].target.nbytes)
        return made(request, buffer)

    monkeypatch.setattr(parallel_read, "read_request", noted)
    pieces = {}
    for known in (True, False, None):
        in_memory(monkeypatch, known, known)
        begun.clear()
        read = parallel_read.Read(file, 10, np.empty(3 * size, np.uint8))
        parallel_read.read_all([read], NoBar())
        pieces[known] = sorted(begun)
    assert pieces[True] == [10, size - 10, size, size]
    assert max(pieces[False]) == max(pieces[None]) == parallel_read.REQUEST_BYTES


@pytest.mark.parametrize("failing", ["here", "beside"])
def test_an_error_of_one_copy_ends_the_others(tmp_path, monkeypatch, failing):
    """Whichever thread makes it."""
    monkeypatch.setattr(parallel_read, "COPIED_BYTES", 1 << 16)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begun, both = [], threading.Barrier(2)

    def fail(request, buffer):
        begun.append(request)
        if len(begun) <= 2:
            both.wait(10)
        if (threading.current_thread() is threading.main_thread()) == (failing == "here"):
            raise OSError(5, "Input/output error")
        time.sleep(0.05)

    monkeypatch.setattr(parallel_read, "read_request", fail)
    monkeypatch.setattr(parallel_read, "is_copied", lambda _: True)
    file, target = OpenFile(Path(__file__)), np.empty(1 << 22, np.uint8)
    with pytest.raises(OSError, match="Input/output error"):
        parallel_read.read_all([parallel_read.Read(file, 0, target)], NoBar())
    assert len(begun) <= 8


@pytest.mark.parametrize("copied", [True, False])
def test_nothing_is_written_after_ctrl_c(tmp_path, monkeypatch, copied):
    """Even if it comes before the thread that it started is known."""
    done, one_begun, start = [], threading.Event(), threading.Thread.start

    def read(request, buffer):
        one_begun.set()
        time.sleep(0.05)
        done.append(request)

    def start_one(thread):
        start(thread)
        if threading.current_thread() is threading.main_thread():
            assert one_begun.wait(10)
            raise KeyboardInterrupt

    monkeypatch.setattr(parallel_read, "COPIED_BYTES", 1 << 16)
    monkeypatch.setattr(parallel_read, "REQUEST_BYTES", 1 << 16)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    monkeypatch.setattr(parallel_read, "read_request", read)
    monkeypatch.setattr(parallel_read, "is_copied", lambda _: copied)
    file, target = OpenFile(Path(__file__)), np.empty(1 << 22, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        parallel_read.read_all([parallel_read.Read(file, 0, target)], NoBar())
    before = len(done)
    time.sleep(0.2)
    assert len(done) == before <= 8


def test_tied_tensors_that_are_cut_into_requests_fill_each_its_own(tmp_path, way):
    size = parallel_read.REQUEST_BYTES
    base = torch.arange(9 * size // 8, dtype=torch.uint8)
    state = {"whole": base, "part": base[size - size // 16 : size - size // 32]}
    torch.save(state, tmp_path / "x.pt")
    into = {name: torch.zeros_like(one) for name, one in state.items()}
    open_checkpoint(tmp_path / "x.pt").load(into=into)
    assert all(torch.equal(into[name], one) for name, one in state.items())


def test_reads_that_overlap_are_each_read_whole(tmp_path, way):
    content = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    content.tofile(tmp_path / "f")
    file, size = OpenFile(tmp_path / "f"), parallel_read.REQUEST_BYTES
    places = [(0, 2 * size + 500), (size - 900, 700), (size - 100, 900), (5, 50), (5, 50)]
    reads = [parallel_read.Read(file, at, np.empty(n, np.uint8)) for at, n in places]
    parallel_read.read_all(reads, NoBar())
    for (at, n), read in zip(places, reads, strict=True):
        assert (read.target == content[at : at + n]).all(), (at, n)


def test_a_load_onto_another_device_goes_there_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "ON_THE_WAY_BYTES", 1 << 20)
    with open_checkpoint(written_as("zip", tmp_path)) as checkpoint:
        loaded = checkpoint.load(device="meta")
        assert {n: (t.device.type, t.shape, t.dtype) for n, t in loaded.items()} == {
            n: ("meta", t.shape, t.dtype) for n, t in STATE.items()
        }


def test_a_training_checkpoint_is_loaded_without_maps_and_into_what_is_there(tmp_path):
    model = torch.nn.Linear(50, 60)
    model.register_parameter("tied", model.weight)
    with AsyncCheckpointer() as saver:
        saver.save(tmp_path / "c", model.state_dict())
    loaded, _, _ = load_checkpoint(tmp_path / "c", mmap=False)
    assert torch.equal(loaded["weight"], model.weight)
    assert loaded["tied"] is loaded["weight"]


def test_a_training_checkpoint_fills_a_model_and_an_optimizer(tmp_path):
    def trained(steps):
        model = torch.nn.Linear(50, 60)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.randn(4, 50)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    (model, optimizer), (other, second) = trained(3), trained(1)
    with AsyncCheckpointer() as saver:
        saver.save(tmp_path / "c", model.state_dict(), optimizer.state_dict())
    weight = other.weight.data_ptr()
    state, optimizer_state, _ = load_checkpoint(tmp_path / "c", into=(other, second))
    assert str(other.state_dict()) == str(model.state_dict()) == str(state)
    assert str(second.state_dict()) == str(optimizer.state_dict()) == str(optimizer_state)
    assert state["weight"].data_ptr() == other.weight.data_ptr() == weight
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=r"into has no .state\.0\.step"):
        load_checkpoint(tmp_path / "c", into=(other, fresh))


@pytest.mark.parametrize("kind", [lambda model: model, lambda model: model.state_dict(),
                                  lambda model: [model], lambda model: (model, None)])  # fmt: skip
def test_a_model_alone_may_be_filled_as_it_is(tmp_path, kind):
    saved, model = torch.nn.Linear(5, 6), torch.nn.Linear(5, 6)
    with AsyncCheckpointer() as saver:
        saver.save(tmp_path / "c", saved.state_dict())
    state, _, _ = load_checkpoint(tmp_path / "c", into=kind(model))
    assert torch.equal(model.weight, saved.weight)
    assert state["weight"].data_ptr() == model.weight.data_ptr()


MODEL = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters())


@pytest.mark.parametrize(
    ("into", "given"),
    [
        (SGD, "SGD"),
        ((SGD, MODEL), "SGD, Linear"),
        ((MODEL, SGD, MODEL), "Linear, SGD, Linear"),
        ("model", "str"),
        ((MODEL, "sgd"), "Linear, str"),
        (MODEL.parameters(), "generator"),
    ],
)
def test_what_can_not_be_filled_is_said_before_anything_is_read(tmp_path, into, given):
    with pytest.raises(
        CheckpointError, match=rf"^into={given}: expected the model, or \(model, op"
    ):
        load_checkpoint(tmp_path / "not there", into=into)


def small_file(folder, **tensors):
    save_file(tensors or {"w": torch.ones(40_000), "x": torch.zeros(3)}, path := folder / "a.st")
    return path


def test_a_copy_of_a_checkpoint_is_refused_and_takes_no_file_with_it(tmp_path):
    """Its descriptors would be closed with the copy, and their numbers be those of other files."""
    with open_checkpoint(small_file(tmp_path)) as checkpoint:
        for copies in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="open the checkpoint again"):
                copies(checkpoint)
        gc.collect()
        with open(os.devnull, "rb"), open(os.devnull, "rb"):
            assert checkpoint.load()["w"].sum() == 40_000


LOCKED = """
import os, signal, sys
from threading import Thread
from npydata import open_checkpoint
from npydata.system.fork import OWNERS

with open_checkpoint(sys.argv[1]) as checkpoint:
    checkpoint["w"]
    assert len(OWNERS) >= 3  # a file, its map, and who makes tensors
    lock_all = lambda: [owner._lock.acquire() for owner in OWNERS]
"""
INTERRUPTED = """
    signal.signal(signal.SIGUSR1, lambda *_: print(int(checkpoint["w"].sum())))
    lock_all()
    signal.alarm(10)  # ends it if it hangs
    os.kill(os.getpid(), signal.SIGUSR1)
"""
FORKED_WHILE_LOCKED = """
    other = Thread(target=lock_all)  # which the child has not
    other.start()
    other.join()
    if not (child := os.fork()):
        signal.alarm(10)
        os._exit(int(checkpoint["w"].sum()) != 40_000)
    print(os.waitpid(child, 0)[1])
    os._exit(0)
"""


def deflated(folder):
    torch.save({"w": torch.ones(40_000)}, folder / "a.pt")
    return zipped_again(folder / "a.pt")


def zipped_again(path):
    with ZipFile(path) as stored:
        records = {one: stored.read(one) for one in stored.namelist()}
    with ZipFile(path, "w", ZIP_DEFLATED, compresslevel=0) as out:
        for name, content in records.items():
            out.writestr(name, content)
    return path


def test_a_compressed_file_fills_a_model_from_the_disk_as_well(tmp_path, monkeypatch):
    """What was unpacked may have left memory, where there is little of it."""
    in_memory(monkeypatch, False, False)
    with open_checkpoint(deflated(tmp_path)) as checkpoint:
        filled = checkpoint.load(into={"w": torch.zeros(40_000)})["w"]
    assert (filled == 1).all()


@pytest.mark.parametrize("written", [small_file, deflated])
def test_a_forked_child_waits_for_no_thread_of_its_parent(tmp_path, written):
    child = run_child(LOCKED + FORKED_WHILE_LOCKED, written(tmp_path), seconds=30)
    assert (child.returncode, child.stdout) == (0, "0\n"), child.stderr


@pytest.mark.parametrize("written", [small_file, deflated])
def test_a_signals_handler_does_not_wait_for_the_thread_that_it_interrupts(tmp_path, written):
    child = run_child(LOCKED + INTERRUPTED, written(tmp_path), seconds=30)
    assert (child.returncode, child.stdout) == (0, "40000\n"), child.stderr


def test_tensors_are_in_memory_here_whatever_device_is_the_default(tmp_path):
    path = small_file(tmp_path, w=torch.arange(12.0).reshape(3, 4))
    target = torch.zeros(3, 4, dtype=torch.float64)
    with torch.device("meta"), open_checkpoint(path) as checkpoint:
        part = {"w": np.s_[1:3, ::2]}
        made = [checkpoint["w"], checkpoint.get_slice("w")[1:]]
        made += [checkpoint.load(part)["w"], checkpoint.load(into={"w": target})["w"]]
        made += checkpoint.load().values()
    assert {one.device.type for one in made} == {"cpu"}
    assert [one.sum().item() for one in made] == [66.0, 60.0, 28.0, 66.0, 66.0]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.zeros(3, device="meta"), "x: .* meta device"),
        (torch.zeros(1).expand(3), "x: .* expanded"),
        (torch.zeros(3).to_sparse(), "x: .* torch.sparse_coo"),
        ("freed", "x: .* memory was freed"),
        ("r", "x: .* may only be read"),
        ("array", "a numpy array as 'x', expected a tensor"),
        (torch.nn.Linear, "the class Linear as 'x', expected a tensor"),
    ],
)
def test_a_tensor_without_memory_of_its_own_is_refused_before_any_is_written(tmp_path, target, why):
    if target == "freed":
        (target := torch.zeros(3)).untyped_storage().resize_(0)
    elif target == "r":
        np.save(tmp_path / "a.npy", np.zeros(3, np.float32))
        with warnings.catch_warnings(action="ignore"):
            target = torch.from_numpy(np.load(tmp_path / "a.npy", mmap_mode="r"))
    elif target == "array":
        target = np.zeros(3, np.float32)
    into = {"w": torch.zeros(40_000), "x": target}
    with open_checkpoint(small_file(tmp_path)) as checkpoint:
        with pytest.raises(CheckpointError, match=why):
            checkpoint.load(into=into)
        with pytest.raises(CheckpointError, match=r"two tensors called 'a\.b'"):
            checkpoint.load(into={"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}})
    assert not into["w"].any()


class WithExtraState(torch.nn.Linear):
    """A layer that counts in a tensor; what it gives out of it is that, or a copy."""

    def __init__(self, given):
        super().__init__(3, 2)
        self.count, self.given = torch.zeros(()), given

    def get_extra_state(self):
        return self.given(self.count)


def test_what_a_state_dict_makes_anew_cannot_be_filled(tmp_path):
    saved = WithExtraState(torch.Tensor.detach)
    saved.count += 5
    save_file(saved.state_dict(), path := tmp_path / "m.safetensors")
    save_checkpoint(tmp_path / "run", saved.state_dict())
    loads = [lambda into: open_checkpoint(path).load(into=into),
             lambda into: load_checkpoint(tmp_path / "run", into=[into])]  # fmt: skip
    for load in loads:
        load(own := WithExtraState(torch.Tensor.detach))
        assert own.count == 5
        copies = WithExtraState(torch.Tensor.clone)
        before = copies.weight.detach().clone()
        with pytest.raises(CheckpointError, match=r"_extra_state: .* WithExtraState .* anew"):
            load(copies)
        assert torch.equal(copies.weight, before)


def test_numbers_beside_the_tensors_cannot_be_filled(tmp_path):
    saved = WithExtraState(lambda count: {"count": count.item()})
    save_checkpoint(tmp_path / "module", saved.state_dict())
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "both", table.state_dict(), optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"_extra_state\.count: is float, .* WithExtraState"):
        load_checkpoint(tmp_path / "module", into=[saved])
    before = table.weight.detach().clone()
    with torch.no_grad():
        table.weight += 1
    with pytest.raises(
        CheckpointError, match=r"0\.step: is int, not a tensor, in the SparseAdam .*: load"
    ):
        load_checkpoint(tmp_path / "both", into=[table, optimizer])
    assert torch.equal(table.weight, before + 1)


def test_views_that_begin_at_one_place_are_filled_each(tmp_path):
    def views(whole):
        return {"column": whole[:, 0], "even": whole[0, ::2], "row": whole[0, :2],
                "rest": whole[1:, 1:]}  # fmt: skip

    saved, whole = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    path = small_file(tmp_path, **{k: one.clone() for k, one in views(saved).items()})
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(into=views(whole))
    assert torch.equal(whole, saved * (saved != 3))  # which is in none of them


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(2)[::2],
        torch.zeros(3, 5)[:1, 1:2].t(),
        torch.zeros(0, 2)[:, 0],
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
)
def test_targets_of_odd_strides_and_turned_ones_are_filled(tmp_path, target):
    saved = torch.arange(1.0, 1 + target.numel()).reshape(target.shape).to(target.dtype)
    path = small_file(tmp_path, x=saved)
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(["x"], into={"x": target})
    assert torch.equal(target, saved)


def test_a_tensor_that_torch_cannot_convert_is_refused_before_any_is_written(tmp_path):
    w, other = torch.zeros(40_000), torch.empty(3, dtype=torch.float4_e2m1fn_x2)
    path = small_file(tmp_path, w=torch.ones(40_000), x=torch.ones(3))
    nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    lazy = torch.nn.LazyLinear(3).weight
    with open_checkpoint(path) as checkpoint:
        for target, why in ((other, "torch makes no"), (nested, "nested"), (lazy, "no shape yet")):
            with pytest.raises(CheckpointError, match=f"x: .*can't be filled: .*{why}"):
                checkpoint.load(into={"w": w, "x": target})
    assert not w.any()


def test_an_inference_tensor_of_another_dtype_is_filled(tmp_path):
    with torch.inference_mode():
        target = torch.zeros(3, dtype=torch.float64)
    with open_checkpoint(small_file(tmp_path, x=torch.ones(3))) as checkpoint:
        checkpoint.load(["x"], into={"x": target})
    assert target.tolist() == [1.0] * 3


def test_a_tied_tensor_that_the_file_lacks_is_filled_under_its_other_name(tmp_path):
    def tied():
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    save_model(saved := tied(), path := tmp_path / "m.safetensors")
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(into=(model := tied()))
        torch.testing.assert_close(model.state_dict(), saved.state_dict(), rtol=0, atol=0)
        model[1].weight = torch.nn.Parameter(torch.zeros(5, 3))
        with pytest.raises(CheckpointError, match=r"has no '\d\.weight', which into has"):
            checkpoint.load(into=model)


def test_a_file_that_was_cut_off_is_refused_where_its_tensors_are_converted(tmp_path):
    path = small_file(tmp_path, x=torch.ones(1 << 20))
    into = [torch.zeros(1 << 20, dtype=torch.float64), torch.zeros(1 << 21)[::2]]
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 1 << 20)
        for target in into:
            with pytest.raises(CheckpointError, match=r"a\.st: .*ends at byte 1,048,576 now"):
                checkpoint.load(["x"], into={"x": target})


@pytest.mark.parametrize("more", [8, 12, 16])
def test_what_zlib_holds_back_at_the_end_of_a_record_is_unpacked(tmp_path, more):
    state = {"x": torch.zeros((1 << 20) // 4 + more // 4), "y": torch.rand(10_000)}
    torch.save(state, whole := tmp_path / "whole.pt")
    with ZipFile(whole) as stored, ZipFile(tmp_path / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with open_checkpoint(tmp_path / "packed.pt") as checkpoint:
        assert not checkpoint["x"].any()


def test_a_slice_of_a_file_that_somebody_writes_is_read_and_not_mapped(tmp_path, monkeypatch):
    path = small_file(tmp_path, x=torch.arange(1 << 20))
    monkeypatch.setattr(OpenFile, "map", None)
    with open_checkpoint(path) as checkpoint, path.open("r+b"):
        assert torch.equal(checkpoint.get_slice("x")[5:900_000], torch.arange(5, 900_000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_a_set_the_file_that_was_cut_off_is_named(tmp_path, dtype):
    path = written_as("sharded", tmp_path)
    into = {name: torch.zeros_like(one, dtype=dtype if one.is_floating_point() else one.dtype)
            for name, one in STATE.items()}  # fmt: skip
    with open_checkpoint(path) as checkpoint:
        os.truncate(tmp_path / "1.safetensors", 6000)
        with pytest.raises(CheckpointError, match=r"1\.safetensors: ends at byte 6,000 now"):
            checkpoint.load(into=into)
        with pytest.raises(CheckpointError, match=r"1\.safetensors: (now )?ends at byte 6,000"):
            checkpoint.to_safetensors(tmp_path / "c.safetensors")


@pytest.mark.parametrize("verify", [False, True])
def test_of_names_that_are_one_tensor_the_last_one_fills_it(tmp_path, verify):
    path = small_file(
        tmp_path, **{k: torch.full((3 << 20,), float(n)) for n, k in enumerate("abc")}
    )
    write_record(path)
    one = torch.ones(3 << 20)
    with open_checkpoint(path) as checkpoint:
        for _ in range(3):
            into = {"a": one, "b": torch.zeros(3 << 20), "c": one}
            for names in ("abc", "cba"):
                loaded = checkpoint.load(list(names), into=into, verify=verify)
                assert list(loaded) == list(names)
                assert all(loaded[name] is into[name] for name in into)
                assert (one == 2).all()
                assert (into["b"] == 1).all()


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("second", [lambda one: one[512:], lambda one: one[:1024].T])
def test_of_targets_that_overlap_the_last_one_counts(tmp_path, names, verify, second):
    ours, expected = torch.zeros(1536, 1024), torch.zeros(1536, 1024)
    state = {"b": torch.full((1024, 1024), 2.0), "a": torch.full((1024, 1024), 1.0)}
    state["a"][3] = 7.0
    save_file(state, path := tmp_path / "m.safetensors")
    write_record(path)
    for name in names:
        (expected[:1024] if name == "a" else second(expected)).copy_(state[name])
    into = {name: ours[:1024] if name == "a" else second(ours) for name in names}
    with open_checkpoint(path) as checkpoint:
        for _ in range(3):
            checkpoint.load(into=into, verify=verify)
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_model_stays_as_it_is_where_the_optimizer_does_not_fit(tmp_path, with_optimizer):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with AsyncCheckpointer() as saver:
        saver.save(
            tmp_path / "c", model.state_dict(), optimizer.state_dict() if with_optimizer else None
        )
    other = torch.nn.Linear(3, 2)
    before = [one.clone() for one in other.parameters()]
    without_state = torch.optim.Adam(other.parameters())
    words = "which the checkpoint has" if with_optimizer else "has no optimizer"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "c", into=(other, without_state))
    assert all(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))


def test_a_record_is_found_wherever_the_process_goes(tmp_path, monkeypatch):
    write_record(small_file(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("a.st") as checkpoint:
        monkeypatch.chdir("elsewhere")
        assert checkpoint.load(verify=True)["w"].sum() == 40_000


def test_a_file_whose_name_leaves_no_room_for_a_record_is_vouched_for_by_its_folder(tmp_path):
    path = tmp_path / ("a" * 239 + ".safetensors")
    small_file(tmp_path).rename(path)
    write_record(tmp_path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.load(verify=True)["w"].sum() == 40_000


def test_what_is_verified_is_what_is_converted(tmp_path, monkeypatch):
    """A tensor of another dtype is compared first, and read once more."""
    path = small_file(tmp_path, w=torch.ones(40_000))
    write_record(path)

    def then_written(*given):
        real(*given)
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"changed!")

    into = {"w": torch.zeros(40_000, dtype=torch.float64)}
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(into=into, verify=True)
        real = loading.read_compared
        monkeypatch.setattr(loading, "read_compared", then_written)
        with pytest.raises(CheckpointError, match="changed since"):
            checkpoint.load(into=into, verify=True)


def test_what_is_verified_is_what_was_opened(tmp_path):
    """Written anew and recorded again, it agrees with its record, but lies elsewhere."""
    path = small_file(tmp_path, a=torch.ones(9), b=torch.full((9,), 2.0))
    write_record(path)
    with open_checkpoint(path) as checkpoint:
        begin = path.stat()
        content = path.read_bytes().replace(b'"a"', b'"?"').replace(b'"b"', b'"a"')
        path.write_bytes(content.replace(b'"?"', b'"b"'))
        write_record(path)
        assert path.stat().st_ino == begin.st_ino
        with pytest.raises(CheckpointError, match="changed since"):
            checkpoint.load(verify=True)


def test_nothing_is_filled_from_a_file_that_was_written_to(tmp_path):
    path = small_file(tmp_path, w=torch.ones(9))
    into = {"w": torch.zeros(9)}
    with open_checkpoint(path) as checkpoint:
        path.write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match="changed since"):
            checkpoint.load(into=into)
    assert not into["w"].any()


@pytest.mark.parametrize("saved", [
    torch.randn(300, 7, dtype=torch.float64), torch.randn(2100, dtype=torch.complex64).conj(),
    torch.randn(300, 7).to(torch.bfloat16), torch._neg_view(torch.randn(2100)),
], ids=["float64", "conjugate", "bfloat16", "negative"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_what_is_converted_comes_in_portions(tmp_path, monkeypatch, saved, dtype):
    """A tensor and its copy of another dtype need not be in memory at once."""
    warnings.filterwarnings("ignore", message="Casting complex values to real")
    torch.save({"w": saved}, tmp_path / "a.pt")
    read = []
    real = OpenFile.copy
    monkeypatch.setattr(loading, "PORTION_BYTES", 1 << 10)

    def copy(file, offset, nbytes):
        read.append(nbytes)
        return real(file, offset, nbytes)

    monkeypatch.setattr(OpenFile, "copy", copy)
    into = {"w": torch.zeros(saved.shape, dtype=dtype)}
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        read.clear()
        checkpoint.load(into=into)
    assert torch.equal(into["w"], saved.to(dtype))
    assert max(read) <= 1 << 10
    assert sum(read) == saved.nbytes


TARGETS = {
    "turned": lambda shape: torch.zeros(shape[::-1]).t(),
    "of longer rows": lambda shape: torch.zeros(shape[0], shape[1] + 1)[:, 1:],
    "every other column": lambda shape: torch.zeros(shape[0], 2 * shape[1])[:, ::2],
    "of another dtype": lambda shape: torch.zeros(shape, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("form", ["zip", "dcp", "turned", "part"])
def test_what_lies_otherwise_in_memory_comes_in_portions(tmp_path, monkeypatch, form, kind):
    """From a file or from chunks, all of it or a part, whether its owner reads it or not."""
    w, path = torch.randn(60, 50), tmp_path / "a.pt"
    w = w.t() if form == "turned" else w
    if form == "dcp":
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"w": w}, checkpoint_id=path)
    else:
        torch.save({"w": w}, path)
    expected, index = (w[3:, 1::2], np.s_[3:, 1::2]) if form == "part" else (w, ...)
    for module in (loading, tensors):
        monkeypatch.setattr(module, "PORTION_BYTES", 1 << 10)
    monkeypatch.setattr(tensors, "SMALL_BYTES", 0)
    read, real = [], OpenFile.copy
    monkeypatch.setattr(files, "read_lease", lambda _: nullcontext(False))
    monkeypatch.setattr(
        OpenFile, "copy", lambda file, at, n: (read.append(n), real(file, at, n))[1]
    )
    brought, copied = [], loading.copied
    monkeypatch.setattr(
        loading, "copied", lambda one, to: (brought.append(one.nbytes), copied(one, to))[1]
    )
    into = {"w": TARGETS[kind](expected.shape)}
    with open_checkpoint(path) as checkpoint:
        read.clear()
        checkpoint.load({"w": index}, into=into)
        assert max(read + brought) <= 1 << 10
        assert torch.equal(into["w"].float(), expected)
        read.clear()
        assert torch.equal(checkpoint.load({"w": np.s_[:, ::7]})["w"], w[:, ::7])
        assert form == "dcp" or max(read) <= 1 << 10


def test_the_disk_is_asked_for_a_large_slice_in_pieces_that_it_takes(tmp_path, monkeypatch):
    """Of one long request it read 4 MiB, and the rest a page at a time: 0.1 GB/s."""
    path, asked = small_file(tmp_path, w=torch.zeros(1 << 22)), []
    monkeypatch.setattr(files, "is_cached", lambda *_: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *place: asked.append(place))
    with open_checkpoint(path) as checkpoint:
        begin = checkpoint.info("w").file_offset
        checkpoint.get_slice("w")[:]
    pieces = sorted(place for place in asked if place[2] == os.POSIX_FADV_WILLNEED)
    assert [at for at, _, _ in pieces] == [*range(0, begin + (1 << 24), files.ADVISED_BYTES)]
    assert {length for _, length, _ in pieces[:-1]} == {files.ADVISED_BYTES}


def test_a_tensor_that_is_listed_only_is_named_by_a_load(tmp_path):
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: s: a sparse tensor can be listed"):
        open_checkpoint(tmp_path / "a.pt").load()


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("saved", [
    lambda whole: whole[:100].t(), lambda whole: whole[:1].expand(7, 1024),
    lambda whole: whole[::9, ::2],
])  # fmt: skip
@pytest.mark.parametrize("lease", [True, False])
def test_no_tensor_of_a_load_is_a_map(tmp_path, monkeypatch, kind, saved, lease):
    tensor = saved(torch.arange(1 << 20).reshape(1024, 1024))
    torch.save({"w": tensor}, tmp_path / "a.pt", _use_new_zipfile_serialization=kind == "zip")
    monkeypatch.setattr(OpenFile, "private", None)
    if not lease:
        monkeypatch.setattr(files, "read_lease", lambda _: nullcontext(False))
        monkeypatch.setattr(OpenFile, "map", None)
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        loaded = checkpoint.load()["w"]
        assert torch.equal(loaded, tensor)
        assert loaded.stride() == tensor.stride()
        for dtype in (torch.int64, torch.float32):
            target = torch.zeros(tensor.shape, dtype=dtype)
            assert torch.equal(checkpoint.load(into={"w": target})["w"], tensor.to(dtype))
        part = checkpoint.load({"w": np.s_[3:5, 1:]}) if len(tensor) > 4 else None
        assert part is None or torch.equal(part["w"], tensor[3:5, 1:])


class AsItIs(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
def test_a_subclass_in_the_same_memory_is_filled_in_order(tmp_path, names):
    path, memory = small_file(tmp_path, a=torch.zeros(9), b=torch.ones(9)), torch.full((9,), 7.0)
    held = {"a": memory.as_subclass(AsItIs), "b": memory}
    with open_checkpoint(path) as checkpoint:
        checkpoint.load(["a", "b"], into={name: held[name] for name in names})
    assert (memory == (names[-1] == "b")).all()


def test_memory_of_which_the_system_tells_nothing_is_filled(tmp_path, monkeypatch):
    path, target = small_file(tmp_path, w=torch.ones(9)), torch.zeros(9)
    monkeypatch.setattr(private_memory, "takes_writes", lambda at: at != target.data_ptr())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.load(["w"], into={"w": target})["w"].all()
