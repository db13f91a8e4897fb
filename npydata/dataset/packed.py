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

from npydata.dataset.datasets import as_indices
from npydata.dataset.describing import Described
from npydata.dataset.documents import document_ends, recorded_eot_id
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.hashing import stream_key
from npydata.dataset.packing import (
    PACKING_VERSION,
    PackingReport,
    RowTable,
    begins_of,
    require_crop,
)
from npydata.dataset.row_file import kept_rows
from npydata.dataset.row_writer import RowWriter
from npydata.dataset.spans import ranges, spans_of
from npydata.dataset.token_file import Paths, open_files
from npydata.dataset.token_windows import as_int, require_vocabulary
from npydata.dataset.tokens import TokenFiles
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError
from npydata.system.page_cache import AdviceBackoff

IGNORE_INDEX = -100
"""What ``torch.nn.functional.cross_entropy`` leaves out unless told otherwise."""

ADVISED_TOKENS = 2048
"""A span is announced to the kernel in parts of so many tokens."""


class Packed(NamedTuple):
    """A batch of packed rows, or one row: ``(B, T)`` or ``(T,)`` where nothing else is said.

    Attributes:
        inputs: What the model reads, int64; 0 where a row is padded.
        targets: The next token of the same document, int64; ``ignore_index`` behind its last one.
        position_ids: Places within the sequence, int32: 0 wherever one begins. What takes int64
            alone gets ``position_ids.long()``.
        cu_seqlens: Where sequences begin in the flattened batch, and its length: int32,
            ``(sequences + 1,)``. What pads a row is a sequence too.
        max_seqlen: Length of the longest sequence, in tokens.
        document_ids: The document that a token is of, counted over all files; -1 where a row is
            padded. int32, or int64 of 2**31 documents or more.
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


class PackedDataset(Described, Dataset[Packed]):
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
            documents end. They are searched once, and an index is kept beside each; where it is,
            as behind ``npydata prepare --documents``, a 1-D file needs no ``eot_id``.
        ignore_index: The target of a position that has nothing to predict.
        dtype: The integer dtype of a headerless file; see :func:`npydata.open_tokens`.
        format: The name of their format, such as ``llm.c``; recognised if not given (see
            :func:`npydata.open_tokens`).
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).
        vocab_size: Raise on an id outside ``0 .. vocab_size - 1``.

    Raises:
        TokenFileError: A file is malformed, does not say where documents end, or has no token.
        ValueError: A number or ``crop`` is impossible.

    ``fetch(indices)`` gives a :class:`Packed`: inputs and targets, int64, and position and document
    ids, int32, each ``(len(indices), seq_len)``, and the boundaries. ``ds[i]`` is the same of one
    row.

    A document longer than a row fills rows of its own, and what is left of it is packed like a
    short one; ``row(i)`` says so. Rows are numbered, and the same in every epoch: the loader
    shuffles them, shares them among ranks and resumes. So there is no ``state_dict`` here: a row
    depends on nothing that came before it, and a loader's state says all. ``report`` counts what
    is used, cropped and padded. Positions begin again at 0 with each sequence. Rows of many
    documents are packed once, and kept in a file beside the tokens.
    """

    described_by = ("seq_len", "documents", "crop", "block")

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
        self._bos = int(bos_id is not None)
        self._eot_id = recorded_eot_id(self.files) if eot_id is None else eot_id
        self._packing: dict[str, Any] = {
            "seq_len": self.seq_len, "block": as_int(block, "block", least=1), "crop": crop,
            "seed": int(stream_key(0 if seed is None else as_int(seed, "seed"))),
            "extra": self._bos,
        }  # fmt: skip
        self._open_table()
        if len(self) == 0:
            raise TokenFileError(f"{self.tokens.path}: no document has a token, expected one")
        self._advice = AdviceBackoff()

    def _open_table(self) -> None:
        """Find the documents, and their rows."""
        self.ends = document_ends(self.files, self._eot_id)
        self.table: RowTable
        self.table, self._documents = kept_rows(self.files, self.ends, self._packing, self._eot_id)
        self._writer = self._new_writer()

    def _new_writer(self) -> RowWriter:
        """Return what writes rows; a copy gets its own."""
        return RowWriter(
            self.table, self.ends, self.tokens, self.seq_len, self.bos_id, self.ignore_index
        )

    def __len__(self) -> int:
        return len(self.table.row_begins) - 1

    @property
    def batch_tensors(self) -> int:
        """Tensors ``(B, seq_len)`` of int64 that have room for a batch: ``fetch`` takes these."""
        return self._writer.tensors

    @property
    def num_tokens(self) -> int:
        """Tokens in all files."""
        return self.tokens.num_tokens

    @property
    def documents(self) -> int:
        """Documents that are packed."""
        return self.table.documents

    @property
    def crop(self) -> str:
        """``"tail"`` or ``"none"``, as it was given."""
        return str(self._packing["crop"])

    @property
    def block(self) -> int:
        """How many documents are packed together."""
        return int(self._packing["block"])

    @property
    def report(self) -> PackingReport:
        """What an epoch uses, crops and pads."""
        table, positions = self.table, len(self) * self.seq_len
        total = int(self.ends[-1]) + self._bos * table.documents
        return PackingReport(
            len(self), positions, table.used, total - table.used, positions - table.used,
            table.documents,
        )  # fmt: skip

    def row(self, index: int) -> list[DocumentSpan]:
        """Return the documents of a row, in order."""
        spans = spans_of(self.table, as_indices([index], len(self)), self.seq_len)
        begins, bos = begins_of(spans.documents, self.ends), self._writer.put_before(spans)
        lengths = spans.lengths - bos
        is_cut = lengths < self.ends[spans.documents] - begins
        numbers = (spans.documents, spans.starts + bos - begins, lengths, is_cut)
        return [
            DocumentSpan(*each) for each in zip(*(part.tolist() for part in numbers), strict=True)
        ]

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the rows of some indices: those numbers, whatever seed and epoch."""
        return indices

    def fetch(
        self,
        indices: npt.ArrayLike,
        *,
        empty: Callable[[tuple[int, ...]], IntArray] | None = None,
    ) -> Packed:
        """Return some rows as one batch; safe to call from many threads.

        Raises:
            IndexError: An index is not in the dataset.
            TokenFileError: An id is not below ``vocab_size``, or a file changed.
        """
        rows = as_indices(indices, len(self))
        out = empty((self.batch_tensors, len(rows), self.seq_len)) if empty else None
        return self.fetch_windows(rows, out=out)

    def fetch_windows(self, rows: IntArray, *, out: IntArray | None = None) -> Packed:
        """Return some rows as one batch; they must be in the dataset.

        ``out`` is memory for the result, int64 ``(batch_tensors, len(rows), seq_len)``.
        """
        if out is None:
            out = np.empty((self.batch_tensors, len(rows), self.seq_len), np.int64)
        parts = self._writer.parts_of(out)
        if not len(rows):
            return Packed.of(*map(torch.from_numpy, parts))
        bounds, longest = self._writer.write(rows, parts)
        self._require_vocabulary(parts.inputs, parts.targets)
        inputs, targets, positions, document_ids = map(torch.from_numpy, parts)
        return Packed(inputs, targets, positions, torch.from_numpy(bounds), longest, document_ids)

    def will_need(self, indices: npt.ArrayLike) -> None:
        """Advise the kernel of rows fetched soon, so that the disk reads them meanwhile."""
        self.advise_windows(as_indices(indices, len(self)))

    def advise_windows(self, rows: IntArray) -> None:
        """Advise the kernel of rows that are in the dataset."""
        if self._advice.is_due() and len(rows):
            spans = spans_of(self.table, rows, self.seq_len)
            width = min(ADVISED_TOKENS, self.tokens.num_tokens)
            starts = ranges(spans.starts, -(-spans.lengths // width), step=width)
            starts = np.clip(starts, 0, self.tokens.num_tokens - width)
            self._advice.record(was_resident=self.tokens.will_need(starts, width))

    def fingerprint(self) -> str:
        """Return a short text that tells these rows of this data from any others."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(fingerprint_of(self.files, self.seq_len, self._bos).encode())
        decided_by = PACKING_VERSION, sorted(self._packing.items()), self._documents
        digest.update(repr(decided_by).encode())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along; it opens a table in a file again, and finds documents."""
        left_out = {"_writer"} | ({"table", "ends"} if self.table.checks else set())
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "table" in state:
            self._writer = self._new_writer()
        else:
            self._open_table()

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

    def _require_vocabulary(self, inputs: IntArray, targets: IntArray) -> None:
        """Raise if an id is outside the vocabulary, or too large for int64."""
        if self.vocab_size is not None or self.tokens.dtype == np.uint64:
            limit = (1 << 63) if self.vocab_size is None else self.vocab_size
            for ids in (inputs, targets[targets != self.ignore_index]):
                require_vocabulary(ids, limit, self.files)
