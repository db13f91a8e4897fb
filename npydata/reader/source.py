"""The level below tensors: a checkpoint file as storages, whole or in ranges of bytes."""

import os
from collections.abc import Callable

from npydata.reader.file import Extent, File, FormatError, naming
from npydata.reader.formats import Contents
from npydata.reader.formats.legacy import COUNT_BYTES, read_legacy
from npydata.reader.formats.safetensors import read_safetensors
from npydata.reader.formats.tar import read_tar
from npydata.reader.formats.zip import read_zip
from npydata.reader.names import as_value
from npydata.reader.pickle.objects import TensorSpec
from npydata.reader.tensor import readable


class LazyDataSource:
    """The storages of one checkpoint file; reads only what is asked for.

    Made by :meth:`from_zip` and the other constructors. Any number of threads may read at once. A
    context manager: ``close`` lets go of the file.
    """

    def __init__(self, path: str | os.PathLike[str], read: Callable[[File], Contents]) -> None:
        self._path = path
        with naming(os.fspath(path)):
            self._file = File(path)
            self._extents: dict[str, Extent] = {}
            specs = map(as_value, read(self._file).leaves.values())
            for spec in (one for one in specs if isinstance(one, TensorSpec) and one.storage):
                root = readable(spec).root
                assert root.extent is not None
                self._extents[root.key] = root.extent
            for extent in self._extents.values():
                extent.check()
        self._extents = dict(sorted(self._extents.items(), key=lambda pair: pair[1].offset))

    @classmethod
    def from_zip(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a zip file of ``torch.save``."""
        return cls(path, read_zip)

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
        made = cls(path, read_legacy)
        size = made._file.size
        begin = min((one.offset - COUNT_BYTES for one in made._extents.values()), default=size)
        for name, given, found in (("data_offset", data_offset, begin),
                                   ("data_size", data_size, size - begin)):  # fmt: skip
            if given is not None and given != found:
                with naming(path):
                    raise FormatError(f"{name} is {found:,}, not the given {given:,}")
        return made

    @classmethod
    def from_tar(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a file that torch wrote before 0.1.10."""
        return cls(path, read_tar)

    @classmethod
    def from_safetensors(cls, path: str | os.PathLike[str]) -> "LazyDataSource":
        """Open a safetensors file; each tensor is a storage."""
        return cls(path, read_safetensors)

    def keys(self) -> list[str]:
        """Return the keys of the storages, in the order of the file."""
        return list(self._extents)

    def contains(self, key: str) -> bool:
        """Whether there is a storage called ``0`` or ``data/0``."""
        return self._short(key) in self._extents

    def nbytes(self, key: str) -> int:
        """Return how many bytes a storage has."""
        return self._extent(key).nbytes

    def read(self, key: str) -> bytes:
        """Return all bytes of a storage, as they are in the file.

        Raises:
            KeyError: There is no such storage.
        """
        return self.read_range(key, 0, self.nbytes(key))

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a storage from byte ``offset`` on, and read no others.

        Raises:
            KeyError: There is no such storage.
            CheckpointError: The range is not inside the storage.
        """
        extent = self._extent(key)
        with naming(f"{os.fspath(self._path)}: storage {key!r}"):
            part = extent.part(offset, length)
            return part.file.read(part.offset, part.nbytes)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> "LazyDataSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _extent(self, key: str) -> Extent:
        try:
            return self._extents[self._short(key)]
        except KeyError:
            raise KeyError(f"no storage {key!r} in {os.fspath(self._path)}") from None

    def _short(self, key: str) -> str:
        """Return a key as the pickle has it."""
        return key if key in self._extents else key.rpartition("data/")[2]
