"""The builders themselves: what they write well-formed, torch and safetensors read."""

import pickle
import pickletools
import zipfile
from collections import OrderedDict

import pytest
import torch
from checkpoint_files import (
    PAYLOAD,
    SMALL,
    Record,
    TarTensor,
    checkpoint_records,
    legacy_file,
    payload,
    stored_zip,
    tar_file,
    tar_members,
)
from pickle_code import (
    binstring,
    bytes8,
    get,
    int_line,
    long1,
    long4,
    long_line,
    name,
    ordered_dict,
    persistent,
    program,
    put,
    stack_name,
    storage,
    string_line,
    tensor,
    tensor_v1,
    unicode8,
    unicode_line,
    value,
)
from safetensors import safe_open
from torch.nn import Linear

FLOATS = torch.full((6,), PAYLOAD, dtype=torch.uint8).repeat(4).view(torch.float32)
NUMBERS = torch.arange(6.0)
RAW = NUMBERS.numpy().tobytes()
TORCH_FORMS = ["zip", "legacy"]


def test_values_come_back_from_the_standard_unpickler():
    item = {"a": [1, -1, 2**40, -(2**70), 1.5, None, True], "b": (), "c": b"raw", "d": ([], {})}
    assert pickle.loads(program(value(item))) == item


def test_python_2_values_come_back_as_the_standard_unpickler_decodes_them():
    item = {"a": (1, 2**40, False), "long": "x" * 300}
    assert pickle.loads(program(value(item, python=2))) == item


@pytest.mark.parametrize("number", [0, 1, -1, 127, 128, 255, 256, -256, 2**31, 2**80, -(2**80)])
def test_every_way_to_write_an_integer_says_the_same_number(number):
    raw = number.to_bytes(12, "little", signed=True)
    for code in (long1(number), long4(raw), int_line(number), long_line(number)):
        assert pickle.loads(program(code)) == number


def test_every_way_to_write_a_string_says_the_same_text():
    for code in (binstring(b"it's"), string_line("it's"), unicode_line("it's"), unicode8("it's")):
        assert pickle.loads(program(code)) == "it's"
    assert pickle.loads(program(bytes8(b"it's"))) == b"it's"


def test_both_ways_to_write_a_global_name_it():
    for code in (name("collections", "OrderedDict"), stack_name("collections", "OrderedDict")):
        assert pickle.loads(program(code)) is OrderedDict


def test_an_ordered_dict_is_the_same_in_both_dialects():
    for python in (2, 3):
        code = ordered_dict({"a": 1, "b": 2}, python=python)
        assert pickle.loads(program(code)) == OrderedDict(a=1, b=2)


def test_the_memo_gives_the_same_object_at_small_and_large_indices():
    for index in (3, 300):
        twice = pickle.loads(program(b"(", put(value([]), index), get(index), b"t"))
        assert twice[0] is twice[1]


def torch_file(form, path, item, storages):
    if form == "zip":
        raw = {key: data for key, _, data in storages}
        return stored_zip(path, checkpoint_records(program(item), raw))
    return legacy_file(path, program(item), storages)


def view(form):
    return (None,) if form == "legacy" else ()


