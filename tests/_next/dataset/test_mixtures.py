"""Mixtures: shares that hold at every prefix, nothing lost or repeated, the same anywhere."""

# ruff: noqa: E501

import pickle
from collections import Counter
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_builders import Numbers, sequences, write_documents, write_npy
from torch.utils.data import DataLoader

from npydata import MixtureDataset, MmapDataset, NpyDataError, NpyTokensDataset, PackedDataset

SLOW = settings(deadline=None, max_examples=60)
WEIGHTS = st.lists(
    st.one_of(st.integers(0, 9), st.floats(0, 1).map(lambda w: round(w, 2))), min_size=4, max_size=4
).filter(any)
BOUND = 2.5
"""No source is further from its share, counted from where its weights begin (1 of two sources)."""


class Fetched(Numbers):
    """Numbers that come as whole batches."""

    def fetch(self, indices):
        return torch.tensor([self[i] for i in np.asarray(indices).tolist()], dtype=torch.int64)


def numbers(*lengths, kind=Fetched):
    return {name: kind(n, k) for k, (name, n) in enumerate(zip("abcdefg", lengths, strict=False))}


def sources_in(samples):
    return [sample // 1_000_000 for sample in samples]


def require_shares(found, weights, bound):
    """Raise unless each prefix of some samples has the shares of these weights."""
    taken = np.cumsum(np.eye(len(weights))[found], axis=0)
    share = np.array(weights, float) / sum(weights)
    off = taken - np.arange(1, len(found) + 1)[:, None] * share
    assert np.abs(off).max(initial=0) <= bound + 1e-3 * len(found) * 1e-2


@SLOW
@given(WEIGHTS, st.dictionaries(st.integers(1, 700), WEIGHTS, max_size=4), st.integers(1, 1000))
def test_shares_hold_at_every_prefix_of_every_phase(weights, schedule, count):
    mixture = MixtureDataset(numbers(50, 60, 70, 80), weights, schedule=schedule, num_samples=count)
    samples = mixture.fetch(range(count)).tolist()
    found = sources_in(samples)
    begins = [0, *sorted(schedule)]
    for begin, end in zip(begins, [*begins[1:], count], strict=True):
        require_shares(found[begin:end], schedule.get(begin, weights), BOUND)
    for k, (name, length) in enumerate(zip("abcd", (50, 60, 70, 80), strict=True)):
        own = [s for s in samples if s // 1_000_000 == k]
        assert mixture.counts(count)[name] == len(own)
        for first in range(0, len(own), length):  # each sample once in each epoch of its source
            epoch = own[first : first + length]
            assert len(set(epoch)) == len(epoch)
        assert mixture.progress(0, count)[name].epochs == pytest.approx(len(own) / length)


@SLOW
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20), st.integers(0, 2**60))
def test_shares_hold_for_up_to_twenty_sources_and_far_away(weights, begin):
    sources = {str(k): Fetched(1000, k) for k in range(len(weights))}
    mixture = MixtureDataset(sources, weights, num_samples=2**61)
    bound = 1 if len(weights) == 2 else BOUND
    require_shares(sources_in(mixture.fetch(range(300)).tolist()), weights, bound)
    counts = [np.array([*mixture.counts(begin + k).values()], object) for k in range(40)]
    found = sources_in(mixture.fetch(range(begin, begin + 39)).tolist())
    for k, source in enumerate(found):
        step = counts[k + 1] - counts[k]
        assert step[source] == step.sum() == 1
    assert sum(counts[0]) == begin
    for count, weight in zip(counts[0].tolist(), weights, strict=True):
        assert abs(count - Fraction(begin * weight, sum(weights))) <= bound + begin / 10**12


