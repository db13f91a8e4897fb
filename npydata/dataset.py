"""Two datasets over token files: random windows, and windows in order.

Both give ``x, y`` with ``y`` shifted by one, and fetch a whole batch with one gather::

    train = NpyTokensDataset("train.npy", seq_len=1024, seed=0)
    x, y = train.fetch(range(32))                   # (32, 1024) int64 each
    val = MmapDataset("val.bin", seq_len=1024, dtype="uint16")
    inputs, targets = val.get(0)                    # (1024,) int64 each

Built in ``notebooks/01_memmap_dataset``.
"""

import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from npydata.access import TokenArray
from npydata.errors import TokenFileError
from npydata.fingerprint import fingerprint_of
from npydata.formats import IntArray
from npydata.pages import HintPauses
from npydata.tokens import Paths, TokenFile, open_files
from npydata.windows import num_windows, random_windows, window_offsets

SHORTEST_EPOCH = 4096
"""Random windows have no natural end; shorter epochs make progress bars and logs jumpy."""

LARGEST_ID = np.iinfo(np.int64).max

Pair = tuple[torch.Tensor, torch.Tensor]


class Batch(NamedTuple):
    """Inputs and targets of one sample or of several."""

    inputs: torch.Tensor
    """What the model reads, int64: ``(seq_len,)`` of one sample."""
    targets: torch.Tensor
    """What it should predict: the inputs shifted by one, same shape, int64."""


class TokenWindows:
    """The windows of some token files, numbered from 0 to ``count - 1``; none crosses a row."""

    def __init__(self, files: Sequence[TokenFile], seq_len: int, stride: int) -> None:
        self.files, self.width, self.stride = files, seq_len + 1, stride
        self.per_row = [num_windows(file.row_len, seq_len, stride) for file in files]
        counts = [n * file.rows for n, file in zip(self.per_row, files, strict=True)]
        self.ends: list[int] = np.cumsum(counts).tolist()
        self.count: int = self.ends[-1]
        self.dtype = common_dtype(files)

    def offsets(self, k: int, windows: IntArray) -> IntArray:
        """Return where some windows of file ``k`` begin in it, in tokens."""
        within = windows - self.ends[k - 1] if k else windows
        return window_offsets(within, self.per_row[k], self.files[k].row_len, self.stride)

    def gather(self, windows: IntArray) -> TokenArray:
        """Return the windows' tokens, ``(B, seq_len + 1)``, in the files' own dtype."""
        if len(self.files) == 1:
            return self.files[0].tokens.gather(self.offsets(0, windows), self.width)
        tokens = np.empty((len(windows), self.width), self.dtype)
        for k, mine in self.by_file(windows):
            tokens[mine] = self.files[k].tokens.gather(self.offsets(k, windows[mine]), self.width)
        return tokens

    def by_file(self, windows: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Yield, for each file that holds some of the windows, its number and which ones."""
        which = np.searchsorted(self.ends, windows, side="right")
        for k in np.unique(which).tolist():
            yield k, np.flatnonzero(which == k)

    def will_need(self, windows: IntArray) -> bool:
        """Announce windows that will be gathered soon; return whether they were in memory."""
        warm = [
            self.files[k].will_need(self.offsets(k, windows[mine]), self.width)
            for k, mine in self.by_file(windows)
        ]
        return all(warm)


def shifted_pair(tokens: TokenArray, out: IntArray | None = None) -> Pair:
    """Split windows ``(B, T+1)`` into ``x`` and ``y``, ``(B, T)`` int64, ``y`` shifted by one.

    Both are contiguous, so that ``y.view(-1)`` works. ``out`` is memory to use, ``(2, B, T)``.
    """
    if out is None:
        x = tokens[:, :-1].astype(np.int64, order="C")
        y = tokens[:, 1:].astype(np.int64, order="C")
        return torch.from_numpy(x), torch.from_numpy(y)
    out[0] = tokens[:, :-1]
    out[1] = tokens[:, 1:]
    inputs, targets = torch.from_numpy(out).unbind()
    return inputs, targets


class TokenDataset(Dataset[Pair]):
    """What both datasets share: a batch is one gather over numbered windows.

    A subclass says how long it is and which window belongs to which index.
    """

    def __init__(
        self, files: Sequence[TokenFile], seq_len: int, stride: int, vocab_size: int | None
    ) -> None:
        require_one_window(files, seq_len, stride)
        self.files, self.seq_len, self.vocab_size = files, seq_len, vocab_size
        self.windows = TokenWindows(files, seq_len, stride)
        self._hints = HintPauses()

    def __len__(self) -> int:
        raise NotImplementedError

    def window_numbers(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return which window belongs to each index."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return sum(file.num_tokens for file in self.files)

    def fetch(
        self,
        indices: npt.ArrayLike,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        out: IntArray | None = None,
        windows: IntArray | None = None,
    ) -> Pair:
        """Return ``x, y``, both ``(len(indices), seq_len)`` int64 and contiguous.

        The fast path: one gather for the whole batch, safe to call from many threads.

        Args:
            indices: Samples, a 1-D list or array of integers; negative ones count from the end.
            seed: Of random windows; the dataset's own if not given.
            epoch: Of random windows; the dataset's own if not given.
            out: Memory for the result, int64 ``(2, len(indices), seq_len)``, for callers who
                reuse it.
            windows: What ``window_numbers`` returns for the same indices, seed and epoch, for
                callers who ask it about many batches at a time.

        Raises:
            IndexError: An index is not in the dataset.
            TypeError: The indices are not a list of integers.
            TokenFileError: An id is not below ``vocab_size``, or a file changed.
        """
        if windows is None:
            windows = self.window_numbers(as_indices(indices, len(self)), seed, epoch)
        tokens = self.windows.gather(windows)
        check_ids(tokens, self.vocab_size, self.files)
        return shifted_pair(tokens, out)

    def batch_shape(self, batch_size: int) -> tuple[int, int, int]:
        """Return the shape of the memory that ``fetch`` fills for a batch: ``(2, B, T)``."""
        return 2, batch_size, self.seq_len

    def fingerprint(self) -> str:
        """Return a short text that tells this data, cut into these windows, from any other.

        The same for a moved file, another one for retokenised text. Reads 256 KiB.
        """
        windows = [self.windows.width, self.windows.stride]
        return fingerprint_of(self.files, *windows)

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Announce samples that will be fetched soon, so that the disk reads them meanwhile.

        Does nothing costly on files that are in memory. Call it some batches ahead, with the
        ``indices``, ``seed`` and ``epoch`` that ``fetch`` will get.
        """
        if self._hints.is_due():
            numbers = self.window_numbers(as_indices(indices, len(self)), seed, epoch)
            self._hints.found(warm=self.windows.will_need(numbers))

    def __getitem__(self, index: Any) -> Pair:
        """Return one sample ``x, y``, ``(seq_len,)`` int64 each.

        For a slice or a list of indices a batch, as ``fetch`` does.

        Raises:
            IndexError: An index is not in the dataset.
        """
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))
        try:
            one = operator.index(index)
        except TypeError:
            return self.fetch(index)
        x, y = self.fetch([one])
        return x[0], y[0]

    def __getitems__(self, indices: list[int]) -> list[Pair]:
        """Return the samples of a batch as pairs, for a stock ``DataLoader``'s collate."""
        return list(zip(*self.fetch(indices), strict=True))


