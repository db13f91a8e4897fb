"""Wrong answers to the exercises of notebook 01, each with a phrase of the message it deserves."""

import numpy as np


def windows_of_seq_len(num_tokens, seq_len, stride):
    return sum(1 for start in range(0, num_tokens, stride) if start + seq_len <= num_tokens)


def one_window_lost(num_tokens, seq_len, stride):
    count = -1
    start = 0
    while start + seq_len + 1 <= num_tokens:
        count += 1
        start += stride
    return max(count, 0)


def forgets_short_files(num_tokens, seq_len, stride):
    room = num_tokens - seq_len - 1
    return (room - room % stride) // stride + 1


def lets_windows_hang_over(num_tokens, seq_len, stride):
    return len(range(0, num_tokens - num_tokens % stride, stride))


def always_side_by_side(num_tokens, seq_len, stride):
    return len(range(seq_len, num_tokens, seq_len + 1))


def counts_the_strides(num_tokens, seq_len, stride):
    return (num_tokens - seq_len) // stride


def byte_after_the_end(start, count, itemsize, offset, page_size):
    begin = start * itemsize + offset
    return tuple(byte // page_size for byte in (begin, begin + count * itemsize))


def bytes_for_tokens(start, count, itemsize, offset, page_size):
    held = range(start + offset, start + offset + count)
    return held[0] // page_size, held[-1] // page_size


def no_header(start, count, itemsize, offset, page_size):
    held = range(start * itemsize, (start + count) * itemsize)
    return held[0] // page_size, held[-1] // page_size


def scales_the_offset(start, count, itemsize, offset, page_size):
    first = (offset + start) * itemsize
    return first // page_size, (first + count * itemsize - 1) // page_size


def counts_pages(start, count, itemsize, offset, page_size):
    held = range(offset + start * itemsize, offset + (start + count) * itemsize)
    return held[0] // page_size, len({held[0] // page_size, *range(
        held[0] // page_size, held[-1] // page_size + 1)})  # fmt: skip


def one_page_too_many(start, count, itemsize, offset, page_size):
    held = range(offset + start * itemsize, offset + (start + count) * itemsize)
    return held[0] // page_size, 1 + held[-1] // page_size


def rows_of(tokens, starts, begin, end):
    return np.stack([tokens[s + begin : s + end] for s in starts.tolist()])


def keeps_the_dtype(tokens, starts, seq_len):
    return rows_of(tokens, starts, 0, seq_len), rows_of(tokens, starts, 1, seq_len + 1)


def targets_are_inputs(tokens, starts, seq_len):
    x = rows_of(tokens, starts, 0, seq_len).astype(np.int64)
    return x, x.copy()


def shifts_by_two(tokens, starts, seq_len):
    longer = np.concatenate((tokens, tokens[-1:]))
    x = rows_of(longer, starts, 0, seq_len).astype(np.int64)
    return x, rows_of(longer, starts, 2, seq_len + 2).astype(np.int64)


def one_token_short(tokens, starts, seq_len):
    batch = rows_of(tokens, starts, 0, seq_len).astype(np.int64)
    return batch[:, :-1], batch[:, 1:]


def y_first(tokens, starts, seq_len):
    y = rows_of(tokens, starts, 1, seq_len + 1).astype(np.int64)
    return y, rows_of(tokens, starts, 0, seq_len).astype(np.int64)


WRONG = {
    "num_windows": [
        ("what does the last position predict", windows_of_seq_len),
        ("one window is missing", one_window_lost),
        ("a negative number", forgets_short_files),
        ("would hang over the end", lets_windows_hang_over),
        ("side by side", always_side_by_side),
        ("how often a stride fits", counts_the_strides),
    ],
    "pages_touched": [
        ("first byte after the window", byte_after_the_end),
        ("as if each were one byte", bytes_for_tokens),
        ("where the header is", no_header),
        ("in bytes already", scales_the_offset),
        ("how many pages there are", counts_pages),
        ("as a range would", one_page_too_many),
    ],
    "fetch": [
        ("the file's dtype", keeps_the_dtype),
        ("nothing is left to predict", targets_are_inputs),
        ("two tokens on", shifts_by_two),
        ("one token too short", one_token_short),
        ("y before x", y_first),
    ],
}
