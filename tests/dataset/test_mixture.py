"""Mixtures: shares exact at every prefix, nothing lost or repeated, the same wherever it runs."""

import warnings
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_tools import Fetched, Numbers
from packing_tools import write_datatrove
from torch.utils.data import DataLoader

from npydata import (
    AsyncDataLoader,
    LoaderError,
    MixtureDataset,
    MmapDataset,
    NpyDataError,
    NpyTokensDataset,
    Packed,
    PackedDataset,
    write_tokens,
)
from npydata.dataset.interleaving import FINEST_SHARE, Interleaving, shares_of

SLOW = settings(deadline=None, max_examples=60)
WEIGHTS = st.lists(
    st.one_of(st.integers(0, 9), st.floats(0, 1).map(lambda w: round(w, 2))), min_size=4, max_size=4
).filter(any)


class Named(Fetched):
    """Sample ``i`` of source ``k`` is ``1000 * k + i``."""

    def __init__(self, length, number):
        super().__init__(length)
        self.number = number

    def __getitem__(self, index):
        return super().__getitem__(index) + 1000 * self.number

    def fetch(self, indices):
        return super().fetch(indices) + 1000 * self.number


def sources(*lengths):
    return {name: Named(n, k) for k, (name, n) in enumerate(zip("abcdefg", lengths, strict=False))}


@SLOW
@given(WEIGHTS, st.dictionaries(st.integers(1, 700), WEIGHTS, max_size=4), st.integers(1, 1000))
def test_shares_are_within_one_sample_at_every_prefix(weights, schedule, count):
    interleaving = Interleaving(weights, schedule)
    found, ranks = interleaving.sources_at(np.arange(count))
    counts, shares, phase = [0] * 4, [Fraction(0)] * 4, 0
    for sample, (source, rank) in enumerate(zip(found.tolist(), ranks.tolist(), strict=True)):
        phase += sample in interleaving.begins[1:]
        assert rank == counts[source]  # nothing is lost or repeated
        assert interleaving.sample_of(source, rank) == sample
        counts[source] += 1
        assert interleaving.counts(sample + 1).tolist() == counts
        shares = [a + b for a, b in zip(shares, interleaving.weights[phase], strict=True)]
        assert all(abs(a - b) < 1 for a, b in zip(counts, shares, strict=True))


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.7, 0.2, 0.1], [0.70001, 0.2, 0.09999]])
def test_far_away_samples_are_found_at_once(weights):
    interleaving = Interleaving(weights, {10**9: [5, 1, 1]})
    for sample in (10**9 - 1, 10**9 + 5, 10**15):
        samples = np.arange(sample, sample + 50)
        found, ranks = interleaving.sources_at(samples)
        for source in range(3):
            mine = ranks[found == source]
            begin = interleaving.counts(sample)[source]
            assert mine.tolist() == list(range(begin, begin + len(mine)))
        before = {1: 10**9, 0: 0}[sample > 10**9]
        share = [
            before * old + (sample - before) * new if before else sample * old
            for old, new in zip(*[*interleaving.weights], strict=True)
        ]
        counts = interleaving.counts(sample)
        assert all(abs(int(c) - s) < 1 for c, s in zip(counts, share, strict=True))


def test_shares_too_fine_are_rounded_and_none_is_lost():
    shares = shares_of([123_456_789, 3, 987_654_321])
    assert sum(shares) == 1
    assert shares[1] == Fraction(1, FINEST_SHARE)
    assert abs(shares[0] - Fraction(123_456_789, 1_111_111_113)) < Fraction(3, FINEST_SHARE)


@pytest.mark.parametrize(("weights", "message"), [
    ([1, -1], "weight -1, expected a number of 0 or more"),
    ([0, 0], "expected one above 0"),
    ([1], "1 weights, expected 2"),
    (["x", 1], "weight 'x'"),
    ([float("nan"), 1], "weight nan"),
    ({"a": 1, "z": 2}, "'b' is in only one of the two"),
])  # fmt: skip
def test_impossible_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        MixtureDataset(sources(5, 5), weights)


