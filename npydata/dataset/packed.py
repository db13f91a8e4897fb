"""Rows packed with whole documents and their boundaries: no token of a batch sees another text.

Example::

    packed = PackedDataset("train.ds", seq_len=2048)
    loader = AsyncDataLoader(packed, batch_size=8, seed=0)
    for batch in loader:
        batch.inputs, batch.targets, batch.cu_seqlens

A row is a few *spans*, stretches of documents; ``packing.py`` decides which, once, and keeps them
in an index. ``fetch`` looks up the spans of its rows (``_spans_of``), reads each from its file and
writes it beside the one before (``_fill``). A span that is not the end of its document is read one
token further, for the last target.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from npydata.dataset.backend import Access
from npydata.dataset.datasets import (
    Empty,
    Paths,
    TokenDataset,
    as_indices,
    empty_int64,
    open_files,
)
from npydata.dataset.documents import Documents
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.formats import FormatName
from npydata.dataset.packing import (
    DOCUMENT,
    ENDS,
    FIRST,
    LAST,
    LENGTH,
    NO_DOCUMENT,
    PACKING_VERSION,
    START,
    PackingReport,
    kept_index,
)
from npydata.dataset.windows import IntArray, TokenArray, as_int, stream_key
from npydata.errors import TokenFileError

IGNORE_INDEX = -100
"""The target where there is nothing to predict: what ``cross_entropy`` leaves out."""


class PackedBatch(NamedTuple):
    """A batch of packed rows, or one row: int64, ``(B, T)`` or ``(T,)``, if nothing else is said.

    Attributes:
        inputs: What the model reads; 0 where a row is padded.
        targets: The next token of the same document; -100 behind its last one.
        position_ids: Places within the sequence: 0 wherever one begins.
        cu_seqlens: Where sequences begin in the flattened batch, and its length: int32,
            ``(sequences + 1,)``. What pads a row is a sequence too.
        max_seqlen: Length of the longest sequence, in tokens.
        document_ids: The document that a token is of, counted over all files; -1 where a row is
            padded.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    document_ids: torch.Tensor

    @classmethod
    def of(
        cls,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor,
    ) -> "PackedBatch":
        """Return a batch of these tensors, with the boundaries that the positions show."""
        bounds = sequence_bounds(position_ids)
        longest = int(bounds.diff().max()) if inputs.numel() else 0
        return cls(inputs, targets, position_ids, bounds, longest, document_ids)

    @staticmethod
    def collate(
        batches: Sequence["PackedBatch"], order: torch.Tensor | None = None, **_: Any
    ) -> "PackedBatch":
        """Return rows, or the rows of batches in an ``order``, as one batch.

        ``torch.utils.data.default_collate`` does the same.
        """
        width = batches[0].inputs.shape[-1]
        parts = [
            torch.cat([getattr(batch, name).reshape(-1, width) for batch in batches])
            for name in ("inputs", "targets", "position_ids", "document_ids")
        ]
        return PackedBatch.of(*(part if order is None else part[order] for part in parts))

    def samples(self) -> list["PackedBatch"]:
        """Return the rows one by one, ``(T,)`` each."""
        rows = zip(self.inputs, self.targets, self.position_ids, self.document_ids, strict=True)
        return [PackedBatch.of(*row) for row in rows]


# torch documents this table for types that its own way, field by field, would get wrong.
default_collate_fn_map[PackedBatch] = PackedBatch.collate