@pytest.mark.parametrize("form", TORCH_FORMS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_reads_a_tensor_at_an_offset_with_strides(tmp_path, form, weights_only):
    item = tensor(storage("0", 6, "FloatStorage", "cpu", *view(form)), 1, (2, 2), (1, 2))
    path = torch_file(form, tmp_path / "a.pt", item, [("0", 6, RAW)])
    loaded = torch.load(path, weights_only=weights_only)
    assert torch.equal(loaded, NUMBERS.as_strided((2, 2), (1, 2), 1))


def test_torch_reads_the_small_zip_mapped_because_payloads_are_aligned(tmp_path):
    loaded = torch.load(SMALL["zip"](tmp_path / "a.pt"), mmap=True)
    assert torch.equal(loaded["bias"], FLOATS[1:])
    assert loaded["tied"].data_ptr() == loaded["weight"].data_ptr()


@pytest.mark.parametrize("form", ["zip", "legacy", "tar"])
def test_torch_reads_the_small_files(tmp_path, form):
    loaded = torch.load(SMALL[form](tmp_path / "a.pt"), weights_only=False)
    assert torch.equal(loaded["weight"], FLOATS[:4].view(2, 2))
    assert loaded["step"] == 7


def test_safe_open_reads_the_small_safetensors_file(tmp_path):
    with safe_open(SMALL["safetensors"](tmp_path / "a.safetensors"), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_tensor("weight"), FLOATS[:4].view(2, 2))
        assert torch.equal(opened.get_tensor("bias"), FLOATS[:2].view(torch.bfloat16)[:3])


def test_torch_swaps_a_big_endian_zip(tmp_path):
    records = checkpoint_records(
        program(tensor(storage("0", 6), 0, (6,))),
        {"0": NUMBERS.numpy().astype(">f4").tobytes()},
        byteorder="big",
    )
    assert torch.equal(torch.load(stored_zip(tmp_path / "a.pt", records)), NUMBERS)


@pytest.mark.parametrize("zip64", [True, False])
@pytest.mark.parametrize("described", [True, False])
def test_zip_tools_read_every_well_formed_variant(tmp_path, zip64, described):
    records = [Record(name="a", data=payload(5), described=described), Record(name="b/c")]
    path = stored_zip(tmp_path / "a.zip", records, zip64=zip64, comment=b"hello")
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == ["archive/a", "archive/b/c"]
        assert opened.read("archive/a") == payload(5)
        assert opened.comment == b"hello"


def python_2(kind="FloatStorage", *view):
    return storage("0", long1(6), kind, "cpu", *view, python=2)


def test_torch_reads_a_python_2_legacy_file(tmp_path):
    items = {"a": tensor_v1(python_2("FloatStorage", None), 0, (long1(6),), (long1(1),), python=2)}
    path = legacy_file(
        tmp_path / "a.pt", program(ordered_dict(items, python=2)), [("0", 6, RAW)], python=2
    )
    assert torch.equal(torch.load(path, weights_only=False)["a"], NUMBERS)


def test_torch_reads_a_legacy_storage_view(tmp_path):
    part = tensor(storage("0", 6, "FloatStorage", "cpu", ("1", 2, 3)), 1, (2,), (1,))
    path = legacy_file(tmp_path / "a.pt", program(part), [("0", 6, RAW)])
    assert torch.equal(torch.load(path, weights_only=False), NUMBERS[3:5])


@pytest.mark.filterwarnings("ignore")  # the source of the class has changed: made up here
def test_torch_reads_a_legacy_module_id_as_its_class(tmp_path):
    identifier = ("module", name("torch.nn.modules.linear", "Linear"), "linear.py", "class Linear")
    path = legacy_file(tmp_path / "a.pt", program(persistent(identifier)), [])
    assert torch.load(path, weights_only=False) is Linear


def test_torch_reads_a_tar_file_with_a_storage_view(tmp_path):
    members = tar_members(
        program(persistent("20", python=2)),
        [(10, "FloatStorage", 6, RAW)],
        [TarTensor(key=20, storage=11, size=(2,), stride=(2,), offset=1)],
        views=[(11, 10, 1, 5)],
    )
    path = tar_file(tmp_path / "a.tar", members)
    assert torch.equal(torch.load(path, weights_only=False), NUMBERS[2:6:2])


@pytest.mark.filterwarnings("ignore")
def test_torch_reads_a_tar_module_id_as_its_class(tmp_path):
    identifier = (name("torch.nn.modules.linear", "Linear"), "linear.py", "class Linear")
    members = tar_members(program(persistent(identifier, python=2)), [], [])
    assert torch.load(tar_file(tmp_path / "a.tar", members), weights_only=False) is Linear


@pytest.mark.parametrize("form", TORCH_FORMS)
def test_small_pickles_disassemble_to_the_end(tmp_path, form):
    raw = SMALL[form](tmp_path / "a.pt").read_bytes()
    start = raw.index(b"\x80\x02ccollections")
    assert list(pickletools.genops(raw[start:]))[-1][0].name == "STOP"
