"""Windows of an epoch that share no target: which they are, and where they begin this time.

Pure arithmetic on integer arrays, as in ``windows``.
"""

import numpy as np

from npydata.dataset.hashing import hash_of, stream_key
from npydata.dataset.permutation import Permutation
from npydata.dataset.token_windows import TokenWindows
from npydata.dataset.windows import IntArray

ENOUGH_WINDOWS = 64
"""A row of so many windows does without one of them, so that its first may begin anywhere."""


class WindowsOnce:
    """The windows of an epoch without replacement, in a shuffled order.

    A row (a 1-D file is one) is cut into windows that begin ``seq_len`` tokens apart, so that each
    token is the target of one window at most. In each epoch the first begins at a place of its own,
    as far behind the row's first token as what fills no window allows; rows of 64 windows or more
    leave one out for that. What is left out before the first and behind the last window of a row,
    fewer than ``2 * seq_len`` tokens, is another part of it in another epoch.
    """

    def __init__(self, windows: TokenWindows, seq_len: int) -> None:
        self.seq_len, self.row_ends = seq_len, np.cumsum(windows.rows)
        row_lens, per_row = np.array(windows.row_lens), np.array(windows.per_row)
        full = (row_lens - 1) // seq_len
        self.counts = np.where(full >= ENOUGH_WINDOWS, full - 1, full)
        """For each file, the windows of a row."""
        self.phases = row_lens - self.counts * seq_len
        """For each file, at how many places the first window of a row may begin."""
        self.ends = np.cumsum(self.counts * windows.rows)
        self.row_steps, self.file_begins = per_row, windows.ends - per_row * windows.rows

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __call__(self, indices: IntArray, seed: int, epoch: int) -> IntArray:
        """Return the window of each index, numbered as ``TokenWindows`` does with a stride of 1."""
        places = np.asarray(Permutation(len(self), int(stream_key(seed, epoch)))(indices))
        files = np.searchsorted(self.ends, places, side="right")
        within = places - (self.ends - self.counts * self.rows_of_files())[files]
        rows: IntArray
        slots: IntArray
        rows, slots = np.divmod(within, self.counts[files])
        number = rows + (self.row_ends - self.rows_of_files())[files]
        hashes = hash_of(number, seed, epoch, 1)
        phase: IntArray = (hashes % self.phases[files].astype(np.uint64)).astype(np.int64)
        windows: IntArray = self.file_begins[files] + rows * self.row_steps[files]
        windows += phase + slots * self.seq_len
        return windows

    def rows_of_files(self) -> IntArray:
        """Return the rows of each file."""
        rows: IntArray = np.diff(self.row_ends, prepend=0)
        return rows
