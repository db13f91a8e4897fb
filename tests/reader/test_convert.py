"""A checkpoint as one safetensors file: the same tensors and values, whole or not at all."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections import OrderedDict, namedtuple
from itertools import product

import numpy as np
import pytest
import torch
from checkpoint_files import (
    SMALL,
    checkpoint_records,
    entry,
    payload,
    safetensors_file,
    stored_zip,
)
from pickle_code import program, storage, tensor, value
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors_codes import require_known

from npydata import CheckpointError, open_checkpoint
from npydata.reader import convert, elements
from npydata.reader.containers import safetensors
from npydata.reader.containers.safetensors import CODES, COMPLEX_AS_REAL

DTYPES = [*CODES, *COMPLEX_AS_REAL]


@pytest.fixture
def small_chunks(monkeypatch):
    """So few bytes at once that tensors of a test take several chunks."""
    monkeypatch.setattr(elements, "CHUNK_BYTES", 64)


def numbers(*shape, dtype=torch.float32, seed=0):
    """Bytes of every kind, as elements of a dtype."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return raw.view(dtype).reshape(shape)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def assert_same(found, wanted):
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert bits(found) == bits(wanted)


def save(folder, content, **options):
    torch.save(content, folder / "from.pt", **options)
    return folder / "from.pt"


def to_file(source, folder, **options):
    with open_checkpoint(source) as checkpoint:
        checkpoint.to_safetensors(folder / "to.safetensors", **options)
    return folder / "to.safetensors"


