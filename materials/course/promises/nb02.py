"""What must hold of the order of lesson 02, and one-line changes that break it."""

import numpy as np

from course.exercises import nb02
from course.lab import Card
from course.promises import expect


def every_sample_comes_once(mine):
    """Every sample comes once in an epoch"""
    for n in range(1, 120):
        order = np.sort(mine.MyShuffle(n, n)(np.arange(n)))
        expect(np.array_equal(order, np.arange(n)), True, f"each of {n} samples once")
    orders = [mine.MyOrder(53, 8, rank=rank, world_size=3) for rank in range(3)]
    dealt = [sample for order in orders for batch in order for sample in batch]
    found = len(dealt), len({*dealt})  # 2 x 24 and a short step of 3
    expect(found, (51, 51), "samples that 3 ranks get of 53, and how many of them differ")


def seeds_decide(mine):
    """Another seed gives another order, and the same seed the same"""
    orders = [tuple(mine.MyShuffle(100, seed)(range(100))) for seed in range(30)]
    expect(len(set(orders)), 30, "orders of 30 seeds")
    expect(tuple(mine.MyShuffle(100, 7)(range(100))), orders[7], "seed 7 again")


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
        "= start + >> =",
        a_resume_goes_on,
        {
            "A resumed epoch shows its first samples once more.": "",
            "A resumed epoch skips samples.": "It begins too early, not too late.",
            "The ranks of a resumed run get different numbers of batches.": "All of them make the "
            "same mistake, so they stay together.",
        },
    ),
}
