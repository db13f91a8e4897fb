"""The tokens of the spans of packed rows, read one span after the other or all at once."""

from collections.abc import Callable, Iterator

import numpy as np

from npydata.dataset.access import TokenArray
from npydata.dataset.spans import Spans
from npydata.dataset.tokens import TokenFile, TokenFiles
from npydata.dataset.windows import IntArray

SHORT_SPANS = 96
"""Spans of fewer tokens are gathered token by token, all at once; a longer one is a slice."""


class SpanReader:
    """Reads spans of a token file, or of several seen as one, in their own dtype.

    A span lies in one file. What pads a row, and what is put before a document, has no token there:
    its place gets any.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self.tokens = tokens
        self.files = tokens.files if isinstance(tokens, TokenFiles) else [tokens]
        self.counts = [file.num_tokens for file in self.files]
        self.ends = np.cumsum(self.counts)
        self.is_mapped = all(file.access == "mmap" for file in self.files)
        self.are_alike = all(file.dtype == tokens.dtype for file in self.files)

    def read(self, spans: Spans, sizes: IntArray) -> TokenArray:
        """Return the tokens of rows whose spans have these ``sizes``, ``(rows, seq_len + 1)``.

        Behind a row's last token comes the one that follows it in its file.
        """
        widths = sizes.copy()
        widths[spans.row_lasts] += 1
        shape = len(spans.row_lasts), -1
        if self.is_mapped and spans.size < SHORT_SPANS * len(sizes):
            return self._gather(spans.starts, widths).reshape(shape)
        joined = b""
        if self.is_mapped and self.are_alike:  # one copy of all, in one call
            joined = b"".join(self._slices(spans, widths))
        if len(joined) < (spans.size + shape[0]) * self.tokens.dtype.itemsize:
            joined = b"".join(self._copies(spans, widths))  # for some reach out of their file
        return np.frombuffer(joined, self.tokens.dtype).reshape(shape)

    def slicer(self) -> Callable[[int, int], memoryview]:
        """Return what gives the bytes of the tokens from one on, so many or fewer at the end."""
        if not self.is_mapped or len(self.files) > 1:
            return lambda start, count: self.tokens.read(start, count).view(np.uint8).data
        mapped = self.files[0].tokens.read(0, self.counts[0]).view(np.uint8).data
        size = self.tokens.dtype.itemsize
        return lambda start, count: mapped[start * size : (start + count) * size]

    def _gather(self, starts: IntArray, sizes: IntArray) -> TokenArray:
        """Return the tokens of spans one by one; for a place outside, the nearest one."""
        ends = sizes.cumsum()
        places = np.arange(ends[-1])
        places += (starts - ends + sizes).repeat(sizes)
        if len(self.files) > 1:
            return self.tokens.gather(places.clip(0, self.tokens.num_tokens - 1), 1)[:, 0]
        mapped = self.tokens.read(0, self.tokens.num_tokens)
        mapped.take(starts, mode="clip")  # memory fetches all of them together
        return mapped.take(places, mode="clip")

    def _slices(self, spans: Spans, sizes: IntArray) -> list[memoryview]:
        """Return the spans as they lie in the maps; too little of one that reaches out of its file.

        One that begins before its file does so by one token, so what a negative index gives of it
        is too little as well.
        """
        if len(self.files) == 1:
            view = self._view(0)
            ranges = zip(spans.starts.tolist(), (spans.starts + sizes).tolist(), strict=True)
            return [view[begin:end] for begin, end in ranges]
        which, starts = self._in_files(spans)
        numbers = which.tolist()
        views = {k: self._view(k) for k in set(numbers)}
        each = zip(numbers, starts.tolist(), (starts + sizes).tolist(), strict=True)
        return [views[k][begin:end] for k, begin, end in each]

    def _view(self, number: int) -> memoryview:
        """Return the map of a file, which has the size that it was opened with."""
        return self.files[number].tokens.read(0, self.counts[number]).data

    def _copies(self, spans: Spans, sizes: IntArray) -> Iterator[memoryview]:
        """Yield the tokens of each span; zeros where it reaches out of its file."""
        which, starts = self._in_files(spans)
        each = (part.tolist() for part in (which, starts, sizes))
        for k, start, size in zip(*each, strict=True):
            tokens, before = np.zeros(size, self.tokens.dtype), max(0, -start)
            found = self.files[k].read(start + before, size - before)
            tokens[before : before + len(found)] = found
            yield tokens.data

    def _in_files(self, spans: Spans) -> tuple[IntArray, IntArray]:
        """Return which file each span lies in, and where in it."""
        which = np.searchsorted(self.ends, spans.starts + spans.lengths - 1, side="right")
        passed = np.append(0, self.ends[:-1])
        return which, spans.starts - passed.take(which)