def there_and_back(folder, content, **options):
    return open_checkpoint(to_file(save(folder, content), folder, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    wanted = numbers(3, 5, dtype=dtype)
    assert_same(there_and_back(tmp_path, {"a": wanted})["a"], wanted)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_of_the_format_is_read_by_safe_open(tmp_path, dtype):
    require_known(dtype)
    wanted = numbers(3, 5, dtype=dtype)
    with safe_open(to_file(save(tmp_path, {"a": wanted}), tmp_path), "pt") as opened:
        assert_same(opened.get_tensor("a"), wanted)


@pytest.mark.parametrize("dtype", COMPLEX_AS_REAL, ids=str)
def test_other_complex_numbers_are_pairs_for_safe_open(tmp_path, dtype):
    wanted = numbers(3, 5, dtype=dtype)
    with safe_open(to_file(save(tmp_path, {"a": wanted}), tmp_path), "pt") as opened:
        assert_same(opened.get_tensor("a"), torch.view_as_real(wanted))


BASE = numbers(6, 8, 4, seed=1)
COMPLEX = {str(dtype): numbers(5, 7, dtype=dtype, seed=2)
           for dtype in (torch.complex32, torch.complex64, torch.complex128)}  # fmt: skip
VIEWS = {
    "transposed": BASE.transpose(0, 2), "permuted": BASE.permute(1, 2, 0), "offset": BASE[2:],
    "every other": BASE[::2, 1::3], "a column": BASE[:, 3, 1], "a scalar": BASE[1, 2, 3],
    "expanded in front": BASE[0].expand(9, 8, 4), "expanded behind": BASE[..., :1].expand(6, 8, 7),
    "expanded inside": BASE[:, :1].expand(6, 30, 4), "one number, often": BASE[0, 0, 0].expand(99),
    "overlapping": BASE.as_strided((9, 9), (2, 2)), "windows": BASE.as_strided((20, 8), (3, 1)),
    "windows apart": BASE.as_strided((8, 20), (1, 3)), "empty": BASE[:, :0],
    "empty, of large sizes": torch.empty(2**40, 0, 2**20), "one of one": BASE[3:4, 2:3, 1:2],
    "odd stride of a size 1": BASE[:1].as_strided((1, 8, 4), (77, 4, 1)),
    **{f"conjugate {name}": one.conj() for name, one in COMPLEX.items()},
    **{f"conjugate, transposed {name}": one.mH for name, one in COMPLEX.items()},
    "negative": torch._neg_view(BASE), "imaginary": COMPLEX["torch.complex64"].conj().imag,
    "both": torch._neg_view(COMPLEX["torch.complex64"].conj())[::2],
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_comes_back_with_its_elements_in_order(tmp_path, name):
    assert_same(there_and_back(tmp_path, {"a": VIEWS[name]})["a"], VIEWS[name])


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.usefixtures("small_chunks")
def test_every_view_comes_back_chunk_by_chunk(tmp_path, name):
    assert_same(there_and_back(tmp_path, {"a": VIEWS[name]})["a"], VIEWS[name])


def some_view(draw, base):
    """Any strides and sizes that stay inside."""
    shape = [draw.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(draw.randint(0, 4))]
    stride = [draw.choice([0, 1, 1, 2, 3, 7, 15, 40]) for _ in shape]
    reach = sum(max(0, size - 1) * step for size, step in zip(shape, stride, strict=True))
    if reach >= base.numel():
        return some_view(draw, base)
    return base.as_strided(shape, stride, draw.randrange(base.numel() - reach))


@pytest.mark.usefixtures("small_chunks")
def test_any_view_comes_back_chunk_by_chunk(tmp_path):
    draw = random.Random(0)
    base = numbers(600, dtype=torch.int32)
    views = {str(number): some_view(draw, base) for number in range(300)}
    found = there_and_back(tmp_path, views)
    for name, view in views.items():
        assert_same(found[name], view)


@pytest.mark.usefixtures("small_chunks")
def test_no_chunk_is_longer_than_asked_for(tmp_path):
    draw = random.Random(1)
    base = numbers(600, dtype=torch.int32)
    views = {str(number): some_view(draw, base) for number in range(300)}
    with open_checkpoint(save(tmp_path, views)) as checkpoint:
        for name, found in checkpoint.distinct():
            for chunk in elements.element_chunks(found.reader, found.value):
                assert chunk.nbytes <= 64, name


ORDERS = {"<": "little", ">": "big"}
ON_DISK = {
    "FloatStorage": "f4",
    "ShortStorage": "i2",
    "ByteStorage": "u1",
    "ComplexFloatStorage": "c8",
}


@pytest.mark.parametrize("order, kind", list(product(ORDERS, ON_DISK)))
@pytest.mark.parametrize("stride", [(4, 1), (1, 3)], ids=["as it lies", "transposed"])
@pytest.mark.usefixtures("small_chunks")
def test_files_of_either_byte_order_are_written_in_little(tmp_path, order, kind, stride):
    wanted = np.arange(12).astype(ON_DISK[kind])
    require_known(torch.from_numpy(wanted).dtype)
    raw = wanted.astype(order + ON_DISK[kind]).tobytes()
    code = program(value({"a": tensor(storage("0", 12, kind), 0, (3, 4), stride)}))
    records = checkpoint_records(code, {"0": raw}, byteorder=ORDERS[order])
    path = to_file(stored_zip(tmp_path / "a.pt", records), tmp_path)
    with safe_open(path, "pt") as opened:
        found = opened.get_tensor("a")
    assert torch.equal(found, torch.from_numpy(wanted).as_strided((3, 4), stride))


def test_tied_tensors_are_written_once_and_tied_again_when_read(tmp_path):
    weight = numbers(40, 50)
    source = save(tmp_path, {"embed": weight, "other": numbers(3), "head": weight})
    with open_checkpoint(source) as checkpoint:
        done = checkpoint.to_safetensors(tmp_path / "to.safetensors")
    assert (done.tensors, done.ties) == (3, 1)
    assert done.nbytes == (tmp_path / "to.safetensors").stat().st_size < 2 * weight.nbytes
    with safe_open(tmp_path / "to.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["embed", "other"]
    found = open_checkpoint(tmp_path / "to.safetensors")
    head, embed = found["head"], found["embed"]
    assert head.data_ptr() == embed.data_ptr()
    assert_same(head, weight)


def test_tied_complex_numbers_come_back(tmp_path):
    one = numbers(3, dtype=torch.complex128)
    assert_same(there_and_back(tmp_path, {"a": one, "b": one})["b"], one)


def test_a_conjugate_is_not_tied_to_its_base(tmp_path):
    one = numbers(3, dtype=torch.complex64)
    found = there_and_back(tmp_path, {"a": one, "b": one.conj()})
    assert_same(found["b"], one.conj().resolve_conj())


def test_views_that_share_a_storage_are_each_written(tmp_path):
    found = there_and_back(tmp_path, {"all": BASE, "part": BASE[1:3], "turned": BASE.mT})
    assert_same(found["part"], BASE[1:3])
    assert_same(found["turned"], BASE.mT)


def test_parameters_are_written_as_tensors(tmp_path):
    layer = torch.nn.Linear(3, 4)
    found = there_and_back(tmp_path, layer.state_dict(keep_vars=True))
    assert_same(found["weight"], layer.weight)


@pytest.mark.parametrize(
    "name", ["a.b.c", "äöü 漢字 🙂", "x" * 100_000, 'quote"\\', "\x1b[31m\n\0"]
)
def test_any_name_that_is_text_comes_back(tmp_path, name):
    found = there_and_back(tmp_path, {name: numbers(2), "other": numbers(1)})
    assert list(found) == ["other", name] or list(found) == [name, "other"]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(tmp_path, name):
    code = tensor(storage("0", 4))
    name_code = b"X" + len(raw := name.encode("utf-8", "surrogatepass")).to_bytes(4, "little") + raw
    records = checkpoint_records(program(b"}", name_code, code, b"s"), {"0": payload(16)})
    with pytest.raises(CheckpointError, match="name"):
        to_file(stored_zip(tmp_path / "a.pt", records), tmp_path)
    assert not (tmp_path / "to.safetensors").exists()


def test_values_come_back_with_their_types(tmp_path):
    values = {"int": 7, "text": "seven", "none": None, "yes": True, "float": 0.1, "tuple": (1, 2.5),
              "bytes": b"\0\xff", "list": [1, "a", None], "inf": -np.inf, "size": torch.Size([2]),
              "dtype": torch.bfloat16, "complex": 1j, "set": {1, 2}, "nothing": {},
              "npydata": "our own word"}  # fmt: skip
    found = there_and_back(tmp_path, {**values, "a": numbers(2)})
    assert dict(found.metadata) == {**values, "format": "pt"}
    assert {name: type(found.metadata[name]) for name in values} == {
        name: type(one) for name, one in values.items()
    }


def test_values_survive_a_second_conversion(tmp_path):
    values = {"npydata": "our own word", "format": "theirs", "step": 7, "text": "\ud800", "t": (1,)}
    first = to_file(save(tmp_path, {**values, "a": numbers(2)}), tmp_path)
    (tmp_path / "again").mkdir()
    second = to_file(first, tmp_path / "again")
    assert dict(open_checkpoint(second).metadata) == dict(open_checkpoint(first).metadata) == values


Named = namedtuple("Named", "a")


def test_what_needs_code_is_left_out_and_named(tmp_path):
    source = save(tmp_path, {"a": numbers(2), "step": 1, "code": Named(3), "fn": os.getcwd})
    with open_checkpoint(source) as checkpoint:
        done = checkpoint.to_safetensors(tmp_path / "to.safetensors")
    assert done.left_out == ("code", "fn")
    assert "step" in open_checkpoint(tmp_path / "to.safetensors").metadata


def test_values_too_long_for_a_header_are_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "MAX_VALUES_BYTES", 100)
    source = save(tmp_path, {"long": "x" * 200, "half": "x" * 50, "more": "x" * 50, "step": 1})
    with open_checkpoint(source) as checkpoint:
        done = checkpoint.to_safetensors(tmp_path / "to.safetensors")
    assert done.left_out == ("long", "more")
    assert open_checkpoint(tmp_path / "to.safetensors").metadata["step"] == 1


def test_a_header_that_no_reader_takes_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 5000)
    with pytest.raises(CheckpointError, match="header of 8,184 bytes, at most 5,000"):
        there_and_back(tmp_path, {"x" * 5000: numbers(2)})


def test_texts_of_a_safetensors_file_stay_texts_for_other_readers(tmp_path):
    save_file({"a": numbers(3)}, tmp_path / "from.safetensors", {"author": "me", "format": "np"})
    path = to_file(tmp_path / "from.safetensors", tmp_path)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"author": "me", "format": "np"}


def test_dtype_casts_tensors_of_floating_point_and_no_others(tmp_path):
    kinds = {str(dtype): torch.arange(6).to(dtype) for dtype in
             (torch.float64, torch.float32, torch.float16, torch.float8_e5m2, torch.int32,
              torch.bool, torch.complex64, torch.complex128)}  # fmt: skip
    found = there_and_back(tmp_path, kinds, dtype=torch.bfloat16)
    for name, one in kinds.items():
        assert_same(found[name], one.to(torch.bfloat16) if one.is_floating_point() else one)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.usefixtures("small_chunks")
def test_dtype_casts_every_view(tmp_path, name):
    wanted = VIEWS[name]
    found = there_and_back(tmp_path, {"a": wanted}, dtype=torch.float64)["a"]
    assert_same(found, wanted.double() if wanted.is_floating_point() else wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.bits8, "half"])
