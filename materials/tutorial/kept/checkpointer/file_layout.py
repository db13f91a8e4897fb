"""From a nested state to the bytes of a safetensors file, before a tensor is copied.

Pure arithmetic: the snapshot is the file. The tensors are taken out of the state, and the rest
becomes typed JSON. The file's header is padded so that the data begins on a page; tensors follow by
falling size of their elements, so that each is aligned and none leaves a gap. Built in
``notebooks/07_async_checkpointer``.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.containers.safetensors import (
    CODES,
    COMPLEX_AS_REAL,
    NOTES,
    RESERVED,
    header_bytes,
)
from tutorial.kept.reader.naming import free_name
from tutorial.kept.reader.typed_json import (
    VERSIONS,
    Named,
    decode,
    encode,
    like,
    versions_of,
    with_named,
)

PAGE = 4096
MAX_DEPTH = 100
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def require_state(part: str, state: Any) -> None:
    """Raise unless a part of a checkpoint is given as a state, as ``state_dict()`` returns it."""
    if not isinstance(state, Mapping):
        hint = f"; pass {part}.state_dict()" if hasattr(state, "state_dict") else ""
        raise CheckpointError(f"{part}_state is a {type(state).__name__}, expected a dict{hint}")


def flatten_state_dict(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors of a state by name, and its tree spec: JSON with names in their places.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(tensor: torch.Tensor, path: tuple[Any, ...]) -> Named:
        name = ".".join(map(str, path))
        if not name or name in tensors:
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
        raise CheckpointError(f"{path_text(path[:8])}...: nested more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        return take(value, path)
    if isinstance(value, Mapping):
        require_storable(list(value), path)
        require_storable(versions_of(value), (*path, VERSIONS))
        replaced = {key: replace_tensors(one, take, (*path, key)) for key, one in value.items()}
        return like(value, replaced, versions_of(value))
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(one, take, (*path, k)) for k, one in enumerate(value))
    require_storable(value, path)
    return value


def require_text(name: str, path: tuple[Any, ...]) -> None:
    """Refuse half a character, which no file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path_text(path)}: a name that is not text") from None


def require_storable(value: Any, path: tuple[Any, ...]) -> None:
    """Refuse what JSON has no place for, and say where it is."""
    try:
        encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path_text(path)}: {error}") from None


def refuse_tensor(tensor: torch.Tensor, path: tuple[Any, ...]) -> Any:
    """Refuse a tensor where only plain values are stored."""
    raise CheckpointError(
        f"{path_text(path)}: a tensor; only model and optimizer state hold tensors"
    )


def unflatten_state_dict(tree_spec: Any, tensor_called: Callable[[str], Any]) -> Any:
    """Return the state that :func:`flatten_state_dict` took apart."""
    return with_named(decode(tree_spec), tensor_called)


def path_text(path: tuple[Any, ...]) -> str:
    """Return a path as one would write it in Python: ``['state'][0]['exp_avg']``."""
    return "".join(f"[{key!r:.60}]" for key in path) or "the state"


class TensorSlot(NamedTuple):
    """Where one tensor's elements stand in the data of a file."""

    name: str
    dtype: torch.dtype
    """As stored: a complex dtype that safetensors lacks is stored as pairs of this one."""
    shape: tuple[int, ...]
    """As stored."""
    begin: int
    """Bytes of the data before it."""
    nbytes: int

    @property
    def header(self) -> dict[str, Any]:
        """The tensor's entry in the file's header."""
        return {
            "dtype": CODES[self.dtype],
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.begin + self.nbytes],
        }


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A whole file: the header, and a slot for each tensor that is stored."""

    header: bytes
    slots: tuple[TensorSlot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(slot.nbytes for slot in self.slots)

    @property
    def capacity(self) -> int:
        """Bytes of the file, up to whole pages, which is what direct writes want."""
        return whole_pages(self.nbytes)


def lay_out(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """Return the layout of a file that holds these tensors; tied ones have one slot.

    Raises:
        CheckpointError: A tensor is of a kind or dtype that safetensors can't hold.
    """
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    ties = find_ties(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
    slots = slots_for(kept, stored)
    entries = {slot.name: slot.header for slot in slots}
    return FileLayout(header_bytes(entries, metadata_of(kept, ties)), tuple(slots))


def slots_for(
    tensors: Mapping[str, torch.Tensor],
    stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> list[TensorSlot]:
    """Return a slot for each tensor, one behind the other, each at a multiple of its element.

    ``stored`` has the dtype and the shape with which each is stored.
    """
    slots, at = [], 0
    for name in sorted(tensors, key=lambda one: -tensors[one].dtype.itemsize):
        dtype, shape = stored[name]
        nbytes = math.prod(shape) * dtype.itemsize
        slots.append(TensorSlot(name, dtype, shape, at, nbytes))
        at += nbytes
    return slots


def whole_pages(nbytes: int) -> int:
    """Return so many bytes, up to the end of their last page."""
    return -(-nbytes // PAGE) * PAGE


def metadata_of(kept: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> dict[str, str]:
    """Return what the header says beside the tensors: ties, and dtypes stored as pairs."""
    complex_names = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in kept.items() if tensor.dtype in COMPLEX_AS_REAL
    }  # fmt: skip
    notes = {key: note for key, note in (("ties", ties), ("dtypes", complex_names)) if note}
    return {"format": "pt", **({NOTES: json.dumps(notes)} if notes else {})}


def find_ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the very same elements as an earlier one."""
    first: dict[Any, str] = {}
    ties = {}
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
    tensors_at = Counter(pointers.values())
    for name, pointer in pointers.items():
        if tensors_at[pointer] == 1:
            continue
        tensor = tensors[name]
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(),
                tensor.is_conj(), tensor.is_neg())  # fmt: skip
        if (earlier := first.setdefault(same, name)) != name:
            ties[name] = earlier
    return ties


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is spread over processes; asked without the import of what spreads them."""
    return type(tensor).__name__ == "DTensor"


def to_local(tensor: Any) -> torch.Tensor:
    """Return what this process has of a tensor that may be spread over several."""
    with torch.no_grad():  # with autograd a parameter's shard takes twice as long
        local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether nothing about a tensor needs a closer look: few questions, for states of many."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.dtype in CODES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.data_ptr() != 0
    )


def stored_as(name: str, tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape with which a tensor is stored."""
    if is_ordinary(tensor):
        return tensor.dtype, tuple(tensor.shape)
    if is_dtensor(tensor):
        raise CheckpointError(f"{name}: is sharded over processes; save it with save_distributed")
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{name}: an uninitialized parameter; first run the module once")
    for kind in ("meta", "quantized", "nested"):
        if getattr(tensor, f"is_{kind}"):
            raise CheckpointError(f"{name}: a {kind} tensor, expected a dense one")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"{name}: a {tensor.layout} tensor, expected a dense one")
    if tensor.numel() and tensor.data_ptr() == 0:
        raise CheckpointError(f"{name}: a {type(tensor).__name__} without memory of its own")
    if (real := COMPLEX_AS_REAL.get(tensor.dtype)) is not None:
        return real, (*tensor.shape, 2)
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{name}: safetensors has no code for {tensor.dtype}")
    return tensor.dtype, tuple(tensor.shape)