@pytest.mark.parametrize(("change", "message"), [
    ({"sources": {}, "weights": []}, "no sources"),
    ({"sources": sources(5, 0)}, "source 'b' has 0 samples"),
    ({"num_samples": 0}, "num_samples=0"),
    ({"max_epochs": 0}, "max_epochs=0"),
    ({"at_the_end": "stop"}, "at_the_end='stop', expected one of raise, drop, warn"),
    ({"schedule": {0: [1, 1]}}, "sample number 0, expected more than 0"),
])  # fmt: skip
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MixtureDataset(**{"sources": sources(5, 5), "weights": [1, 1], **change})


@pytest.mark.parametrize(("change", "message"), [
    ({"sources": list(sources(5, 5).values())}, 'sources is a list, expected .*"web": web'),
    ({"sources": {"a": "a.npy", "b": [1]}}, "source 'a' is a str, expected a map-style dataset"),
    ({"sources": {"a": [1], "b": ([1], 0.5)}}, "source 'b' is a tuple, expected a map-style"),
    ({"sources": {"a": [1], "b": iter([1])}}, "source 'b' is a list_iterator, expected a map-st"),
    ({"weights": 0.5}, "weights=0.5, expected one for each of a, b"),
])  # fmt: skip
def test_what_is_no_dictionary_of_datasets_or_no_weights_is_named(change, message):
    with pytest.raises(TypeError, match=message):
        MixtureDataset(**{"sources": sources(5, 5), "weights": [1, 1], **change})


