"""Tensors that are not dense: listed, and read by their parts.

The calls are those of ``torch/_utils.py``: ``_rebuild_sparse_tensor``, ``_rebuild_nested_tensor``,
``_rebuild_meta_tensor_no_storage``.
"""

from dataclasses import replace
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.plain_calls import brief, counts, flag
from tutorial.kept.reader.stored import Global, StoredTensor

SPARSE_PARTS = {
    "torch.sparse_coo": ("indices", "values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def sparse(_: Any, layout: Any, data: Any) -> StoredTensor:
    """Read ``_rebuild_sparse_tensor``: listed, and read by its parts."""
    names = SPARSE_PARTS.get(str(layout) if isinstance(layout, str | Global) else "")
    if names is None or not isinstance(data, tuple) or len(data) not in (len(names) + 1, 4):
        raise CheckpointError(f"a sparse tensor made of {brief((layout, data))}")
    parts = dict(zip(names, data, strict=False))
    return in_parts("sparse", parts["values"], data[len(names)], parts)


def nested(_: Any, buffer: Any, sizes: Any, strides: Any, offsets: Any) -> StoredTensor:
    """Read ``_rebuild_nested_tensor``: listed, and read by its parts."""
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "storage_offsets": offsets}
    return in_parts("nested", buffer, (), parts)


def meta(_: Any, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> StoredTensor:
    """Read ``_rebuild_meta_tensor_no_storage``: it has no data."""
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {brief(dtype)} of a meta tensor")
    made = StoredTensor(None, dtype, counts(size, "size"), counts(stride, "stride"), 0, kind="meta")
    return replace(made, requires_grad=flag(requires_grad, "requires_grad"))


def in_parts(kind: str, elements: Any, size: Any, parts: dict[str, Any]) -> StoredTensor:
    """Return the description of a tensor that is listed, and read by its parts only."""
    if not isinstance(elements, StoredTensor):
        raise CheckpointError(f"a {kind} tensor made of {brief(elements)}")
    return StoredTensor(None, elements.dtype, counts(size, "size"), (), 0, kind=kind, parts=parts)
