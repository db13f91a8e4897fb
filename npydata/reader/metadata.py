"""What a checkpoint holds beside its tensors: plain values, and what only code could make."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError, UnsafeCheckpointError
from npydata.reader.stored import Global, Opaque, Storage, StoredTensor


class Metadata(Mapping[str, Any]):
    """What a checkpoint holds beside tensors, by name."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path, self._values = path, values
        self._plain: set[int] = set()
        """Sets that were looked through: a file may have one under many names."""

    def __getitem__(self, name: str) -> Any:
        """Return a plain value; one that code would have to make raises UnsafeCheckpointError."""
        value = self._values[name]
        if id(value) in self._plain:
            return value
        plain = plain_value(self._path, name, value)
        if isinstance(value, set | frozenset):
            self._plain.add(id(value))
        return plain

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
    members = list(value) if isinstance(value, set | frozenset) else [value]
    for one in members:
        if one is not value and isinstance(one, Storage | StoredTensor):
            raise CheckpointError(f"{path}: {name} is a set that holds a tensor, which has no name")
        if isinstance(one, Global | Opaque):
            cause = one.cause if isinstance(one, Opaque) else str(one)
            raise UnsafeCheckpointError(
                f"{path}: {name} needs {cause}, which the file names; it is not called here"
            )
    return value
