"""Two datasets over token files: random windows, and windows in order.

Both give ``x, y`` with ``y`` shifted by one, and fetch a whole batch with one gather::

    train = NpyTokensDataset("train.npy", seq_len=1024, seed=0)
    x, y = train.fetch(range(32))                   # (32, 1024) int64 each
    val = MmapDataset("val.bin", seq_len=1024, dtype="uint16")
    inputs, targets = val.get(0)                    # (1024,) int64 each

With ``as_dict=("input_ids", "labels")`` a sample is a dictionary for models that shift the labels
themselves, as Hugging Face's do: both are the same ``seq_len`` tokens.

There are two numberings. *Windows* are numbered from 0 across all rows and files. A *start* is the
position of a window's first token, counted over all files. ``WindowDataset.fetch`` makes a batch:
``map_indices`` turns indices into starts (the only difference between the two datasets);
``by_file`` splits the starts by file; each file's backend gathers its windows; ``shifted_pair``
casts them.

Built in ``notebooks/01_memmap_dataset``.
"""

import glob
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from npydata.dataset.backend import Access
from npydata.dataset.batches import samples_of
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.formats import FormatName
from npydata.dataset.token_file import TokenFile, open_tokens
from npydata.dataset.windows import (
    IntArray,
    TokenArray,
    as_int,
    hash_of,
    num_windows,
    random_windows,
    window_offsets,
)
from npydata.errors import TokenFileError
from npydata.system.page_cache import AdviceBackoff

SHORTEST_EPOCH = 4096
"""Random windows have no natural end; shorter epochs make progress bars and logs jumpy."""
ENOUGH_WINDOWS = 64
"""A row with at least this many windows can spare one, to begin at any of ``stride`` offsets."""
NON_TOKEN_SUFFIXES = (
    ".idx",
    ".ds.index",
    ".ds.metadata",
    ".ds.loss",
    ".documents",
    ".tokenizer.json",
)
"""Suffixes of files that a glob may match but that hold no tokens."""

ROW_0 = np.zeros(1, np.int64)

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Pair = tuple[torch.Tensor, torch.Tensor]
Empty = Callable[[tuple[int, ...]], IntArray]


def empty_int64(shape: tuple[int, ...]) -> IntArray:
    """Return new memory for a batch."""
    return np.empty(shape, np.int64)


class Batch(NamedTuple):
    """Inputs and targets of one sample or of several."""

    inputs: torch.Tensor
    """What the model reads, int64: ``(seq_len,)`` for one sample."""
    targets: torch.Tensor
    """What it should predict: the inputs shifted by one, same shape, int64."""


class TokenDataset(Dataset[Any]):
    """Numbered samples that come a batch at a time: the base of all datasets here.

    A subclass defines its length and ``fetch``; everything else follows from these.
    """

    shuffle_by_default = True
    """Whether a loader shuffles if its ``shuffle`` is ``None``."""
    seed: int | None = None
    seq_len: int
    num_tokens: int
    """Tokens in all files; a mixture has none of its own."""
    fetch: Callable[..., Any]
    """``fetch(indices, *, seed, epoch)`` returns samples as one batch; safe from many threads."""

    def __init__(
        self, files: list[TokenFile], vocab_size: int | None = None, as_dict: Any = None
    ) -> None:
        self.vocab_size = None if vocab_size is None else as_int(vocab_size, "vocab_size", least=1)
        if as_dict is not None and not (isinstance(as_dict, list | tuple) and len({*as_dict}) == 2):
            raise ValueError(f'as_dict={as_dict!r}, expected two names, as ("input_ids", "labels")')
        self.as_dict, self.files = as_dict, files
        if files:
            self.dtype = np.result_type(*[file.dtype for file in files])
            ends = np.cumsum([0] + [file.num_tokens for file in files])
            self._file_begins, self.num_tokens = ends[:-1], int(ends[-1])
        self._advice = AdviceBackoff()
        # In shared memory, so that running worker processes see the epoch change.
        self._epoch = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        if "__getitem__" in vars(cls) and "fetch" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} defines __getitem__, which no loader calls: define fetch, or pass "
                "transforms to the loader"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch.share_memory_()  # a copy has memory of its own

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch that ``ds[i]`` uses; a loader passes its own."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of later samples; call it before each pass of a stock ``DataLoader``."""
        self._epoch.fill_(operator.index(epoch))

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, or for a slice or list of indices a batch, as ``fetch`` does.

        Raises:
            IndexError: An index is not in the dataset.
        """
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))
        if np.ndim(index):
            return self.fetch(index)
        return samples_of(self.fetch([operator.index(index)]))[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples of a batch one by one, for a stock ``DataLoader``'s collate."""
        return samples_of(self.fetch(indices))

    def __repr__(self) -> str:
        more = f" and {len(self.files) - 1:,} more files" if len(self.files) > 1 else ""
        return (
            f"{type(self).__name__}({str(self.files[0].path)!r}{more}, {self.num_tokens:,} tokens "
            f"of {self.dtype}, seq_len={self.seq_len}, {len(self):,} samples)"
        )

    def by_file(self, starts: IntArray) -> Iterator[tuple[TokenFile, IntArray, IntArray]]:
        """Yield each file that holds some starts, their indices, and their positions in the file.

        ``starts`` are token positions counted over all files.
        """
        which = np.searchsorted(self._file_begins, starts, side="right") - 1
        for k in sorted(set(which.tolist())):
            mine = np.flatnonzero(which == k)
            yield self.files[k], mine, starts[mine] - self._file_begins[k]

    def advise(self, starts: IntArray, counts: IntArray) -> None:
        """Advise the kernel that ``counts`` tokens from each start will be read soon."""
        warm = [f.backend.will_need(at, counts[mine]) for f, mine, at in self.by_file(starts)]
        self._advice.record(was_resident=all(warm))

    def require_vocabulary(self, tokens: TokenArray) -> None:
        """Raise if an id is negative, not in the vocabulary, or too large for an int64."""
        if tokens.size == 0 or (self.vocab_size is None and np.can_cast(tokens.dtype, "u4")):
            return
        limit = self.vocab_size or 1 << 63
        for found in (int(tokens.min()), int(tokens.max())):
            if not 0 <= found < limit:
                raise TokenFileError(f"{self}: id {found}, expected 0 to {limit - 1}")