def test_a_dtype_that_tensors_cannot_be_written_in_is_refused(tmp_path, dtype):
    with pytest.raises(CheckpointError, match=f"dtype={dtype!r}, expected one of floating point"):
        there_and_back(tmp_path, {"a": numbers(2)}, dtype=dtype)


@pytest.mark.parametrize("form", SMALL)
def test_every_format_is_converted(tmp_path, form):
    source = SMALL[form](tmp_path / "from")
    found = open_checkpoint(to_file(source, tmp_path))
    with open_checkpoint(source) as wanted:
        assert sorted(found) == sorted(wanted)
        for name in wanted:
            assert_same(found[name], wanted[name])


def test_a_legacy_file_of_torch_is_converted(tmp_path):
    content = {"a": BASE.mT, "b": BASE, "step": 3}
    path = to_file(save(tmp_path, content, _use_new_zipfile_serialization=False), tmp_path)
    assert_same(open_checkpoint(path)["a"], BASE.mT)


def test_a_sharded_set_becomes_one_file(tmp_path):
    for number in "12":
        save_file({f"t{number}": numbers(3, seed=int(number))}, tmp_path / f"{number}.safetensors")
    placed = {"t1": "1.safetensors", "t2": "2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "one").mkdir()
    found = open_checkpoint(to_file(index, tmp_path / "one"))
    assert_same(found["t1"], numbers(3, seed=1))
    assert_same(found["t2"], numbers(3, seed=2))


def test_a_checkpoint_without_tensors_becomes_a_file_without_any(tmp_path):
    found = there_and_back(tmp_path, {"step": 1})
    assert (len(found), found.metadata["step"]) == (0, 1)


def test_the_new_file_is_read_where_there_is_no_torch(tmp_path):
    path = to_file(save(tmp_path, {"a": torch.arange(6.0).view(2, 3).t()}), tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None; from safetensors.numpy import load_file; "
        f"print(load_file({str(path)!r})['a'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]\n"


def test_every_tensor_begins_where_its_elements_are_aligned(tmp_path):
    odd = {f"{size} bytes": numbers(size, dtype=torch.uint8) for size in (1, 2, 4)}
    found = there_and_back(tmp_path, odd | {str(d): numbers(3, dtype=d) for d in DTYPES})
    for name in found:
        assert found.info(name).file_offset % min(8, found[name].dtype.itemsize) == 0


def test_the_data_begins_on_a_page(tmp_path):
    found = there_and_back(tmp_path, {"a": numbers(3)})
    assert found.info("a").file_offset % os.sysconf("SC_PAGE_SIZE") == 0


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path):
    content = {"b": BASE.mT, "a": COMPLEX["torch.complex32"], "step": 1}
    first = to_file(save(tmp_path, content), tmp_path).read_bytes()
    assert to_file(tmp_path / "from.pt", tmp_path).read_bytes() == first


def test_a_kind_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"from\.pt: b: a sparse tensor"):
        there_and_back(tmp_path, {"a": numbers(2), "b": torch.eye(3).to_sparse()})
    assert not (tmp_path / "to.safetensors").exists()


