"""What may be filled in place of new memory: the tensors of models and optimizers, by name.

Whatever can't be filled is refused before anything is written to any of them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from npydata.errors import CheckpointError
from tutorial.kept.reader.private_memory import is_writable
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.strides import byte_span, slice_view
from tutorial.kept.reader.tensors import Entry

INSTEAD = "load without it, and call load_state_dict()"
PLAIN = torch.Tensor, torch.nn.Parameter
"""Tensors that say where their memory is; what is made of others is up to their class."""


def tensors_by_name(into: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of modules, optimizers and nested mappings by names with dots."""
    found: dict[str, torch.Tensor] = {}
    for name, value in leaves(into):
        if isinstance(value, np.ndarray | type):
            what = f"the class {value.__name__}" if isinstance(value, type) else "a numpy array"
            at = f"as {name!r}" if name else "in place of it"
            raise CheckpointError(f"into has {what} {at}, expected a tensor, or what holds some")
        if isinstance(value, torch.Tensor) and found.setdefault(name, value) is not value:
            raise CheckpointError(f"into has two tensors called {name!r}")
    return found


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what modules, optimizers and nested mappings hold, by names with dots."""
    if hasattr(value, "state_dict") and not isinstance(value, type):
        value = own_state(value)
    if isinstance(value, Mapping):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    else:
        yield ".".join(map(str, path)), value
        return
    for key, one in inner:
        yield from leaves(one, (*path, key))


def own_state(owner: Any) -> Any:
    """Return the ``state_dict()`` of a module or an optimizer, whose tensors are all of it.

    Raises:
        CheckpointError: It makes some of them anew, or holds what is no tensor: it would not be
            what was saved when the tensors are filled. An optimizer's settings may differ.
    """
    state = owner.state_dict()
    wraps = isinstance(state, Mapping) and {*state} == {"state", "param_groups"}
    held = state["state"] if wraps or isinstance(owner, torch.optim.Optimizer) else state
    for name, one in leaves(held):
        if one is not None and not isinstance(one, torch.Tensor):
            raise CheckpointError(
                f"{name}: is {type(one).__name__}, not a tensor, in the {type(owner).__name__} of "
                f"into: {INSTEAD}"
            )
    require_kept(owner, state)
    return state


def require_kept(owner: Any, state: Any) -> None:
    """Refuse tensors of a ``state_dict()`` that it makes anew: to fill them changes nothing."""
    again = tensors_by_name(owner.state_dict())
    for name, tensor in tensors_by_name(state).items():
        if name in again and own_address(tensor) != own_address(again[name]):
            raise CheckpointError(
                f"{name}: the state_dict() of a {type(owner).__name__} makes it anew: {INSTEAD}"
            )


def memory_of(target: torch.Tensor) -> Any:
    """Return the same for tensors that are the same elements: the last to fill them counts."""
    if (begin := address(target)) and target.numel():
        return begin, target.dtype, tuple(target.shape), target.stride()
    return id(target)


def overlapping(targets: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors of which parts lie in the memory of another one."""
    spans = sorted((str(one.device), *where, name) for name, one in targets.items()
                   if (where := own_span(one)) is not None)  # fmt: skip
    found, before = set[str](), ("", 0, 0, "")
    for span in spans:
        device, begin, end, name = span
        if device == before[0] and begin < before[2]:
            found |= {name, before[3]}
        if device != before[0] or end > before[2]:
            before = span
    return found


def own_span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return where the memory of a tensor begins and ends; of a subclass, that of its storage."""
    if (begin := address(tensor)) and tensor.numel():
        return begin, begin + reach(tensor)
    if type(tensor) not in PLAIN and (begin := own_address(tensor)):
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return None


def reach(tensor: torch.Tensor) -> int:
    """Return how many bytes of memory a tensor has from its first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return byte_span(tensor.shape, tensor.stride(), 0, tensor.itemsize)[1]


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins, if it says so."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if type(tensor) in PLAIN and strided and not tensor.is_meta else 0