class WindowDataset(TokenDataset):
    """Windows of token files, numbered from 0 over all rows and files; none crosses a row.

    A batch is one gather. A subclass maps each index to the start of its window.
    """

    map_indices: Callable[[IntArray, int | None, int | None], IntArray]
    """``map_indices(indices, seed, epoch)`` returns the start of each index's window."""

    def __init__(
        self,
        files: list[TokenFile],
        seq_len: int,
        stride: int | None,
        vocab_size: int | None,
        as_dict: Any,
    ) -> None:
        super().__init__(files, vocab_size, as_dict)
        self.seq_len = as_int(seq_len, "seq_len", least=1)
        self.width = self.seq_len + (as_dict is None)
        """Tokens per window: ``seq_len``, plus one where targets are shifted."""
        self.stride = self.width if stride is None else as_int(stride, "stride", least=1)
        self._rows = np.array([file.rows for file in files])
        self._row_lens = np.array([file.row_len for file in files])
        # num_windows adds the one token that as_dict does without.
        per_row = [num_windows(file.row_len, self.width - 1, self.stride) for file in files]
        for file, count in zip(files, per_row, strict=True):
            if count * file.rows == 0:
                raise TokenFileError(
                    f"{file.path}: tokens of shape {file.shape}, expected at least {self.width} "
                    f"in a row for seq_len={seq_len}"
                )
        self.number_windows(np.array(per_row))

    def number_windows(self, per_row: IntArray) -> None:
        """Number the windows; ``per_row``, ``(files,)``, is how many each row of a file has."""
        ends = np.cumsum(np.append(0, per_row * self._rows))
        self._per_row, self._window_begins = per_row, ends[:-1]
        self.num_windows = int(ends[-1])

    def fetch(
        self,
        indices: npt.ArrayLike,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        empty: Empty = empty_int64,
    ) -> Any:
        """Return ``x, y``, both ``(len(indices), seq_len)`` int64 and contiguous.

        The fast path: one gather for the whole batch, safe to call from many threads. With
        ``as_dict`` it returns a dictionary of the two instead.

        Args:
            indices: Samples, a 1-D list or array of integers; negative ones count from the end.
            seed: Seed of random windows; the dataset's own if not given.
            epoch: Epoch of random windows; the dataset's own if not given.
            empty: Allocates the result: called once with its shape, returns int64. The loader lends
                memory that was written before, which costs no page faults.

        Raises:
            IndexError: An index is not in the dataset.
            TypeError: The indices are not a list of integers.
            TokenFileError: An id is not below ``vocab_size``, or a file changed.
        """
        starts = self.map_indices(as_indices(indices, len(self)), seed, epoch)
        if len(self.files) == 1:
            tokens = self.files[0].backend.gather(starts, self.width)
        else:
            tokens = np.empty((len(starts), self.width), self.dtype)
            for file, mine, starts_in_file in self.by_file(starts):
                tokens[mine] = file.backend.gather(starts_in_file, self.width)
        self.require_vocabulary(tokens)
        batch = shifted_pair(tokens, empty((2, len(tokens), self.seq_len)))
        return batch if self.as_dict is None else dict(zip(self.as_dict, batch, strict=True))

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Tell the kernel which samples will be fetched soon, so that the disk reads ahead.

        Costs next to nothing on files that are in memory. Call it some batches ahead, with the
        ``indices``, ``seed`` and ``epoch`` that ``fetch`` will get.
        """
        if self._advice.is_due():
            starts = self.map_indices(as_indices(indices, len(self)), seed, epoch)
            self.advise(starts, np.full(len(starts), self.width))

    def fingerprint(self) -> str:
        """Return a short text that identifies this data, cut into these windows.

        It stays the same if a file is moved, and changes if the text is retokenised. Reads 256 KiB.
        """
        return fingerprint_of(self.files, self.width, self.stride, len(self))

    def locate(self, windows: IntArray) -> tuple[IntArray, IntArray, Any]:
        """Return the start of each window, its row in its file, and that file's number.

        For a single row, or a single file, one number stands for all windows.
        """
        if len(self.files) == 1 and self.files[0].rows == 1:
            return windows if self.stride == 1 else windows * self.stride, ROW_0, 0
        k: Any = 0
        if len(self.files) > 1:
            k = np.searchsorted(self._window_begins, windows, side="right") - 1
        within, per_row = windows - self._window_begins[k], self._per_row[k]
        offsets = window_offsets(within, per_row, self._row_lens[k], self.stride)
        return self._file_begins[k] + offsets, within // per_row, k


def shifted_pair(tokens: TokenArray, out: IntArray) -> Pair:
    """Cast windows to ``x`` and ``y`` in ``out``, int64 ``(2, B, T)``; both are contiguous.

    Windows ``(B, T+1)`` give ``y`` shifted by one; windows ``(B, T)`` give both the same.
    """
    inputs, targets = out[0], out[1]
    seq_len = out.shape[2]
    inputs[:] = tokens[:, :seq_len]
    targets[:] = tokens[:, -seq_len:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class MmapDataset(WindowDataset):
    """Windows in order: sample ``i`` begins ``stride`` tokens after sample ``i - 1``.

    Args:
        paths: A token file, a list of them, or a glob; read one after the other.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        stride: Tokens from one sample's start to the next. ``seq_len + 1`` if not given, so that
            no token is in two samples (``seq_len`` with ``as_dict``, for the same reason);
            ``seq_len`` makes every token but the first a target once.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The files' format, such as ``llm.c``; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give samples as a dictionary with these two names, inputs and labels; the labels
            are the inputs themselves, not shifted.

    Raises:
        TokenFileError: A file is malformed, or too short for one window.
        ValueError: ``seq_len`` or ``stride`` is below 1.

    Rows of a 2-D file are kept apart: no window crosses a row. Tokens at the end of a row that do
    not fill a window are not used. Built in ``notebooks/01_memmap_dataset``.
    """

    shuffle_by_default = False

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        stride: int | None = None,
        dtype: npt.DTypeLike | None = None,
        format: FormatName = "auto",
        access: Access = "mmap",
        vocab_size: int | None = None,
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        files = open_files(paths, dtype, format, access)
        super().__init__(files, seq_len, stride, vocab_size, as_dict)

    def __len__(self) -> int:
        return self.num_windows

    @property
    def num_samples(self) -> int:
        """How many windows fit; the same as ``len``."""
        return self.num_windows

    def map_indices(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Sample ``i`` is window ``i``, in every epoch."""
        return self.locate(indices)[0]

    def get(self, idx: int, device: torch.device | str = "cpu") -> Batch:
        """Return sample ``idx`` on ``device``: inputs and targets, ``(seq_len,)`` int64 each."""
        sample = self[idx]
        x, y = sample.values() if self.as_dict else sample
        return Batch(x.to(device), y.to(device))


