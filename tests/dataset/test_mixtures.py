"""Mixtures: shares that hold at every prefix, nothing lost or repeated, the same anywhere."""

import pickle
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import Fetched, Numbers, OneBuffer
from token_builders import sequences, write, write_documents

from npydata import (
    AsyncDataLoader,
    MixtureDataset,
    MmapDataset,
    NpyDataError,
    NpyTokensDataset,
    PackedDataset,
)

SLOW = settings(deadline=None, max_examples=60)
WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 2, 9, 0.1, 0.25, 0.33]), min_size=4, max_size=4)
WEIGHTS = WEIGHTS.filter(any)
LENGTHS = [50, 60, 70, 80]


def mixture_of(lengths, weights, kind=Fetched, **options):
    """Return a mixture of sources a, b, ... of numbers; those of the k-th begin at a million k."""
    sources = {chr(97 + k): kind(n, 1_000_000 * k) for k, n in enumerate(lengths)}
    return MixtureDataset(sources, weights, **options)


def counts(mixture, samples):
    """Return how many of the first samples each source gives."""
    return [source.samples for source in mixture.progress(0, samples).values()]


def require_shares(samples, weights):
    """Raise unless each prefix of some samples has the shares of these weights.

    No source is further than 2.5 samples from its share (1 of two), since the weights began.
    """
    found = np.array(samples, np.int64) // 1_000_000
    taken = np.cumsum(np.eye(len(weights))[found], axis=0)
    share = np.arange(1, len(found) + 1)[:, None] * (np.array(weights, float) / sum(weights))
    assert np.abs(taken - share).max(initial=0) <= (1.01 if len(weights) == 2 else 2.51)


def require_each_once(samples, lengths):
    """Raise if a source gives a sample twice in one of its epochs."""
    for k, length in enumerate(lengths):
        own = [sample for sample in samples if sample // 1_000_000 == k]
        epochs = [own[first : first + length] for first in range(0, len(own), length)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)


@SLOW
@given(WEIGHTS, st.dictionaries(st.integers(1, 700), WEIGHTS, max_size=4), st.integers(1, 1000))
def test_shares_hold_at_every_prefix_of_every_phase(weights, schedule, count):
    mixture = mixture_of(LENGTHS, weights, schedule=schedule, num_samples=count)
    samples = mixture.fetch(range(count)).tolist()
    steps = {0: weights, **schedule}
    for begin, end in pairwise([*sorted(steps), count]):
        require_shares(samples[begin:end], steps[begin])
    require_each_once(samples, LENGTHS)
    given_by = np.bincount(np.array(samples) // 1_000_000, minlength=4).tolist()
    assert counts(mixture, count) == given_by
    assert mixture.progress(0, count)["c"].epochs == given_by[2] / 70


@SLOW
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20), st.integers(0, 2**60))
def test_shares_hold_for_up_to_twenty_sources_and_far_away(weights, begin):
    mixture = mixture_of([1000] * len(weights), weights, num_samples=2**61)
    require_shares(mixture.fetch(range(300)).tolist(), weights)
    before, after = (np.array(counts(mixture, end)) for end in (begin, begin + 40))
    assert sum(before) == begin
    for count, weight in zip(before.tolist(), weights, strict=True):
        assert abs(count - Fraction(begin * weight, sum(weights))) <= 2.5
    found = mixture.fetch(range(begin, begin + 40)).numpy() // 1_000_000
    assert np.array_equal(np.bincount(found, minlength=len(weights)), after - before)


@SLOW
@given(WEIGHTS, WEIGHTS, st.integers(0, 300), st.integers(0, 300))
def test_new_weights_in_mid_run_lose_and_repeat_nothing(weights, later, at, more):
    old = mixture_of(LENGTHS, weights, num_samples=600)
    new = old.reweighted(at, later).reweighted(at + more, weights)
    new = new.reweighted(at + more + 50, later)
    before, after = old[:].tolist(), new[:].tolist()
    assert after[:at] == before[:at]
    require_shares(after[at : at + more], later)
    require_shares(after[at + more : at + more + 50], weights)
    require_shares(after[at + more + 50 :], later)
    require_each_once(after, LENGTHS)
    assert new.fingerprint_at(0, at) == old.fingerprint_at(0, at)
    new.set_epoch(1)
    assert (old.epoch, new.epoch) == (0, 1)


def test_weights_are_ratios_of_decimals_by_name_or_in_order():
    exact = {"a": Fraction(1, 4), "b": Fraction(3, 4)}
    for weights in ([0.1, 0.3], [1, 3], {"b": 0.75, "a": 0.25}):
        assert mixture_of([9, 9], weights, num_samples=4).weights == exact


