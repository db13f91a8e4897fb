"""A checkpoint as a mapping: names up front, tensors on demand."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from npydata.errors import CheckpointError, UnsafeCheckpointError
from npydata.reader.convert import Converted, convert
from npydata.reader.file import SMALL_BYTES, FormatError, naming
from npydata.reader.formats import Contents
from npydata.reader.load import Job, comparisons, load_into, load_new
from npydata.reader.names import free_name, nest
from npydata.reader.pickle.objects import Global, TensorSpec, UnresolvedObject
from npydata.reader.targets import MissingKeyError, check_targets, targets_of
from npydata.reader.tensor import read_part, read_tensor, sliced
from npydata.system.accelerator import why_unusable
from npydata.system.progress import harmless

MAX_TIED_CHARACTERS = 100_000_000
"""A report or a header repeats a tensor's first name for each of its names; longer than this
together, they are refused."""


@dataclass(frozen=True)
class TensorInfo:
    """What the file says about a tensor; none of its bytes are read for it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    nbytes: int
    """Bytes of its elements, without the gaps a view may have."""
    storage: str | None
    """The key of its storage, which other tensors may share."""
    offset: int
    """Bytes of the storage before its first element."""
    file_offset: int | None
    """Bytes of the file before its first element; ``None`` for a tensor in chunks."""
    kind: str = "dense"
    """``dense``, or the file's name for a dtype that torch lacks."""
    requires_grad: bool = False
    path: Path | str | None = None
    """The file that holds it; for a tensor in chunks, the first of the set."""


