"""The level below tensors: a checkpoint file as storages, whole or in ranges of bytes."""

import os
from pathlib import Path

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent
from tutorial.kept.reader.containers import open_container
from tutorial.kept.reader.containers.legacy import COUNT_BYTES
from tutorial.kept.reader.containers.zip import read_directory
from tutorial.kept.reader.files import naming_errors


class LazyDataSource:
    """The storages of one checkpoint file; reads only what is asked for.

    The file is opened once; any number of threads may read at once. Made by ``from_zip`` and the
    other constructors. A context manager: ``close`` lets go of the file.
    """

    def __init__(self, archive: Archive, folders: tuple[str, ...] = ("data/",)) -> None:
        given: object = archive
        if not isinstance(given, Archive):
            raise TypeError(f"a {type(given).__name__}, expected LazyDataSource.from_zip(path) or "
                            "another constructor; open_checkpoint(path) reads tensors")  # fmt: skip
        self._archive = archive
        self._extents = archive.extents
        self._folders = folders

    @classmethod
    def from_zip(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a zip file of ``torch.save``."""
        archive = opened(path, "zip")
        with naming_errors(os.fspath(path)):
            prefix = read_directory(archive.file)[0][0].name.split("/")[0]
        return cls(archive, ("data/", f"{prefix}/data/"))

    @classmethod
    def from_legacy_multi_storage(
        cls, path: str | os.PathLike[str], data_offset: int | None = None,
        data_size: int | None = None,
    ) -> "LazyDataSource":  # fmt: skip
        """Open a file that ``torch.save`` wrote before 1.6.

        The file itself says where each storage begins: ``data_offset`` (bytes before the first
        storage's count) and ``data_size`` (bytes from there to the end) are only compared with it.

        Raises:
            CheckpointError: They do not agree, or the file is damaged.
        """
        archive = opened(path, "legacy")
        extents = archive.extents.values()
        begin = min((one.offset - COUNT_BYTES for one in extents), default=archive.file.size)
        size = archive.file.size - begin
        for name, given, found in (
            ("data_offset", data_offset, begin),
            ("data_size", data_size, size),
        ):
            if given is not None and given != found:
                raise CheckpointError(f"{path}: {name} is {found:,}, not the given {given:,}")
        return cls(archive)

    @classmethod
    def from_tar(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a file that torch wrote before 0.1.10."""
        return cls(opened(path, "tar"))

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a safetensors file; each tensor is a storage."""
        return cls(opened(path, "safetensors"))

    def keys(self) -> list[str]:
        """Return the keys of the storages, in the order of the file."""
        return list(self._extents)

    def contains(self, key: str) -> bool:
        """Whether there is a storage called ``0``, ``data/0`` or by its full record name."""
        return self._short(key) in self._extents

    def nbytes(self, key: str) -> int:
        """Return how many bytes a storage has."""
        return self._extent(key).nbytes

    def read(self, key: str) -> bytes:
        """Return all bytes of a storage, as they are in the file.

        Raises:
            KeyError: There is no such storage.
        """
        extent = self._extent(key)
        with naming_errors(f"{self._archive.file.path}: storage {key!r}"):
            return extent.file.read(extent.offset, extent.nbytes)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a storage from byte ``offset`` on, and read no others.

        Raises:
            KeyError: There is no such storage.
            CheckpointError: The range is not inside the storage.
        """
        extent = self._extent(key)
        with naming_errors(f"{self._archive.file.path}: storage {key!r}"):
            part = extent.part(offset, length)
            return part.file.read(part.offset, part.nbytes)

    def close(self) -> None:
        """Let go of the file."""
        self._archive.file.close()

    def __enter__(self) -> "LazyDataSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extent(self, key: str) -> Extent:
        try:
            return self._extents[self._short(key)]
        except KeyError:
            raise KeyError(f"no storage {key!r} in {self._archive.file.path}") from None

    def _short(self, key: str) -> str:
        """Return a key as the pickle has it; one that a tensor of safetensors has is left alone."""
        if key not in self._extents:
            for folder in self._folders:
                if key.startswith(folder):
                    return key.removeprefix(folder)
        return key


def opened(path: str | os.PathLike[str], format: str) -> Archive:
    """Open a file of a known format."""
    with naming_errors(os.fspath(path)):
        return open_container(Path(path), format)
