"""What the learner's dataset must keep, and one-line changes that break it."""

import os
import pickle
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from npydata import TokenFileError
from tutorial.mutation import Card
from tutorial.promised import expect


@contextmanager
def file_of(ids, dtype=np.uint16):
    """A token file that is there while it is needed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        np.save(path, np.asarray(ids, dtype))
        yield path


def every_window_counts(mine):
    """Every window that fits is counted, and no other"""
    for tokens in range(14):
        for seq_len in (1, 2, 3):
            for stride in range(1, 6):
                fitting = [s for s in range(0, tokens, stride) if s + seq_len + 1 <= tokens]
                call = f"num_windows({tokens}, {seq_len}, {stride})"
                expect(mine.num_windows(tokens, seq_len, stride), len(fitting), call)


def windows_stay_in_their_row(mine):
    """No window crosses from one row into the next"""
    with file_of(np.arange(200).reshape(8, 25)) as path:
        x, y = mine.MyDataset(path, 6, seed=0).fetch(range(500))
        crossing = int((x[:, 0] // 25 != y[:, -1] // 25).sum())
        expect(crossing, 0, "windows that cross, of 500")
    starts = mine.window_offsets(np.arange(4), 2, 9, 4)
    expect(list(starts), [0, 4, 9, 13], "two rows of 9 tokens, stride 4")


def pages_hold_the_window(mine):
    """The pages of a window are those of its first and its last byte"""
    for start, count, itemsize, offset in [(0, 1, 2, 0), (2047, 1, 2, 0), (2048, 2048, 2, 0),
                                           (1000, 1025, 4, 128), (2**42, 7, 4, 1024)]:  # fmt: skip
        held = range(offset + start * itemsize, offset + (start + count) * itemsize)
        found = mine.pages_touched(start, count, itemsize, offset, 4096)
        expect(tuple(found), (held[0] // 4096, held[-1] // 4096), "pages")


def y_is_x_shifted(mine):
    """y is x, one token on"""
    with file_of(range(10_000)) as path:
        x, y = mine.MyDataset(path, 16, seed=0).fetch(range(64))
        expect(tuple(x.shape), (64, 16), "shape")
        expect(y[0].tolist(), (x[0] + 1).tolist(), "targets")
        expect(torch.equal(x + 1, y), True, "in every row")


def tensors_are_ready(mine):
    """x and y are contiguous tensors of 64-bit integers"""
    with file_of(range(1000)) as path:
        for part in mine.MyDataset(path, 16, seed=0).fetch([0, 5, 9]):
            expect((part.dtype, part.is_contiguous()), (torch.int64, True), "dtype, contiguous")


def large_ids_survive(mine):
    """Ids above 2^24 survive exactly"""
    for first in (2**24 - 5, 2**32 - 10):
        with file_of(range(first, first + 10), np.uint32) as path:
            x, y = mine.MyDataset(path, 9, seed=0)[0]
            expect(x.tolist(), list(range(first, first + 9)), "x")
            expect(y.tolist(), list(range(first + 1, first + 10)), "y")


def every_start_is_drawn(mine):
    """Every window can be drawn, the last one too"""
    with file_of(range(8)) as path:
        starts = mine.MyDataset(path, 3, seed=0).fetch(range(300))[0][:, 0]
        expect(sorted(set(starts.tolist())), [0, 1, 2, 3, 4], "starts drawn")
    with file_of(range(4)) as path:
        expect(mine.MyDataset(path, 3, seed=0)[0][0].tolist(), [0, 1, 2], "a file of one window")


def samples_come_back(mine):
    """A sample depends on seed, epoch and index, and on nothing else"""
    with file_of(range(50_000)) as path:
        one, again = (mine.MyDataset(path, 16, seed=7) for _ in range(2))
        batch = one.fetch([3, 1, 4])[0]
        expect(torch.equal(again.fetch([1, 4, 3])[0][[2, 0, 1]], batch), True, "in another order")
        expect(torch.equal(again[4][0], batch[2]), True, "asked for alone")


def epochs_differ(mine):
    """Another epoch draws other windows"""
    with file_of(range(50_000)) as path:
        data = mine.MyDataset(path, 16, seed=7)
        first = data.fetch(range(100))[0]
        data.set_epoch(1)
        expect(torch.equal(data.fetch(range(100))[0], first), False, "epochs 0 and 1 are equal")
        expect(torch.equal(data.fetch(range(100), epoch=0)[0], first), True, "epoch 0 came back")


def no_seed_is_fresh(mine):
    """Without a seed every call draws anew"""
    with file_of(range(50_000)) as path:
        data = mine.MyDataset(path, 16)
        one, other = (data.fetch(range(100))[0] for _ in range(2))
        expect(torch.equal(one, other), False, "two calls are equal")
        starts = data.fetch([5] * 100)[0][:, 0]
        expect(len(starts.unique()) > 50, True, "one index, many windows")


def a_shrunk_file_is_an_error(mine):
    """A file that changed its size is an error, and kills nobody"""
    for fetched_before in (False, True):
        with file_of(range(50_000)) as path:
            data = mine.MyDataset(path, 16, seed=0)
            if fetched_before:
                data.fetch(range(64))
            os.truncate(path, 4096)
            try:
                data.fetch(range(64))
            except TokenFileError as error:
                expect(path.name in str(error), True, "the message names the file")
            else:
                raise AssertionError("garbage was returned, expected TokenFileError")


def the_vocabulary_is_a_bound(mine):
    """An id outside the vocabulary is an error"""
    with file_of(range(100)) as path:
        expect(mine.MyDataset(path, 9, seed=0, vocab_size=100).fetch([0])[0].shape[1], 9, "x")
        try:
            mine.MyDataset(path, 9, seed=0, vocab_size=50).fetch(range(64))
        except TokenFileError:
            return
        raise AssertionError("ids up to 99 came through, expected TokenFileError at 50")


def pickles_are_small(mine):
    """A pickled dataset is the file's name, not its tokens"""
    with file_of(range(50_000)) as path:
        data = mine.MyDataset(path, 16, seed=0)
        expect(len(pickle.dumps(data.files[0])) < 2000, True, "under 2,000 bytes")


