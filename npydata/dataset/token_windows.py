"""The windows of several token files: numbered through, and gathered with one call a file."""

import operator
from collections.abc import Iterator, Sequence

import numpy as np

from npydata.dataset.access import TokenArray
from npydata.dataset.tokens import TokenFile, common_dtype
from npydata.dataset.windows import IntArray, num_windows, window_offsets
from npydata.errors import TokenFileError

LARGEST_ID = np.iinfo(np.int64).max


class TokenWindows:
    """The windows of some token files, numbered from 0 to ``count - 1``; none crosses a row."""

    def __init__(self, files: Sequence[TokenFile], seq_len: int, stride: int) -> None:
        require_one_window(files, seq_len, stride)
        self.files, self.width, self.stride = files, seq_len + 1, stride
        self.rows, self.row_lens = [file.rows for file in files], [file.row_len for file in files]
        self.per_row = [num_windows(row_len, seq_len, stride) for row_len in self.row_lens]
        counts = [n * rows for n, rows in zip(self.per_row, self.rows, strict=True)]
        self.ends = np.cumsum(counts)
        self.count = int(self.ends[-1])
        self.dtype = common_dtype(files)

    def offsets(self, k: int, windows: IntArray) -> IntArray:
        """Return where some windows of file ``k`` begin in it, in tokens."""
        within = windows - self.ends[k - 1] if k else windows
        if self.rows[k] == 1:
            return within if self.stride == 1 else within * self.stride
        return window_offsets(within, self.per_row[k], self.row_lens[k], self.stride)

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
        for k in sorted(set(which.tolist())):
            yield k, (which == k).nonzero()[0]

    def will_need(self, windows: IntArray) -> bool:
        """Advise the kernel of windows gathered soon; return whether they were in memory."""
        warm = [
            self.files[k].will_need(self.offsets(k, windows[mine]), self.width)
            for k, mine in self.by_file(windows)
        ]
        return all(warm)


def require_vocabulary(
    tokens: TokenArray, vocab_size: int | None, files: Sequence[TokenFile]
) -> None:
    """Raise if an id is outside the vocabulary, or too large for the int64 of a tensor."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    largest = LARGEST_ID if vocab_size is None else vocab_size - 1
    if high > largest or (vocab_size is not None and low < 0):
        names = ", ".join(str(file.path) for file in files[:3])
        raise TokenFileError(
            f"{names}: id {high if high > largest else low}, expected 0 to {largest}"
        )


def as_int(value: int, name: str, least: int | None = None) -> int:
    """Return an integer of any kind as Python's own; raise for others, and below ``least``."""
    at_least = "" if least is None else f" of {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}, expected an integer{at_least}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number}, expected an integer{at_least}")
    return number


def require_one_window(files: Sequence[TokenFile], seq_len: int, stride: int) -> None:
    """Raise unless the sizes count tokens and every file holds at least one window."""
    as_int(seq_len, "seq_len", least=1)
    as_int(stride, "stride", least=1)
    for file in files:
        if file.rows == 0 or file.row_len < seq_len + 1:
            what = "tokens" if len(file.shape) == 1 else f"rows of {file.row_len} tokens"
            raise TokenFileError(
                f"{file.path}: {file.shape[0]} {what}, expected at least {seq_len + 1} tokens "
                f"for seq_len={seq_len}"
            )
