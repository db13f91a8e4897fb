"""What the learner's documents and mixtures must keep, and one-line changes that break it."""

from itertools import product

import numpy as np
import torch

from tutorial import documents
from tutorial.mutation import Card
from tutorial.promised import expect

# Rows


def an_end_is_behind_its_token(mine):
    """A document ends behind its end-of-text token, and all pieces together are the file"""
    tokens = documents.corpus(60)
    ends = np.asarray(mine.ends_behind(tokens, documents.EOT))
    expect(int(ends[-1]), len(tokens), "end of the last document")
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        found = np.flatnonzero(tokens[begin:end] == documents.EOT).tolist()
        expect(found, [end - begin - 1], "where a document has its end-of-text token")


def positions_begin_again(mine):
    """Positions begin again at 0 with each document, and bounds tell where"""
    for lengths in ([3, 1, 4], [1], [5, 5], [1, 1, 1, 61]):
        counted = np.asarray(mine.within_groups(np.array(lengths)))
        expect(counted.tolist(), [k for n in lengths for k in range(n)], f"positions of {lengths}")
        bounds = mine.sequence_bounds(torch.from_numpy(counted)[None])
        expect(bounds.tolist(), [0, *np.cumsum(lengths).tolist()], f"bounds of {lengths}")
        expect(bounds.dtype, torch.int32, "dtype of the bounds")


def a_row_is_its_documents_alone(mine):
    """Each document of a packed row has the losses that it has alone"""
    row = documents.three_documents()
    mask = mine.document_mask(row.document_ids)
    positions = mine.within_groups(row.lengths)
    expect(documents.changed(row, mask=mask, position_ids=positions), [0, 0, 0], "other losses")


def nothing_sees_what_comes(mine):
    """No position sees a later one, and each sees itself"""
    seen = mine.document_mask(torch.tensor([[7, 7, 7, 9, 9, -1]]))[0, 0]
    expect(bool(seen.triu(1).any()), False, "a position sees a later one")
    expect(bool(seen.diagonal().all()), True, "each position sees itself")


# Sources

LENGTHS = [70, 40, 30]
WEIGHTS = [[7, 2, 1], [1, 1, 1], [5, 5, 0]]
UNIT = 30
"""What a sample is worth, so that all shares are whole numbers."""


def mixtures(mine):
    """Some weights, alone and followed by others."""
    for first, second in product(WEIGHTS, [None, *WEIGHTS]):
        schedule = {133: second} if second else None
        yield first, second or first, mine.MyMixture(LENGTHS, first, schedule)


def every_prefix_has_its_shares(mine):
    """After any number of samples each source has given its share, to within one sample"""
    for first, second, mixture in mixtures(mine):
        given, owed = np.zeros(3, int), np.zeros(3, int)
        for i in range(len(mixture)):
            given[mixture.source_of(i)[0]] += 1
            now = first if i < 133 else second
            owed += UNIT // sum(now) * np.array(now)
            near = (abs(given * UNIT - owed) < UNIT).all()
            expect(near, True, f"{first}, then {second}: within one after {i + 1} samples")


def what_was_given_is_known(mine):
    """How much each source has given is known after any number of samples, without counting"""
    for first, second, mixture in mixtures(mine):
        sources = [mixture.source_of(i)[0] for i in range(len(mixture))]
        for samples in (1, 10, 132, 133, 134, 399):
            expected = np.bincount(sources[:samples], minlength=3).tolist()
            found = np.asarray(mixture.given(samples)).tolist()
            expect(found, expected, f"{first}, then {second}: of the first {samples}")


def a_far_sample_is_found_at_once(mine):
    """The source of sample 10^15 is found at once"""
    mixture = mine.MyMixture(LENGTHS, [7, 2, 1], num_samples=10**15 + 10)
    given = np.asarray(mixture.given(10**15)).tolist()
    expect(given, [7 * 10**14, 2 * 10**14, 10**14], "of the first 10^15")
    found = sorted(mixture.source_of(10**15 + k)[0] for k in range(10))
    expect(found, [0] * 7 + [1] * 2 + [2], "sources of the ten samples from there on")


