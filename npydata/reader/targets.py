"""What ``load(into=...)`` fills: the tensors of models and optimizers, by name."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from npydata.reader.file import FormatError
from npydata.reader.pickle.objects import TensorSpec
from npydata.reader.tensor import byte_span

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose tensors expose their memory; a subclass may keep its elements elsewhere."""
INSTEAD = "load without into, and call load_state_dict()"


def targets_of(into: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of modules, optimizers and nested mappings by dotted name.

    Raises:
        FormatError: A value is not a tensor, or a ``state_dict()`` makes its tensors anew, so that
            filling them would change nothing.
    """
    found: dict[str, torch.Tensor] = {}
    for (name, value), (_, again) in zip(walk(into), walk(into), strict=True):
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise FormatError(f"into has {name!r} of type {kind}, expected tensors: {INSTEAD}")
        if again is not value and byte_range(value) != byte_range(again):
            raise FormatError(f"{name}: its state_dict() returns a copy: {INSTEAD}")
        if found.setdefault(name, value) is not value:
            raise FormatError(f"into has two tensors called {name!r}")
    return found


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what modules, optimizers and nested mappings hold, except None and settings."""
    if hasattr(value, "state_dict") and not isinstance(value, type):
        value = value.state_dict()
    if isinstance(value, Mapping | list | tuple):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from walk(one, (*path, key))
    elif isinstance(value, torch.Tensor) or not (value is None or "param_groups" in path):
        yield ".".join(map(str, path)), value


def check_targets(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor], *, exactly: bool
) -> None:
    """Refuse targets that are missing, extra, of another shape, or without memory to fill."""
    if lacking := [name for name in specs if name not in targets]:
        others = f" and {len(lacking) - 1:,} more" if lacking[1:] else ""
        hint = did_you_mean(lacking[0], targets)
        raise FormatError(f"into has no {lacking[0]!r}{others}, which the checkpoint has{hint}")
    more = [name for name in targets if name not in specs] if exactly else []
    filled = {alias_key(targets[name]) for name in specs} if more else ()
    for name in more:
        if alias_key(targets[name]) not in filled:
            raise FormatError(f"has no {name!r}, which into has{did_you_mean(name, specs)}")
    for name, spec in specs.items():
        if why := why_not_filled(spec, targets[name]):
            raise FormatError(f"{name}: into has a tensor that can't be filled: {why}")


def why_not_filled(spec: TensorSpec, target: torch.Tensor) -> str | None:
    """Return why a target can't be filled, or None if it can."""
    if hasattr(target, "to_local"):
        return "it is a DTensor: load without into, and call torch's set_model_state_dict()"
    if target.is_meta or target.layout is not torch.strided or target.is_nested:
        return f"it has no memory of its own (device {target.device}, {target.layout})"
    if tuple(target.shape) != spec.shape:
        return f"its shape is {tuple(target.shape)}, the checkpoint has {spec.shape}"
    steps = [step for step, size in zip(target.stride(), target.shape, strict=True) if size > 1]
    if 0 in steps and target.numel():
        return f"it is expanded: its strides are {target.stride()}"
    found = byte_range(target)
    if found and found[1] > target.untyped_storage().data_ptr() + target.untyped_storage().nbytes():
        return "its memory was freed"
    return None


def alias_key(target: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that view exactly the same elements."""
    if (memory := byte_range(target)) is None:
        return None, id(target)
    return memory, target.dtype, target.shape, target.stride()


def byte_range(target: torch.Tensor) -> tuple[int, int] | None:
    """Return the addresses where a tensor's memory begins and ends, or None if unknown."""
    strided = target.layout is torch.strided and not target.is_nested and not target.is_meta
    if type(target) not in PLAIN or not strided or not target.numel():
        return None
    _, end = byte_span((tuple(target.shape), target.stride(), 0), target.itemsize)
    return target.data_ptr(), target.data_ptr() + end


class MissingKeyError(KeyError):
    """What is missing, its name, and the names that are there.

    One like it is only looked for when this is shown.
    """

    def __str__(self) -> str:
        """Return the message with a hint."""
        said, name, others = self.args
        return repr(said + did_you_mean(name, others))


def did_you_mean(name: str, others: Iterable[str]) -> str:
    """Return a hint at the name that may have been meant, or an empty string."""
    some = list(islice(others, 10_000))
    near = [
        one
        for one in some
        if one.endswith(f".{name}") or one.startswith(f"{name}.") or f"{name}".endswith(f".{one}")
    ]
    near = near or difflib.get_close_matches(str(name), some, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
