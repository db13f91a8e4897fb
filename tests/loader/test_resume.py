"""A state gives exactly what an uninterrupted run would have given, also the second, third, fourth
time, and on other workers, ranks and batch sizes."""

import copy
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import Fetched, Numbers, StatefulStream, Stream, flat, take, values
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from npydata import AsyncDataLoader, LoaderError, MmapDataset, NpyTokensDataset, write_tokens

ONCE = pytest.mark.timeout(120)


def legs(draw_int, most):
    """Return 1 to 4 settings, the last of which runs to the end."""
    return [
        {
            "batch_size": draw_int(1, 7),
            "num_workers": draw_int(0, 3),
            "prefetch_factor": draw_int(0, 3),
            "world_size": draw_int(1, 4),
            "take": draw_int(0, most),
        }
        for _ in range(draw_int(2, 5))
    ]


def run_leg(state, length, leg, shuffle, last):
    """Run all ranks of one leg from a state; return what they gave, in order, and their state."""
    world, given, states = leg["world_size"], [], []
    for rank in range(world):
        loader = AsyncDataLoader(
            Fetched(length),
            batch_size=leg["batch_size"],
            shuffle=shuffle,
            seed=3,
            num_workers=leg["num_workers"],
            prefetch_factor=leg["prefetch_factor"],
            rank=rank,
            world_size=world,
        )
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        iterator = iter(loader)
        for _ in range(len(iterator) if last else min(leg["take"], max(0, len(iterator) - 1))):
            batches.append(values(next(iterator)))
        given.append(batches)
        states.append(json.loads(json.dumps(loader.state_dict())))
        iterator.close()
    assert all(s == states[0] for s in states), "the ranks' states are one and the same"
    in_order = [v for batches in zip(*given, strict=True) for batch in batches for v in batch]
    return in_order, states[0]


def interrupted(draw_int, length, shuffle):
    """Run an epoch in several legs: each sample comes once, in an uninterrupted run's order."""
    whole = flat(AsyncDataLoader(Fetched(length), batch_size=1, shuffle=shuffle, seed=3))
    assert sorted(whole) == list(range(length))
    state, given, plan = None, [], legs(draw_int, 9)
    for number, leg in enumerate(plan):
        found, state = run_leg(state, length, leg, shuffle, last=number == len(plan) - 1)
        given += found
    assert given == whole[: len(given)], plan
    # What is left over are fewer samples than ranks, which go to nobody.
    assert len(whole) - len(given) < plan[-1]["world_size"], plan


@ONCE
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 150), st.booleans())
def test_resumed_up_to_four_times_each_sample_comes_once(data, length, shuffle):
    interrupted(lambda a, b: data.draw(st.integers(a, b)), length, shuffle)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_interruptions_resumed_up_to_four_times(seed):
    chance = random.Random(seed)
    for _ in range(1000):
        interrupted(chance.randint, chance.randint(1, 400), chance.random() < 0.5)


