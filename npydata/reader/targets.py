"""What may be filled in place of new memory: the tensors of models and optimizers, by name.

Whatever can't be filled is refused before anything is written to any of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from npydata.errors import CheckpointError
from npydata.reader.stored import StoredTensor
from npydata.reader.strides import slice_view
from npydata.reader.tensors import Entry

INSTEAD = "load without it, and call load_state_dict()"
PLAIN = torch.Tensor, torch.nn.Parameter
"""Tensors that say where their memory is; what is made of others is up to their class."""


def tensors_by_name(into: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of modules, optimizers and nested mappings by names with dots."""
    found: dict[str, torch.Tensor] = {}
    for name, value in leaves(into):
        if isinstance(value, torch.Tensor) and found.setdefault(name, value) is not value:
            raise CheckpointError(f"into has two tensors called {name!r}")
    return found


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what modules, optimizers and nested mappings hold, by names with dots."""
    value = own_state(value) if hasattr(value, "state_dict") else value
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
    held = state if isinstance(owner, torch.nn.Module) else {}
    if isinstance(owner, torch.optim.Optimizer):
        held = state.get("state")
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
        if name in again and address(tensor) != address(again[name]):
            raise CheckpointError(
                f"{name}: the state_dict() of a {type(owner).__name__} makes it anew: {INSTEAD}"
            )


def memory_of(target: torch.Tensor) -> Any:
    """Return the same for tensors that are the same elements: the last to fill them counts."""
    if (begin := address(target)) and target.numel():
        return begin, target.dtype, tuple(target.shape), target.stride()
    return id(target)


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins, if it says so."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if type(tensor) in PLAIN and strided and not tensor.is_meta else 0


def require_targets(
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    targets: Mapping[str, torch.Tensor],
    *,
    exactly: bool,
) -> None:
    """Refuse tensors to fill that are not those to read, not of their shapes, or take no values."""
    if missing := [name for name in wanted if name not in targets]:
        raise CheckpointError(f"into has no {some_of(missing)}, which the checkpoint has")
    filled = {memory_of(targets[name]) for name in wanted}
    others = [name for name in targets
              if name not in wanted and memory_of(targets[name]) not in filled]  # fmt: skip
    if exactly and others:
        raise CheckpointError(f"has no {some_of(others)}, which into has")
    for name, index in wanted.items():
        stored = entries[name].value
        if why := why_not_filled(targets[name]) or why_not_converted(stored, targets[name].dtype):
            raise CheckpointError(f"{name}: into has a tensor that can't be filled: {why}")
        expected, found = shape_of(stored, index), tuple(targets[name].shape)
        if found != expected:
            raise CheckpointError(f"{name}: into has shape {found}, the checkpoint {expected}")


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
    if is_expanded(target.shape, target.stride()):
        return "it is expanded, several of its elements are one"
    if type(target) in PLAIN and target.numel() and not target.untyped_storage().nbytes():
        return "its memory was freed"
    return None


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether several elements of a tensor are one."""
    return any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))


def shape_of(stored: StoredTensor, index: Any) -> tuple[int, ...]:
    """Return the shape of a part of a tensor."""
    if index is ...:
        return stored.shape
    return slice_view((stored.shape, stored.stride, stored.offset), index)[0]


def require_index(name: str, stored: StoredTensor, index: Any) -> None:
    """Raise what an index raises that a tensor hasn't, with the tensor's name."""
    try:
        shape_of(stored, index)
    except (IndexError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def some_of(names: list[str]) -> str:
    """Return names as they stand in a message, the first few of them."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
