"""The layout of a file before a byte is copied: pages, alignment, ties, a header others read."""

import json
import random

import pytest
import torch
from safetensors import deserialize
from safetensors_codes import known

from npydata import CheckpointError
from npydata.checkpointer.file_layout import PAGE, lay_out
from npydata.reader.containers.safetensors import CODES

DTYPES = [*CODES, torch.complex32, torch.complex128]
NO_CODE = [name for name in ("bits8", "float4_e2m1fn_x2") if hasattr(torch, name)]


def some_tensors(seed):
    rng = random.Random(seed)
    return {
        f"t{k}": torch.empty([rng.randrange(5) for _ in range(rng.randrange(4))], dtype=dtype)
        for k, dtype in enumerate(rng.choices(DTYPES, k=rng.randrange(30)))
    }


SEEDS = pytest.mark.parametrize("seed", range(20))


@SEEDS
def test_the_data_begins_on_a_page(seed):
    assert len(lay_out(some_tensors(seed)).header) % PAGE == 0


@SEEDS
def test_tensors_follow_each_other_without_a_gap(seed):
    at = 0
    for slot in lay_out(some_tensors(seed)).slots:
        assert slot.begin == at
        at += slot.nbytes


@SEEDS
def test_each_tensor_is_aligned_to_its_own_elements(seed):
    tensors = some_tensors(seed)
    for slot in lay_out(tensors).slots:
        assert slot.begin % tensors[slot.name].dtype.itemsize == 0


def test_complex_numbers_stored_as_pairs_are_aligned_as_a_whole():
    layout = lay_out(
        {"i": torch.zeros(1, dtype=torch.int64), "z": torch.zeros(1).to(torch.cdouble)}
    )
    assert [(slot.name, slot.begin) for slot in layout.slots] == [("z", 0), ("i", 16)]


@SEEDS
def test_the_file_has_the_bytes_of_its_header_and_its_tensors(seed):
    tensors = some_tensors(seed)
    layout = lay_out(tensors)
    assert layout.nbytes == len(layout.header) + sum(one.nbytes for one in tensors.values())


@SEEDS
def test_the_capacity_is_the_file_up_to_the_next_page(seed):
    layout = lay_out(some_tensors(seed))
    assert layout.capacity % PAGE == 0
    assert 0 <= layout.capacity - layout.nbytes < PAGE


@SEEDS
def test_safetensors_accepts_the_header_and_finds_every_tensor(seed):
    tensors = some_tensors(seed)
    layout = lay_out({name: one for name, one in tensors.items() if known(one.dtype)})
    found = dict(deserialize(layout.header + bytes(layout.nbytes - len(layout.header))))
    assert {name: (one["dtype"], one["shape"]) for name, one in found.items()} == {
        slot.name: (CODES[slot.dtype], list(slot.shape)) for slot in layout.slots
    }


def header_of(layout):
    length = int.from_bytes(layout.header[:8], "little")
    assert length == len(layout.header) - 8
    return json.loads(layout.header[8:])


def test_without_ties_and_pairs_the_metadata_is_what_safetensors_writes_itself():
    assert header_of(lay_out({"w": torch.ones(1)}))["__metadata__"] == {"format": "pt"}


def test_a_file_without_tensors_is_one_page():
    layout = lay_out({})
    assert (layout.nbytes, layout.capacity, layout.slots) == (PAGE, PAGE, ())


def test_a_header_one_byte_too_long_for_a_page_takes_two():
    lengths = {n: len(lay_out({"n" * n: torch.ones(1)}).header) for n in range(3900, 4100)}
    turn = next(n for n in lengths if lengths[n] > PAGE)
    assert lengths[turn - 1] == PAGE
    assert lengths[turn] == 2 * PAGE
    text = json.dumps(header_of(lay_out({"n" * (turn - 1): torch.ones(1)})), separators=(",", ":"))
    assert len(text) + 8 == PAGE


def test_tied_tensors_have_one_slot_and_the_others_a_note():
    weight = torch.ones(2)
    layout = lay_out({"a": weight, "b": weight.detach(), "c": weight.view(2)})
    assert [slot.name for slot in layout.slots] == ["a"]
    note = json.loads(header_of(layout)["__metadata__"]["npydata"])
    assert note == {"ties": {"b": "a", "c": "a"}}


def test_tensors_without_elements_are_never_tied():
    empty = torch.empty(0)
    assert len(lay_out({"a": empty, "b": empty}).slots) == 2


@pytest.mark.parametrize("name", NO_CODE)
def test_a_dtype_without_a_code_is_refused_by_name(name):
    with pytest.raises(CheckpointError, match=f"w: .*{name}"):
        lay_out({"w": torch.empty(2, dtype=getattr(torch, name))})


def test_a_tensor_of_a_kind_with_memory_elsewhere_is_refused_even_if_it_looks_tied():
    one, two = (torch.ones(3) for _ in range(2))
    for tensor in (one, two):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="without memory of its own"):
        lay_out({"a": one, "b": two})
