"""Which tokens make window i, which window comes at which place, and which pages hold it.

Pure arithmetic on integers and integer arrays: no file, no clock, no global state. Everything is
64 bits wide. Built in ``notebooks/01_memmap_dataset``.
"""

import mmap

import numpy as np
import numpy.typing as npt

from npydata.dataset.hashing import hash_of

IntArray = npt.NDArray[np.int64]


def num_windows(num_tokens: int, seq_len: int, stride: int) -> int:
    """Count the windows of ``seq_len + 1`` tokens that start every ``stride`` tokens.

    A window holds one token more than the model reads, because the targets are the inputs shifted
    by one. All three are counted in tokens; a file that is too short has 0 windows.
    """
    width = seq_len + 1
    if num_tokens < width:
        return 0
    return (num_tokens - width) // stride + 1


def window_offsets(windows: IntArray, per_row: int, row_len: int, stride: int) -> IntArray:
    """Return the token at which each window begins; no window crosses a row.

    ``windows`` are numbers from 0 on, int64 of any shape, and so is the result. ``per_row`` is how
    many windows a row holds. A 1-D file is one long row. The first factor is what a row has left
    over behind its windows.
    """
    left_over = row_len - per_row * stride
    return windows * stride + windows // per_row * left_over


def pages_touched(
    start: int, count: int, itemsize: int, offset: int = 0, page_size: int = mmap.PAGESIZE
) -> tuple[int, int]:
    """Return the first and the last page that hold ``count`` tokens from token ``start`` on.

    ``offset`` is the length of the file's header in bytes.
    """
    first_byte = offset + start * itemsize
    last_byte = first_byte + count * itemsize - 1
    return first_byte // page_size, last_byte // page_size


def page_runs(
    begins: IntArray, length: int, page_size: int = mmap.PAGESIZE
) -> tuple[IntArray, IntArray]:
    """Return begin and length in bytes of the page-aligned runs that cover some byte ranges.

    ``begins`` are the ranges' first bytes, all ``length`` bytes long. Ranges that share a page or
    touch are merged, so that a run costs one system call.
    """
    begins = np.sort(begins)
    first, stop = begins // page_size, (begins + length - 1) // page_size + 1
    run_first, run_stop = merged(first, stop)
    return run_first * page_size, (run_stop - run_first) * page_size


def merged(first: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """Join ranges ``first .. stop - 1`` that overlap or touch; both arrays must ascend."""
    apart = first[1:] > stop[:-1]
    return first[np.append(True, apart)], stop[np.append(apart, True)]


def random_windows(indices: IntArray, count: int, seed: int, epoch: int) -> IntArray:
    """Draw one of ``count`` windows for each index: a pure function of (seed, epoch, index).

    Both are int64 arrays of the same shape. Windows are drawn with replacement. The remainder's
    bias is ``count / 2**64``, far below one in a million for any file that fits on a disk.
    """
    hashes = hash_of(indices, seed, epoch)
    return (hashes % np.array(count, np.uint64)).view(np.int64)
