"""What a batch is: fetched or collated, transformed, cast, and the caller's own."""

import threading
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from loader_cases import Failing, Fetched, Numbers, flat, take, values
from token_builders import write
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from npydata import (
    AsyncDataLoader,
    LoaderError,
    MmapDataset,
    PackedDataset,
    TokenFileError,
)


@pytest.mark.parametrize("kind", [MmapDataset, partial(PackedDataset, crop="none", eot_id=0)])
def test_windows_and_packed_rows_come_as_the_dataset_fetches_them(tmp_path, kind):
    chance = np.random.default_rng(0)
    ids = chance.integers(1, 99, 4000)
    ids[chance.integers(0, 4000, 200)] = 0
    dataset = kind(write(tmp_path / "a.npy", ids=ids), 32)
    for number, batch in enumerate(AsyncDataLoader(dataset, batch_size=7, shuffle=False)):
        wanted = dataset.fetch(range(7 * number, min(7 * number + 7, len(dataset))))
        for one, other in zip(batch, wanted, strict=True):
            one, other = torch.as_tensor(one), torch.as_tensor(other)
            assert one.dtype == other.dtype
            assert one.is_contiguous()
            assert torch.equal(one, other)
    assert len(dataset) % 7


def test_iter_epoch_names_inputs_and_targets(tokens):
    loader = AsyncDataLoader(MmapDataset(tokens, 30), batch_size=7, seed=1)
    pairs = [*AsyncDataLoader(MmapDataset(tokens, 30), batch_size=7, seed=1)]
    named = [*loader.iter_epoch("in", "out")]
    assert all(list(batch) == ["in", "out"] for batch in named)
    assert all(torch.equal(batch["in"], x) for batch, (x, _) in zip(named, pairs, strict=True))
    with pytest.raises(LoaderError):
        next(iter(AsyncDataLoader(Fetched(10)).iter_epoch()))


class Point(NamedTuple):
    x: int
    y: float


SAMPLES = {
    "integers": lambda i: i,
    "tuples": lambda i: (i, float(i)),
    "named tuples": lambda i: Point(i, 0.5 * i),
    "dictionaries": lambda i: {"k": i, "v": torch.full((2,), i)},
    "text": lambda i: str(i),
    "arrays": lambda i: np.full(3, i),
}


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("at_once", [False, True])
def test_samples_are_collated_as_torch_does_it(kind, at_once):
    class Samples(Numbers):
        def __getitem__(self, index):
            return SAMPLES[kind](index)

    if at_once:
        Samples.__getitems__ = lambda self, indices: [self[i] for i in indices]
    require_same_as_stock(Samples(10))


def require_same_as_stock(dataset):
    ours = AsyncDataLoader(dataset, batch_size=4, shuffle=False)
    stock = torch.utils.data.DataLoader(dataset, batch_size=4)
    assert [repr(batch) for batch in ours] == [repr(batch) for batch in stock]


def test_an_array_of_texts_is_a_batch_of_no_tokens():
    loader = AsyncDataLoader(
        Numbers(10), 5, shuffle=False, collate_fn=lambda samples: np.array("a")
    )
    assert [batch.item() for batch in loader] == ["a", "a"]
    assert (loader.stats.batches, loader.stats.tokens) == (2, 0)


def test_torchs_own_datasets_come_as_in_torchs_loader():
    pairs = TensorDataset(torch.arange(20), torch.arange(20) * 2.0)
    for dataset in (pairs, Subset(pairs, range(3, 17)), ConcatDataset([pairs, pairs])):
        require_same_as_stock(dataset)


@pytest.mark.parametrize("dataset", [Numbers(10), Fetched(10)], ids=["samples", "fetched"])
def test_collate_fn_makes_the_batch(dataset):
    loader = AsyncDataLoader(dataset, batch_size=4, shuffle=False, collate_fn=list)
    assert [[int(value) for value in batch] for batch in loader] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_transforms_act_on_each_sample_in_order(tokens):
    loader = AsyncDataLoader(
        MmapDataset(tokens, 30),
        batch_size=7,
        shuffle=False,
        transforms=[lambda pair: (pair[0] + 1, pair[1])],
    )
    assert loader.with_transform(lambda pair: (pair[0] * 2, pair[1])) is loader
    plain = AsyncDataLoader(MmapDataset(tokens, 30), batch_size=7, shuffle=False)
    for (x, y), (a, b) in zip(loader, plain, strict=True):
        assert torch.equal(x, (a + 1) * 2)
        assert torch.equal(y, b)


@pytest.mark.parametrize("workers, prefetch", [(0, 0), (1, 2), (4, 3)])
def test_a_transforms_randomness_depends_on_seed_epoch_and_sample_only(workers, prefetch):
    def draw(sample, rng):
        before = sample if isinstance(sample, tuple) else (int(sample),)
        return *before, int(rng.integers(10**9))

    class Draw(torch.nn.Module):
        forward = staticmethod(draw)

    def twice(seed, size, **settings):
        loader = AsyncDataLoader(
            Fetched(50),
            batch_size=size,
            seed=seed,
            collate_fn=list,
            transforms=[draw, lambda drawn: drawn, Draw()],
            **settings,
        )
        return [{k: drawn for batch in loader for k, *drawn in batch} for _ in range(2)]

    first, second = twice(3, 8, num_workers=workers, prefetch_factor=prefetch)
    assert [first, second] == twice(3, 5, num_workers=2)
    by_numpy = twice(3, 5, sampler=np.arange(49, -1, -1))
    assert by_numpy == twice(3, 7, sampler=range(50)) == [first, second]
    epochs = (first, second, twice(4, 8)[0])
    assert len({one for epoch in epochs for drawn in epoch.values() for one in drawn}) == 300


