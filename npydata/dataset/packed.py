"""Rows packed with documents that fit together, and the boundaries that keep documents apart.

Example::

    packed = PackedDataset("train.ds", seq_len=2048)
    loader = AsyncDataLoader(packed, batch_size=8, seed=0)
    for batch in loader:
        batch.inputs, batch.targets, batch.cu_seqlens

A row is a few *spans*, stretches of documents; ``packing.py`` chooses them once and keeps them in
an index. ``fetch`` looks up the spans of its rows (``_spans_of``), reads each from its file and
joins them (``_read``). A span that is not the end of its document is read one token further, for
the last target.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from npydata.dataset.backend import Access
from npydata.dataset.datasets import Empty, Paths, TokenDataset, as_indices, empty_int64, open_files
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
    within_groups,
)
from npydata.dataset.windows import IntArray, as_int, stream_key
from npydata.errors import TokenFileError

IGNORE_INDEX = -100
"""The target where there is nothing to predict: what ``cross_entropy`` leaves out."""


class PackedBatch(NamedTuple):
    """A batch of packed rows, ``(B, T)``, or one row, ``(T,)``: int64 unless noted.

    A sequence is a stretch of a document, or the padding of a row.

    Attributes:
        inputs: What the model reads; 0 where a row is padded.
        targets: The next token of the same document; -100 after its last one.
        cu_seqlens: Where sequences begin in the flattened batch, and its length: int32,
            ``(sequences + 1,)``.
        max_seqlen: Length of the longest sequence, in tokens.
        documents: The number of each sequence's document, counted over all files, ``(sequences,)``;
            -1 for padding.

    ``position_ids`` and ``document_ids`` are computed on each access, on the batch's device: they
    would otherwise be half of what is copied there.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    documents: torch.Tensor

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions within the sequence, in the shape of ``inputs``: 0 wherever one begins."""
        # Count up through the batch, and back by a sequence's length after its end.
        steps = torch.ones_like(self.inputs).view(-1)
        steps[self.cu_seqlens[1:-1]] -= self.cu_seqlens.diff()[:-1]
        return steps.cumsum(0).sub_(1).view_as(self.inputs)

    @property
    def document_ids(self) -> torch.Tensor:
        """Each token's document number, in the shape of ``inputs``; -1 where a row is padded."""
        lengths, total = self.cu_seqlens.diff(), self.inputs.numel()
        return self.documents.repeat_interleave(lengths, output_size=total).view_as(self.inputs)

    @staticmethod
    def collate(rows: Sequence["PackedBatch"], **_: Any) -> "PackedBatch":
        """Return rows as one batch, as ``torch.utils.data.default_collate`` does."""
        inputs, targets, bounds, longest, documents = zip(*rows, strict=True)
        lengths = torch.cat(bounds).diff()  # negative from the end of a row to the next one's start
        cu_seqlens = torch.cat([bounds[0][:1], lengths[lengths > 0]]).cumsum(0, dtype=torch.int32)
        return PackedBatch(
            torch.stack(inputs),
            torch.stack(targets),
            cu_seqlens,
            max(longest),
            torch.cat(documents),
        )

    def samples(self) -> list["PackedBatch"]:
        """Return the rows one by one, ``(T,)`` each."""
        return self._cut(self.inputs.unbind(), self.targets.unbind())

    def split(self, sizes: list[int]) -> list["PackedBatch"]:
        """Return batches of ``sizes`` rows, in the same memory."""
        return self._cut(torch.split(self.inputs, sizes), torch.split(self.targets, sizes))

    def _cut(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list["PackedBatch"]:
        """Return batches of these consecutive rows."""
        bounds, documents = self.cu_seqlens.numpy(), self.documents.numpy()
        cuts = np.searchsorted(bounds, np.cumsum([0, *map(torch.numel, inputs)])).tolist()
        longest = np.maximum.reduceat(np.diff(bounds), cuts[:-1]).tolist()
        return [
            PackedBatch(
                x,
                y,
                torch.from_numpy(bounds[begin : end + 1] - bounds[begin]),
                most,
                torch.from_numpy(documents[begin:end]),
            )
            for x, y, (begin, end), most in zip(
                inputs, targets, pairwise(cuts), longest, strict=True
            )
        ]


# torch documents this table for types that its field-by-field collation would get wrong.
default_collate_fn_map[PackedBatch] = PackedBatch.collate


class PackedDataset(TokenDataset):
    """Rows of ``seq_len`` tokens, filled with documents that fit together.

    Args:
        paths: A token file, a list of them, or a glob. Documents are what the format says
            (Megatron, datatrove), the rows of a 2-D file, or what ``eot_id`` ends.
        seq_len: Tokens per row.
        seed: Decides which documents are packed together, by shuffling them first.
        crop: ``"tail"`` fills every row, cutting off the end of a document where needed; only the
            last row of a block of documents may be padded. ``"none"`` cuts nothing off, and pads.
        bos_id: A token to put before each document.
        eot_id: The token that ends a document and belongs to it, in files that don't say where
            documents end. Files written by ``npydata prepare --documents`` need none.
        index_dir: Where the rows of 100,000 or more documents are kept, so that they are packed
            only once; beside the first file if not given.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The files' format, such as ``llm.c``; recognised if not given.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.
        as_dict: Give batches as a dictionary with these two names, and ``position_ids``, for
            models that shift the labels themselves, as Hugging Face's do: the labels are the
            inputs, with -100 where a row is padded and at the first token of each sequence, so that
            no model learns to predict that token from another document.

    Raises:
        TokenFileError: A file is malformed, does not say where documents end, or has no token.
        ValueError: A number or ``crop`` is invalid.

    ``fetch(indices)`` gives a :class:`PackedBatch`; ``ds[i]`` gives the same for one row. A
    document longer than a row fills rows of its own, and what is left of it is packed like a short
    one. Row ``i`` is the same in every epoch: the loader shuffles rows, shares them among ranks and
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

        first = self.files[0].path
        folder = first.parent if index_dir is None else Path(index_dir)
        self.index = kept_index(folder / f".npydata-{self._fingerprint}", find_ends, packing)
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
        """Return a short text that identifies these rows of this data."""
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

        A :class:`PackedBatch`, or with ``as_dict`` a dictionary. Rows don't depend on ``seed`` and
        ``epoch``. ``empty`` allocates the result: called once, returns int64.

        Raises:
            IndexError: An index is not in the dataset.
            TokenFileError: An id is not below ``vocab_size``, a file changed, or the index of rows
                is damaged.
        """
        rows = as_indices(indices, len(self))
        try:
            batch = self._read(self._spans_of(rows), empty((2, len(rows), self.seq_len)))
        except TokenFileError:
            raise
        except (IndexError, ValueError):  # the index is a file, which may be damaged
            raise TokenFileError(
                f"{self.index.path}-*: damaged; remove it, and the rows are packed again"
            ) from None
        if self.as_dict is None:
            return batch
        pair = dict(zip(self.as_dict, batch[:2], strict=True))
        return {**pair, "position_ids": batch.position_ids}

    def will_need(
        self, indices: npt.ArrayLike, *, seed: int | None = None, epoch: int | None = None
    ) -> None:
        """Tell the kernel which rows will be fetched soon, so that the disk reads ahead."""
        if self._advice.is_due():
            spans = self._spans_of(as_indices(indices, len(self)))
            self.advise(spans[:, START], spans[:, LENGTH])

    def _spans_of(self, rows: IntArray) -> IntArray:
        """Return the spans of some rows, ``(spans, 4)``, one row after the other."""
        firsts = self.index.row_begins[rows]
        counts = self.index.row_begins[rows + 1] - firsts
        spans: IntArray = self.index.spans[np.repeat(firsts, counts) + within_groups(counts)]
        return spans

    def _read(self, spans: IntArray, out: IntArray) -> PackedBatch:
        """Read the spans of some rows into ``out``, ``(2, B, T)``."""
        starts, documents, lengths, ends = spans.T
        inputs, targets = out
        # Spans fill the rows without a gap, so each begins where the one before ended.
        bounds = np.append(0, lengths.cumsum())
        begins, last = bounds[:-1], bounds[1:] - 1
        is_padding = documents == NO_DOCUMENT
        # The length counts the bos, which isn't in the file.
        has_bos = (ends & FIRST > 0) & (self.bos_id is not None)
        goes_on = ends & LAST == 0
        # One extra column per row, for the last target of a document that continues, which only a
        # row's last span may do. Zeros fill the gaps between stretches.
        to = begins + begins // self.seq_len + has_bos
        sizes = (lengths - has_bos + goes_on) * ~is_padding
        gaps = np.append(to, targets.size + len(targets)) - np.append(0, to + sizes)
        if bounds[-1] != targets.size:
            raise ValueError("spans that don't fill their rows")
        sizes_of_gaps = (gaps * self.dtype.itemsize).repeat(2)[1:].tolist()
        pieces: list[Any] = [bytes(nbytes) for nbytes in sizes_of_gaps]
        for file, which, starts_in_file in self.by_file(starts):
            stretches = file.backend.read(starts_in_file.tolist(), sizes[which].tolist())
            if file.dtype != self.dtype:
                stretches = [np.asarray(one).astype(self.dtype) for one in stretches]
            for k, stretch in zip(which.tolist(), stretches, strict=True):
                pieces[2 * k + 1] = stretch
        # Pieces are a gap, a span, a gap, ..., a gap. Joined in one call: with a copy per array,
        # workers would hand over the GIL at each one.
        tokens = np.frombuffer(b"".join(pieces), self.dtype).reshape(len(inputs), self.seq_len + 1)
        self.require_vocabulary(tokens)
        inputs[:] = tokens[:, :-1]
        inputs.reshape(-1)[begins[has_bos]] = self.bos_id or 0
        targets[:] = inputs if self.as_dict else tokens[:, 1:]
        targets.reshape(-1)[begins if self.as_dict else last[~goes_on]] = IGNORE_INDEX
        if is_padding.any():
            targets.reshape(-1)[np.repeat(is_padding, lengths)] = IGNORE_INDEX
        cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
        return PackedBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            cu_seqlens,
            int(lengths.max(initial=0)),
            torch.from_numpy(documents.copy()),
        )
