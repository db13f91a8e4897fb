"""Rows packed with whole documents, their boundaries told: no token of a batch sees another text.

Example::

    packed = PackedDataset("train.ds", seq_len=2048)
    loader = AsyncDataLoader(packed, batch_size=8, seed=0)
    for batch in loader:
        batch.inputs, batch.targets, batch.cu_seqlens
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from npydata.dataset.access import TokenArray
from npydata.dataset.datasets import as_indices
from npydata.dataset.documents import document_ends
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.hashing import stream_key
from npydata.dataset.packing import PackingReport, RowTable, pack, require_crop
from npydata.dataset.token_file import Paths, open_files
from npydata.dataset.token_windows import as_int, require_vocabulary
from npydata.dataset.tokens import TokenFiles
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError
from npydata.system.page_cache import AdviceBackoff

IGNORE_INDEX = -100
"""What ``torch.nn.functional.cross_entropy`` leaves out unless told otherwise."""

NO_DOCUMENT = -1
"""The document of a position that is padded."""

SHORT_SPANS = 64
"""Spans of so few tokens are gathered token by token; a copy for each would cost more."""

ADVISED_TOKENS = 2048
"""A span is announced to the kernel in parts of so many tokens."""


class Packed(NamedTuple):
    """A batch of packed rows, or one row: ``(B, T)`` or ``(T,)`` where nothing else is said."""

    inputs: torch.Tensor
    """What the model reads, int64; 0 where a row is padded."""
    targets: torch.Tensor
    """The next token of the same document, int64; ``ignore_index`` behind its last one."""
    position_ids: torch.Tensor
    """Places within the sequence, int64: 0 wherever one begins."""
    cu_seqlens: torch.Tensor
    """Where sequences begin in the flattened batch, and its length: int32, ``(sequences + 1,)``.
    What pads a row is a sequence too."""
    max_seqlen: int
    """Length of the longest sequence."""
    document_ids: torch.Tensor
    """The document that a token is of, int64, counted over all files; -1 where a row is padded."""

    @classmethod
    def of(
        cls,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
    ) -> "Packed":
        """Return a batch of these tensors, with the boundaries that the positions tell."""
        bounds = sequence_bounds(position_ids)
        longest = int(bounds.diff().max()) if inputs.numel() else 0
        return cls(inputs, targets, position_ids, bounds, longest, document_ids)

    @classmethod
    def join(cls, batches: Sequence["Packed"], order: torch.Tensor | None = None) -> "Packed":
        """Return the rows of several batches, or several rows, as one batch."""
        parts = [
            torch.cat(
                [getattr(batch, name).reshape(-1, batch.inputs.shape[-1]) for batch in batches]
            )
            for name in ("inputs", "targets", "position_ids", "document_ids")
        ]
        return cls.of(*(part if order is None else part[order] for part in parts))

    def samples(self) -> list["Packed"]:
        """Return the rows one by one, ``(T,)`` each."""
        rows = zip(self.inputs, self.targets, self.position_ids, self.document_ids, strict=True)
        return [Packed.of(*row) for row in rows]


def sequence_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where sequences begin in the flattened batch, and its length, int32."""
    begins = (position_ids.reshape(-1) == 0).nonzero()[:, 0]
    return torch.cat([begins, torch.tensor([position_ids.numel()])]).to(torch.int32)


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A document, or what is in one row of a document that is cut."""

    document: int
    """Counted over all files."""
    start: int
    """Its first token, counted from the document's first."""
    length: int
    is_cut: bool
    """Whether the row holds only a part of the document."""


