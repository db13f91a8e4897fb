"""Which samples make batch k, for every rank, from any position; and an order without a list."""

import itertools

import numpy as np
import pytest

from npydata import Permutation
from npydata.loader.sampler import BLOCK_SAMPLES, BatchSampler, EpochOrder


def positions(sampler):
    return [list(sampler.positions(k)) for k in range(len(sampler))]


def small_cases():
    sizes = itertools.product(range(14), range(1, 6), range(1, 5), (False, True))
    for samples, batch_size, world_size, drop_last in sizes:
        for start in range(samples + 1):
            yield samples, batch_size, world_size, drop_last, start


def test_the_positions_of_several_batches_are_those_of_each():
    for samples, batch_size, world_size, drop_last, start in small_cases():
        sampler = BatchSampler(
            samples, batch_size, rank=world_size - 1, world_size=world_size,
            drop_last=drop_last, start=start,
        )  # fmt: skip
        each = positions(sampler)
        for batches in filter(len, (range(len(each)), range(1, len(each)), range(len(each) - 1))):
            found = sampler.positions_of(batches).tolist()
            assert found == [k for batch in batches for k in each[batch]]


def ranks_of(samples, batch_size, world_size, drop_last=False, start=0):
    return [
        BatchSampler(
            samples,
            batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            start=start,
        )
        for rank in range(world_size)
    ]


def test_every_rank_gets_equally_many_batches_of_equal_size():
    for case in small_cases():
        shapes = {tuple(map(len, positions(rank))) for rank in ranks_of(*case)}
        assert len(shapes) == 1, case


def test_the_ranks_share_the_rest_of_the_epoch_and_nobody_gets_a_sample_twice():
    for samples, batch_size, world_size, drop_last, start in small_cases():
        ranks = ranks_of(samples, batch_size, world_size, drop_last, start)
        given = sorted(k for rank in ranks for batch in positions(rank) for k in batch)
        assert given == list(range(start, samples - ranks[0].dropped))


def test_less_than_one_sample_per_rank_is_dropped():
    for samples, batch_size, world_size, drop_last, start in small_cases():
        sampler = ranks_of(samples, batch_size, world_size, drop_last, start)[0]
        rest = (samples - start) % (batch_size * world_size)
        assert sampler.dropped == (rest if drop_last else rest % world_size)


def test_a_global_batch_is_the_next_samples_and_rank_r_takes_the_rth_slice():
    first, second = ranks_of(100, 4, 2)
    assert positions(first)[:2] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert positions(second)[:2] == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_the_tail_is_split_evenly():
    assert [positions(rank)[-1] for rank in ranks_of(17, 4, 3)] == [[12], [13], [14]]


def test_a_sampler_from_where_another_stood_goes_on_with_its_batches():
    for samples, batch_size, world_size, drop_last, start in small_cases():
        ranks = ranks_of(samples, batch_size, world_size, drop_last, start)
        for rank, k in itertools.product(ranks[-1:], range(len(ranks[0]))):
            after = ranks_of(samples, batch_size, world_size, drop_last, rank.samples_after(k))
            assert positions(after[-1]) == positions(rank)[k:]


def test_every_batch_but_the_last_is_full():
    for case in small_cases():
        sizes = [len(batch) for batch in positions(ranks_of(*case)[0])]
        assert set(sizes[:-1]) <= {case[1]}
        assert all(0 < size <= case[1] for size in sizes)


def test_drop_last_leaves_out_a_short_batch_only():
    assert [len(BatchSampler(n, 4, drop_last=True)) for n in (3, 4, 7, 8)] == [
        0,
        1,
        1,
        2,
    ]
    assert [len(BatchSampler(n, 4)) for n in (0, 3, 4, 7, 8)] == [0, 1, 1, 2, 2]


def test_positions_are_exact_at_an_8_tib_file_and_4096_ranks():
    samples, world_size = 2**42 - 1, 4096
    last = BatchSampler(samples, 32, rank=4095, world_size=world_size)
    assert last.positions(len(last) - 1)[-1] == samples - last.dropped - 1
    assert last.dropped == samples % world_size


def test_the_shuffle_is_a_permutation():
    lengths = [*range(1, 300), 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537]
    for n in lengths:
        assert np.array_equal(np.sort(Permutation(n, n)(np.arange(n))), np.arange(n))


def test_a_large_shuffle_stays_in_range_and_never_repeats():
    for n in (2**31 + 1, 10**12, 4**20 + 1, 2**62):
        samples = Permutation(n, 11)(np.arange(n - 10_000, n))
        assert samples.min() >= 0
        assert samples.max() < n
        assert len(np.unique(samples)) == 10_000


def test_another_seed_shuffles_otherwise_and_the_same_one_alike():
    orders = [tuple(Permutation(100, seed)(np.arange(100))) for seed in range(50)]
    assert len(set(orders)) == 50
    assert tuple(Permutation(100, 7)(np.arange(100))) == orders[7]


def test_single_positions_and_blocks_agree():
    shuffle = Permutation(50, 5)
    assert [shuffle(i) for i in range(50)] == shuffle(np.arange(50)).tolist()


def test_the_order_of_an_epoch_is_the_shuffle_cut_into_batches():
    order = EpochOrder(BatchSampler(1000, 7), seed=3, epoch=2, shuffle=True)
    whole = np.concatenate([order(k) for k in range(143)])
    assert np.array_equal(np.sort(whole), np.arange(1000))
    assert np.array_equal(whole, order.permutation(np.arange(1000)))


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = BatchSampler(100, 100)
    orders = {
        tuple(EpochOrder(sampler, seed, epoch, True)(0)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_without_shuffle_the_order_is_the_datasets():
    order = EpochOrder(BatchSampler(10, 4), seed=3, epoch=2, shuffle=False)
    assert [order(k).tolist() for k in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("batch_size", [1, 3, BLOCK_SAMPLES - 1, BLOCK_SAMPLES, BLOCK_SAMPLES + 1])
def test_batches_asked_for_in_any_order_are_the_same(batch_size):
    sampler = BatchSampler(9 * BLOCK_SAMPLES + 5, batch_size)
    mixed = EpochOrder(sampler, 1, 0, True)
    numbers = np.linspace(0, len(sampler) - 1, 20).astype(int).tolist()
    for number in [*reversed(numbers), *numbers, numbers[0]]:
        positions_of_it = np.array(sampler.positions(number))
        assert np.array_equal(mixed(number), mixed.permutation(positions_of_it))


def test_a_block_that_was_given_up_is_computed_again():
    order = EpochOrder(BatchSampler(20 * BLOCK_SAMPLES, BLOCK_SAMPLES), 1, 0, True)
    first = order(0).tolist()
    for number in range(1, 20):
        order(number)
    assert order(0).tolist() == first


def test_an_epoch_of_a_trillion_samples_keeps_a_few_blocks():
    order = EpochOrder(BatchSampler(10**12, 32), 1, 0, True)
    for number in range(0, 10**10, 10**9):
        assert len(order(number)) == 32
    assert len(order._blocks) <= EpochOrder.KEPT_BLOCKS


def test_an_order_of_windows_gives_the_windows_of_each_batchs_indices():
    sampler = BatchSampler(1000, 7)
    order = EpochOrder(sampler, 3, 2, True)
    windows = EpochOrder(sampler, 3, 2, True, windows_of=lambda indices: 10 * indices)
    for number in range(len(sampler)):
        assert windows(number).tolist() == (10 * order(number)).tolist()
