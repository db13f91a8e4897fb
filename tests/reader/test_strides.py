"""Which elements a view and a slice of it touch, compared with torch and counted one by one."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from npydata.reader.strides import (
    byte_span,
    contiguous_stride,
    element_span,
    page_runs,
    slice_view,
    validate_view,
)

VIEWS = [
    torch.arange(24).reshape(2, 3, 4),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    torch.arange(30)[3:27].reshape(4, 6).t(),
    torch.arange(10)[2:9:3],
    torch.arange(4)[1:2].expand(3, 5, 1),
    torch.arange(12).unfold(0, 4, 2),
    torch.empty(3, 0, 2, dtype=torch.int64),
    torch.arange(7)[5],
]


def view_of(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def elements(view):
    """Every element a view touches, the long way."""
    shape, stride, offset = view
    places = itertools.product(*map(range, shape))
    return [offset + sum(i * s for i, s in zip(at, stride, strict=True)) for at in places]


def random_index(rng, shape):
    front = rng.randint(0, len(shape))
    back = rng.randint(0, len(shape) - front)
    index = [one_index(rng, size) for size in shape[:front]]
    if back or rng.random() < 0.3:
        index += [..., *(one_index(rng, size) for size in shape[len(shape) - back :])]
    return index[0] if len(index) == 1 and rng.random() < 0.5 else tuple(index)


def one_index(rng, size):
    if size and rng.random() < 0.3:
        return rng.randrange(-size, size)
    ends = [rng.choice([None, rng.randint(-size - 2, size + 2)]) for _ in range(2)]
    return slice(*ends, rng.choice([None, 1, 2, 3, size + 1]))


@pytest.mark.parametrize("seed", range(40))
def test_a_slice_is_the_view_that_torch_makes(seed):
    rng = random.Random(seed)
    for tensor in VIEWS:
        index = random_index(rng, tensor.shape)
        shape, stride, offset = slice_view(view_of(tensor), index)
        wanted = tensor[index]
        assert shape == wanted.shape
        assert elements((shape, stride, offset)) == elements(view_of(wanted))


@pytest.mark.parametrize("seed", range(20))
def test_a_slice_of_a_slice_is_a_slice(seed):
    rng = random.Random(seed)
    tensor = torch.arange(210).reshape(5, 6, 7).permute(1, 2, 0)
    for _ in range(20):
        view, wanted = view_of(tensor), tensor
        for _ in range(2):
            index = random_index(rng, wanted.shape)
            view, wanted = slice_view(view, index), wanted[index]
        assert elements(view) == elements(view_of(wanted))


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0, 0), (..., ...)])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError):
        slice_view(view_of(torch.zeros(5, 5, 5)), index)


@pytest.mark.parametrize("index", [None, True, [0, 1], torch.tensor([0]), 1.0, "a"])
def test_an_index_of_another_kind_is_a_type_error(index):
    with pytest.raises(TypeError, match="integers, slices"):
        slice_view(view_of(torch.zeros(5, 5)), index)


def test_a_step_that_leads_nowhere_may_be_of_any_length():
    tensor = torch.arange(12).reshape(3, 4)
    for step in (5, 2**63, 10**30):
        shape, stride, offset = slice_view(view_of(tensor), np.s_[1:2:step, 1::step])
        assert tensor.as_strided(shape, stride, offset).tolist() == [[5]]


def test_a_slice_that_steps_backwards_is_refused_as_by_torch():
    with pytest.raises(ValueError, match="steps by -1"):
        slice_view(view_of(torch.zeros(5)), slice(None, None, -1))


@pytest.mark.parametrize("tensor", VIEWS, ids=str)
def test_a_span_begins_at_the_first_element_and_ends_behind_the_last(tensor):
    touched = elements(view_of(tensor))
    first, end = element_span(*view_of(tensor))
    assert (first, end) == ((min(touched), max(touched) + 1) if touched else (first, first))
    assert byte_span(*view_of(tensor), 8) == (8 * first, 8 * end)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (1, 5)])
def test_contiguous_strides_are_those_of_a_new_tensor(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_view_that_ends_with_its_storage_fits_and_one_element_more_does_not():
    assert validate_view((2, 3), (3, 1), 4, 10) is None
    assert "reaches to element 10 of a storage of 9" in validate_view((2, 3), (3, 1), 4, 9)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((-1,), (1,), 0),
        ((1,), (-1,), 0),
        ((1,), (1,), -1),
        ((2**63,), (0,), 0),
        ((2,), (2**63,), 0),
        ((2**40, 2**40), (0, 0), 0),
        ((2, 2), (1,), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((2,), (2**63 - 1,), 2**63 - 1),
    ],
)
def test_sizes_that_overflow_elsewhere_are_faults_here(shape, stride, offset):
    assert validate_view(shape, stride, offset, 10) is not None


@pytest.mark.parametrize("seed", range(30))
def test_page_runs_are_the_pages_of_the_elements_and_no_others(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
    stride = tuple(rng.choice([0, 1, 3, 17, 64]) for _ in shape)
    offset, itemsize, base, page = rng.randint(0, 50), rng.choice([1, 2, 8]), rng.randint(0, 99), 32
    runs = page_runs((shape, stride, offset), itemsize, base, page, 10**6)
    spanned = {n for begin, end in runs for n in range(begin // page, end // page)}
    places = [base + one * itemsize for one in elements((shape, stride, offset))]
    wanted = {n for place in places for n in (place // page, (place + itemsize - 1) // page)}
    assert spanned == wanted
    assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))


def test_hints_for_too_many_pieces_are_none():
    assert page_runs(((1000,), (4096,), 0), 1, 0, 4096, 999) == []
    assert len(page_runs(((1000,), (8192,), 0), 1, 0, 4096, 1000)) == 1000


def test_an_empty_view_spans_no_page():
    assert page_runs(((0, 3), (3, 1), 0), 4, 0, 4096, 10) == []
    assert math.prod(slice_view(((4, 3), (3, 1), 0), slice(2, 2))[0]) == 0
