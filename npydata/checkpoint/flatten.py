"""Take the tensors out of a nested state and put them back: the rest becomes typed JSON.

Built in ``notebooks/05_async_checkpointer``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from npydata.errors import CheckpointError
from npydata.lazy.naming import free_name
from npydata.lazy.typed_json import Named, decode, encode, with_named

MAX_DEPTH = 100
RESERVED = "__metadata__"
"""What safetensors keeps for itself among the names."""


def take_tensors(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors of a state by name, and the state as JSON with names in their places.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor, path: tuple[Any, ...]) -> Named:
        name = free_name(path, tensors)
        if name == RESERVED:
            name = free_name((f"{RESERVED}'",), tensors)
        require_text(name, path)
        tensors[name] = tensor
        return Named(name)

    return tensors, as_json(state, take)


def as_json(state: Any, take: Callable[[torch.Tensor, tuple[Any, ...]], Any]) -> Any:
    """Return a state as typed JSON, with ``take(tensor, path)`` in the place of each tensor."""
    return encode(replace_tensors(state, take, ()))


def replace_tensors(
    value: Any, take: Callable[[torch.Tensor, tuple[Any, ...]], Any], path: tuple[Any, ...]
) -> Any:
    """Return a nested value in which each tensor is replaced; what can't be stored raises."""
    if len(path) > MAX_DEPTH:
        raise CheckpointError(f"{place(path[:8])}...: nested more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        return take(value, path)
    if isinstance(value, Mapping):
        require_storable(list(value), path)
        return {key: replace_tensors(one, take, (*path, key)) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(one, take, (*path, k)) for k, one in enumerate(value))
    require_storable(value, path)
    return value


def require_text(name: str, path: tuple[Any, ...]) -> None:
    """Refuse half a character, which no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{place(path)}: a name that is not text") from None


def require_storable(value: Any, path: tuple[Any, ...]) -> None:
    """Refuse what JSON has no place for, and say where it is."""
    try:
        encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{place(path)}: {error}") from None


def refuse_tensor(tensor: torch.Tensor, path: tuple[Any, ...]) -> Any:
    """Refuse a tensor where only plain values are stored."""
    raise CheckpointError(f"{place(path)}: a tensor; only model and optimizer state hold tensors")


def put_back(data: Any, tensor_called: Callable[[str], Any]) -> Any:
    """Return the state that :func:`take_tensors` took apart."""
    return with_named(decode(data), tensor_called)


def place(path: tuple[Any, ...]) -> str:
    """Return a path as one would write it in Python: ``['state'][0]['exp_avg']``."""
    return "".join(f"[{key!r:.60}]" for key in path) or "the state"