@ONCE
def test_random_windows_are_those_of_an_uninterrupted_run(tokens):
    dataset = NpyTokensDataset(tokens, 16)
    loader = AsyncDataLoader(dataset, batch_size=64, seed=5)
    whole = [values(batch) for batch in loader]
    loader.set_epoch(0)
    iterator, before = take(loader, 3)
    resumed = AsyncDataLoader(dataset, batch_size=64, seed=9, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    iterator.close()
    assert before + [values(batch) for batch in resumed] == whole


class Shuffled(torch.utils.data.Sampler):
    """A sampler with a state of its own; it counts what it was asked for."""

    def __init__(self, length):
        self.order = np.random.default_rng(0).permutation(length).tolist()
        self.at, self.asked = 0, 0

    def __iter__(self):
        self.position, self.at = self.at, 0
        while self.position < len(self.order):
            self.position += 1
            self.asked += 1
            yield self.order[self.position - 1]

    def __len__(self):
        return len(self.order)

    def state_dict(self):
        return {"at": getattr(self, "position", 0)}

    def load_state_dict(self, state):
        self.at = state["at"] % len(self.order)


class DrawnAtOnce(RandomSampler):
    """A sampler that draws when it is iterated, not at its first item."""

    def __iter__(self):
        return iter(torch.randperm(len(self)).tolist())


class Streaming(Stream):
    """A stream whose state needs arguments that only its library's loader knows."""

    def state_dict(self, samples, from_beginning):
        return {"samples": samples}

    def load_state_dict(self, state):
        raise AssertionError


def loaders_of(length):
    """Return, by name, functions that make a loader whose order is somebody else's."""
    numbers = Numbers(length)
    return {
        "sampler": lambda w: AsyncDataLoader(
            numbers, batch_size=3, sampler=RandomSampler(numbers), seed=1, num_workers=w
        ),
        "drawn at once": lambda w: AsyncDataLoader(
            numbers, batch_size=3, sampler=DrawnAtOnce(numbers), seed=1, num_workers=w
        ),
        "stateful sampler": lambda w: AsyncDataLoader(
            numbers, batch_size=3, sampler=Shuffled(length), num_workers=w
        ),
        "list": lambda w: AsyncDataLoader(
            Fetched(length), batch_size=3, sampler=list(range(length))[::-1], num_workers=w
        ),
        "batch sampler": lambda w: AsyncDataLoader(
            numbers, batch_sampler=BatchSampler(SequentialSampler(numbers), 3, False), num_workers=w
        ),
        "stream": lambda w: AsyncDataLoader(Streaming(length), batch_size=3, num_workers=w),
        "stateful stream": lambda w: AsyncDataLoader(
            StatefulStream(length), batch_size=3, num_workers=w
        ),
    }


@ONCE
@pytest.mark.parametrize("kind", loaders_of(1))
def test_orders_of_others_resume_up_to_four_times_too(kind):
    chance = random.Random(0)
    for length in (1, 3, 10, 29, 30):
        make = loaders_of(length)[kind]
        whole = [values(batch) for batch in make(2)]
        for _ in range(6):
            state, given = None, []
            for _ in range(chance.randint(1, 4)):
                loader = make(chance.randint(0, 3))
                if state is not None:
                    loader.load_state_dict(state)
                count = chance.randint(0, max(0, len(whole) - len(given) - 1))
                iterator, batches = take(loader, count)
                given, state = given + batches, json.loads(json.dumps(loader.state_dict()))
                iterator.close()
            loader = make(1)
            loader.load_state_dict(state)
            assert given + [values(batch) for batch in loader] == whole
            assert len([*loader]) == len(whole), "the next epoch is a whole one"


def test_a_batch_sampler_that_begins_with_other_batches_is_refused():
    loader = AsyncDataLoader(Numbers(24), batch_sampler=np.arange(24).reshape(6, 4))
    take(loader, 3)
    other = AsyncDataLoader(Numbers(24), batch_sampler=np.arange(24).reshape(12, 2))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(LoaderError, match="6 samples in those already given, expected 12"):
        next(iter(other))


@ONCE
def test_a_stateful_order_is_not_gone_through_again():
    for source, settings_of in ((StatefulStream(100), {}), (Shuffled(100), {"sampler": None})):

        def loader(source=source, named=bool(settings_of)):
            fresh = copy.deepcopy(source)
            given = {"sampler": fresh} if named else {}
            return fresh, AsyncDataLoader(
                Numbers(100) if named else fresh, batch_size=5, prefetch_factor=0, **given
            )

        _, first = loader()
        iterator, _ = take(first, 15)
        state = first.state_dict()
        iterator.close()
        fresh, second = loader()
        second.load_state_dict(state)
        assert len([*second]) == 5
        assert fresh.asked == 25


@pytest.mark.parametrize("kind", ["sampler", "stateful sampler", "list", "batch sampler"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_after_the_last_full_batch_of_others_orders_begins_the_next(kind, drop_last):
    if kind == "batch sampler" and drop_last:
        return
    make = loaders_of(30 + 2 * drop_last)[kind]
    loader, whole = make(2), make(2)
    for one in (loader, whole):
        one.drop_last = drop_last
    epochs = [[values(batch) for batch in whole] for _ in "12"]
    iterator, batches = take(loader, 10)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    resumed = make(1)
    resumed.drop_last = drop_last
    resumed.load_state_dict(state)
    assert [batches, [values(batch) for batch in resumed]] == epochs


def test_a_state_after_an_epochs_last_batch_begins_the_next():
    loader = AsyncDataLoader(Fetched(30), batch_size=10, seed=1)
    first = [values(batch) for batch in loader]
    state, second = loader.state_dict(), [values(batch) for batch in loader]
    assert first != second
    other = AsyncDataLoader(Fetched(30), batch_size=10, seed=2)
    other.load_state_dict(state)
    assert [values(batch) for batch in other] == second


def test_copies_and_pickles_go_on_from_the_same_place():
    import pickle

    loader = AsyncDataLoader(Fetched(100), batch_size=10, seed=1)
    iterator, _ = take(loader, 4)
    copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    copy.copy(loader).with_transform(lambda one: 0 * one)
    rest = [values(batch) for batch in iterator]
    for one in copies:
        assert [values(batch) for batch in one] == rest


BAD_STATES = {
    "no dictionary": lambda state: [],
    "a key missing": lambda state: {k: v for k, v in state.items() if k != "samples"},
}
WRONG = {
    "another version": {"version": 99},
    "a seed that is no integer": {"seed": "0"},
    "a negative epoch": {"epoch": -1},
    "too many samples": {"samples": 10**9},
    "samples that are no integer": {"samples": 1.5},
    "other data": {"fingerprint": "other"},
}
BAD_STATES |= {title: lambda state, wrong=wrong: state | wrong for title, wrong in WRONG.items()}


@pytest.mark.parametrize("damage", BAD_STATES)
def test_a_bad_state_is_refused_and_changes_nothing(damage):
    loader = AsyncDataLoader(Fetched(100), batch_size=10, seed=1)
    iterator, batches = take(loader, 2)
    state = loader.state_dict()
    with pytest.raises(LoaderError):
        loader.load_state_dict(BAD_STATES[damage](state))
    assert loader.state_dict() == state
    assert values(next(iterator)) not in batches


def test_states_of_other_orders_and_data_are_refused(tmp_path):
    for name, count in (("a", 1000), ("b", 1010)):
        write_tokens(tmp_path / f"{name}.npy", [np.arange(count, dtype=np.uint16)])
    a, b = (MmapDataset(tmp_path / f"{name}.npy", 9) for name in "ab")

    def state_of(dataset, **settings):
        loader = AsyncDataLoader(dataset, batch_size=4, **settings)
        iterator, _ = take(loader, 2)
        state = loader.state_dict()
        iterator.close()
        return state

    for state in (
        state_of(b, shuffle=True),
        state_of(a, shuffle=False),
        state_of(a, sampler=range(50)),
    ):
        with pytest.raises(LoaderError):
            AsyncDataLoader(a, batch_size=4, shuffle=True).load_state_dict(state)
