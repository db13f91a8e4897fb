"""What must hold of rows and mixtures, and one-line changes that break it."""

from itertools import pairwise

import numpy as np
import torch

from course.exercises import nb11
from course.lab import Card
from course.play import nb11 as play
from course.promises import expect

LENGTHS, PHASES = [70, 40, 30], [{0: [7, 2, 1]}, {0: [7, 2, 1], 133: [1, 1, 1], 200: [5, 1, 3]}]


def a_row_is_its_documents_alone(mine):
    """Each document of a packed row has the losses that it has alone"""
    row = play.three_documents()
    positions = torch.from_numpy(mine.within_groups(row.lengths))
    found = play.changed(row, mine.document_mask(row.document_ids), positions)
    expect(found, [0, 0, 0], "losses that differ, by document")


def nothing_sees_what_comes(mine):
    """No position sees a later one, and each sees itself"""
    seen = mine.document_mask(torch.tensor([[7, 7, 7, 9, 9, -1]]))[0, 0]
    expect(bool(seen.triu(1).any()), False, "a position sees a later one")
    expect(bool(seen.diagonal().all()), True, "each position sees itself")


def shares_hold_at_every_sample(mine):
    """After any number of samples, each source is within one of its share since the last change"""
    for phases in PHASES:
        mixture, begins = mine.Mixture(LENGTHS, phases), [*sorted(phases), 400]
        for begin, end in pairwise(begins):
            share = np.array(phases[begin]) / sum(phases[begin])
            start = mixture.given(begin)
            for n in range(begin, end + 1):
                away = abs(mixture.given(n) - start - share * (n - begin)).max()
                expect(away <= 1 and mixture.given(n).sum() == n, True, f"after {n} samples")


CARDS = {
    "a mask without a triangle": Card(
        nb11.DOCUMENT_MASK,
        "return same.tril() >> return same",
        nothing_sees_what_comes,
        {
            "The loss falls towards zero within minutes, and the model can write nothing.": "",
            "Documents see their neighbours again.": "The mask still keeps documents apart.",
            "Nothing: the next token is masked in the targets.": (
                "Only the last target of each document is left out."
            ),
        },
    ),
    "one count for the whole row": Card(
        nb11.WITHIN_GROUPS,
        "np.repeat(ends - counts, counts) >> 0",
        a_row_is_its_documents_alone,
        {
            "A document's loss depends a little on how long those before it are.": "",
            "Documents see the words of their neighbours.": "The mask hides those as before.",
            "The model refuses the row.": "Every position is below 64, as in a row that was cut.",
        },
    ),
    "each by itself": Card(
        nb11.COUNTS_AFTER,
        "samples, total = samples - counts[-1], total - weight >> pass",
        shares_hold_at_every_sample,
        {
            "Some samples come twice, and some sources are passed over.": "",
            "In the long run the shares are wrong.": (
                "Each count is within half a sample of its share, however long the run is."
            ),
            "A resumed run gets other samples.": "It computes the same counts again.",
        },
    ),
}
