"""Random state dicts, and what is seen of a tensor."""

from collections import OrderedDict
from typing import Any

import torch
from agreement import shown_tensor
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

quickly = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""For properties whose examples are files."""
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.float8_e4m3fn,
]
VIEWS = {
    "whole": lambda one: one,
    "rows": lambda one: one[1:3],
    "columns": lambda one: one[:, ::2],
    "corner": lambda one: one[:1, 1:2],
    "turned": lambda one: one.t(),
    "expanded": lambda one: one[:, :1].expand(-1, 5),
    "flat": lambda one: one.reshape(-1),
    "element": lambda one: one[0, 0],
    "nothing": lambda one: one[:0],
    "cloned": lambda one: one.clone(),
    "parameter": lambda one: torch.nn.Parameter(one, one.is_floating_point()),
    "conjugate": lambda one: one.conj() if one.is_complex() else one,
    "negative": lambda one: (
        torch._neg_view(one) if one.itemsize > 1 and one.is_floating_point() else one
    ),
}
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(min_size=1, max_size=3),
    st.just(torch.Size([2, 3])),
    st.sets(st.integers(0, 9), max_size=3),
)
KEYS = st.one_of(st.sampled_from(["w", "b", "a.b", "layers", ""]), st.integers(0, 4))


def base(number: int) -> torch.Tensor:
    """A tensor of 4 by 6 whose dtype and content follow from a number."""
    dtype = DTYPES[number % len(DTYPES)]
    raw = torch.randint(
        0,
        256,
        (4, 6 * dtype.itemsize),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(number),
    )
    if dtype is torch.bool:
        return (raw % 2).bool()
    return raw.view(dtype)


@st.composite
def states(draw: Any, views: Any = tuple(VIEWS), dtypes: int = len(DTYPES)) -> Any:
    """A nested state dict: tensors that are tied, views, or have flags; and values."""
    bases = [
        base(number)
        for number in draw(st.lists(st.integers(0, dtypes - 1), min_size=1, max_size=3))
    ]
    leaf = st.one_of(
        st.builds(
            lambda number, view: VIEWS[view](bases[number % len(bases)]),
            st.integers(0, 2),
            st.sampled_from(views),
        ),
        PLAIN,
    )
    nested = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=4),
            st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=10,
    )
    state = draw(st.dictionaries(KEYS, nested, min_size=1, max_size=4))
    shared = draw(st.booleans())
    return {**state, "again": state, "tied": bases[0]} if shared else {**state, "one": bases[0]}


def seen(tensor: torch.Tensor, *, strides: bool = True) -> Any:
    """Everything of a tensor that can be seen, its elements bit by bit."""
    shown = shown_tensor(tensor)
    return [*shown[:6], *(shown[6:] if strides else shown[7:])]


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a file of plain numbers holds it."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    parts = parts if isinstance(value, dict | list | tuple) else ()
    return [one for part in parts for one in tensors_of(part)]
