"""The same batches from any number of workers, and from wherever a run was left."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from loader_tools import Fetched, Numbers, values

from npydata import (
    AsyncDataLoader,
    LoaderError,
    MixtureDataset,
    MmapDataset,
    NpyTokensDataset,
    write_tokens,
)

SETTINGS = list(itertools.product((0, 1, 2, 4, 8), (0, 1, 2, 3, 8)))
KINDS = ("windows", "random windows", "map style", "fetch")


@pytest.fixture
def dataset_of(tmp_path):
    """Return a maker of datasets with about ``length`` samples that differ from each other."""

    def make(kind, length=97):
        if kind == "map style":
            return Numbers(length)
        if kind == "fetch":
            return Fetched(length)
        path = tmp_path / f"{length}.npy"
        if kind == "random windows":  # its epoch has 4,096 samples at least
            write_tokens(path, [np.arange(30_000, dtype=np.uint16)])
            return NpyTokensDataset(path, 9)
        write_tokens(path, [np.arange(length * 10, dtype=np.uint16)])
        return MmapDataset(path, 9)

    return make


def tensors(batch):
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def same(one, other):
    """Whether two lists of batches are bit for bit the same."""
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(tensors(left), tensors(right), strict=True)
    )


def stream(loader):
    """Return the rest of the epoch as one list of samples."""
    return [value for batch in loader for value in values(batch)]


def ranks(dataset, world_size, state=None, **settings):
    """Return one loader per rank, each at ``state``."""
    loaders = [
        AsyncDataLoader(dataset, rank=rank, world_size=world_size, **{"seed": 7, **settings})
        for rank in range(world_size)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


def global_stream(loaders):
    """Return what all ranks get, in the order of the global batches; and their batch counts."""
    given = [[values(batch) for batch in loader] for loader in loaders]
    merged = [value for batches in zip(*given, strict=True) for part in batches for value in part]
    return merged, {len(batches) for batches in given}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_whatever_the_workers_and_prefetch_factors(dataset_of, kind):
    dataset = dataset_of(kind)
    batch_size = 300 if kind == "random windows" else 7
    runs = []
    for workers, factor in SETTINGS:
        loader = AsyncDataLoader(
            dataset, batch_size=batch_size, seed=1, num_workers=workers, prefetch_factor=factor
        )
        runs.append([batch for _ in range(2) for batch in loader])
    assert len(runs[0]) == 28
    wrong = [setting for setting, run in zip(SETTINGS, runs, strict=True) if not same(run, runs[0])]
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_every_batch_gives_the_batches_that_an_uninterrupted_run_gives(
    dataset_of, kind
):
    settings = {"batch_size": 300 if kind == "random windows" else 7, "seed": 1}
    dataset = dataset_of(kind)
    loader, whole, states = AsyncDataLoader(dataset, **settings), [], []
    for _ in range(2):
        for batch in loader:
            states.append(loader.state_dict())
            whole.append(batch)
    assert len(states) == 28
    for taken, state in enumerate(states, start=1):
        resumed = AsyncDataLoader(dataset, **{**settings, "seed": 99}, num_workers=taken % 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        rest = [batch for _ in range(2 - state["epoch"]) for batch in resumed]
        assert same(rest, whole[taken:]), taken


def test_a_state_before_the_first_batch_is_the_epochs_start(dataset_of):
    loader = AsyncDataLoader(dataset_of("windows"), batch_size=7, seed=1)
    state = loader.state_dict()
    iterator = iter(loader)
    assert loader.state_dict() == state
    whole = list(iterator)
    loader.load_state_dict(state)
    assert same(list(loader), whole)


def test_a_state_behind_the_last_batch_is_the_next_epochs_start(dataset_of):
    loader = AsyncDataLoader(dataset_of("windows"), batch_size=7, seed=1)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 0)


def test_an_epoch_that_goes_on_anyway_is_not_begun_again_by_its_number():
    loader = AsyncDataLoader(Numbers(40), batch_size=4, seed=3)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [values(batch) for batch in batches]
    resumed = AsyncDataLoader(Numbers(40), batch_size=4, seed=3)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert [values(batch) for batch in resumed] == rest


def test_prefetched_batches_that_were_not_delivered_come_again(dataset_of):
    loader = AsyncDataLoader(
        dataset_of("fetch", 1000), batch_size=5, seed=1, num_workers=4, prefetch_factor=8
    )
    iterator = iter(loader)
    delivered = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    assert state["samples"] == 15
    loader.load_state_dict(state)
    whole = list(AsyncDataLoader(dataset_of("fetch", 1000), batch_size=5, seed=1))
    assert same(delivered + list(loader), whole)


@pytest.mark.parametrize("kind", ["windows", "map style"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_batch_index_resumes_on_every_world_size_and_other_batch_sizes(
    dataset_of, kind, drop_last
):
    dataset = dataset_of(kind, 61)
    uninterrupted = AsyncDataLoader(dataset, batch_size=4, seed=7)
    epochs = [stream(uninterrupted) for _ in range(2)]
    settings = {"prefetch_factor": 0, "drop_last": drop_last}
    for before, after, size in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (4, 3)):
        loader = ranks(dataset, before, batch_size=4, **settings)[0]
        for _ in loader:
            state = loader.state_dict()
            whole = epochs[state["epoch"]]  # behind the last batch, the next one
            loaders = ranks(dataset, after, state, batch_size=size, **settings)
            rest, counts = global_stream(loaders)
            left = len(whole) - state["samples"]
            kept = left - left % (after * size if drop_last else after)
            assert rest == whole[state["samples"] :][:kept]
            assert len(counts) == 1


def test_ranks_change_back_and_forth_and_together_give_the_stream(dataset_of):
    dataset = dataset_of("random windows")
    whole = stream(AsyncDataLoader(dataset, batch_size=8, seed=7))
    given, state = [], None
    for world_size, size in [(1, 8), (4, 8), (2, 16), (3, 5), (1, 100), (4, 1), (2, 8)]:
        loaders = ranks(dataset, world_size, state, batch_size=size)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(9):
            given += [value for iterator in iterators for value in values(next(iterator))]
        states = [loader.state_dict() for loader in loaders]
        state = states[0]
        assert all(other == state for other in states)
    rest, _ = global_stream(ranks(dataset, 1, state, batch_size=8))
    assert given + rest == whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_union_is_the_stream_disjoint_and_equally_many_batches(
    dataset_of, kind, world_size
):
    dataset = dataset_of(kind)
    loaders = ranks(dataset, world_size, batch_size=8)
    whole = stream(AsyncDataLoader(dataset, batch_size=8, seed=7))
    for epoch in range(2):
        given, counts = global_stream(loaders)
        assert counts == {len(loaders[0])}
        assert loaders[0].dropped == len(dataset) % world_size
        if epoch == 0:
            assert given == whole[: len(whole) - loaders[0].dropped]
        if kind != "random windows":  # where two samples may begin at the same token
            assert len(set(given)) == len(given)


def test_more_ranks_than_samples_are_left_get_no_batch_and_go_on_to_the_next_epoch(dataset_of):
    dataset = dataset_of("map style", 9)
    loader = AsyncDataLoader(dataset, batch_size=4, seed=7)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loaders = ranks(dataset, 2, loader.state_dict(), batch_size=4)
    assert global_stream(loaders) == ([], {0})
    fresh = ranks(dataset, 2, batch_size=4)
    global_stream(fresh)
    assert global_stream(loaders) == global_stream(fresh)


def test_a_state_goes_over_a_moved_file_but_not_over_a_retokenised_one(tmp_path):
    tokens = np.arange(5000, dtype=np.uint16)
    write_tokens(tmp_path / "a.npy", [tokens])
    loader = AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9), seed=1)
    next(iter(loader))
    state = loader.state_dict()
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    AsyncDataLoader(MmapDataset(tmp_path / "b.npy", 9)).load_state_dict(state)
    write_tokens(tmp_path / "a.npy", [tokens[::-1]])
    with pytest.raises(LoaderError, match="the state belongs to other data: fingerprint"):
        AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9)).load_state_dict(state)
    with pytest.raises(LoaderError, match="other data"):
        AsyncDataLoader(MmapDataset(tmp_path / "b.npy", 8)).load_state_dict(state)


def test_a_state_of_other_data_says_what_is_other(tmp_path):
    of_each = {"a": np.arange(5000), "b": np.arange(6000), "c": np.arange(5000)[::-1]}
    for name, ids in of_each.items():
        write_tokens(tmp_path / f"{name}.npy", [ids.astype(np.uint16)])
    write_tokens(tmp_path / "wide.npy", [np.arange(5000, dtype=np.uint32)])
    a, b, c, wide = (str(tmp_path / f"{name}.npy") for name in ("a", "b", "c", "wide"))
    state = json.loads(json.dumps(AsyncDataLoader(MmapDataset(a, 9), seed=1).state_dict()))
    moved = f"path was {a!r}, is "
    said = {
        "tokens was 5000, is 6000, samples was 500, is 600, " + moved + repr(b): MmapDataset(b, 9),
        "dtype was 'uint16', is 'uint32', " + moved + repr(wide): MmapDataset(wide, 9),
        "seq_len was 9, is 8, stride was 10, is 9, samples was 500, is 555": MmapDataset(a, 8),
        "the tokens are others, in files that are alike in all else, " + moved + repr(c):
            MmapDataset(c, 9),
        "kind was 'MmapDataset', is 'NpyTokensDataset', samples was 500, is 4096":
            NpyTokensDataset(a, 9),
    }  # fmt: skip
    for words, dataset in said.items():
        with pytest.raises(LoaderError, match=re.escape(f": {words}") + "$"):
            AsyncDataLoader(dataset).load_state_dict(state)
    one, other = ({"x": MmapDataset(path, 9)} for path in (a, b))
    state = AsyncDataLoader(MixtureDataset(one, [1]), shuffle=False, seed=1).state_dict()
    with pytest.raises(LoaderError, match=r"samples was 500, is 600, sources\.x\.tokens was 5000"):
        AsyncDataLoader(MixtureDataset(other, [1]), shuffle=False).load_state_dict(state)
    more = MixtureDataset({"y": MmapDataset(b, 9), **one}, [1, 1], num_samples=500)
    words = "weights.y is new, weights.x was '1', is '1/2', sources.y is new"
    with pytest.raises(LoaderError, match=re.escape(f": {words}") + "$"):
        AsyncDataLoader(more, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("data", [None, "text", {}, ["a"]])
def test_a_state_that_says_nothing_of_its_data_is_still_told_by_its_fingerprint(tmp_path, data):
    write_tokens(tmp_path / "a.npy", [np.arange(5000, dtype=np.uint16)])
    state = AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9), seed=1).state_dict()
    del state["data"]
    old = state if data is None else {**state, "data": data}
    AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9)).load_state_dict(old)
    with pytest.raises(LoaderError, match=r"other data: fingerprint \w+, expected \w+$"):
        AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 8)).load_state_dict(old)


def test_a_dataset_of_ones_own_is_told_by_its_length_or_its_own_fingerprint():
    class Named(Numbers):
        def fingerprint(self):
            return "mine"

    state = AsyncDataLoader(Numbers(10), seed=0).state_dict()
    AsyncDataLoader(Numbers(10)).load_state_dict(state)
    for other in (Numbers(11), Named(10)):
        with pytest.raises(LoaderError, match="other data"):
            AsyncDataLoader(other).load_state_dict(state)
    assert AsyncDataLoader(Named(10)).state_dict()["fingerprint"] == "mine"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: None, "not a loader's state"),
        (lambda s: "x", "not a loader's state"),
        (lambda s: {k: v for k, v in s.items() if k != "seed"}, "not a loader's state"),
        (lambda s: {**s, "version": 2}, "version 2, expected 1"),
        (lambda s: {**s, "samples": -1}, "samples=-1"),
        (lambda s: {**s, "samples": 101}, "samples=101, expected an integer from 0 to 100"),
        (lambda s: {**s, "samples": 1.5}, "samples=1.5"),
        (lambda s: {**s, "samples": True}, "samples=True"),
        (lambda s: {**s, "epoch": -1}, "epoch=-1, expected an integer of 0 or more"),
        (lambda s: {**s, "epoch": "1"}, "epoch='1'"),
        (lambda s: {**s, "seed": None}, "seed=None"),
        (lambda s: {**s, "seed": 0.5}, "seed=0.5"),
        (lambda s: {**s, "seed": "7"}, "seed='7'"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(change, message):
    loader = AsyncDataLoader(Numbers(100), batch_size=10, seed=3)
    iterator = iter(loader)
    next(iterator)
    before = loader.state_dict()
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict(change(before))
    assert loader.state_dict() == before
    assert len(list(iterator)) == 9


def test_a_state_of_an_empty_dataset_says_that_it_holds_no_samples():
    loader = AsyncDataLoader([], seed=0)
    with pytest.raises(LoaderError, match="samples=1, expected an integer from 0 to 0, the length"):
        loader.load_state_dict({**loader.state_dict(), "samples": 1})


def test_a_negative_seed_goes_through_a_state():
    whole = stream(AsyncDataLoader(Numbers(50), seed=-3))
    loader = AsyncDataLoader(Numbers(50))
    loader.load_state_dict(AsyncDataLoader(Numbers(50), seed=-3).state_dict())
    assert stream(loader) == whole


def test_the_state_is_plain_values_with_a_version():
    state = AsyncDataLoader(Numbers(50), seed=np.int64(3)).state_dict()
    assert json.loads(json.dumps(state)) == state == {
        "version": 1,
        "seed": 3,
        "epoch": 0,
        "samples": 0,
        "fingerprint": "50 samples",
        "shuffle": True,
    }  # fmt: skip


def test_a_state_of_another_order_is_refused_in_mid_epoch_unless_it_says_nothing_of_it():
    shuffled = AsyncDataLoader(Numbers(50), batch_size=8, seed=3)
    before = shuffled.state_dict()
    next(iter(shuffled))
    state = shuffled.state_dict()
    in_order = AsyncDataLoader(Numbers(50), batch_size=8, seed=3, shuffle=False)
    with pytest.raises(LoaderError, match="shuffle=True, this one has shuffle=False"):
        in_order.load_state_dict(state)
    in_order.load_state_dict(before)  # nothing was given yet
    del state["shuffle"]  # as versions before have it
    in_order.load_state_dict(state)
    assert len(list(in_order)) == 6