def each_sample_once_an_epoch(mine):
    """In each of its epochs a source gives each sample once, over a change of weights too"""
    mixture = mine.MyMixture(LENGTHS, [7, 2, 1], {133: [1, 1, 1]})
    seen = {}
    for i in range(len(mixture)):
        source, epoch, sample = mixture[i].tolist()
        seen.setdefault((source, epoch), []).append(sample)
    for (source, epoch), samples in seen.items():
        complete = (source, epoch + 1) in seen
        expect(
            len(samples), len(set(samples)), f"source {source}, epoch {epoch}: different samples"
        )
        if complete:
            expect(len(samples), LENGTHS[source], f"source {source}, epoch {epoch}: samples")


def another_epoch_another_order(mine):
    """Each epoch of a source has another order; the same seed has the same one again"""
    ranks = np.arange(200)
    epochs, samples = mine.shuffled_samples(ranks, 100, 3)
    expect(np.asarray(epochs).tolist(), (ranks // 100).tolist(), "epochs")
    first, second = np.asarray(samples).reshape(2, 100).tolist()
    expect(first != second, True, "epoch 1 has another order than epoch 0")
    again = np.asarray(mine.shuffled_samples(ranks[150:], 100, 3)[1]).tolist()
    expect(again, second[50:], "asked again, from the middle of an epoch on")


def a_stopped_run_goes_on(mine):
    """A run that was stopped goes on with the samples it would have had, in other batches too"""
    mixture = mine.MyMixture(LENGTHS, [7, 2, 1], {133: [1, 1, 1]})
    whole = [mixture[i].tolist() for i in range(len(mixture))]
    for batches, size in ((1, 20), (7, 12), (13, 50)):
        _, given = documents.stopped(mixture, batches, 20, size)
        expect(given == whole, True, f"stopped after {batches} batches, then batches of {size}")


PROMISES = [
    an_end_is_behind_its_token,
    positions_begin_again,
    a_row_is_its_documents_alone,
    nothing_sees_what_comes,
    every_prefix_has_its_shares,
    what_was_given_is_known,
    a_far_sample_is_found_at_once,
    each_sample_once_an_epoch,
    another_epoch_another_order,
    a_stopped_run_goes_on,
]

CARDS = [
    Card(
        name="one mask for all",
        symbol="examples.masks.document_mask",
        line="return same.tril()",
        mutant="return same",
        promise=nothing_sees_what_comes,
        symptoms=(
            "Documents see their neighbours again.",
            "The loss falls towards zero within minutes, and the model can write nothing.",
            "Nothing: the next token is masked in the targets.",
        ),
        right=2,
        reasons={
            1: "The mask still keeps documents apart.",
            3: "Only the last target of each document is left out.",
        },
    ),
    Card(
        name="the pattern from its beginning",
        symbol="tutorial.blending.Run.sources_at",
        line="repetition, slot = divmod(samples - self.begin, len(self.pattern))",
        mutant="repetition, slot = divmod(samples, len(self.pattern))",
        promise=each_sample_once_an_epoch,
        symptoms=(
            "The shares of the sources are wrong.",
            "Every source begins again at its first sample when the weights change.",
            "Shares are right, or nearly, but some samples of the sources never come.",
        ),
        right=3,
        reasons={
            1: "A pattern that begins elsewhere still has the same shares.",
            2: "What came before the run is still added.",
        },
    ),
    Card(
        name="one order for ever",
        symbol="tutorial.blending.shuffled_samples",
        line="order = Permutation(length, int(stream_key(seed, epoch)))",
        mutant="order = Permutation(length, int(stream_key(seed, 0)))",
        promise=another_epoch_another_order,
        symptoms=(
            "A source that is passed over again comes in the same order each time.",
            "Two sources come in the same order.",
            "A resumed run sees other samples than the run that crashed.",
        ),
        right=1,
        reasons={
            2: "Each source has a seed of its own.",
            3: "The order still depends on the seed alone, so it can be computed again.",
        },
    ),
]