def test_equal_and_zero_weights_and_decimals():
    found = sources_in(
        MixtureDataset(numbers(9, 9), [1, 1], num_samples=8).fetch(range(8)).tolist()
    )
    assert Counter(found) == {0: 4, 1: 4}
    never = MixtureDataset(numbers(9, 9, 9), [1, 0, 1], num_samples=100).fetch(range(100))
    assert 1 not in sources_in(never.tolist())
    assert MixtureDataset(numbers(9, 9), [0.1, 0.3], num_samples=4).weights == {
        "a": Fraction(1, 4), "b": Fraction(3, 4)}  # fmt: skip
    by_name = MixtureDataset(numbers(9, 9), {"b": 3, "a": 1}, num_samples=4)
    assert by_name.weights["a"] == Fraction(1, 4)


def test_an_epoch_ends_with_the_first_source_that_was_passed_over():
    mixture = MixtureDataset(numbers(100, 10), [1, 1])
    samples = mixture.fetch(range(len(mixture))).tolist()
    assert sum(s >= 1_000_000 for s in samples) == 10
    assert samples[-1] >= 1_000_000


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"weights": [1, -1]}, ValueError, "weight -1, expected"),
    ({"weights": [0, 0]}, ValueError, "expected one above 0"),
    ({"weights": [1]}, ValueError, "1 weights, expected 2"),
    ({"weights": ["x", 1]}, ValueError, "weight 'x'"),
    ({"weights": [float("nan"), 1]}, ValueError, "weight nan"),
    ({"weights": {"a": 1, "z": 2}}, ValueError, "'b'"),
    ({"weights": 3}, TypeError, "weights=3"),
    ({"sources": {}, "weights": []}, ValueError, "no sources"),
    ({"sources": numbers(5, 0)}, ValueError, "source 'b' has 0 samples"),
    ({"sources": {"a": "a.npy", "b": "b.npy"}}, TypeError, "source 'a' is a str"),
    ({"sources": [1, 2]}, TypeError, "expected a dictionary"),
    ({"num_samples": 0}, ValueError, "num_samples=0"),
    ({"schedule": {0: [1, 1]}}, ValueError, "0, expected more than 0"),
])  # fmt: skip
def test_impossible_settings_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        MixtureDataset(**{"sources": numbers(5, 5), "weights": [1, 1], **change})


def test_epochs_of_the_mixture_go_on_where_the_last_one_ended():
    mixture = MixtureDataset(numbers(50, 70), [2, 1], num_samples=40, seed=3)
    epochs = [mixture.fetch(range(40), epoch=e).tolist() for e in range(5)]
    longer = MixtureDataset(numbers(50, 70), [2, 1], num_samples=200, seed=3)
    assert list(chain(*epochs)) == longer.fetch(range(200)).tolist()
    mixture.set_epoch(2)
    assert mixture[:].tolist() == epochs[2]
    assert [int(mixture[i]) for i in (0, 7, -1)] == [epochs[2][i] for i in (0, 7, -1)]
    assert mixture.fetch([5, 5, -1], epoch=1).tolist() == [epochs[1][i] for i in (5, 5, -1)]
    assert mixture.fetch(range(40), seed=4).tolist() != epochs[2]
    for wrong in (40, -41):
        with pytest.raises(IndexError):
            mixture.fetch([wrong])


