"""Two datasets over token files: random windows, and windows in order.

Both give ``x, y`` with ``y`` shifted by one, and fetch a whole batch with one gather::

    train = NpyTokensDataset("train.npy", seq_len=1024, seed=0)
    x, y = train.fetch(range(32))                   # (32, 1024) int64 each
    val = MmapDataset("val.bin", seq_len=1024, dtype="uint16")
    inputs, targets = val.get(0)                    # (1024,) int64 each

With ``as_dict=("input_ids", "labels")`` a sample is a dictionary for models that shift the labels
themselves, as Hugging Face's do: both are the same tokens.

Built in ``notebooks/01_memmap_dataset``.
"""

import inspect
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from npydata.dataset.access import TokenArray
from npydata.dataset.batches import split
from npydata.dataset.describing import Described
from npydata.dataset.epochs import InEpochs, SharedInt
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.once import WindowsOnce
from npydata.dataset.token_file import Paths, open_files
from npydata.dataset.token_windows import TokenWindows, as_int, require_vocabulary
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import IntArray, random_windows
from npydata.system.page_cache import AdviceBackoff

SHORTEST_EPOCH = 4096
"""Random windows have no natural end; shorter epochs make progress bars and logs jumpy."""

FEW = 256
"""Of so many integers Python finds the ends in half of numpy's time."""

Pair = tuple[torch.Tensor, torch.Tensor]


class Batch(NamedTuple):
    """Inputs and targets of one sample or of several."""

    inputs: torch.Tensor
    """What the model reads, int64: ``(seq_len,)`` of one sample."""
    targets: torch.Tensor
    """What it should predict: the inputs shifted by one, same shape, int64."""


class TokenDataset(Described, Dataset[Pair]):
    """What both datasets share: a batch is one gather over numbered windows.

    A subclass says how long it is and which window belongs to which index.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        stride: int,
        vocab_size: int | None,
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        self.files, self.seq_len, self.as_dict = files, seq_len, two_names(as_dict)
        self.vocab_size = None if vocab_size is None else as_int(vocab_size, "vocab_size", least=1)
        self.windows = TokenWindows(files, seq_len, stride)
        self._advice = AdviceBackoff()

    def __len__(self) -> int:
        raise NotImplementedError

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
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
        empty: Callable[[tuple[int, ...]], IntArray] | None = None,
    ) -> Pair:
        """Return ``x, y``, both ``(len(indices), seq_len)`` int64 and contiguous.

        The fast path: one gather for the whole batch, safe to call from many threads. A dictionary
        of two if the dataset was asked for such with ``as_dict``.

        Args:
            indices: Samples, a 1-D list or array of integers; negative ones count from the end.
            seed: Of random windows; the dataset's own if not given.
            epoch: Of random windows; the dataset's own if not given.
            empty: Gives the memory for the batch, as ``numpy.empty`` does for int64.

        Raises:
            IndexError: An index is not in the dataset.
            TypeError: The indices are not a list of integers.
            TokenFileError: An id is not below ``vocab_size``, or a file changed.
        """
        windows = self.windows_of(as_indices(indices, len(self)), seed, epoch)
        out = empty((2, len(windows), self.seq_len)) if empty else None
        batch: Pair = self.named(self.fetch_windows(windows, out=out))
        return batch

    def fetch_windows(self, windows: IntArray, *, out: IntArray | None = None) -> Pair:
        """Return ``x, y`` of some windows, both ``(len(windows), seq_len)`` int64 and contiguous.

        ``out`` is memory for the result, int64 ``(2, len(windows), seq_len)``.
        """
        tokens = self.windows.gather(windows)
        if self.vocab_size is not None or tokens.dtype == np.uint64:
            require_vocabulary(tokens, self.vocab_size, self.files)
        return shifted_pair(tokens, out)

    def named(self, batch: Pair) -> Any:
        """Return a batch as it was asked for: the pair, or a dictionary of unshifted labels."""
        if self.as_dict is None:
            return batch
        inputs, labels = batch
        return dict(zip(self.as_dict, (inputs, labels.copy_(inputs)), strict=True))

    def fingerprint(self) -> str:
        """Return a short text that tells this data, cut into these windows, from any other.

        The same for a moved file, another one for retokenised text. Reads 256 KiB.
        """
        windows = [self.windows.width, self.windows.stride]
        return fingerprint_of(self.files, *windows)

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Advise the kernel of samples fetched soon, so that the disk reads them meanwhile.

        Does nothing costly on files that are in memory. Call it some batches ahead, with the
        ``indices``, ``seed`` and ``epoch`` that ``fetch`` will get.
        """
        if self._advice.is_due():
            self._advise(self.windows_of(as_indices(indices, len(self)), seed, epoch))

    def advise_windows(self, windows: IntArray) -> None:
        """Tell the kernel that these windows will be fetched soon."""
        if self._advice.is_due():
            self._advise(windows)

    def _advise(self, windows: IntArray) -> None:
        self._advice.record(was_resident=self.windows.will_need(windows))

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
        sample: Pair = split(self.fetch([one]))[0]
        return sample

    def __getitems__(self, indices: list[int]) -> list[Pair]:
        """Return the samples of a batch one by one, for a stock ``DataLoader``'s collate.

        Indices that came out of ``AsyncDataLoader.batch_sampler`` bring seed and epoch along.
        """
        drawn_by = {name: getattr(indices, name, None) for name in ("seed", "epoch")}
        return split(self.fetch(indices, **drawn_by))


