"""What the learner's order must keep, and one-line changes that break it."""

from itertools import product

import numpy as np

from tutorial.mutation import Card
from tutorial.promised import expect


def small_epochs():
    """(samples, batch size, ranks, drop_last, start) of epochs that can be looked at whole."""
    for samples, batch, ranks, drop_last in product(range(12), (1, 3), (1, 2, 3), (False, True)):
        for start in {0, samples // 2, samples}:
            yield samples, batch, ranks, drop_last, start


def ranks_of(mine, samples, batch, ranks, drop_last=False, start=0):
    """The sampler of each rank."""
    return [
        mine.MySampler(
            samples, batch, rank=rank, world_size=ranks, drop_last=drop_last, start=start
        )
        for rank in range(ranks)
    ]


def batches(sampler):
    return [list(sampler.positions(k)) for k in range(len(sampler))]


def every_sample_comes_once(mine):
    """Every sample comes once in an epoch"""
    for n in [*range(1, 120), 1023, 1024, 1025]:
        order = np.sort(mine.MyPermutation(n, n)(np.arange(n)))
        expect(np.array_equal(order, np.arange(n)), True, f"each of {n} samples once")


def neighbours_part(mine):
    """Neighbours do not stay neighbours"""
    for side in (30, 50):
        shuffle = mine.MyPermutation(side**2, 3)
        steps = np.diff(shuffle(np.arange(side**2))) % side
        most = np.bincount(steps).max() / len(steps)
        found = "under a fifth" if most < 0.2 else f"{most:.0%}"
        expect(found, "under a fifth", "neighbours that end equally far from each other")


def no_list_is_kept(mine):
    """A trillion samples take no memory"""
    for n in (10**12, 4**20 + 1, 2**62):
        shuffle = mine.MyPermutation(n, 11)
        samples = shuffle(np.arange(n - 5000, n))
        kept = sum(np.size(value) for value in vars(shuffle).values())
        expect(kept < 100, True, "fewer than 100 numbers are kept")
        expect(int(samples.min()) >= 0 and int(samples.max()) < n, True, "samples in range")
        expect(len(np.unique(samples)), 5000, "different samples, of 5000")


def seeds_decide(mine):
    """Another seed gives another order, and the same seed the same"""
    orders = [tuple(mine.MyPermutation(100, seed)(np.arange(100))) for seed in range(30)]
    expect(len(set(orders)), 30, "orders of 30 seeds")
    expect(tuple(mine.MyPermutation(100, 7)(np.arange(100))) == orders[7], True, "seed 7 again")


def epochs_differ(mine):
    """No two pairs of seed and epoch share an order"""
    pairs = list(product((0, 1, 7, 2**40), (0, 1, 2, 1000)))
    expect(len({int(mine.epoch_seed(*pair)) for pair in pairs}), len(pairs), "different seeds")


def one_or_many(mine):
    """One position alone gives the same sample as among others"""
    shuffle = mine.MyPermutation(50, 5)
    expect([shuffle(k) for k in range(50)], shuffle(np.arange(50)).tolist(), "samples")


def ranks_stay_together(mine):
    """All ranks get equally many batches, of the same sizes"""
    for case in small_epochs():
        sizes = {tuple(map(len, batches(rank))) for rank in ranks_of(mine, *case)}
        expect(len(sizes), 1, f"different cuts of {case}")


def nobody_shares(mine):
    """No sample goes to two ranks, and fewer than one for each rank are left over"""
    for samples, batch, ranks, drop_last, start in small_epochs():
        found = ranks_of(mine, samples, batch, ranks, drop_last, start)
        given = sorted(k for rank in found for one in batches(rank) for k in one)
        rest = (samples - start) % (batch * ranks)
        end = samples - (rest if drop_last else rest % ranks)
        expect(given, list(range(start, end)), f"positions of {samples} samples from {start}")


def slices_in_turn(mine):
    """A round of batches is the next samples, and rank r takes slice r of them"""
    first, second = ranks_of(mine, 100, 4, 2)
    expect(batches(first)[:2], [[0, 1, 2, 3], [8, 9, 10, 11]], "rank 0")
    expect(batches(second)[:2], [[4, 5, 6, 7], [12, 13, 14, 15]], "rank 1")


def a_resume_goes_on(mine):
    """A run that resumes gets just the batches that were still to come"""
    for samples, batch, ranks, drop_last, start in small_epochs():
        for sampler in ranks_of(mine, samples, batch, ranks, drop_last, start)[-1:]:
            for k in range(len(sampler)):
                stood = sampler.samples_after(k)
                later = ranks_of(mine, samples, batch, ranks, drop_last, stood)[-1]
                expect(batches(later), batches(sampler)[k:], f"batches after sample {stood}")


def a_resume_may_differ(mine):
    """A run may resume with another batch size and another number of ranks"""
    for (batch, ranks), (new_batch, new_ranks) in product(product((2, 3), (1, 2, 3)), repeat=2):
        old = ranks_of(mine, 48, batch, ranks)
        seen = [k for rank in old for one in batches(rank)[:2] for k in one]
        new = ranks_of(mine, 48, new_batch, new_ranks, start=old[0].samples_after(2))
        seen += [k for rank in new for one in batches(rank) for k in one]
        dropped = new[0].dropped
        expect(sorted(seen), list(range(48 - dropped)), f"{ranks} ranks, then {new_ranks}")


def iterators_begin_where_they_should(mine):
    """A new iterator begins the next epoch, unless none was begun"""
    for cursor, place in [
        (mine.MyCursor(2, 64), (2, 64)),
        (mine.MyCursor(2, 64, begun=True), (3, 0)),
        (mine.MyCursor(0, 0), (0, 0)),
        (mine.MyCursor(2, 64, begun=True, after_failure=mine.MyCursor(2, 96)), (2, 96)),
    ]:
        found = cursor.for_next_iterator()
        expect((found.epoch, found.samples), place, "epoch and sample")


PROMISES = [
    every_sample_comes_once,
    neighbours_part,
    no_list_is_kept,
    seeds_decide,
    epochs_differ,
    one_or_many,
    ranks_stay_together,
    nobody_shares,
    slices_in_turn,
    a_resume_goes_on,
    a_resume_may_differ,
    iterators_begin_where_they_should,
]

CARDS = [
    Card(
        name="one order for all",
        symbol="npydata.dataset.permutation.Permutation.__init__",
        line="self.keys = [stream_key(seed, n, k) for k in range(FEISTEL_ROUNDS // 2)]",
        mutant="self.keys = [stream_key(n, k) for k in range(FEISTEL_ROUNDS // 2)]",
        promise=seeds_decide,
        symptoms=(
            "Some samples come twice in an epoch, and others never.",
            "No error: every seed and every epoch has the same order.",
            "A resumed run sees other samples than the run that crashed.",
        ),
        right=2,
        reasons={
            1: "The moves are the same ones, so each can still be undone: every sample comes once.",
            3: "One order for all is the same order before the crash and after it.",
        },
    ),
    Card(
        name="from the beginning",
        symbol="npydata.loader.sampler.BatchSampler.samples_after",
        line="return self.start + (full * self.batch_size + tail) * self.world_size",
        mutant="return (full * self.batch_size + tail) * self.world_size",
        promise=a_resume_goes_on,
        symptoms=(
            "A resumed epoch shows its first samples again, and never its last ones.",
            "A resumed epoch has too many batches.",
            "The ranks of a resumed run get different numbers of batches.",
        ),
        right=1,
        reasons={
            2: "How many batches are left was computed before; only where they lie is wrong.",
            3: "No rank computes another number of batches: all of them make the same mistake.",
        },
    ),
    Card(
        name="the last round",
        symbol="npydata.loader.sampler.BatchSampler.cut",
        line="return full_batches, 0 if drop_last else rest // self.world_size",
        mutant="return full_batches, 0 if drop_last else -(-rest // self.world_size)",
        promise=nobody_shares,
        symptoms=(
            "The ranks wait for each other for ever at the end of the epoch.",
            "The last batch is missing on one rank.",
            "The last rank is given positions that don't exist: an IndexError after a whole epoch.",
        ),
        right=3,
        reasons={
            1: "All ranks still get equally many batches, so nobody waits for another.",
            2: "Every rank has its last batch; that of the last rank reaches beyond the samples.",
        },
    ),
]