class NpyTokensDataset(WindowDataset):
    """Random windows: every start in the files is equally likely, the last one too.

    Args:
        paths: A token file, a list of them, or a glob. In a 2-D file no window crosses a row.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        seed: With a seed, the window is a pure function of (seed, epoch, index), whatever the
            worker. Without one it is new at every call.
        without_replacement: No token is a target twice in an epoch: sample ``i`` is window ``i``
            in order, and each epoch's windows begin at another offset. ``len`` is then the number
            of these windows. At most ``2 * seq_len`` tokens of a row fill no window and are left
            out, different ones each time. Without a ``seed``, the loader's counts; without a
            loader, one that is drawn now.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The files' format, such as ``llm.c``; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give samples as a dictionary with these two names, inputs and labels; the labels
            are the inputs themselves, not shifted.

    Raises:
        TokenFileError: A file is malformed, or too short for one window.
        ValueError: ``seq_len`` is below 1.

    Random windows have no natural epoch. The length is virtual: as many samples as windows fit
    side by side, at least 4 for each row of a 2-D file, and at least 4,096. Don't split them with
    ``random_split`` or ``Subset``: an index stands for no fixed tokens, so the parts overlap, and
    the loader's seed and epoch don't reach them. Built in ``notebooks/01_memmap_dataset``.
    """

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        seed: int | None = None,
        without_replacement: bool = False,
        dtype: npt.DTypeLike | None = None,
        format: FormatName = "auto",
        access: Access = "mmap",
        vocab_size: int | None = None,
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        files = open_files(paths, dtype, format, access)
        stride = seq_len if without_replacement else 1
        super().__init__(files, seq_len, stride, vocab_size, as_dict)
        self.seed = None if seed is None else as_int(seed, "seed")
        self.without_replacement = without_replacement
        side_by_side = (self._row_lens - 1) // self.seq_len
        counts = [
            n if len(file.shape) == 1 else file.rows * max(4, n)
            for n, file in zip(side_by_side.tolist(), self.files, strict=True)
        ]
        self._len: int = max(SHORTEST_EPOCH, sum(counts))
        if without_replacement:
            # Each epoch moves the windows of a row by another offset. The room for that is what the
            # windows leave of the row, plus one window if the row has enough of them.
            self.number_windows(self._per_row - (self._per_row >= ENOUGH_WINDOWS))
            room = self._row_lens - self.width - (self._per_row - 1) * self.stride
            self._num_offsets = (room + 1).astype(np.uint64)
            self._len = self.num_windows

    def __len__(self) -> int:
        return self._len

    def map_indices(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the start of each index's window; without a seed, windows are drawn anew."""
        seed = self.seed if seed is None else seed
        epoch = self.epoch if epoch is None else epoch
        if not self.without_replacement:
            if seed is None:
                indices, seed = np.arange(len(indices)), fresh_seed()
            return self.locate(random_windows(indices, self.num_windows, seed, epoch))[0]
        starts, rows, k = self.locate(indices)
        # The 1 sets these hashes apart from those that draw random windows.
        offsets = hash_of(rows, seed or 0, epoch, 1) % self._num_offsets[k]
        found: IntArray = starts + offsets.astype(np.int64)
        return found


def fresh_seed() -> int:
    """Return 64 bits of the operating system's randomness.

    Numpy's global generator is no good here: a forked process begins with a copy of its state.
    """
    return int.from_bytes(os.urandom(8))


def as_indices(indices: npt.ArrayLike, length: int) -> IntArray:
    """Return indices as a 1-D int64 array; negative ones count from the end, as in a list."""
    asked = np.asarray(indices)
    if asked.size == 0:
        return np.zeros(0, np.int64)
    if asked.dtype.kind not in "iu" or asked.ndim != 1:
        raise TypeError(
            f"indices of dtype {asked.dtype} and shape {asked.shape}, expected a list of integers"
        )
    numbers = asked.astype(np.int64, copy=False)
    if (numbers.view(np.uint64) >= length).any():  # too large, or negative
        low, high = int(asked.min()), int(asked.max())
        if low < -length or high >= length:
            raise IndexError(
                f"indices range from {low} to {high}, expected {-length} to {length - 1}"
            )
        return np.where(numbers < 0, numbers + length, numbers)
    return numbers


def open_files(
    paths: Paths, dtype: npt.DTypeLike | None, format: FormatName, access: Access
) -> list[TokenFile]:
    """Open every file that a path, a list of paths or a glob names; globs are sorted."""
    try:
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        names = [os.fspath(path) for path in several]
    except TypeError:
        raise TypeError(
            f"paths is of type {type(paths).__name__}, expected a path, a list of paths or a glob; "
            "write_tokens(path, [ids]) makes a file of ids"
        ) from None
    found = list[str]()
    for name in names:
        if Path(name).exists() or not glob.has_magic(name):  # a file may be named like a glob
            found.append(name)
            continue
        files = [
            one for one in glob.glob(name, recursive=True) if not one.endswith(NON_TOKEN_SUFFIXES)
        ]
        if not files:
            raise TokenFileError(f"{name}: no file matches, expected one token file at least")
        found += sorted(files)
    if not found:
        raise TokenFileError("no token file given, expected at least one path")
    return [open_tokens(path, format=format, dtype=dtype, access=access) for path in found]