def shifted_pair(tokens: TokenArray, out: IntArray | None = None) -> Pair:
    """Split windows ``(B, T+1)`` into ``x`` and ``y``, ``(B, T)`` int64, ``y`` shifted by one.

    Both are contiguous, so that ``y.view(-1)`` works. ``out`` is memory to use, ``(2, B, T)``.
    """
    if out is None:
        out = np.empty((2, len(tokens), tokens.shape[1] - 1), np.int64)
    inputs, targets = out[0], out[1]
    inputs[:] = tokens[:, :-1]
    targets[:] = tokens[:, 1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class MmapDataset(TokenDataset):
    """Windows in order: sample ``i`` begins ``stride`` tokens after sample ``i - 1``.

    Args:
        paths: A token file, a list of them, or a glob; read one after the other.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        stride: Tokens from one sample's start to the next. ``seq_len + 1`` if not given, so that
            no token is in two samples (``seq_len`` with ``as_dict``, for the same reason);
            ``seq_len`` makes every token but the first a target once.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The name of their format, such as ``llm.c``; recognised if not given (see
            :func:`npydata.open_tokens`).
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give samples as a dictionary with these two names, inputs and labels; the labels
            are the inputs themselves, not shifted.

    Raises:
        TokenFileError: A file is malformed, or too short for one window.
        ValueError: ``seq_len`` or ``stride`` is below 1.

    Rows of a 2-D file are kept apart: no window crosses a row. What is left at the end of a row
    and does not fill a window is not used. Built in ``notebooks/01_memmap_dataset``.
    """

    described_by = ("seq_len", "stride")
    shuffle_by_default = False

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
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        files = open_files(paths, dtype, format, access)
        if stride is None:  # the last token of a window is a target only
            stride = as_int(seq_len, "seq_len", least=1) + (as_dict is None)
        super().__init__(files, seq_len, stride, vocab_size, as_dict)

    def __len__(self) -> int:
        return self.windows.count

    @property
    def stride(self) -> int:
        """Tokens from one sample's start to the next."""
        return self.windows.stride

    @property
    def num_samples(self) -> int:
        """How many windows fit; the same as ``len``."""
        return self.windows.count

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the indices: sample ``i`` is window ``i``, in every epoch."""
        return indices

    def get(self, idx: int, device: torch.device | str = "cpu") -> Batch:
        """Return sample ``idx`` on ``device``: inputs and targets, ``(seq_len,)`` int64 each."""
        sample: Any = self[idx]
        x, y = sample.values() if self.as_dict else sample
        return Batch(x.to(device), y.to(device))


class NpyTokensDataset(InEpochs, TokenDataset):
    """Random windows: every start in the files is equally likely, the last one too.

    Args:
        paths: A token file, a list of them, or a glob. In a 2-D file no window crosses a row.
        seq_len: Tokens per sample; ``x`` and ``y`` are ``(seq_len,)`` int64.
        seed: With a seed, the window is a pure function of (seed, epoch, index), whatever the
            worker. Without one it is new at every call.
        without_replacement: No token is a target twice in an epoch; each epoch's windows begin at
            other places. ``len`` is then the number of these windows, and what fills none, fewer
            than ``2 * seq_len`` tokens of a row, is left out, other ones each time. Without a
            ``seed``, one is drawn now.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The name of their format, such as ``llm.c``; recognised if not given (see
            :func:`npydata.open_tokens`).
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give samples as a dictionary with these two names, inputs and labels; the labels
            are the inputs themselves, not shifted.

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
        without_replacement: bool = False,
        dtype: npt.DTypeLike | None = None,
        format: str = "auto",
        access: str = "mmap",
        vocab_size: int | None = None,
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(open_files(paths, dtype, format, access), seq_len, 1, vocab_size, as_dict)
        self.seed = None if seed is None else as_int(seed, "seed")
        self._epoch = SharedInt(torch.zeros(1, dtype=torch.int64))
        self._len = max(SHORTEST_EPOCH, sum(virtual_len(file, seq_len) for file in self.files))

    def __len__(self) -> int:
        return self._len

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the windows drawn for some indices; fresh ones when there is no seed at all."""
        seed = self.seed if seed is None else seed
        epoch = self._epoch.value if epoch is None else epoch
        if seed is None:
            indices, seed = np.arange(len(indices)), fresh_seed()
        return random_windows(indices, self.windows.count, seed, epoch)

    def __new__(cls, *_: Any, without_replacement: bool = False, **__: Any) -> "NpyTokensDataset":
        """Make the kind of dataset that is asked for."""
        is_plain = cls is NpyTokensDataset and without_replacement
        return super().__new__(OnceInAnEpoch if is_plain else cls)

    vars(__new__)["__signature__"] = inspect.signature(__init__)  # what help() shows


class OnceInAnEpoch(NpyTokensDataset):
    """``NpyTokensDataset(..., without_replacement=True)``."""

    without_replacement = True
    described_as, described_by = "NpyTokensDataset", ("seq_len", "without_replacement")

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.once = WindowsOnce(self.windows, self.seq_len)
        self._len = len(self.once)
        if self.seed is None:
            self.seed = fresh_seed() >> 1

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the windows of some indices."""
        seed = self.seed if seed is None else seed
        assert seed is not None
        return self.once(indices, seed, self.epoch if epoch is None else epoch)

    def fingerprint(self) -> str:
        """Return another text than that of windows with replacement."""
        return fingerprint_of(self.files, self.windows.width, self.seq_len, len(self))


def two_names(names: Any) -> tuple[str, str] | None:
    """Return the names that inputs and labels shall have; none is what it was before."""
    if names is None:
        return None
    found = names if isinstance(names, tuple | list) else ()
    if len(found) != 2 or not all(isinstance(name, str) for name in found) or len(set(found)) < 2:
        raise ValueError(f'as_dict={names!r}, expected two names, as ("input_ids", "labels")')
    return found[0], found[1]


def fresh_seed() -> int:
    """Return 64 bits of the operating system's randomness.

    Numpy's global generator is no good here: a forked process begins with a copy of its state.
    """
    return int.from_bytes(os.urandom(8))


def virtual_len(file: TokenFile, seq_len: int) -> int:
    """Return how many samples one file adds to an epoch of random windows."""
    side_by_side = (file.row_len - 1) // seq_len
    return side_by_side if len(file.shape) == 1 else file.rows * max(4, side_by_side)


def as_indices(indices: npt.ArrayLike, length: int) -> IntArray:
    """Return indices as a 1-D int64 array; negative ones count from the end, as in a list."""
    if isinstance(indices, range) and indices:  # numpy would take it element by element
        asked = np.arange(indices.start, indices.stop, indices.step)
        ends = [indices[0], indices[-1]]
    else:
        asked = np.asarray(indices)
        if asked.shape == (0,):
            return np.zeros(0, np.int64)
        if asked.ndim == 0:
            raise TypeError(f"index {indices!r}, expected an integer, a slice or a list of them")
        if asked.dtype.kind not in "iu" or asked.ndim != 1:
            raise TypeError(f"indices are {asked.dtype} {asked.shape}, expected a list of integers")
        ends = asked.tolist() if len(asked) <= FEW else [int(asked.min()), int(asked.max())]
    low, high = min(ends), max(ends)
    if low < -length or high >= length:
        wrong = high if high >= length else low
        raise IndexError(f"index {wrong}, expected {-length} to {length - 1}: {length} samples")
    numbers = asked.astype(np.int64, copy=False)
    return numbers if low >= 0 else np.where(numbers < 0, numbers + length, numbers)
