"""The shuffle that is computed: a bijection for every size, the same everywhere, in no memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npydata import Permutation

POWERS = [2**k + d for k in range(1, 17) for d in (-1, 0, 1)]


def test_every_small_size_is_a_bijection():
    for n in [*range(1, 700), *POWERS]:
        assert np.array_equal(np.sort(Permutation(n, 3)(np.arange(n))), np.arange(n)), n


@given(st.integers(1, 62), st.sampled_from([-1, 0, 1]), st.integers(-(2**70), 2**70))
def test_no_two_places_have_the_same_sample_at_any_size(bits, more, seed):
    n = min(max(1, 2**bits + more), 2**62)
    places = np.unique(np.linspace(0, n - 1, 500).astype(np.int64).clip(0, n - 1))
    samples = Permutation(n, seed)(places)
    assert len(np.unique(samples)) == len(places)
    assert 0 <= samples.min() <= samples.max() < n
    assert Permutation(n, seed)(int(places[-1])) == samples[-1]


def test_a_resumed_run_sees_the_same_order_whatever_the_versions():
    assert Permutation(10, 0)(np.arange(10)).tolist() == [5, 9, 2, 7, 4, 3, 1, 6, 0, 8]
    large = Permutation(10**12, 0)([0, 10**12 - 1])
    assert large.tolist() == [206204812167, 884502287972]


def test_every_order_of_a_few_is_about_equally_likely():
    orders = [tuple(Permutation(4, seed)(np.arange(4))) for seed in range(4800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert 120 < counts.min() <= counts.max() < 290


def test_what_is_out_of_range_is_refused():
    for n in (0, 2**62 + 1):
        with pytest.raises(ValueError, match=f"n={n}"):
            Permutation(n, 0)
    for position in (-1, [3, 10]):
        with pytest.raises(IndexError):
            Permutation(10, 0)(position)