def sequence_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where sequences begin in the flattened batch, and its length, int32."""
    begins = (position_ids.reshape(-1) == 0).nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])]).to(torch.int32)


class PackedDataset(TokenDataset):
    """Rows of ``seq_len`` tokens, filled with documents that fit beside each other.

    Args:
        paths: A token file, a list of them, or a glob. Documents are what the format says
            (Megatron, datatrove), the rows of a 2-D file, or what ``eot_id`` ends.
        seq_len: Tokens per row.
        seed: Which documents are packed together: they are shuffled by it first.
        crop: ``"tail"`` fills every row, and cuts off the end of a document for that; only the
            last row of a block of documents may be padded. ``"none"`` cuts nothing off, and pads.
        bos_id: A token to put before each document.
        eot_id: The token that ends a document and belongs to it, in files that don't say where
            documents end. What ``npydata prepare --documents`` wrote needs none.
        index_dir: Where the rows of 100,000 documents or more are kept, so that they are packed
            only once; beside the first file if not given.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The name of their format, such as ``llm.c``; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give batches as a dictionary with these two names, and ``position_ids``, for
            models that shift the labels themselves, as Hugging Face's do: the labels are the
            inputs, with -100 at the first token of each sequence, so that no model learns to
            predict it from another text, and where a row is padded.

    Raises:
        TokenFileError: A file is malformed, does not say where documents end, or has no token.
        ValueError: A number or ``crop`` is impossible.

    ``fetch(indices)`` gives a :class:`PackedBatch`; ``ds[i]`` is the same of one row. A document
    longer than a row fills rows of its own, and what is left of it is packed like a short one. Rows
    are numbered, and the same in every epoch: the loader shuffles them, shares them among ranks and
    resumes. ``report`` counts what is used, cropped and padded.
    """

    def __init__(
        self,
        paths: Paths,
        seq_len: int,
        *,
        seed: int | None = None,
        crop: Literal["tail", "none"] = "tail",
        bos_id: int | None = None,
        eot_id: int | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        dtype: npt.DTypeLike | None = None,
        format: FormatName = "auto",
        access: Access = "mmap",
        vocab_size: int | None = None,
        as_dict: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(open_files(paths, dtype, format, access), vocab_size, as_dict)
        self.seq_len = as_int(seq_len, "seq_len", least=1)
        self.seed = None if seed is None else as_int(seed, "seed")
        self.bos_id = None if bos_id is None else as_int(bos_id, "bos_id", least=0)
        if self.bos_id is not None and self.bos_id >= (self.vocab_size or 1 << 63):
            raise ValueError(f"bos_id={bos_id}, expected an id below vocab_size={vocab_size}")
        if crop not in ("tail", "none"):
            raise ValueError(f"crop={crop!r}, expected tail or none")
        if eot_id is not None:
            eot_id = as_int(eot_id, "eot_id")
        documents = [Documents(file, eot_id) for file in self.files]
        packing = self.seq_len, crop, int(stream_key(self.seed or 0)), int(bos_id is not None)
        decided_by = PACKING_VERSION, packing, self.bos_id, [one.key() for one in documents]
        self._fingerprint = fingerprint_of(self.files, *decided_by)

        def find_ends() -> IntArray:
            pairs = zip(documents, self._file_begins, strict=True)
            return np.concatenate([one.ends() + begin for one, begin in pairs])

        self._begins: list[int] = self._file_begins.tolist()
        first = self.files[0].path
        folder = first.parent if index_dir is None else Path(index_dir)
        self.index = kept_index(folder / f".{first.name}.{self._fingerprint}", find_ends, packing)
        if len(self) == 0:
            raise TokenFileError(f"{first}: no document has a token, expected one")

    def __len__(self) -> int:
        return len(self.index.row_begins) - 1

    @property
    def report(self) -> PackingReport:
        """What an epoch uses, crops and pads."""
        spans = self.index.spans
        used = int(spans[spans[:, DOCUMENT] != NO_DOCUMENT, LENGTH].sum())
        documents = int((spans[:, ENDS] & FIRST).sum())
        total = self.num_tokens + documents * (self.bos_id is not None)
        padded = len(self) * self.seq_len - used
        return PackingReport(len(self), used, total - used, padded, documents)

    def fingerprint(self) -> str:
        """Return a short text that tells these rows of this data from any others."""
        return self._fingerprint

    def fetch(
        self,
        indices: npt.ArrayLike,
        *,
        seed: int | None = None,
        epoch: int | None = None,
        empty: Empty = empty_int64,
    ) -> Any:
        """Return some rows as one batch; safe to call from many threads.

        A :class:`PackedBatch`, or a dictionary if one was asked for with ``as_dict``. Rows don't
        depend on ``seed`` and ``epoch``. ``empty`` gives the memory: called once, returns int64.

        Raises:
            IndexError: An index is not in the dataset.
            TokenFileError: An id is not below ``vocab_size``, a file changed, or the index of rows
                is damaged.
        """
        rows = as_indices(indices, len(self))
        out = empty((4, len(rows), self.seq_len))
        bounds = self._fill(rows, *out)
        inputs, targets, positions, documents = (torch.from_numpy(part) for part in out)
        if self.as_dict is None:
            longest = int(np.diff(bounds).max(initial=0))
            cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
            return PackedBatch(inputs, targets, positions, cu_seqlens, longest, documents)
        labels = targets.copy_(inputs)
        labels[(positions == 0) | (documents == NO_DOCUMENT)] = IGNORE_INDEX
        return {self.as_dict[0]: inputs, self.as_dict[1]: labels, "position_ids": positions}

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Advise the kernel of rows fetched soon, so that the disk reads them meanwhile."""
        if self._advice.is_due():
            spans = np.array([*self._spans_of(as_indices(indices, len(self)))])
            if len(spans):
                self.advise(spans[:, START], spans[:, LENGTH])

    def _spans_of(self, rows: IntArray) -> Iterator[list[int]]:
        """Yield the spans of some rows, one row after the other.

        Raises:
            TokenFileError: They don't fill the rows, or lead out of the files.
        """
        for row in rows.tolist():
            first, stop = self.index.row_begins[row : row + 2].tolist()
            room = self.seq_len if first >= 0 else -1
            for span in self.index.spans[first:stop].tolist():
                # The index is a file, which anybody may have damaged.
                if not (0 <= span[START] < self.num_tokens and 0 < span[LENGTH] <= room):
                    break
                room -= span[LENGTH]
                yield span
            if room:
                raise self._damaged()

    def _damaged(self) -> TokenFileError:
        return TokenFileError(
            f"{self.index.path}.*: damaged; remove it, and the rows are packed again"
        )

    def _fill(
        self, rows: IntArray, inputs: IntArray, targets: IntArray, positions: IntArray,
        documents: IntArray,
    ) -> IntArray:  # fmt: skip
        """Write rows, ``(len(rows), seq_len)`` each; return their bounds in the flattened batch."""
        # A column more than the row has, for the last target of a document that goes on: only the
        # last span of a row may.
        tokens = np.zeros((len(rows), self.seq_len + 1), self.dtype)
        flat_tokens, flat_positions = tokens.reshape(-1), positions.reshape(-1)
        flat_documents, upto = documents.reshape(-1), np.arange(self.seq_len)
        bounds, bos_at, last_at = [0], list[int](), list[int]()
        # Spans fill the rows without a gap, so each begins where the one before ended.
        for start, document, length, ends in self._spans_of(rows):
            begin, stop = bounds[-1], bounds[-1] + length
            bounds.append(stop)
            flat_positions[begin:stop] = upto[:length]
            flat_documents[begin:stop] = document
            goes_on, has_bos = not ends & LAST, self.bos_id is not None and ends & FIRST
            if has_bos:
                bos_at.append(begin)
            if not goes_on:
                last_at.append(stop - 1)
            if document != NO_DOCUMENT:
                # The length counts the bos, which isn't in the file. Each row before this one has
                # a column more in ``tokens``.
                to = begin + begin // self.seq_len + has_bos
                size = length - has_bos + goes_on
                flat_tokens[to : to + size] = self._read(start, size)
        self.require_vocabulary(tokens)
        inputs[:], targets[:] = tokens[:, :-1], tokens[:, 1:]
        inputs.reshape(-1)[bos_at] = self.bos_id or 0
        targets.reshape(-1)[last_at] = IGNORE_INDEX
        if NO_DOCUMENT in flat_documents[last_at]:
            targets[documents == NO_DOCUMENT] = IGNORE_INDEX
        return np.array(bounds)

    def _read(self, start: int, count: int) -> TokenArray:
        """Return the tokens from a start on, counted over all files, which one file must hold."""
        # A list and ``bisect``, not ``by_file``: numpy is slow with a single number.
        k = bisect_right(self._begins, start) - 1
        file, start_in_file = self.files[k], start - self._begins[k]
        if start_in_file + count > file.num_tokens:
            raise self._damaged()
        return file.backend.read(start_in_file, count)