def test_a_closed_checkpoint_is_not_converted(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, {"a": numbers(2)}))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.to_safetensors(tmp_path / "to.safetensors")
    assert not (tmp_path / "to.safetensors").exists()


def no_such_call(*_):
    raise OSError(errno.EXDEV, "on another disk")


def few_bytes(source, target, count, offset_src, offset_dst, call=os.copy_file_range):
    return call(source, target, min(count, 7), offset_src, offset_dst)


def fails_later(*arguments):
    if arguments[3] % 2:
        no_such_call()
    return few_bytes(*arguments)


@pytest.mark.parametrize("call", [no_such_call, few_bytes, fails_later])
def test_a_copy_that_the_kernel_does_in_part_or_not_at_all_is_the_same(tmp_path, monkeypatch, call):
    wanted = to_file(save(tmp_path, {"a": BASE, "b": numbers(5)}), tmp_path).read_bytes()
    monkeypatch.setattr(os, "copy_file_range", call)
    assert to_file(tmp_path / "from.pt", tmp_path).read_bytes() == wanted


def test_a_system_without_copies_in_the_kernel_writes_the_same(tmp_path, monkeypatch):
    wanted = to_file(save(tmp_path, {"a": BASE}), tmp_path).read_bytes()
    monkeypatch.delattr(os, "copy_file_range")
    assert to_file(tmp_path / "from.pt", tmp_path).read_bytes() == wanted