def test_an_epoch_ends_when_the_first_source_was_passed_over():
    ds = MixtureDataset(sources(10, 7, 50), {"a": 0.5, "b": 0.3, "c": 0.2})
    taken = Counter((ds.fetch(range(len(ds))) // 1000).tolist())
    assert taken[0] == 10
    assert max(taken[1] / 7, taken[2] / 50) < 1


@SLOW
@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    num_samples=st.integers(1, 80),
    seed=st.integers(0, 5),
)
def test_a_source_gives_each_sample_once_in_each_of_its_epochs(lengths, weights, num_samples, seed):
    ds = MixtureDataset(sources(*lengths), weights, num_samples=num_samples)
    epochs = [ds.fetch(range(num_samples), seed=seed, epoch=e).tolist() for e in range(4)]
    stream = [sample for epoch in epochs for sample in epoch]
    for k, length in enumerate(lengths):
        mine = [sample - 1000 * k for sample in stream if sample // 1000 == k]
        whole = len(mine) // length * length
        for begin in range(0, whole, length):
            assert sorted(mine[begin : begin + length]) == list(range(length))
        assert len(set(mine[whole:])) == len(mine) - whole


def test_passes_over_a_source_differ():
    ds = MixtureDataset(sources(40), [1], num_samples=40)
    assert ds.fetch(range(40), epoch=0).tolist() != ds.fetch(range(40), epoch=1).tolist()
    assert ds.fetch(range(40), seed=1).tolist() != ds.fetch(range(40), seed=2).tolist()


def test_new_weights_lose_and_repeat_nothing():
    old = MixtureDataset(sources(20, 30, 40), [3, 2, 1], num_samples=50, seed=3)
    new = old.reweighted(70, {"a": 1, "b": 1, "c": 8}, {90: [1, 1, 1]})
    stream = [s for epoch in range(3) for s in new.fetch(range(50), epoch=epoch).tolist()]
    before = [s for epoch in range(2) for s in old.fetch(range(50), epoch=epoch).tolist()][:70]
    assert stream[:70] == before
    for k, length in enumerate((20, 30, 40)):
        mine = [s for s in stream if s // 1000 == k]
        assert all(
            len(set(mine[b : b + length])) == len(mine[b : b + length])
            for b in range(0, len(mine), length)
        )
    assert [s // 1000 for s in stream[70:80]].count(2) == 8
    assert new.weights_at(69) == old.weights
    assert new.weights_at(95) == dict.fromkeys("abc", Fraction(1, 3))


@pytest.mark.parametrize("at_the_end", ["raise", "drop", "warn"])
def test_a_source_is_passed_over_no_more_often_than_allowed(at_the_end):
    ds = MixtureDataset(
        sources(4, 100), [1, 1], num_samples=60, max_epochs=2, at_the_end=at_the_end
    )
    begun = ds.fetch(range(15)) // 1000
    assert begun.tolist().count(0) == 8
    if at_the_end == "raise":
        with pytest.raises(NpyDataError, match=r"source 'a' begins epoch 3, expected 2 at most"):
            ds.fetch(range(20))
    elif at_the_end == "warn":
        with pytest.warns(UserWarning, match="source 'a' begins epoch 3"):
            ds.fetch(range(20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ds.fetch(range(20))
    else:
        found = (ds.fetch(range(60)) // 1000).tolist()
        assert found.count(0) == 8
        assert ds.weights_at(30) == {"a": 0, "b": 1}


def test_when_all_sources_are_dropped_the_mixture_is_over():
    ds = MixtureDataset(sources(3, 4), [1, 1], num_samples=7, max_epochs=1, at_the_end="drop")
    assert sorted(ds.fetch(range(7)).tolist()) == [0, 1, 2, 1000, 1001, 1002, 1003]
    with pytest.raises(NpyDataError, match="begins epoch 2, expected 1 at most"):
        ds.fetch([0], epoch=1)


def test_a_loader_must_not_shuffle_a_mixture():
    ds = MixtureDataset(sources(5, 5), [1, 1])
    with pytest.raises(LoaderError, match=r"shuffle=True over a MixtureDataset.*keeps the shares"):
        AsyncDataLoader(ds, shuffle=True)


def run(ds, state=None, *, world_size=1, batch_size=3, batches=None, **settings):
    """Samples of an epoch in global order, and the state behind some batches of every rank."""
    loaders = [
        AsyncDataLoader(ds, shuffle=False, seed=7, batch_size=batch_size, rank=rank,
                        world_size=world_size, **settings)
        for rank in range(world_size)
    ]  # fmt: skip
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    found = []
    iterators = [iter(loader) for loader in loaders]
    for parts in zip(*iterators, strict=True):
        found += [sample for part in parts for sample in part.tolist()]
        if batches is not None and len(found) >= batches * batch_size * world_size:
            break
    for iterator in iterators:
        iterator.close()
    return found, loaders[0].state_dict()


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_workers": 4, "prefetch_factor": 8}])
def test_samples_are_the_same_for_any_number_of_workers(settings):
    ds = MixtureDataset(sources(20, 30, 40), [3, 2, 1], num_samples=60)
    assert run(ds, **settings)[0] == run(ds, prefetch_factor=0)[0]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(1, 3)), max_size=4),
    st.integers(0, 2),
)
def test_interrupted_anywhere_each_sample_comes_once(stops, epoch):
    ds = MixtureDataset(sources(20, 300, 40), [3, 2, 1], schedule={100: [1, 1, 1]}, num_samples=840)
    expected = ds.fetch(range(840), seed=7, epoch=epoch).tolist()
    base = AsyncDataLoader(ds, shuffle=False, seed=7).state_dict()
    state = {**base, "epoch": epoch, "fingerprint": ds.fingerprint_at(epoch, 0)}
    found = []
    for world_size, batch_size, batches in stops:
        part, state = run(ds, state, world_size=world_size, batch_size=batch_size,
                          batches=batches, prefetch_factor=0)  # fmt: skip
        found += part
    part, _ = run(ds, state, batch_size=11, prefetch_factor=0)
    assert found + part == expected


def test_a_state_fits_a_mixture_that_differs_only_in_what_comes_later():
    old = MixtureDataset(sources(20, 30), [3, 1], num_samples=60)
    _, state = run(old, batches=4)  # 12 samples
    new = old.reweighted(12, [1, 3])
    found, _ = run(new, state)
    assert found == new.fetch(range(12, 60), seed=7).tolist()
    with pytest.raises(LoaderError, match="other data"):
        run(old.reweighted(11, [1, 3]), state)
    with pytest.raises(LoaderError, match="other data"):
        run(MixtureDataset(sources(20, 31), [3, 1], num_samples=60), state)
    with pytest.raises(LoaderError, match="other data"):
        run(MixtureDataset(sources(20, 30), [2, 1], num_samples=60), state)


def test_the_loader_counts_what_it_gave_of_each_source():
    ds = MixtureDataset(sources(10, 30), [3, 1], num_samples=40)
    loader = AsyncDataLoader(ds, shuffle=False, batch_size=4, seed=0)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    counts = loader.stats.sources
    assert {name: count.samples for name, count in counts.items()} == {"a": 15, "b": 5}
    assert counts["a"].epochs == 1.5
    assert counts["a"].tokens is None
    iterator.close()


def test_tokens_are_counted_where_samples_have_so_many(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1000)])
    ds = MixtureDataset({"a": MmapDataset(tmp_path / "a.npy", 10)}, [1], num_samples=8)
    assert ds.progress(0, 5)["a"].tokens == 50


def test_mixtures_of_mixtures_keep_all_shares():
    inner = MixtureDataset(sources(50, 60), [1, 2], num_samples=30)
    outer = MixtureDataset({"in": inner, "c": Named(70, 5)}, [3, 1], num_samples=100)
    stream = [s // 1000 for e in range(2) for s in outer.fetch(range(100), epoch=e).tolist()]
    assert Counter(stream) == {5: 50, 0: 50, 1: 100}


def test_token_windows_and_packed_rows_can_be_mixed_each_with_their_like(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1000)])
    windows = NpyTokensDataset(tmp_path / "a.npy", 16)
    in_order = MmapDataset(tmp_path / "a.npy", 16)
    rows = [PackedDataset(write_datatrove(tmp_path, [9, 30, 8, 25], name), 16) for name in "bc"]
    ds = MixtureDataset({"w": windows, "m": in_order}, [1, 1])
    x, y = ds.fetch(range(10))
    assert torch.equal(x[:, 1:], y[:, :-1])
    packed = MixtureDataset({"b": rows[0], "c": rows[1]}, [1, 1], num_samples=6)
    batch = packed.fetch(range(6))
    assert isinstance(batch, Packed)
    assert batch.inputs.shape == (6, 16)
    for index in range(6):
        for one, other in zip(packed[index], batch.samples()[index], strict=True):
            assert one == other if isinstance(one, int) else torch.equal(one, other)
    assert len(list(AsyncDataLoader(packed, shuffle=False, batch_size=4))) == 2
    mixed = MixtureDataset({"w": windows, "b": rows[0]}, [1, 1])
    with pytest.raises(NpyDataError, match="different kinds"):
        mixed.fetch(range(4))
    shapes = MixtureDataset({"a": in_order, "b": MmapDataset(tmp_path / "a.npy", 8)}, [1, 1])
    with pytest.raises(NpyDataError, match="different shapes"):
        shapes.fetch(range(4))


def test_sources_without_whole_batches_are_asked_for_samples():
    ds = MixtureDataset({"a": Numbers(5), "b": Named(6, 1)}, [1, 1], num_samples=10)
    assert sorted(ds.fetch(range(10)).tolist()) == sorted(int(ds[i]) for i in range(10))
    stock = DataLoader(ds, batch_size=5)
    assert torch.cat(list(stock)).tolist() == ds[0:10].tolist()


def test_a_stock_loader_s_epoch_is_set_by_hand():
    ds = MixtureDataset(sources(20, 30), [1, 1], num_samples=8)
    first = ds[range(8)].tolist()
    ds.set_epoch(1)
    assert ds[range(8)].tolist() == ds.fetch(range(8), epoch=1).tolist() != first