@SLOW
@given(WEIGHTS, WEIGHTS, st.integers(0, 300), st.integers(0, 300))
def test_new_weights_in_mid_run_lose_and_repeat_nothing(weights, later, at, again):
    old = MixtureDataset(numbers(50, 60, 70, 80), weights, num_samples=600)
    new = old.reweighted(at, later).reweighted(at + again, weights, {at + again + 50: later})
    before, after = old.fetch(range(600)).tolist(), new.fetch(range(600)).tolist()
    assert after[:at] == before[:at]
    for begin, end, now in ((at, at + again, later), (at + again, at + again + 50, weights),
                            (at + again + 50, 600, later)):  # fmt: skip
        require_shares(sources_in(after[begin:end]), now, BOUND)
    for k, length in enumerate((50, 60, 70, 80)):
        own = [s for s in after if s // 1_000_000 == k]
        for first in range(0, len(own), length):
            epoch = own[first : first + length]
            assert len(set(epoch)) == len(epoch)
    if at:
        assert new.fingerprint_at(0, at) == old.fingerprint_at(0, at)
    if at and weights != later and again:
        assert new.fingerprint() != old.fingerprint()


def test_a_fingerprint_tells_sources_weights_and_lengths_apart():
    made = [MixtureDataset(numbers(50, 70), w, num_samples=n, schedule=s)
            for w, n, s in (([2, 1], 40, None), ([1, 1], 40, None), ([2, 1], 40, {20: [1, 1]}))]  # fmt: skip
    made.append(MixtureDataset(numbers(50, 71), [2, 1], num_samples=40))
    assert len({m.fingerprint() for m in made}) == len(made)
    again = MixtureDataset(numbers(50, 70), [2, 1], num_samples=40)
    assert again.fingerprint() == made[0].fingerprint()
    assert made[0].fingerprint_at(0, 10) == made[2].fingerprint_at(0, 10)
    assert "0.6667" in repr(made[0])


def test_sources_of_any_kind_fetch_together_and_one_by_one(tmp_path):
    path = write_npy(tmp_path / "a.npy", np.arange(2000, dtype="<u2"))
    windows = {"a": MmapDataset(path, 8), "b": NpyTokensDataset(path, 8, seed=1)}
    mixture = MixtureDataset(windows, [1, 3], num_samples=60)
    x, y = mixture.fetch([3, 9, 3, 30, -1])
    assert x.shape == (5, 8)
    assert torch.equal(x + 1, y)
    assert torch.equal(x[0], x[2])
    for k, index in enumerate([3, 9, 3, 30, 59]):
        assert torch.equal(mixture[index][0], x[k])
    stock = next(iter(DataLoader(mixture, 60, num_workers=1)))
    assert torch.equal(stock[0], mixture[:][0])
    one_by_one = MixtureDataset(numbers(50, 70, kind=Numbers), [2, 1], num_samples=40)
    assert torch.equal(
        one_by_one.fetch(range(40)),
        MixtureDataset(numbers(50, 70), [2, 1], num_samples=40).fetch(range(40)),
    )
    mixture.will_need(range(10))
    assert torch.equal(pickle.loads(pickle.dumps(mixture))[:][0], mixture[:][0])


def test_packed_rows_of_several_sources_are_one_batch(tmp_path):
    packed = {name: PackedDataset(write_documents(tmp_path / f"{name}.ds", [9, 5, 30] * 20, first=k), 16)
              for name, k in (("a", 1), ("b", 10_000))}  # fmt: skip
    mixture = MixtureDataset(packed, [1, 1], num_samples=20)
    batch = mixture.fetch(range(20))
    assert batch.inputs.shape == (20, 16)
    for _, tokens, _ in sequences(batch):
        assert len({token >= 10_000 for token in tokens}) == 1
    assert mixture.progress(0, 20)["a"].tokens == mixture.counts(20)["a"] * 16


def test_a_mixture_of_mixtures_keeps_the_inner_order():
    inner = MixtureDataset(numbers(30, 30), [1, 1], num_samples=20)
    outer = MixtureDataset({"in": inner, "c": Fetched(50, 7)}, [1, 1], num_samples=80)
    samples = outer.fetch(range(80)).tolist()
    own = [s for s in samples if s < 7_000_000]
    require_shares(sources_in(own), [1, 1], 1)
    assert len(own) == 40


def test_samples_that_do_not_fit_together_are_refused(tmp_path):
    path = write_npy(tmp_path / "a.npy", np.arange(2000, dtype="<u2"))
    for other in (MmapDataset(path, 9), MmapDataset(path, 8, as_dict=("a", "b")), Fetched(50)):
        mixture = MixtureDataset({"a": MmapDataset(path, 8), "b": other}, [1, 1], num_samples=20)
        with pytest.raises(NpyDataError, match=r"a: .*b: "):
            mixture.fetch(range(10))


def test_a_mixture_refuses_to_be_shuffled():
    assert "order" in MixtureDataset(numbers(5, 5), [1, 1]).refuses_shuffle