FAILURES = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error"),
            CheckpointError("cut off"), KeyboardInterrupt()]  # fmt: skip


@pytest.mark.parametrize("error", FAILURES, ids=repr)
@pytest.mark.parametrize("before", [None, b"what was there before"], ids=["new", "old"])
def test_a_failure_half_way_leaves_what_was_there(tmp_path, monkeypatch, error, before):
    write, calls = convert.write_slot, []

    def failing(*arguments):
        calls.append(write(*arguments))
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(convert, "write_slot", failing)
    out = tmp_path / "out"
    out.mkdir()
    if before is not None:
        (out / "to.safetensors").write_bytes(before)
    with pytest.raises(type(error)):
        to_file(save(tmp_path, {"a": BASE, "b": numbers(3), "c": numbers(4)}), out)
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    assert left == ({} if before is None else {"to.safetensors": before})


def test_a_disk_that_fills_up_is_an_error_that_names_the_file(tmp_path):
    save(tmp_path, {"a": torch.zeros(1 << 18)})
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "from npydata import open_checkpoint\n"
        "try: open_checkpoint('from.pt').to_safetensors('to.safetensors')\n"
        "except OSError as error: print(error.filename)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path / 'to.safetensors'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["from.pt"]


def test_a_disk_without_room_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match=r"No space left .* are needed, 10 are free") as refused:
        there_and_back(tmp_path, {"a": numbers(2)})
    assert refused.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["from.pt"]


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.CKPT", "a.npy", "a.safetensors.index.json"])
def test_nothing_is_written_under_the_name_of_another_format(tmp_path, name):
    checkpoint = open_checkpoint(save(tmp_path, {"a": numbers(2)}))
    with pytest.raises(
        CheckpointError, match=f"{name}: a safetensors file would .* end in .safetensors"
    ):
        checkpoint.to_safetensors(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as refused:
        to_file(save(tmp_path, {"a": numbers(2)}), tmp_path / "missing")
    assert refused.value.filename == str(tmp_path / "missing")


HOW_TO_CUT = {
    "copied": ({"a": torch.ones(1 << 20)}, None),
    "cast": ({"a": torch.ones(1 << 20)}, torch.float16),
    "gathered": ({"a": torch.ones(1 << 10, 1 << 10).t()}, None),
    "strided": ({"a": torch.ones(1 << 10, 1 << 10)[:, ::2]}, None),
}


@pytest.mark.parametrize("how", HOW_TO_CUT)
def test_a_source_that_is_cut_off_meanwhile_is_an_error(tmp_path, how):
    content, dtype = HOW_TO_CUT[how]
    source = save(tmp_path, content)
    with open_checkpoint(source) as checkpoint:
        os.truncate(source, 1 << 20)
        with pytest.raises(CheckpointError, match=r"from\.pt: .*end"):
            checkpoint.to_safetensors(tmp_path / "to.safetensors", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["from.pt"]


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_a_file_is_not_converted_onto_itself(tmp_path, link):
    source = safetensors_file(
        tmp_path / "a.safetensors", {"a": entry("F32", [4], 0, 16)}, bytes(16)
    )
    before = source.read_bytes()
    if link is not None:
        link(source, tmp_path / "b.safetensors")
    with open_checkpoint(source) as checkpoint, pytest.raises(CheckpointError, match="read and"):
        checkpoint.to_safetensors(tmp_path / "b.safetensors" if link else source)
    assert source.read_bytes() == before


def test_a_file_without_a_name_is_converted_though_not_onto_itself(tmp_path):
    source = safetensors_file(
        tmp_path / "a.safetensors", {"a": entry("F32", [4], 0, 16)}, bytes(16)
    )
    with open_checkpoint(source) as checkpoint:
        os.link(source, tmp_path / "b.safetensors")
        source.unlink()
        with pytest.raises(CheckpointError, match="read and"):
            checkpoint.to_safetensors(tmp_path / "b.safetensors")
        checkpoint.to_safetensors(tmp_path / "c.safetensors")
        checkpoint.to_hugging_face(tmp_path / "d")
    assert load_file(tmp_path / "c.safetensors")["a"].tolist() == [0] * 4


def test_a_shard_is_not_replaced_by_the_whole_set(tmp_path):
    save_file({"a": numbers(3)}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    with open_checkpoint(index) as checkpoint, pytest.raises(CheckpointError, match="read and"):
        checkpoint.to_safetensors(tmp_path / "1.safetensors")


MEMORY = """
import sys, torch
from npydata import open_checkpoint
def peak():
    return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1]) << 10
dtype = eval(sys.argv[1])
open_checkpoint("warm.pt").to_safetensors("warm.safetensors", dtype=dtype)
checkpoint = open_checkpoint("from.pt")
before = peak()
checkpoint.to_safetensors("to.safetensors", dtype=dtype)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures memory there")  # noqa: PTH110
@pytest.mark.parametrize("dtype", ["None", "torch.bfloat16"])
def test_memory_stays_below_the_largest_tensor_and_64_mib(tmp_path, dtype):
    rows = 4096
    weight = torch.zeros(rows, 1 << 12)
    torch.save({"a": weight[:8].t(), "b": weight[:8]}, tmp_path / "warm.pt")
    content = {"plain": weight, "turned": torch.ones_like(weight).t(), "part": weight[:, ::2],
               **{str(n): torch.full((1 << 20,), float(n)) for n in range(8)}}  # fmt: skip
    save(tmp_path, OrderedDict(content))
    done = subprocess.run([sys.executable, "-c", MEMORY, dtype], cwd=tmp_path, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert int(done.stdout) < weight.nbytes + (64 << 20)
