"""The level below tensors: a checkpoint file as storages, read whole or by byte range."""

import os

from npydata.errors import CheckpointError
from npydata.reader.file import Extent, naming
from npydata.reader.open import open_checkpoint
from npydata.reader.tensor import whole_extent


class LazyDataSource:
    """The storages of one checkpoint file; reads only what is asked for.

    Made by :meth:`from_zip` or :meth:`from_legacy_multi_storage`. Any number of threads may read at
    once. It is a context manager that closes the file.
    """

    def __init__(self, path: str | os.PathLike[str], format: str) -> None:
        self._path = os.fspath(path)
        self._checkpoint = open_checkpoint(path)
        if self._checkpoint.format != format:
            raise CheckpointError(f"{path}: is {self._checkpoint.format}, expected {format}")
        with naming(self._path):
            found = {
                spec.storage.key: whole_extent(spec.storage)
                for spec in self._checkpoint._tensors.values()
            }
        self._extents = dict(sorted(found.items(), key=lambda pair: pair[1].offset))

    @classmethod
    def from_zip(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a zip file that ``torch.save`` wrote."""
        return cls(path, "zip")

    @classmethod
    def from_legacy_multi_storage(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a file that ``torch.save`` wrote before 1.6; its pickle locates the storages."""
        return cls(path, "legacy")

    def keys(self) -> list[str]:
        """Return the keys of the storages, in the order of the file."""
        return list(self._extents)

    def contains(self, key: str) -> bool:
        """Whether there is a storage called ``0`` or ``data/0``."""
        return key.removeprefix("data/") in self._extents

    def read(self, key: str) -> bytes:
        """Return all bytes of a storage, as they are in the file.

        Raises:
            KeyError: There is no such storage.
        """
        return self.read_range(key, 0, self._extent(key).nbytes)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a storage from byte ``offset`` on, and read no others.

        Raises:
            KeyError: There is no such storage.
            CheckpointError: The range is not inside the storage.
        """
        extent = self._extent(key)
        with naming(f"{self._path}: storage {key!r}"):
            return extent.read(offset, length)

    def close(self) -> None:
        """Close the file."""
        self._checkpoint.close()

    def __enter__(self) -> "LazyDataSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extent(self, key: str) -> Extent:
        if not self.contains(key):
            raise KeyError(f"no storage {key!r} in {self._path}")
        return self._extents[key.removeprefix("data/")]
