"""A checkpoint as a mapping: names at once, tensors when asked for.

Built in ``notebooks/06_lazy_checkpoint``.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.checksums import Vouched
from tutorial.kept.reader.convert import Converted, convert
from tutorial.kept.reader.files import OpenFile, naming_errors
from tutorial.kept.reader.hugging_face import SHARD_BYTES, convert_to_folder
from tutorial.kept.reader.load import load, load_onto, require_device
from tutorial.kept.reader.manifest import vouched_by_records
from tutorial.kept.reader.metadata import Metadata, plain_value
from tutorial.kept.reader.naming import nested
from tutorial.kept.reader.stored import Opaque, StoredTensor
from tutorial.kept.reader.targets import require_index, require_targets, tensors_by_name
from tutorial.kept.reader.tensors import Entry, apply_tensor_flags
from tutorial.kept.reader.whole_storages import identity


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that was found at a path."""

    format: str
    """That of the one file, or ``sharded``, or ``npydata`` for a training checkpoint of ours."""
    archives: list[Archive]
    """The files; the first says the byte order."""
    root: Any
    """Values, tensors and entries as they are nested."""
    leaves: Mapping[str, Any]
    """What stands in ``root`` under each name."""
    tensors: Mapping[str, Entry]
    """Those of them that are tensors, each with who reads it."""
    others: Mapping[str, Entry]
    """The others; and what is listed beside what is nested."""
    vouched: Callable[[], Mapping[OpenFile, Vouched]] | None = None
    """Returns what the manifest says of the files, if there is one that comes with them."""

    @property
    def entries(self) -> dict[str, Entry]:
        """Everything that has a name."""
        return {**self.tensors, **self.others}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the file says of a tensor; none of its bytes was read for it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    nbytes: int
    """Of its elements, without the gaps a view may have."""
    storage: str | None
    """The key of the storage it looks into, which other tensors may share."""
    offset: int
    """Bytes of the storage before its first element."""
    file_offset: int | None
    """Bytes of the file before its first element; ``None`` where those are compressed."""
    names: tuple[str, ...] = field(repr=False)
    """All names of these very elements, its own included."""
    kind: str = "dense"
    """``dense``, or why it can't be read: ``sparse``, ``quantized``, ``nested``, ``meta``."""
    requires_grad: bool = False
    path: Path | None = None
    """The file that holds it; of a sharded tensor, the first of the set."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the very same elements; made when asked for, as a file may tie many."""
        return tuple(one for one in self.names if one != self.name)


class LazyCheckpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name; made by ``open_checkpoint``.

    A tensor is read when it is asked for, and may be written to: the file never changes. Tensors
    outlive :meth:`close`. Any number of threads may read at once.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self.path, self._contents = path, contents
        self.format, self.byteorder = contents.format, contents.archives[0].byteorder
        self._tensors, self._others = contents.tensors, contents.others
        if not all(archive.is_checked for archive in contents.archives):
            for entry in {id(one.value): one for one in self._tensors.values()}.values():
                entry.reader.check(entry.value)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype that it was saved with.

        Raises:
            KeyError: There is no tensor of that name.
            UnsafeCheckpointError: It would take code that the file names to make it.
            CheckpointError: It is of a kind that is listed only, or the file has changed.
        """
        entry = self._entry(name)
        try:
            return apply_tensor_flags(entry.reader.read(entry.value), entry.value)
        except Exception:  # small tensors are read faster than a name is put before no error
            with naming_errors(str(self.path), name):
                raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        return f"<LazyCheckpoint {self.path}: {self.format}, {len(self)} tensors>"

    def load(
        self,
        names: Iterable[str] | Mapping[str, Any] | None = None,
        *,
        device: str | torch.device = "cpu",
        into: Any = None,
        progress: bool = False,
        verify: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Read many tensors, or all, with several large reads in flight; return them by name.

        They are read in the order of the files, past the page cache where they are not in it. Use
        it for what you need whole, and at once; ``ckpt[name]`` maps a tensor instead, which costs
        nothing until it is touched, and then a fault for each page. Small ones share up to 4 MiB of
        memory (or a 1,024th of all), which is given back when all of them are dropped.

        Args:
            names: Which ones; ``None`` is all, and text is one name. A mapping gives an index for
                each name, as :meth:`get_slice` takes it: ``{"w": np.s_[0:128]}``; ``...`` is the
                whole tensor.
            device: Where they go, if not ``into`` what is there.
            into: What to fill in place of new memory: a module, an optimizer that has made its
                state, or tensors by name, nested ones by names with dots. It must have exactly the
                ``names``, or with ``names`` given at least those. Another dtype is converted. Of
                tied or overlapping ones the last in ``into`` counts. Hooks of ``load_state_dict``
                are not called.
            progress: Show a bar, if it takes longer than a second.
            verify: Compare what is read, and the headers, with the checksums of the manifest: of a
                checkpoint of ours, or one of ``npydata verify --record``. The bytes that arrive are
                those that are compared, while they are in the processor's cache; but tensors that
                don't lie in the file as in memory (of another dtype, say) are then read once more.

        Raises:
            CheckpointError: A tensor can't be read; or ``into`` lacks one, has one more, one of
                another shape, one without memory of its own, or one that its ``state_dict()``
                makes anew; or what has a ``state_dict()`` holds more than tensors there, beside an
                optimizer's settings. Nothing was written then. A file was written to since it was
                opened; or, with ``verify``, there is no manifest, or a tensor is not what was
                written: some of ``into`` may be filled by then.
            KeyError: There is no tensor of a name.
            IndexError, TypeError, ValueError: A tensor has no such part.
        """
        names = [names] if isinstance(names, str) else names
        wanted = names
        if not isinstance(wanted, Mapping):
            wanted = dict.fromkeys(self if wanted is None else wanted, ...)
        entries = {name: self._entry(name) for name in wanted}
        for name, entry in entries.items():
            require_index(self.path, name, entry.value, wanted[name])
        with naming_errors(str(self.path)):
            vouched = self._vouched() if verify else None
            require_device(device)
            if into is not None:
                if torch.device(device).type != "cpu":
                    raise CheckpointError(f"device={device}, but into= has a place for each tensor")
                targets = tensors_by_name(into)
                require_targets(entries, wanted, targets, exactly=names is None)
                return load(entries, wanted, targets, progress=progress, vouched=vouched)
            return load_onto(device, entries, wanted, progress=progress, vouched=vouched)

    def require_fits(self, into: Any) -> None:
        """Raise what ``load(into=into)`` would raise before it reads; nothing is written.

        Raises:
            CheckpointError: ``into`` lacks a tensor, or has one more, or one that can't be filled.
        """
        with naming_errors(str(self.path)):
            targets = tensors_by_name(into)
            require_targets(self._tensors, dict.fromkeys(self, ...), targets, exactly=True)

    def info(self, name: str) -> TensorInfo:
        """Return what the file says of a tensor, without reading it."""
        entry = self._entry(name)
        stored: StoredTensor = entry.value
        extent = None if stored.storage is None else entry.reader.extent(stored.storage)
        offset = stored.offset * stored.dtype.itemsize
        return TensorInfo(
            name=name,
            dtype=stored.dtype,
            shape=stored.shape,
            stride=stored.stride,
            nbytes=math.prod(stored.shape) * stored.dtype.itemsize,
            storage=None if stored.storage is None else stored.storage.key,
            offset=offset,
            file_offset=extent.offset + offset if extent and extent.file.in_checkpoint else None,
            names=self._same[identity(entry)],
            kind=stored.kind,
            requires_grad=stored.requires_grad,
            path=entry.reader.path,
        )

    def get_slice(self, name: str) -> "TensorSlice":
        """Return a tensor to be indexed: ``get_slice(name)[2:5, :10]`` reads only those pages."""
        return TensorSlice(self, name)

    def read_slice(self, name: str, index: Any) -> torch.Tensor:
        """Return ``self[name][index]`` in memory of its own, from the pages it spans."""
        entry = self._entry(name)
        try:
            with naming_errors(str(self.path), name):
                tensor = entry.reader.read_slice(entry.value, index)
                return apply_tensor_flags(
                    tensor, replace(entry.value, is_parameter=False, requires_grad=False)
                )
        except (IndexError, TypeError, ValueError):
            require_index(self.path, name, entry.value, index)  # which names them
            raise

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """Everything that is not a tensor, by name; reading what needs foreign code raises."""
        return Metadata(self.path, {name: entry.value for name, entry in self._others.items()})

    @property
    def unsafe_globals(self) -> tuple[str, ...]:
        """The classes and functions that the file names and that are not called here.

        Those this reader does not know, and known ones that left something only they could make.
        """
        unknown = {name for archive in self._contents.archives for name in archive.unknown}
        values = (entry.value for entry in self._others.values())
        return tuple(sorted(unknown | {one.cause for one in values if isinstance(one, Opaque)}))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors; a sharded set has several."""
        return tuple(file.path for file in self.open_files)

    @property
    def open_files(self) -> tuple[OpenFile, ...]:
        """The same as they were opened, whatever bears their names by now."""
        return tuple(archive.file for archive in self._contents.archives)

    def tree(self) -> Any:
        """Return the nesting of the file, a :class:`TensorInfo` in the place of each tensor."""
        leaves = reversed(list(self._contents.leaves.items()))
        names = {id(leaf): name for name, leaf in leaves if name in self._tensors}

        def info_or_value(leaf: Any) -> Any:
            if id(leaf) in names:
                return self.info(names[id(leaf)])
            return leaf.value if isinstance(leaf, Entry) else leaf

        root = self._contents.root
        with naming_errors(str(self.path)):
            return nested(dict(root) if isinstance(root, Mapping) else root, info_or_value)

    def distinct(self) -> list[tuple[str, Entry]]:
        """Return one name for each tensor that is not tied to an earlier one, and its entry."""
        return [(names[0], self._tensors[names[0]]) for names in self._same.values()]

    def ties(self) -> dict[str, str]:
        """Return the other names of tied tensors, each with the name that stands for it."""
        return {name: names[0] for names in self._same.values() for name in names[1:]}

    def to_safetensors(
        self,
        dst: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        progress: bool = False,
        allow_larger: bool = False,
    ) -> Converted:
        """Write all tensors into one safetensors file, whole or not at all.

        No more than one tensor is in memory at a time, and of those that lie in order only a chunk.
        Tied tensors are written once; ties, values that JSON can hold, and what the format has no
        words for go into the metadata, from which :func:`open_checkpoint` restores them. ``dtype``
        casts tensors of floating point. Expanded tensors are written out; where that would make
        more than eight times the bytes of the source, it is refused unless ``allow_larger``.

        Raises:
            CheckpointError: A tensor is of a kind that can't be read, or ``dst`` ends like another
                format's name, such as ``.pt``.
        """
        with naming_errors(str(self.path)):
            return convert(self, dst, dtype=dtype, progress=progress, allow_larger=allow_larger)

    def to_hugging_face(
        self,
        dst: str | os.PathLike[str],
        *,
        shard_size: int = SHARD_BYTES,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        progress: bool = False,
        allow_larger: bool = False,
    ) -> Converted:
        """Write tensors into a new folder that ``from_pretrained`` opens, whole or not at all.

        ``model.safetensors``, or files of ``shard_size`` bytes at most and their index, named as
        ``save_pretrained`` does; ``config.json`` is not made. ``prefix`` chooses the tensors whose
        names begin with it, and is taken off: ``"model."`` of a training checkpoint. Tied tensors
        are written once; values beside tensors are left out. Otherwise as :meth:`to_safetensors`.

        Raises:
            CheckpointError: A tensor can't be read, or no name begins with ``prefix``.
            FileExistsError: ``dst`` is there already, and is no empty folder.
        """
        with naming_errors(str(self.path)):
            return convert_to_folder(self, dst, shard_size=shard_size, prefix=prefix, dtype=dtype,
                                     progress=progress, allow_larger=allow_larger)  # fmt: skip

    def require_unchanged(self) -> None:
        """Refuse files that were written to since they were opened."""
        for file in self.open_files:
            file.require_unchanged()

    def close(self) -> None:
        """Let go of the files. Tensors that were read stay; reading another one raises."""
        for file in self.open_files:
            file.close()

    def __enter__(self) -> "LazyCheckpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        self.close()

    @cached_property
    def _same(self) -> dict[Any, tuple[str, ...]]:
        """The names of the very same elements."""
        same: dict[Any, list[str]] = {}
        for name, entry in self._tensors.items():
            same.setdefault(identity(entry), []).append(name)
        return {key: tuple(names) for key, names in same.items()}

    def _vouched(self) -> Mapping[OpenFile, Vouched]:
        """Return what a manifest says of the files."""
        if self._contents.vouched is not None:
            return self._contents.vouched()
        return vouched_by_records(self._contents.archives)

    def _entry(self, name: str) -> Entry:
        """Return a tensor's entry, or say why there is none."""
        try:
            return self._tensors[name]
        except KeyError:
            pass
        if (other := self._others.get(name)) is not None:
            plain_value(self.path, name, other.value)
            raise KeyError(f"{name!r} in {self.path} is not a tensor: see metadata")
        raise KeyError(f"no tensor {name!r} in {self.path}")


class TensorSlice:
    """A tensor in the file, to be indexed before it is read."""

    def __init__(self, checkpoint: LazyCheckpoint, name: str) -> None:
        info = checkpoint.info(name)
        self.name, self.shape, self.dtype, self.stride = name, info.shape, info.dtype, info.stride
        self._checkpoint = checkpoint

    def get_shape(self) -> list[int]:
        """Return the shape, as ``safetensors`` names it."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return what ``tensor[index]`` is: integers, slices that step forwards, and ``...``."""
        return self._checkpoint.read_slice(self.name, index)

    def __repr__(self) -> str:
        return f"<slice of {self.name!r}: {self.dtype}, {list(self.shape)}>"