class LazyCheckpoint(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name; made by ``open_checkpoint``.

    A tensor is read when you ask for it. You may write to it: the file never changes. While it
    lives, its name, and those of tensors that share its storage, give the same memory, with your
    changes. Tensors outlive :meth:`close`. Any number of threads may read at once.
    """

    def __init__(self, path: Path | str, contents: Contents) -> None:
        self.path, self._contents = path, contents
        self.format, self.byteorder = contents.format, contents.byteorder
        self.open_files: tuple[Any, ...] = tuple(contents.files)
        """The open files under the names in ``files``, wherever these names lead by now."""
        self._tensors: dict[str, TensorSpec] = {}
        self._others: dict[str, Any] = {}
        named = dict(contents.leaves)
        for key, value in contents.values.items():
            named[free_name(key, named)] = value
        for name, value in named.items():
            (self._tensors if isinstance(value, TensorSpec) else self._others)[name] = value

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype that it was saved with.

        Raises:
            KeyError: There is no tensor of that name.
            UnsafeCheckpointError: Building it would take code that the file names.
            CheckpointError: It can only be listed, or the file has changed.
        """
        spec = self._spec(name)
        try:
            return read_tensor(spec)
        except Exception:  # reading is faster than entering this block
            with naming(f"{self.path}: {name}"):
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
        prefix: str = "",
        device: str | torch.device = "cpu",
        into: Any = None,
        progress: bool = False,
        verify: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Read many tensors, or all, with several large reads in flight; return them by name.

        Use it for tensors that you need whole and right away; ``ckpt[name]`` maps a tensor instead,
        which costs nothing until you touch it, and then one page fault per page.

        Args:
            names: Which tensors; ``None`` means all, and a string is one name. A mapping gives an
                index for each name, as :meth:`get_slice` takes it: ``{"w": np.s_[0:128]}``;
                ``...`` is the whole tensor.
            prefix: Only tensors whose names begin with this, which is stripped: ``"model."``.
            device: Where the tensors go; not with ``into``.
            into: What to fill instead of new memory: a module, an optimizer that has made its
                state, or a mapping of these or of tensors, whose keys are joined by dots:
                ``{"model": model}``. It must have exactly the tensors to load or, with ``names``
                given, at least those. Values are converted to its dtypes. If tensors are tied, the
                last in ``into`` wins; others that overlap may get the values of either. Hooks of
                ``load_state_dict`` are not called. An optimizer's settings (lr, betas) are no
                tensors and stay as they are: they are in ``metadata``.
            progress: Show a bar if loading takes longer than a second.
            verify: Compare what is read, and the headers, with the checksums of a checkpoint of
                ours. Each checksum covers 64 MiB, all of which is read.

        Raises:
            CheckpointError: ``into`` lacks a tensor, has an extra one or one that can't be filled;
                or, with ``verify``, there are no checksums: nothing was filled. Or a tensor can't
                be read, a piece of a file is not what was written, or a file was changed since it
                was opened: some of ``into`` may have been filled.
            KeyError: There is no tensor of that name.
            IndexError, TypeError, ValueError: An index doesn't fit its tensor.
        """
        with naming(self.path):
            indices = self._chosen(names, prefix)
            specs = {name: self._part(prefix + name, index) for name, index in indices.items()}
            slices = {name for name, index in indices.items() if index is not ...}
            if (why := why_unusable(device)) is not None:
                raise FormatError(why)
            ranges = self._contents.checksums if verify else None
            if verify and not ranges:
                raise FormatError("has no checksums: verify=True needs a checkpoint of npydata")
            if into is None:
                made = load_new(specs, slices, torch.device(device), progress, ranges)
            else:
                if torch.device(device).type != "cpu":
                    raise FormatError(f"device={device} can't be combined with into=")
                targets = targets_of(into)
                check_targets(specs, targets, exactly=names is None)
                load_into(specs, targets, progress, ranges)
                made = {name: targets[name] for name in specs}
            if self._contents.on_load is not None:
                self._contents.on_load()
            return made

    def mapped(self) -> dict[str, torch.Tensor]:
        """Return all tensors, mapped; those too small to map are read together."""
        small = [
            name
            for name, spec in self._tensors.items()
            if spec.chunks is None and spec.storage.nbytes < SMALL_BYTES
        ]
        read = self.load(small)
        return {name: read[name] if name in read else self[name] for name in self}

    def require_fits(self, into: Any) -> None:
        """Raise what ``load(into=into)`` would raise before it writes."""
        with naming(self.path):
            check_targets(self._tensors, targets_of(into), exactly=True)

    def checks(self) -> list[Job]:
        """Return jobs that compare every byte of the files with checksums; each may raise.

        ``verify_checkpoint`` runs the jobs of several files together.
        """
        ranges = self._contents.checksums
        return list(comparisons(self.open_files, ranges, self._tensors, whole=True))

    def info(self, name: str) -> TensorInfo:
        """Return what the file says about a tensor, without reading it.

        Locating a tensor in a zip file means reading its local header, which isn't done for remote
        files.
        """
        spec = self._spec(name)
        path, file_offset = self.files[0], None
        if (extent := spec.storage.extent) is not None:
            path = extent.file.path
            if not extent.file.is_remote:
                with naming(f"{self.path}: {name}"):
                    extent.check()
                file_offset = extent.offset + spec.offset
        return TensorInfo(
            name,
            spec.dtype,
            spec.shape,
            spec.stride,
            math.prod(spec.shape) * spec.dtype.itemsize,
            spec.storage.key if spec.chunks is None else None,
            spec.offset,
            file_offset,
            spec.kind,
            spec.requires_grad,
            path,
        )

    def get_slice(self, name: str) -> "TensorSlice":
        """Return a tensor to index: ``get_slice(name)[2:5, :10]`` reads only those pages."""
        return TensorSlice(self, name)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Everything that is not a tensor, by name; reading one that needs foreign code raises."""
        return Metadata(self.path, self._others)

    @property
    def unsafe_globals(self) -> tuple[str, ...]:
        """The classes and functions that the file names; they are never called here."""
        return tuple(sorted(self._contents.unknown))

    @property
    def files(self) -> tuple[Path | str, ...]:
        """The files that hold the tensors; a sharded set has several."""
        return tuple(file.path for file in self.open_files)

    def tree(self) -> Any:
        """Return the file's nested values, with a :class:`TensorInfo` in place of each tensor."""
        names = {
            id(leaf): name
            for name, leaf in reversed(self._contents.leaves.items())
            if name in self._tensors
        }
        with naming(self.path):
            return nest(
                self._contents.root,
                lambda leaf: self.info(names[id(leaf)]) if id(leaf) in names else leaf,
            )

    def ties(self) -> dict[str, str]:
        """Return the extra names of tied tensors, each with the tensor's first name."""
        return {name: names[0] for names in self._alias_groups.values() for name in names[1:]}

    def to_safetensors(
        self,
        dst: str | os.PathLike[str],
        *,
        prefix: str = "",
        shard_size: int | None = None,
        progress: bool = False,
    ) -> Converted:
        """Write tensors as safetensors, atomically, with little of them in memory at a time.

        Tied tensors are written once; ties, values that JSON can hold, and complex dtypes go into
        the metadata, from which :func:`open_checkpoint` restores them.

        Args:
            dst: The file; with ``shard_size``, a new folder that ``from_pretrained`` can open.
            prefix: Only tensors whose names begin with this, which is stripped.
            shard_size: The most bytes of tensors in a file of the folder. The header comes on top,
                and a larger tensor has a file of its own.
            progress: Show a bar if writing takes longer than a second.

        Raises:
            CheckpointError: A tensor can't be read, expanded ones would take over eight times the
                bytes of the source, or ``dst`` has another format's suffix.
            FileExistsError: The folder exists and is not empty.
        """
        with naming(self.path):
            return convert(self, dst, prefix, shard_size, progress)

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid; reading another one raises."""
        for file in self.open_files:
            file.close()

    def __enter__(self) -> "LazyCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _alias_groups(self) -> dict[Any, tuple[str, ...]]:
        """All names of each tensor: one, or several if it is tied."""
        same: dict[Any, list[str]] = {}
        for name, spec in self._tensors.items():
            same.setdefault(spec_alias_key(spec), []).append(name)
        if sum(len(names[0]) * len(names) for names in same.values()) > MAX_TIED_CHARACTERS:
            raise CheckpointError(f"{self.path}: the names of its tied tensors are too long")
        return {key: tuple(names) for key, names in same.items()}

    def _spec(self, name: str) -> TensorSpec:
        """Return a tensor's TensorSpec, or raise an error that says why there is none."""
        if (spec := self._tensors.get(name)) is not None:
            return spec
        if name in self._others:
            plain_value(self.path, name, self._others[name])
            raise KeyError(f"{name!r} in {self.path} is not a tensor: see metadata")
        raise MissingKeyError(f"no tensor {name!r} in {self.path}", name, [*self])

    def _part(self, name: str, index: Any) -> TensorSpec:
        """Return the TensorSpec of a part of a tensor."""
        spec = self._spec(name)
        try:
            return spec if index is ... else sliced(spec, index)
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"{self.path}: {name}: {error}") from None

    def _chosen(self, names: Any, prefix: str) -> Mapping[str, Any]:
        """Return an index for each tensor to load, by its name without the prefix."""
        if names is not None:
            names = [names] if isinstance(names, str) else names
            return names if isinstance(names, Mapping) else dict.fromkeys(names, ...)
        if not self._tensors and self.unsafe_globals:
            needed = harmless(", ".join(self.unsafe_globals[:3]), 200)
            raise UnsafeCheckpointError(
                f"{self.path}: no tensor can be read: they need {needed}, which the file names "
                "and which is never called here"
            )
        found = [name.removeprefix(prefix) for name in self if name.startswith(prefix)]
        if prefix and not found:
            raise FormatError(
                f"no name begins with {prefix!r}, the first is {next(iter(self), '')}"
            )
        if prefix and (cut := [name for name in found if name.startswith(".")]):
            raise FormatError(
                f"without {prefix!r}, a name is {cut[0]!r}; did you mean '{prefix}.'?"
            )
        return dict.fromkeys(found, ...)