class MmapDataset(TokenDataset):
    """Windows in order: sample ``i`` begins ``stride`` tokens after sample ``i - 1``.

    Args:
        paths: A token file, a list of them, or a glob; read one after the other.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        stride: Tokens from one sample's start to the next. ``seq_len + 1`` if not given, so that
            no token is in two samples; ``seq_len`` makes every token but the first a target once.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: How the files are laid out; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.

    Raises:
        TokenFileError: A file is malformed, or too short for one window.
        ValueError: ``seq_len`` or ``stride`` is below 1.

    Rows of a 2-D file are kept apart: no window crosses a row. What is left at the end of a row
    and does not fill a window is not used. Built in ``notebooks/01_memmap_dataset``.
    """

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        stride: int | None = None,
        dtype: npt.DTypeLike | None = None,
        format: str = "auto",
        access: str = "mmap",
        vocab_size: int | None = None,
    ) -> None:
        files = open_files(paths, dtype, format, access)
        super().__init__(files, seq_len, seq_len + 1 if stride is None else stride, vocab_size)

    def __len__(self) -> int:
        return self.windows.count

    @property
    def num_samples(self) -> int:
        """How many windows fit; the same as ``len``."""
        return self.windows.count

    def window_numbers(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the indices: sample ``i`` is window ``i``, in every epoch."""
        return indices

    def get(self, idx: int, device: torch.device | str = "cpu") -> Batch:
        """Return sample ``idx`` on ``device``: inputs and targets, ``(seq_len,)`` int64 each."""
        x, y = self[idx]
        return Batch(x.to(device), y.to(device))


class NpyTokensDataset(TokenDataset):
    """Random windows: every start in the files is equally likely, the last one too.

    Args:
        paths: A token file, a list of them, or a glob. In a 2-D file no window crosses a row.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        seed: With a seed, the window is a pure function of (seed, epoch, index), whatever the
            worker. Without one it is new at every call.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: How the files are laid out; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.

    Raises:
        TokenFileError: A file is malformed, or too short for one window.
        ValueError: ``seq_len`` is below 1.

    Random windows have no natural epoch. The length is virtual: as many samples as windows fit
    side by side, at least 4 for each row of a 2-D file, and at least 4,096. Built in
    ``notebooks/01_memmap_dataset``.
    """

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        seed: int | None = None,
        dtype: npt.DTypeLike | None = None,
        format: str = "auto",
        access: str = "mmap",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(open_files(paths, dtype, format, access), seq_len, 1, vocab_size)
        self.seed, self._epoch = as_int(seed), shared_int(0)

    def __len__(self) -> int:
        return max(SHORTEST_EPOCH, sum(virtual_len(file, self.seq_len) for file in self.files))

    @property
    def epoch(self) -> int:
        """The epoch that ``ds[i]`` draws from; the same in all of a DataLoader's workers."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Draw other windows from now on; call it before each pass of a stock ``DataLoader``."""
        self._epoch[0] = operator.index(epoch)

    def window_numbers(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the windows drawn for some indices; fresh ones when there is no seed at all."""
        seed = self.seed if seed is None else operator.index(seed)
        epoch = self.epoch if epoch is None else operator.index(epoch)
        if seed is None:
            indices, seed = np.arange(len(indices)), fresh_seed()
        return random_windows(indices, self.windows.count, seed, epoch)


def as_int(value: int | None) -> int | None:
    """Return an integer of any kind as Python's own; a float is an error."""
    return None if value is None else operator.index(value)


def shared_int(value: int) -> torch.Tensor:
    """Return an int64 in shared memory: set here, it is seen by a DataLoader's living workers."""
    return torch.tensor([value]).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def fresh_seed() -> int:
    """Return 64 bits of the operating system's randomness.

    Numpy's global generator is no good here: a forked process begins with a copy of its state.
    """
    return int.from_bytes(os.urandom(8))


def virtual_len(file: TokenFile, seq_len: int) -> int:
    """Return how many samples one file adds to an epoch of random windows."""
    side_by_side = (file.row_len - 1) // seq_len
    return side_by_side if len(file.shape) == 1 else file.rows * max(4, side_by_side)


def common_dtype(files: Sequence[TokenFile]) -> "np.dtype[np.integer[Any]]":
    """Return the integer dtype that holds every file's ids."""
    common = np.result_type(*(file.dtype for file in files))
    if common.kind == "f":
        raise TokenFileError(
            f"{files[0].path} and its companions mix uint64 with signed tokens; "
            "no integer dtype holds both"
        )
    return common


def require_one_window(files: Sequence[TokenFile], seq_len: int, stride: int) -> None:
    """Raise unless the sizes count tokens and every file holds at least one window."""
    for name, value in {"seq_len": seq_len, "stride": stride}.items():
        if operator.index(value) < 1:
            raise ValueError(f"{name}={value}, expected 1 or more")
    for file in files:
        if file.rows == 0 or file.row_len < seq_len + 1:
            what = "tokens" if len(file.shape) == 1 else f"rows of {file.row_len} tokens"
            raise TokenFileError(
                f"{file.path}: {file.shape[0]} {what}, expected at least {seq_len + 1} tokens "
                f"for seq_len={seq_len}"
            )


def as_indices(indices: npt.ArrayLike, length: int) -> IntArray:
    """Return indices as a 1-D int64 array; negative ones count from the end, as in a list."""
    asked = np.asarray(indices)
    if asked.shape == (0,):
        return np.zeros(0, np.int64)
    if asked.dtype.kind not in "iu" or asked.ndim != 1:
        raise TypeError(f"indices are {asked.dtype} {asked.shape}, expected a list of integers")
    low, high = asked.min(), asked.max()
    if low < -length or high >= length:
        raise IndexError(f"index {high if high >= length else low} of a dataset of {length}")
    numbers = asked.astype(np.int64, copy=False)
    return numbers if low >= 0 else np.where(numbers < 0, numbers + length, numbers)


def check_ids(tokens: TokenArray, vocab_size: int | None, files: Sequence[TokenFile]) -> None:
    """Raise if an id is outside the vocabulary, or too large for the int64 of a tensor."""
    if tokens.size == 0 or (vocab_size is None and tokens.dtype != np.uint64):
        return
    low, high = int(tokens.min()), int(tokens.max())
    largest = LARGEST_ID if vocab_size is None else vocab_size - 1
    if high > largest or (vocab_size is not None and low < 0):
        names = ", ".join(str(file.path) for file in files[:3])
        raise TokenFileError(
            f"{names}: id {high if high > largest else low}, expected 0 to {largest}"
        )
