"""Rows of whole documents beside windows, and beside others' packing.

The documents are the files of Python's standard library, or those of a given token file. What each
way makes of an epoch stands in tables of its own: the share of all places that hold a token, and
the share of all tokens that are in no row.

    python materials/bench/packing.py --quick
"""

import sys
import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from harness import SHARE, Bench, Target, installed, main, naive, ours, peer
from tokens import (
    SEED,
    dataset_of,
    in_order,
    random_windows,
    through_loader,
    warm_rate,
)

from npydata import PackedDataset, open_tokens
from npydata.dataset.prepare import prepare as prepare_tokens

END_OF_TEXT = 0
BUFFERED = 1000
"""Documents that nanochat's loader chooses from."""


def prepare(args):
    args.path = Path(args.tokens) if args.tokens else args.folder / "library.npy"
    if not args.tokens:
        library = Path(sysconfig.get_path("stdlib"))
        sources = [
            one
            for one in sorted(library.rglob("*.py"))
            if not {"site-packages", "test", "tests"} & set(one.parts)
        ]
        every = max(1, len(sources) // 300) if args.quick else 1
        prepare_tokens(sources[::every], args.path, sample_mb=2, progress=False)


def packed(task):
    """Open the documents; where the format does not know their ends, a token ends them."""
    known = open_tokens(task.path, dtype=task.dtype).document_ends is not None
    return dataset_of(task, PackedDataset, eot_id=None if known else END_OF_TEXT)


# Others: each yields rows of ``seq_len + 1`` tokens, and how many of them are padding


def documents(task):
    """Yield the documents, each with the token that ends it, in a shuffled order."""
    file = open_tokens(task.path, dtype=task.dtype)
    tokens = file.read(0, file.num_tokens)
    known = file.document_ends
    ends = np.flatnonzero(tokens == END_OF_TEXT) + 1 if known is None else np.asarray(known)
    begins = np.append(0, ends[:-1])
    for k in np.random.default_rng(SEED).permutation(len(ends)).tolist():
        yield tokens[begins[k] : ends[k]]


def concatenated(task):
    """torchtitan's way: a buffer grows by a document, and rows are cut off its front."""
    buffer = []
    for document in documents(task):
        buffer.extend(document.tolist())
        while len(buffer) > task.seq_len:
            yield np.array(buffer[: task.seq_len + 1]), 0
            buffer = buffer[task.seq_len + 1 :]


def best_fit(task):
    """nanochat's way: the longest document that fits, again and again; the shortest is cropped."""
    rest = documents(task)
    buffer = list(islice(rest, BUFFERED))
    while buffer:
        row, left = [], task.seq_len + 1
        while left and buffer:
            fits = [k for k, one in enumerate(buffer) if len(one) <= left]
            k = (
                max(fits, key=lambda k: len(buffer[k]))
                if fits
                else min(range(len(buffer)), key=lambda k: len(buffer[k]))
            )
            row.append(buffer.pop(k)[:left])
            left -= len(row[-1])
            buffer.extend(islice(rest, 1))
        if not left:
            yield np.concatenate(row), 0


def first_fit(task):
    """Grain's packing; documents longer than a row are cut before."""
    from grain import MapDataset
    from grain import experimental as grain

    width = task.seq_len + 1
    pieces = [
        {"tokens": document[at : at + width]}
        for document in documents(task)
        for at in range(0, len(document), width)
    ]
    source = MapDataset.source(pieces).to_iter_dataset()
    rows = grain.FirstFitPackIterDataset(
        source, length_struct={"tokens": width}, num_packing_bins=64
    )
    for row in rows:
        yield row["tokens"], int((row["tokens_segment_ids"] == 0).sum())


def batches(task, rows):
    """Stack rows into batches, epoch after epoch."""
    while True:
        left = rows(task)
        while len(batch := [row for row, _ in islice(left, task.batch_size)]) == task.batch_size:
            tokens = torch.from_numpy(np.stack(batch).astype(np.int64))
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


DEFAULT, WINDOWS = "default", "random windows"
OTHERS = [
    (naive, "torchtitan's way", "concatenate and cut", concatenated),
    (naive, "nanochat's way", "best fit, 1,000 documents", best_fit),
    *([(peer, "Grain", "first fit", first_fit)] if installed("grain") else []),
]
ROWS = [
    ours("row", "ours", "in process", in_order, dataset=packed),
    peer("row", WINDOWS, "in process", random_windows),
    *(role("row", name, setting, batches, rows=rows) for role, name, setting, rows in OTHERS),
    ours("epoch", "ours", "in process", packed),
    *(role("epoch", name, setting, rows) for role, name, setting, rows in OTHERS),
    ours("loader", "ours", DEFAULT, through_loader, workers=None, dataset=packed),
    ours("loader", "ours", "1 worker, prefetch 8", through_loader, workers=1, prefetch=8,
         dataset=packed),
    peer("loader", WINDOWS, DEFAULT, through_loader, workers=None),
    peer("loader", WINDOWS, "1 worker, prefetch 8", through_loader, workers=1, prefetch=8),
]  # fmt: skip
TARGETS = [
    Target("a packed row through the loader is {} the best peer's", f"loader | ours | {DEFAULT}",
           "row | [!or]*", 5),
    Target("through the loader at its default, packed rows reach {} of random windows",
           f"loader | ours | {DEFAULT}", f"loader | {WINDOWS} | {DEFAULT}", 0.2, style=SHARE),
    Target("{} % of the places hold a token", "filled | ours", None, 99, style="{:.2f}"),
    Target("{} % of the tokens are cropped", "cropped | ours", at_most=10,
           style="{:.2f}"),
]  # fmt: skip


def turn(row, task):
    if row.section != "epoch":
        return {row.section: warm_rate(row, task)}
    if row.work is packed:
        report = packed(task).report
        used, places = report.used, report.rows * task.seq_len
        total = used + report.cropped
    else:
        padding = [pad for _, pad in row.work(task)]
        places = len(padding) * (task.seq_len + 1)  # the last target of a row is a token, too
        used, total = places - sum(padding), open_tokens(task.path, dtype=task.dtype).num_tokens
    return {"filled": 100 * used / places, "cropped": 100 * (1 - used / total)}


BENCH = Bench(
    name="packing",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    prepare=prepare,
    turn=turn,
    options={
        "tokens": None,
        "dtype": None,
        "seq_len": 2048,
        "batch_size": 16,
        "warm_s": (0.5, 0.1),
    },
    groups={
        "row": ("Rows in this process", "Mtok/s"),
        "loader": ("Rows through the loader", "Mtok/s"),
        "filled": ("Places that hold a token", "%"),
        "cropped": ("Tokens in no row of an epoch", "% left out"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
