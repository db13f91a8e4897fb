"""Pure arithmetic: which tokens make a window, which window comes where, which pages hold it."""

import mmap

import numpy as np
import pytest

from npydata import Permutation
from npydata.dataset.hashing import mix64, mix64_of, stream_key
from npydata.dataset.windows import page_runs, random_windows, window_offsets

PAGE = mmap.PAGESIZE
# What a run of today draws; a change here means that no saved run resumes on its own data.
FROZEN_DRAW = [895009708881, 500001607780, 89626006066, 348829052334]
FROZEN_SHUFFLE = [514618328149, 210257271130, 684888377235, 133265405050]


def test_window_offsets_are_exact_beyond_32_bits():
    assert window_offsets(np.array([2**41]), 2**42, 2**43, 3)[0] == 3 * 2**41


def test_another_seed_or_epoch_draws_other_windows():
    draws = [
        random_windows(np.arange(1000), 10**6, seed, epoch)
        for seed, epoch in [(0, 0), (1, 0), (0, 1), (-1, 0), (2**63, 0)]
    ]
    for one in range(len(draws)):
        for other in range(one):
            assert np.mean(draws[one] == draws[other]) < 0.01


def test_random_windows_are_even():
    counts = np.bincount(random_windows(np.arange(160_000), 16, 5, 0), minlength=16)
    chi_square = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi_square < 50  # 15 degrees of freedom: one in 100,000 seeds exceeds it


def test_random_windows_keep_their_values_between_versions():
    drawn = random_windows(np.arange(4), 10**12, seed=1234, epoch=5)
    assert drawn.tolist() == FROZEN_DRAW


def test_mix64_is_the_finaliser_of_splitmix64():
    # First output of splitmix64 seeded with 0, as published with its reference code.
    assert int(mix64(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF


def test_one_integer_is_scrambled_as_an_array_is():
    numbers = [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1, *range(10**18, 10**19, 10**17)]
    assert mix64(np.array(numbers, np.uint64)).tolist() == [mix64_of(one) for one in numbers]


def test_the_order_of_a_keys_parts_counts():
    assert (
        len({int(stream_key(1, 2)), int(stream_key(2, 1)), int(stream_key(1)), int(stream_key())})
        == 4
    )


def test_page_runs_cover_every_byte_with_whole_pages_and_merge_neighbours():
    rng = np.random.default_rng(0)
    for length in (1, 100, PAGE, 3 * PAGE + 5):
        begins = rng.integers(0, 200 * PAGE, 40)
        run_begins, run_lengths = page_runs(begins, length)
        covered = set()
        for begin, run in zip(run_begins.tolist(), run_lengths.tolist(), strict=True):
            assert begin % PAGE == 0
            assert run % PAGE == 0
            pages = set(range(begin // PAGE, (begin + run) // PAGE))
            assert not covered & pages
            covered |= pages
        wanted = {
            p for b in begins.tolist() for p in range(b // PAGE, (b + length - 1) // PAGE + 1)
        }
        assert covered == wanted
        assert np.all(run_begins[1:] > (run_begins + run_lengths)[:-1])


def is_permutation(samples: np.ndarray) -> bool:
    return np.array_equal(np.sort(samples), np.arange(len(samples)))


def test_the_shuffle_is_a_permutation_of_every_length_to_4096():
    wrong = [n for n in range(1, 4097) if not is_permutation(Permutation(n, n)(np.arange(n)))]
    assert not wrong


@pytest.mark.parametrize("exponent", range(13, 21))
def test_the_shuffle_is_a_permutation_around_powers_of_two_and_four(exponent):
    for n in (2**exponent - 1, 2**exponent, 2**exponent + 1):
        assert is_permutation(Permutation(n, 3)(np.arange(n)))


@pytest.mark.parametrize("exponent", [*range(21, 41), 50, 62])
def test_a_large_shuffle_stays_in_range_and_never_repeats(exponent):
    for n in (2**exponent - 1, 2**exponent, min(2**exponent + 1, 2**62)):
        # Half the positions side by side at the end, where cells beyond n are walked over.
        positions = np.unique(
            np.concatenate(
                (np.arange(n - 20_000, n), np.random.default_rng(exponent).integers(0, n, 20_000))
            )
        )
        samples = Permutation(n, 11)(positions)
        assert samples.min() >= 0
        assert samples.max() < n
        assert len(np.unique(samples)) == len(positions)


def test_blocks_of_positions_and_single_ones_agree():
    shuffle = Permutation(1000, 5)
    block = shuffle(np.arange(1000))
    assert [shuffle(i) for i in range(1000)] == block.tolist()
    assert np.array_equal(shuffle(np.arange(1000).reshape(10, 100)), block.reshape(10, 100))
    assert shuffle([]).shape == (0,)


def test_other_seeds_shuffle_otherwise():
    orders = {tuple(Permutation(100, seed)(np.arange(100)).tolist()) for seed in range(200)}
    assert len(orders) == 200


def test_small_shuffles_reach_every_order_about_equally():
    counts = {}
    for seed in range(12_000):
        order = tuple(Permutation(4, seed)(np.arange(4)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert max(counts.values()) < 2 * min(counts.values())


def test_neighbours_are_torn_apart():
    gaps = np.abs(np.diff(Permutation(10**6, 1)(np.arange(10**5))))
    assert 0.9 * 10**6 / 3 < gaps.mean() < 1.1 * 10**6 / 3  # two uniform draws lie n/3 apart


def test_the_shuffle_keeps_its_values_between_versions():
    assert Permutation(10**12, 1234)(np.arange(4)).tolist() == FROZEN_SHUFFLE


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_a_length_that_cannot_be_shuffled_is_refused(n):
    with pytest.raises(ValueError, match=r"expected 1 to 2\*\*62"):
        Permutation(n, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_shuffle_is_refused(position):
    with pytest.raises(IndexError, match="a shuffle of 10"):
        Permutation(10, 0)(position)