def own_address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; of a subclass as well, if it has some itself."""
    with suppress(RuntimeError, TypeError):
        return address(tensor) or tensor.untyped_storage().data_ptr()
    return 0


def require_targets(
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    *,
    exactly: bool,
) -> None:
    """Refuse tensors to fill that are not those to read, not of their shapes, or take no values."""
    if missing := [name for name in wanted if name not in targets]:
        raise CheckpointError(
            f"into has no {some_of(missing)}, which the checkpoint has{prefix_of(missing, targets)}"
        )
    others = [name for name in targets if name not in wanted] if exactly else []
    filled = {memory_of(targets[name]) for name in wanted} if others else set()
    if others := [name for name in others if memory_of(targets[name]) not in filled]:
        raise CheckpointError(
            f"has no {some_of(others)}, which into has{prefix_of(others, entries)}"
        )
    for name, index in wanted.items():
        stored, target = entries[name].value, targets[name]
        if why := why_not_filled(target) or why_not_converted(stored, target.dtype):
            raise CheckpointError(f"{name}: into has a tensor that can't be filled: {why}")
        expected, found = shape_of(stored, index), tuple(target.shape)
        if found != expected:
            raise CheckpointError(f"{name}: into has shape {found}, the checkpoint {expected}")
        if why := why_not_copied(stored, target):
            raise CheckpointError(f"{name}: into has a tensor that can't be filled: {why}")


def why_not_converted(stored: StoredTensor, dtype: torch.dtype) -> str | None:
    """Say why no values of a tensor can be put into one of a dtype, if torch can't do that."""
    if stored.dtype == dtype:
        return None
    try:
        torch.empty(1, dtype=dtype, device="cpu").copy_(
            torch.empty(1, dtype=stored.dtype, device="cpu")
        )
    except (RuntimeError, TypeError) as error:
        return f"torch makes no {dtype} of {stored.dtype} ({error})"
    return None


def why_not_copied(stored: StoredTensor, target: torch.Tensor) -> str | None:
    """Say why a tensor of another class takes no values of a plain one: tried on one like it."""
    if type(target) in PLAIN:
        return None
    try:
        values = torch.empty((), dtype=stored.dtype, device="cpu").expand(target.shape)
        torch.empty_like(target.detach()).copy_(values)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).split("\n")[0]
        return f"it is a {type(target).__name__}, which takes no values of a plain tensor ({why})"
    return None


def why_not_filled(target: torch.Tensor) -> str | None:
    """Say why a tensor takes no values, if it has no memory of its own for them."""
    if is_lazy(target):
        return "it has no shape yet, its module was not called"
    if target.is_meta:
        return "it is on the meta device"
    if target.is_nested:
        return "it is nested"
    if target.layout is not torch.strided:
        return f"its layout is {target.layout}"
    if isinstance(target, FakeTensor) or target._is_zerotensor():
        return "it is fake: it has no memory"
    if may_overlap(target.shape, target.stride()):
        return f"it is expanded, or overlaps itself: its strides are {target.stride()}"
    if type(target) in PLAIN and target.numel():
        held = target.untyped_storage().nbytes()
        if held < (end := int(target.storage_offset()) * target.itemsize + reach(target)):
            return f"its memory was freed: its storage has {held:,} of {end:,} bytes"
        begin, end = own_span(target) or (0, 0)
        if target.device.type == "cpu" and not (is_writable(begin) and is_writable(end - 1)):
            return "its memory may only be read, as that of a map with mode='r'"
    return None


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether several elements of a tensor are one, as a stride of 0 says."""
    return any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))


def may_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether steps along one dimension may lead to where those along others do."""
    last = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step <= last:
            return math.prod(shape) > 0
        last += step * (size - 1)
    return False


def shape_of(stored: StoredTensor, index: Any) -> tuple[int, ...]:
    """Return the shape of a part of a tensor."""
    if index is ...:
        return stored.shape
    return slice_view((stored.shape, stored.stride, stored.offset), index)[0]


def require_index(path: Path, name: str, stored: StoredTensor, index: Any) -> None:
    """Raise what an index raises that a tensor hasn't, with the tensor's name."""
    try:
        shape_of(stored, index)
    except (IndexError, TypeError, ValueError) as error:
        raise type(error)(f"{path}: {name}: {error}") from None


def prefix_of(missing: Sequence[str], others: Iterable[str]) -> str:
    """Say what names begin with that are missing, or with which they are there; nothing mostly.

    Wrapped and compiled modules put ``module.`` or ``_orig_mod.`` before the names.
    """
    first, names = missing[0], set(others)
    for one in names:
        if one.endswith(f".{first}"):
            prefix = one.removesuffix(first)
            if all(prefix + name in names for name in missing):
                return f", but has {one!r}: names begin with {prefix!r} there"
        if first.endswith(f".{one}"):
            prefix = first.removesuffix(one)
            if all(name.removeprefix(prefix) in names for name in missing):
                return f", but has {one!r}: names begin with {prefix!r} here"
    return ""


def some_of(names: list[str]) -> str:
    """Return names as they stand in a message, the first few of them."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