def test_an_epoch_ends_when_the_first_source_was_passed_over():
    samples = mixture_of([100, 10], [1, 1])[:].tolist()
    assert sum(sample >= 1_000_000 for sample in samples) == 10
    assert samples[-1] >= 1_000_000


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"weights": [1, -1]}, ValueError, "weight -1, expected"),
    ({"weights": [0, 0]}, ValueError, "expected one above 0"),
    ({"weights": [1]}, ValueError, "expected one for each of a, b"),
    ({"weights": [float("nan"), 1]}, ValueError, "weight nan"),
    ({"weights": {"a": 1, "z": 2}}, ValueError, "'b'"),
    ({"sources": {"a": [1], "b": []}}, ValueError, "source 'b' has 0 samples"),
    ({"sources": {"a": "a.npy", "b": "b.npy"}}, TypeError, "source 'a' is a str"),
    ({"sources": [1, 2]}, TypeError, "expected a dictionary"),
    ({"schedule": {0: [1, 1]}}, ValueError, "0, expected more than 0"),
    ({"schedule": {0.5: [1, 1]}}, TypeError, "0.5, expected an integer"),
])  # fmt: skip
def test_impossible_settings_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        MixtureDataset(**{"sources": {"a": [1], "b": [2]}, "weights": [1, 1], **change})


def test_epochs_of_the_mixture_go_on_where_the_last_one_ended():
    mixture = mixture_of([50, 70], [2, 1], num_samples=40, seed=3)
    epochs = [mixture.fetch(range(40), epoch=epoch).tolist() for epoch in range(5)]
    longer = mixture_of([50, 70], [2, 1], num_samples=200, seed=3)
    assert [sample for epoch in epochs for sample in epoch] == longer[:].tolist()
    mixture.set_epoch(2)
    assert mixture[:].tolist() == epochs[2]
    assert mixture.fetch(range(40), seed=4).tolist() != epochs[2]
    with pytest.raises(IndexError):
        mixture.fetch([40])


def test_a_fingerprint_tells_sources_weights_and_lengths_apart():
    made = [
        mixture_of([50, n], w, num_samples=m, schedule=s)
        for n, w, m, s in (
            (70, [2, 1], 40, None),
            (70, [1, 1], 40, None),
            (70, [2, 1], 40, {20: [1, 1]}),
            (71, [2, 1], 40, None),
        )
    ]
    assert len({mixture.fingerprint() for mixture in made}) == len(made)
    assert made[0].fingerprint_at(0, 10) == made[2].fingerprint_at(0, 10)


def test_sources_of_any_kind_fetch_together_and_one_by_one(tmp_path):
    path = write(tmp_path / "a.npy", ids=np.arange(2000))
    windows = {"a": MmapDataset(path, 8), "b": NpyTokensDataset(path, 8, seed=1)}
    mixture = MixtureDataset(windows, [1, 3], num_samples=60)
    x, y = mixture.fetch([3, 9, 3, 30, -1])
    assert torch.equal(x + 1, y)
    for k, index in enumerate([3, 9, 3, 30, 59]):
        assert torch.equal(mixture[index][0], x[k])
    assert [tuple(part.shape) for part in mixture.fetch([])] == [(0, 8)] * 2
    mixture.will_need(range(10))
    x, y = MixtureDataset({**windows, "c": [*windows["a"]]}, [1, 1, 1])[:30]
    assert torch.equal(x + 1, y)
    ids, text = MixtureDataset({"a": [([3, 4], "text")]}, [1])[0]
    assert (ids[1], text) == (4, "text")
    slow, fast = (mixture_of([50, 70], [2, 1], kind, num_samples=40) for kind in (Numbers, Fetched))
    assert torch.equal(slow[:], fast[:])
    outer = MixtureDataset({"in": fast, "c": Fetched(50, 7_000_000)}, [1, 1], num_samples=160)
    own = [sample for sample in outer[:].tolist() if sample < 7_000_000]
    assert len(own) == 80
    require_shares(own, [2, 1])  # a mixture's own order is kept


def test_a_source_that_fills_one_buffer_again_and_again_loses_nothing():
    fresh, reusing = (
        mixture_of([7, 11], [2, 1], kind, num_samples=600, seed=1) for kind in (Fetched, OneBuffer)
    )
    expected = fresh[:].tolist()
    assert reusing[:].tolist() == expected  # several epochs of a source in one batch
    loader = AsyncDataLoader(pickle.loads(pickle.dumps(reusing)), 6, num_workers=4, seed=1)
    assert torch.cat(list(loader)).tolist() == expected


def test_packed_rows_of_several_sources_are_one_batch(tmp_path):
    packed = {
        name: PackedDataset(write_documents(tmp_path / name, [9, 5, 30] * 20, first=k), 16)
        for name, k in (("a.ds", 1), ("b.ds", 10_000))
    }
    mixture = MixtureDataset(packed, [1, 1], num_samples=20)
    batch = mixture[:]
    assert batch.inputs.shape == (20, 16)
    for _, tokens, _ in sequences(batch):
        assert len({token >= 10_000 for token in tokens}) == 1
    assert mixture.progress(0, 20)["a.ds"].tokens == 10 * 16


def test_samples_that_do_not_fit_together_are_refused(tmp_path):
    path = write(tmp_path / "a.npy", shape=(3, 100))
    windows = MmapDataset(path, 8)
    for one, other in (
        (windows, MmapDataset(path, 9)),
        (windows, MmapDataset(path, 8, as_dict=("a", "b"))),
        (windows, Fetched(50)),
        (PackedDataset(path, 8), PackedDataset(path, 9)),
    ):
        with pytest.raises(NpyDataError, match=r"a: .*b: "):
            MixtureDataset({"a": one, "b": other}, [1, 1])[:]