class TensorSlice:
    """A tensor in the file, to index before it is read."""

    def __init__(self, checkpoint: LazyCheckpoint, name: str) -> None:
        spec = checkpoint._spec(name)
        self.name, self.shape, self.dtype = name, spec.shape, spec.dtype
        self._checkpoint = checkpoint

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return ``tensor[index]`` for integers, slices that step forwards, and ``...``."""
        with naming(f"{self._checkpoint.path}: {self.name}"):
            return read_part(self._checkpoint._part(self.name, index))


def spec_alias_key(spec: TensorSpec) -> Any:
    """Return a key that is equal for names of exactly the same elements in the file.

    For tensors in memory, see ``targets.alias_key``.
    """
    key = (spec.shape, spec.stride, spec.offset, spec.conj, spec.neg)
    return id(spec.storage), spec.dtype, str(key)  # as text: a file can't choose its hash


class Metadata(Mapping[str, Any]):
    """What a checkpoint holds besides tensors, by name."""

    def __init__(self, path: Path | str, values: dict[str, Any]) -> None:
        self._path, self._values = path, values

    def __getitem__(self, name: str) -> Any:
        """Return a plain value; one that takes code to build raises UnsafeCheckpointError."""
        if name not in self._values:
            raise MissingKeyError(f"no value {name!r} in {self._path}", name, [*self])
        return plain_value(self._path, name, self._values[name])

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<metadata of {self._path}: {len(self)} values>"


def plain_value(path: Path | str, name: str, value: Any) -> Any:
    """Return a value, or refuse one that takes code to build or that holds such a value.

    A tensor can only be here inside a set: lists and tuples with tensors were flattened.
    """
    if isinstance(value, Global | UnresolvedObject):
        raise UnsafeCheckpointError(
            f"{path}: {name:.200} needs {harmless(value.qualname, 200)}, which the file names; it "
            "is not called here, but plain tensors in it can be read by their own names"
        )
    if isinstance(value, TensorSpec):
        raise CheckpointError(
            f"{path}: {name:.200} is a set that holds a tensor, which has no name"
        )
    if isinstance(value, set | frozenset | list | tuple):
        for one in value if not {*map(type, value)} <= {int, float, str, bool} else ():
            plain_value(path, name, one)
    return value