PROMISES = [
    every_window_counts,
    windows_stay_in_their_row,
    pages_hold_the_window,
    y_is_x_shifted,
    tensors_are_ready,
    large_ids_survive,
    every_start_is_drawn,
    samples_come_back,
    epochs_differ,
    no_seed_is_fresh,
    a_shrunk_file_is_an_error,
    the_vocabulary_is_a_bound,
    pickles_are_small,
]

CARDS = [
    Card(
        name="a window lost",
        symbol="npydata.dataset.windows.num_windows",
        line="return (num_tokens - width) // stride + 1",
        mutant="return (num_tokens - width) // stride",
        promise=every_start_is_drawn,
        symptoms=(
            "Training stops with an IndexError at the end of the file.",
            "Almost nothing: the last window of every file is never seen.",
            "The loss jumps once in an epoch.",
        ),
        right=2,
        reasons={
            1: "One window too few is counted; an IndexError needs one too many.",
            3: "Nothing is read that shouldn't be: the loss has no reason to jump.",
        },
    ),
    Card(
        name="an easy target",
        symbol="npydata.dataset.datasets.shifted_pair",
        line="targets[:] = tokens[:, 1:]",
        mutant="targets[:] = tokens[:, :-1]",
        promise=y_is_x_shifted,
        symptoms=(
            "The loss falls to zero within minutes: the model copies its input.",
            "The loss stays where it began: nothing can be learnt.",
            "The shapes don't fit, and the loss raises an error.",
        ),
        right=1,
        reasons={
            2: "There is very much to learn here, and it is easy: the answer stands in the input.",
            3: "Both slices leave out one token, so the shapes are the same.",
        },
    ),
    Card(
        name="one epoch for ever",
        symbol="npydata.dataset.windows.random_windows",
        line="hashes = hash_of(indices, seed, epoch)",
        mutant="hashes = hash_of(indices, seed)",
        promise=epochs_differ,
        symptoms=(
            "Workers get the same windows as each other.",
            "A resumed run sees other data than the run that crashed.",
            "From the second epoch on, the training loss falls faster than the validation loss.",
        ),
        right=3,
        reasons={
            1: "Each index has a hash of its own, and no two workers get the same index.",
            2: "It draws what the crashed run drew: seed and index still decide.",
        },
    ),
]