class PackedDataset(Dataset[Packed]):
    """Rows of ``seq_len`` tokens, filled with documents that fit beside each other.

    Args:
        paths: A token file, a list of them, or a glob. Documents are what the format says
            (Megatron, datatrove), the rows of a 2-D file, or what ``eot_id`` ends.
        seq_len: Tokens per row.
        seed: Which documents are packed together: they are shuffled by it first.
        block: Documents that are packed together; more of them fit better and take longer.
        crop: ``"tail"`` fills every row, and cuts off the end of a document for that; only the
            last row of a block may be padded. ``"none"`` cuts nothing off, and pads.
        bos_id: A token to put before each document.
        eot_id: The token that ends a document and belongs to it, in files that don't say where
            documents end. They are searched once, and an index is kept beside each.
        ignore_index: The target of a position that has nothing to predict.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: How the files are laid out; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.

    Raises:
        TokenFileError: A file is malformed, does not say where documents end, or has no token.
        ValueError: A number or ``crop`` is impossible.

    A document longer than a row fills rows of its own, and what is left of it is packed like a
    short one; ``row(i)`` says so. Rows are numbered, and the same in every epoch: the loader
    shuffles them, shares them among ranks and resumes. ``report`` counts what is used, cropped
    and padded. Positions begin again at 0 with each sequence.
    """

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        seed: int | None = None,
        block: int = 4096,
        crop: str = "tail",
        bos_id: int | None = None,
        eot_id: int | None = None,
        ignore_index: int = IGNORE_INDEX,
        dtype: npt.DTypeLike | None = None,
        format: str = "auto",
        access: str = "mmap",
        vocab_size: int | None = None,
    ) -> None:
        self.seq_len = as_int(seq_len, "seq_len", least=1)
        require_crop(crop)
        self.files = open_files(paths, dtype, format, access)
        self.tokens = self.files[0] if len(self.files) == 1 else TokenFiles(self.files)
        self.bos_id = None if bos_id is None else as_int(bos_id, "bos_id", least=0)
        self.ignore_index = as_int(ignore_index, "ignore_index")
        self.vocab_size = None if vocab_size is None else as_int(vocab_size, "vocab_size", least=1)
        self.ends = document_ends(self.files, eot_id)
        lengths = np.diff(self.ends, prepend=0)
        self._bos = int(bos_id is not None)
        # With a token before each document, documents lie further apart than in the files.
        self._packed_ends = self.ends + self._bos * np.cumsum(lengths > 0)
        self.table: RowTable = pack(
            self._packed_ends, self.seq_len, as_int(block, "block", least=1), crop,
            int(stream_key(0 if seed is None else as_int(seed, "seed"))),
        )  # fmt: skip
        if len(self) == 0:
            raise TokenFileError(f"{self.tokens.path}: no document has a token, expected one")
        self._documents = int(np.count_nonzero(lengths))
        self._advice = AdviceBackoff()

    def __len__(self) -> int:
        return len(self.table.row_begins) - 1

    @property
    def report(self) -> PackingReport:
        """What an epoch uses, crops and pads."""
        positions = len(self) * self.seq_len
        total = int(self._packed_ends[-1])
        return PackingReport(
            len(self), positions, self.table.used, total - self.table.used,
            positions - self.table.used, self._documents,
        )  # fmt: skip

    def row(self, index: int) -> list[DocumentSpan]:
        """Return the documents of a row, in order."""
        spans = self._spans(as_indices([index], len(self)))
        whole = self._packed_ends[spans.documents] - spans.starts + spans.within
        start = np.maximum(spans.within - self._bos, 0)
        with_bos = self._bos * (spans.within == 0)
        numbers = (spans.documents, start, spans.lengths - with_bos, spans.lengths < whole)
        return [
            DocumentSpan(*each) for each in zip(*(part.tolist() for part in numbers), strict=True)
        ]

    def fetch(self, indices: npt.ArrayLike) -> Packed:
        """Return some rows as one batch; safe to call from many threads.

        Raises:
            IndexError: An index is not in the dataset.
            TokenFileError: An id is not below ``vocab_size``, or a file changed.
        """
        rows = as_indices(indices, len(self))
        shape = len(rows), self.seq_len
        if not len(rows):
            return Packed.of(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))
        spans = self._spans(rows)
        inputs, targets = np.zeros((2, *shape), np.int64)
        targets.fill(self.ignore_index)
        self._copy(spans, inputs.reshape(-1), targets.reshape(-1))
        bounds, documents = with_padding(spans, len(rows), self.seq_len)
        sizes = np.diff(bounds)
        positions = np.arange(shape[0] * shape[1]) - np.repeat(bounds[:-1], sizes)
        document_ids = np.repeat(documents, sizes)
        return Packed(
            torch.from_numpy(inputs), torch.from_numpy(targets),
            torch.from_numpy(positions.reshape(shape)),
            torch.from_numpy(bounds.astype(np.int32)), int(sizes.max()),
            torch.from_numpy(document_ids.reshape(shape)),
        )  # fmt: skip

    def will_need(self, indices: npt.ArrayLike) -> None:
        """Advise the kernel of rows fetched soon, so that the disk reads them meanwhile."""
        rows = as_indices(indices, len(self))
        if len(rows) and self._advice.is_due():
            spans = self._spans(rows)
            width = min(ADVISED_TOKENS, self.tokens.num_tokens)
            parts = -(-spans.lengths // width)
            starts = ranges(spans.first_tokens, parts, step=width)
            starts = np.clip(starts, 0, self.tokens.num_tokens - width)
            self._advice.record(was_resident=self.tokens.will_need(starts, width))

    def fingerprint(self) -> str:
        """Return a short text that tells these rows of this data from any others."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(fingerprint_of(self.files, self.seq_len, self._bos).encode())
        for numbers in (self.ends, self.table.starts, self.table.row_begins):
            digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def __getitem__(self, index: Any) -> Packed:
        """Return a row, ``(T,)``; for a slice or a list of indices a batch, as ``fetch`` does.

        Raises:
            IndexError: An index is not in the dataset.
        """
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))
        try:
            one = operator.index(index)
        except TypeError:
            return self.fetch(index)
        return self.fetch([one]).samples()[0]

    def __getitems__(self, indices: list[int]) -> list[Packed]:
        """Return rows one by one; a stock ``DataLoader`` needs ``collate_fn=Packed.join``."""
        return self.fetch(indices).samples()

    def _spans(self, rows: IntArray) -> "Spans":
        """Return what is in some rows, span by span."""
        first, stop = self.table.row_begins[rows], self.table.row_begins[rows + 1]
        starts = self.table.starts[ranges(first, stop - first)]
        documents = np.searchsorted(self._packed_ends, starts, side="right")
        left = self._packed_ends[documents] - starts
        ends = np.cumsum(stop - first)
        # Only the last span of a row may be too long for it.
        lengths = left.copy()
        totals = np.add.reduceat(left, ends - (stop - first))
        lengths[ends - 1] -= np.maximum(totals - self.seq_len, 0)
        totals = np.minimum(totals, self.seq_len)
        padded = self.seq_len * np.arange(len(rows)) - (np.cumsum(totals) - totals)
        begins = np.cumsum(lengths) - lengths + np.repeat(padded, stop - first)
        before = self._packed_ends[np.maximum(documents - 1, 0)] * (documents > 0)
        within = starts - before
        shift = self._packed_ends[documents] - self.ends[documents]
        has_bos = self._bos * (within == 0)
        return Spans(starts, documents, lengths, left, begins, within, has_bos,
                      starts - shift + has_bos)  # fmt: skip

    def _copy(self, spans: "Spans", inputs: IntArray, targets: IntArray) -> None:
        """Copy the spans' tokens to where they are read, and one place earlier to be predicted."""
        if self.bos_id is not None:
            inputs[spans.begins[spans.has_bos == 1]] = self.bos_id
        counts = spans.lengths + (spans.left > spans.lengths) - spans.has_bos
        begins, ends = spans.begins, spans.begins + spans.lengths
        to = begins + spans.has_bos
        if self.files[0].access == "mmap" and counts.mean() < SHORT_SPANS:
            tokens = self.tokens.gather(ranges(spans.first_tokens, counts), 1)[:, 0]
            places = ranges(to, counts)
            is_read = places < np.repeat(ends, counts)
            inputs[places[is_read]] = tokens[is_read]
            is_predicted = places > np.repeat(begins, counts)
            targets[places[is_predicted] - 1] = tokens[is_predicted]
        else:
            read = self._reader()
            rows = zip(spans.first_tokens.tolist(), counts.tolist(), begins.tolist(),
                       to.tolist(), ends.tolist(), strict=True)  # fmt: skip
            for first, count, begin, at, end in rows:
                tokens = read(first, count)
                inputs[at:end] = tokens[: end - at]
                skipped = begin + 1 - at  # the first token of a sequence is predicted by no other
                targets[begin : at + count - 1] = tokens[skipped:]
        if self.vocab_size is not None or self.tokens.dtype == np.uint64:
            limit = (1 << 63) if self.vocab_size is None else self.vocab_size
            for ids in (inputs, targets[targets != self.ignore_index]):
                require_vocabulary(ids, limit, self.files)

    def _reader(self) -> Callable[[int, int], TokenArray]:
        """Return what reads a span: of one mapped file a slice, checked once for all of them."""
        if len(self.files) > 1 or self.tokens.access != "mmap":
            return self.tokens.read
        mapped = self.tokens.read(0, self.tokens.num_tokens)
        return lambda first, count: mapped[first : first + count]


class Spans(NamedTuple):
    """What is in some rows, an array for each property, a number for each span."""

    starts: IntArray
    """First token, counted with the tokens put before documents."""
    documents: IntArray
    lengths: IntArray
    left: IntArray
    """Tokens from the span's first to its document's last."""
    begins: IntArray
    """Places in the flattened batch."""
    within: IntArray
    """First token, counted from the document's first."""
    has_bos: IntArray
    """1 where the first token is one put before a document, else 0."""
    first_tokens: IntArray
    """First tokens in the files."""


def ranges(begins: IntArray, counts: IntArray, step: int = 1) -> IntArray:
    """Return ``counts[k]`` numbers from ``begins[k]`` on, for all k, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    within = np.arange(total) - np.repeat(ends - counts, counts)
    return np.repeat(begins, counts) + step * within


def with_padding(spans: Spans, rows: int, seq_len: int) -> tuple[IntArray, IntArray]:
    """Return the bounds of all sequences of a flattened batch, and their documents."""
    ends = spans.begins + spans.lengths
    begins, documents = spans.begins, spans.documents
    after = np.append(begins[1:], rows * seq_len)
    padded = ends < after
    if padded.any():
        begins = np.append(begins, ends[padded])
        documents = np.append(documents, np.full(int(padded.sum()), NO_DOCUMENT))
        order = np.argsort(begins, kind="stable")
        begins, documents = begins[order], documents[order]
    return np.append(begins, rows * seq_len), documents
