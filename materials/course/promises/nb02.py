"""What must hold of the order of lesson 02, and one-line changes that break it."""

from itertools import product

import numpy as np

from course.exercises import nb02
from course.lab import Card
from course.promises import expect


def every_sample_comes_once(mine):
    """Every sample comes once in an epoch"""
    for n in [*range(1, 120), 1023, 1024, 1025]:
        order = np.sort(mine.MyShuffle(n, n)(np.arange(n)))
        expect(np.array_equal(order, np.arange(n)), True, f"each of {n} samples once")


def no_list_is_kept(mine):
    """A trillion samples take no memory"""
    for n in (10**12, 4**20 + 1, 2**62):
        shuffle = mine.MyShuffle(n, 11)
        samples = shuffle(range(n - 5000, n))
        kept = sum(np.size(value) for value in vars(shuffle).values())
        expect(kept < 100, True, f"{kept} numbers are kept, fewer than 100")
        expect(len({k for k in samples if 0 <= k < n}), 5000, "different samples, of 5000")


def seeds_decide(mine):
    """Another seed gives another order, and the same seed the same"""
    orders = [tuple(mine.MyShuffle(100, seed)(range(100))) for seed in range(30)]
    expect(len(set(orders)), 30, "orders of 30 seeds")
    expect(tuple(mine.MyShuffle(100, 7)(range(100))), orders[7], "seed 7 again")


def no_sample_twice(mine):
    """No sample goes to two ranks, and fewer than one for each rank are dropped"""
    for samples, batch_size, ranks in product(range(14), (1, 3), (1, 2, 3)):
        dealt = [(batch, 0, samples, batch_size, rank, ranks)
                 for batch in range(samples) for rank in range(ranks)]  # fmt: skip
        given = sorted(k for one in dealt for k in mine.rank_slice(*one))
        end = samples - samples % (batch_size * ranks) % ranks
        expect(given, list(range(end)), f"positions of {samples}, for {ranks} ranks")


def a_resume_goes_on(mine):
    """A run that resumes gets just the batches that were still to come"""
    for delivered in range(5):
        whole = [one.tolist() for one in mine.MyOrder(50, 8, seed=3)]
        rest = [one.tolist() for one in mine.MyOrder(50, 8, seed=3, given=8 * delivered)]
        expect(rest, whole[delivered:], f"after {delivered} batches")


CARDS = {
    "one order for all": Card(
        nb02.SCRAMBLE,
        "for across, down in keys: >> for across, down in [(1, 2), (3, 4), (5, 6)]:",
        seeds_decide,
        {
            "No error: every seed and every epoch has the same order.": "",
            "Some samples come twice in an epoch, and others never.": "Each move can still be "
            "undone: every sample comes once.",
            "A resumed run sees other samples than the run that crashed.": "One order for all is "
            "the same order before the crash and after it.",
        },
    ),
    "from the beginning": Card(
        nb02.RANK_SLICE,
        "start + >>",
        a_resume_goes_on,
        {
            "A resumed epoch shows its first samples once more.": "",
            "A resumed epoch skips samples.": "It begins too early, not too late.",
            "The ranks of a resumed run get different numbers of batches.": "All of them make the "
            "same mistake, so they stay together.",
        },
    ),
    "rounded up": Card(
        nb02.RANK_SLICE,
        "(num_samples - begin) // world_size >> -(-(num_samples - begin) // world_size)",
        no_sample_twice,
        {
            "No error: a position past the end becomes a sample that was there before.": "",
            "The ranks wait for each other for ever at the end of the epoch.": "All ranks "
            "still get equally many batches, so none waits for another.",
            "One rank has no last batch.": "Every rank has its last batch; that of the last rank "
            "reaches beyond the samples.",
        },
    ),
}