def test_dtype_casts_tensors_of_its_own_kind_and_loses_nothing(tokens):
    class Mixed(Numbers):
        def __getitem__(self, index):
            return {"f": float(index), "i": index, "b": index % 2 == 0}

    batch = next(iter(AsyncDataLoader(Mixed(10), dtype=torch.int32)))
    assert (batch["f"].dtype, batch["i"].dtype) == (torch.float64, torch.int32)
    batch = next(iter(AsyncDataLoader(Mixed(10), dtype=torch.float32)))
    assert (batch["f"].dtype, batch["i"].dtype) == (torch.float32, torch.int64)
    with pytest.raises(LoaderError, match="from 128 to 159"):
        [*AsyncDataLoader(Fetched(200), shuffle=False, dtype=torch.int8)]
    unsigned = torch.full((40,), 200, dtype=torch.uint8)
    with pytest.raises(LoaderError, match="from 200 to 200"):  # only the sign would change
        [*AsyncDataLoader(unsigned, dtype=torch.int8)]
    x, _ = next(iter(AsyncDataLoader(MmapDataset(tokens, 30), dtype=torch.float32)))
    assert x.dtype == torch.int64


@pytest.mark.parametrize("settings", [{}, {"num_workers": 4}, {"prefetch_factor": 0}])
def test_a_batch_that_is_kept_is_never_overwritten(tokens, settings):
    dataset = MmapDataset(tokens, 10)
    loader = AsyncDataLoader(dataset, batch_size=4, shuffle=False, **settings)
    kept, rows = {}, {}
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            if number % 3 == 0:
                kept[number] = y  # a part of the memory of a batch
            if number % 5 == 0:
                rows[number] = x[1].numpy()[2:]
            del x, y
    for number, y in kept.items():
        assert y[:, 0].tolist() == [11 * (4 * number + k) + 1 for k in range(len(y))]
    for number, row in rows.items():
        assert row[0] == 11 * (4 * number + 1) + 2


def test_memory_of_batches_that_were_dropped_is_used_again(tokens):
    dataset = MmapDataset(tokens, 10, stride=1)
    loader = AsyncDataLoader(dataset, batch_size=8, num_workers=2, prefetch_factor=4)
    places = [x.data_ptr() for x, _ in loader]
    assert len(set(places)) <= 2 * 4 + 3 + 1 < len(places)  # the last batch is shorter


# Errors


@pytest.mark.parametrize("workers, prefetch", [(0, 0), (0, 2), (1, 16), (3, 3)])
def test_an_error_is_raised_at_its_batch_with_its_traceback(workers, prefetch):
    loader = AsyncDataLoader(
        Failing(100, 55),
        batch_size=10,
        shuffle=False,
        num_workers=workers,
        prefetch_factor=prefetch,
    )
    iterator, batches = take(loader, 5)
    assert [v for batch in batches for v in batch] == list(range(50))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="sample 55 is bad") as caught:
        next(iterator)
    assert "fetch" in [entry.name for entry in caught.traceback]
    assert any("55" in note for note in caught.value.__notes__)
    assert loader.state_dict() == state, "the failed batch is still to come"
    other = AsyncDataLoader(Fetched(100), batch_size=10, shuffle=False)
    other.load_state_dict(state)
    assert values(next(iter(other)))[0] == 50


def test_of_windows_fetched_together_only_the_batch_with_the_fault_fails(tokens):
    dataset = MmapDataset(tokens, 9, vocab_size=1000)  # ten tokens a window: batch 12 has id 1000
    iterator, given = take(AsyncDataLoader(dataset, batch_size=8), 12)
    assert [batch[0] for batch in given] == [*range(0, 960, 80)]
    with pytest.raises(TokenFileError, match="id 1039, expected 0 to 999") as raised:
        next(iterator)
    assert "in batch 12 " in raised.value.__notes__[0]


def test_errors_of_samples_and_transforms_name_the_sample():
    def refuse(sample):
        if int(sample) == 7:
            raise KeyError("seven")
        return sample

    class Bad(Numbers):
        def __getitem__(self, index):
            return refuse(index)

    for dataset, transforms in ((Bad(10), []), (Numbers(10), [refuse])):
        loader = AsyncDataLoader(dataset, 2, shuffle=False, transforms=transforms)
        with pytest.raises(KeyError) as caught:
            flat(loader)
        assert any("7" in note for note in caught.value.__notes__)


def test_a_datasets_stop_iteration_does_not_end_the_epoch_silently():
    with pytest.raises(RuntimeError):
        flat(AsyncDataLoader(Failing(100, 55, StopIteration), batch_size=10))


def test_two_threads_may_not_ask_one_iterator_at_the_same_time():
    go, asked = threading.Event(), threading.Event()

    class Waits(Fetched):
        def fetch(self, indices):
            asked.set()
            assert go.wait(20)
            return super().fetch(indices)

    iterator = iter(AsyncDataLoader(Waits(100), prefetch_factor=0))
    first = threading.Thread(target=next, args=(iterator,))
    first.start()
    assert asked.wait(20)
    with pytest.raises(LoaderError):
        next(iterator)
    go.set()
    first.join()
