"""What a checkpoint holds beside its tensors: plain values, and what only code could make."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError, UnsafeCheckpointError
from tutorial.kept.reader.stored import Global, Opaque, Storage, StoredTensor

WITH_MEMBERS = (set, frozenset, tuple, list)


class Metadata(Mapping[str, Any]):
    """What a checkpoint holds beside tensors, by name."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values
        self._plain: set[int] = set()
        """What was looked through: a file may have it under many names."""

    def __getitem__(self, name: str) -> Any:
        """Return a plain value; one that code would have to make raises UnsafeCheckpointError."""
        value = self._values[name]
        if id(value) not in self._plain:
            plain_value(self._path, name, value)
            if isinstance(value, WITH_MEMBERS):
                self._plain.add(id(value))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"<metadata of {self._path}: {', '.join(self._values)}>"


def plain_value(path: Path, name: str, value: Any) -> Any:
    """Return a value, unless foreign code would have to run to make it.

    Raises:
        CheckpointError: A set holds a tensor, which no name leads to.
    """
    for one in members_of(value, set()):
        if one is not value and isinstance(one, Storage | StoredTensor):
            raise CheckpointError(f"{path}: {name} is a set that holds a tensor, which has no name")
        if isinstance(one, Global | Opaque):
            cause = one.cause if isinstance(one, Opaque) else str(one)
            raise UnsafeCheckpointError(
                f"{path}: {name} needs {cause}, which the file names; it is not called here"
            )
    return value


def members_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a value, and what is in it where that has no names: in sets, and in tuples in them."""
    yield value
    if isinstance(value, WITH_MEMBERS) and id(value) not in seen:
        seen.add(id(value))
        if not set(map(type, value)) <= {int, float, str, bool}:
            for one in value:
                yield from members_of(one, seen)
