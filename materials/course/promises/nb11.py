"""What must hold of rows and mixtures, and one-line changes that break it."""

import torch

from course.exercises import nb11
from course.lab import Card
from course.play import nb11 as play
from course.promises import expect


def a_row_is_its_documents_alone(mine):
    """Each document of a packed row has the losses that it has alone"""
    row = play.three_documents()
    positions = torch.from_numpy(mine.within_groups(row.lengths))
    found = play.changed(row, mine.document_mask(row.document_ids), positions)
    expect(found, [0, 0, 0], "losses that differ, by document")


def no_sample_comes_twice(mine):
    """In an epoch of its source, no sample of a mixture comes twice"""
    mixture = mine.Mixture([70, 40, 30], [7, 2, 1])
    expect(len({mixture[i] for i in range(400)}), 400, "different samples, of 400")


CARDS = {
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
        no_sample_comes_twice,
        {
            "Some samples come twice, and some sources are passed over.": "",
            "In the long run the shares are wrong.": (
                "Each count is within half a sample of its share, however long the run is."
            ),
            "A resumed run gets other samples.": "It computes the same counts again.",
        },
    ),
}
