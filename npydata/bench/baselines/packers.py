"""Packers: ours, and how others fill rows with documents; all give ``x, y`` first, as windows do.

``pip install grain``
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from npydata import AsyncDataLoader, NpyTokensDataset, PackedDataset
from npydata.bench.baselines import OURS, baseline
from npydata.bench.baselines.frameworks import installed
from npydata.bench.baselines.loaders import DEFAULT, our_settings
from npydata.bench.baselines.windows import batches_of
from npydata.bench.measure import Steps
from npydata.bench.tokens import SEED, Task

Tokens = npt.NDArray[np.integer]
Count = Counter[str] | None
"""Where an epoch's rows and tokens are counted; without it there is no end."""

WINDOWS = "random windows"
EOT = 0
"""The end-of-text id of :func:`npydata.dataset.prepare.prepare`, for files that say no more."""

BUFFERED = 1000
"""Documents that nanochat's loader chooses from."""


def packed_rows(task: Task) -> PackedDataset:
    """Open the task's file; without documents of its own, a token ends them."""
    has_ends = task.random_dataset().files[0].document_ends is not None
    return PackedDataset(task.path, task.seq_len, dtype=task.dtype, seed=SEED,
                         eot_id=None if has_ends else EOT)  # fmt: skip


def documents_of(task: Task) -> Iterator[Tokens]:
    """Yield the documents in a shuffled order."""
    rows = packed_rows(task)
    tokens = rows.tokens.read(0, rows.tokens.num_tokens)
    begins = np.append(0, rows.ends[:-1])
    for k in np.random.default_rng(SEED).permutation(len(begins)).tolist():
        yield tokens[begins[k] : rows.ends[k]]


@baseline("packing", OURS, "ours", settings={"in process": {}})
def ours(task: Task, count: Count = None) -> Steps:
    dataset = packed_rows(task)
    if count is not None:
        report = dataset.report
        count.update(rows=report.rows, used=report.used, cropped=report.cropped)
        return
    for indices, _ in batches_of(len(dataset), task.batch_size):
        yield dataset.fetch(indices)


@baseline("packing loader", OURS, "ours", settings=our_settings(DEFAULT, (1, 8)))
def ours_through_loader(task: Task, workers: int, prefetch: int) -> Steps:
    return through(packed_rows(task), task, workers, prefetch)


@baseline("packing loader", WINDOWS, "peer", settings=our_settings(DEFAULT, (1, 8)))
def windows_through_loader(task: Task, workers: int, prefetch: int) -> Steps:
    return through(task.random_dataset(), task, workers, prefetch)


def through(
    dataset: PackedDataset | NpyTokensDataset, task: Task, workers: int, prefetch: int
) -> Steps:
    loader = AsyncDataLoader(dataset, batch_size=task.batch_size, num_workers=workers,
                             prefetch_factor=prefetch, seed=SEED)  # fmt: skip
    while True:
        with iter(loader) as batches:
            yield from batches


@baseline("packing", WINDOWS, "peer", settings={"in process": {}})
def windows(task: Task, count: Count = None) -> Steps:
    """Ours without documents: what a row may cost."""
    dataset = task.random_dataset()
    if count is None:
        for indices, epoch in batches_of(len(dataset), task.batch_size):
            yield dataset.fetch(indices, epoch=epoch)


@baseline("packing", "torchtitan's way", "naive", settings={"concatenate and cut": {}})
def cut(task: Task, count: Count = None) -> Steps:
    """A buffer grows by a document at a time, and rows are cut off its front."""

    def rows() -> Iterator[Tokens]:
        buffer: list[int] = []
        for document in documents_of(task):
            buffer.extend(document.tolist())
            while len(buffer) > task.seq_len:
                yield np.array(buffer[: task.seq_len + 1])
                buffer = buffer[task.seq_len + 1 :]

    return batched(rows, task, count)


@baseline("packing", "nanochat's way", "naive", settings={"best fit, 1,000 documents": {}})
def best_fit(task: Task, count: Count = None) -> Steps:
    """The longest document that fits, again and again; then the shortest, cropped to the rest."""

    def rows() -> Iterator[Tokens]:
        documents = documents_of(task)
        buffer = list(islice(documents, BUFFERED))
        while buffer:
            row, left = [], task.seq_len + 1
            while left and buffer:
                fits = [k for k, one in enumerate(buffer) if len(one) <= left]
                k = (max(fits, key=lambda k: len(buffer[k])) if fits
                     else min(range(len(buffer)), key=lambda k: len(buffer[k])))  # fmt: skip
                row.append(buffer.pop(k)[:left])
                left -= len(row[-1])
                buffer.extend(islice(documents, 1))
            if not left:
                yield np.concatenate(row)

    return batched(rows, task, count)


@baseline("packing", "Grain", "peer", settings={"first fit": {}}, available=installed("grain"))
def first_fit(task: Task, count: Count = None) -> Steps:
    """Its packing; documents longer than a row are cut before."""
    from grain import MapDataset
    from grain import experimental as grain

    def rows() -> Iterator[Tokens]:
        width = task.seq_len + 1
        pieces = [document[at : at + width] for document in documents_of(task)
                  for at in range(0, len(document), width)]  # fmt: skip
        source = MapDataset.source([{"tokens": piece} for piece in pieces]).to_iter_dataset()
        packed = grain.FirstFitPackIterDataset(source, length_struct={"tokens": width},
                                               num_packing_bins=64)  # fmt: skip
        for row in packed:
            if count is not None:
                count["padded"] += int((row["tokens_segment_ids"] == 0).sum())
            yield row["tokens"]

    return batched(rows, task, count)


def batched(rows: object, task: Task, count: Count) -> Steps:
    """Stack rows of ``T + 1`` tokens into batches ``(x, y)``, epoch after epoch, or count one."""
    assert callable(rows)
    while True:
        left = iter(rows())
        while batch := list(islice(left, task.batch_size)):
            tokens = torch.from_numpy(np.stack(batch).astype(np.int64))
            if count is None and len(batch) == task.batch_size:
                yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            elif count is not None:
                count.update(rows=len(batch), used=tokens.numel())
        if count is not None:
            count["used"] -= count["padded"]
            return
