"""From indices to a batch, for every kind of dataset; transforms, collation, dtypes."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from loader_tools import Fetched, Numbers, values

from npydata import AsyncDataLoader, LoaderError, MmapDataset, NpyTokensDataset, write_tokens
from npydata.dataset.protocol import accepts
from npydata.loader.fetcher import ADVISED_BATCHES, ReadAhead, cast
from npydata.loader.sampler import BatchSampler, EpochOrder

Scene = namedtuple("Scene", "image label")
FETCHES = {
    "pair": lambda i: (torch.from_numpy(i), torch.from_numpy(-i)),
    "tensor": lambda i: torch.stack((torch.from_numpy(i), torch.from_numpy(-i)), 1),
    "dict": lambda i: {"n": torch.from_numpy(i), "minus": torch.from_numpy(-i)},
}


class Given(torch.utils.data.Dataset):
    """A dataset that computes sample ``i`` with a function."""

    def __init__(self, function, length=20):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


class FetchedWith(Numbers):
    """Whole batches in the form that a function gives them."""

    def __init__(self, function, length=20):
        super().__init__(length)
        self.function = function

    def fetch(self, indices):
        return self.function(np.asarray(indices))


def batches(dataset, **settings):
    settings = {"batch_size": 4, "shuffle": False, "seed": 0, **settings}
    return list(AsyncDataLoader(dataset, **settings))


@pytest.fixture
def tokens(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(3_000, dtype=np.uint16)])
    return tmp_path / "a.npy"


def test_images_and_labels_come_as_stacked_pairs():
    images, labels = batches(Given(lambda i: (np.full((3, 8, 8), i, np.float32), i)))[0]
    assert (images.shape, images.dtype) == ((4, 3, 8, 8), torch.float32)
    assert labels.tolist() == [0, 1, 2, 3]


def test_samples_that_are_dicts_come_as_a_dict_of_stacks():
    batch = batches(Given(lambda i: {"ids": torch.full((5,), i), "name": f"n{i}"}))[1]
    assert batch["ids"].shape == (4, 5)
    assert batch["name"] == ["n4", "n5", "n6", "n7"]


def test_named_tuples_keep_their_type():
    batch = batches(Given(lambda i: Scene(torch.zeros(2), i)))[0]
    assert isinstance(batch, Scene)
    assert batch.label.tolist() == [0, 1, 2, 3]


def test_a_plain_list_is_a_dataset():
    assert [values(batch) for batch in batches([10, 20, 30, 40, 50])] == [[10, 20, 30, 40], [50]]


def test_indices_are_python_integers():
    assert {type(i) for batch in batches(Given(type), collate_fn=list) for i in batch} == {type}
    assert batches(Given(type), collate_fn=list)[0] == [int] * 4


def test_ragged_samples_need_a_collate_fn_and_get_it():
    ragged = Given(lambda i: torch.ones(i + 1))
    padded = batches(ragged, collate_fn=lambda s: torch.nn.utils.rnn.pad_sequence(s, True))
    assert padded[0].sum(1).tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="equal size"):
        batches(ragged)


def test_getitems_is_called_once_a_batch():
    class Many(Numbers):
        calls = 0

        def __getitems__(self, indices):
            self.calls += 1
            return [torch.tensor(i) for i in indices]

    dataset = Many(20)
    assert [values(batch) for batch in batches(dataset)] == np.arange(20).reshape(5, 4).tolist()
    assert dataset.calls == 5


def test_fetch_is_called_once_a_batch_and_its_result_is_the_batch():
    assert [values(batch) for batch in batches(Fetched(6))] == [[0, 1, 2, 3], [4, 5]]


def test_fetch_gets_seed_and_epoch_if_it_has_them():
    class Seeded(Numbers):
        def fetch(self, indices, *, seed, epoch):
            return torch.tensor([[seed, epoch]])

    loader = AsyncDataLoader(Seeded(2), batch_size=2, seed=-7)
    assert [next(iter(loader)).tolist() for _ in range(2)] == [[[-7, 0]], [[-7, 1]]]


class Asked(NpyTokensDataset):
    """Random windows that count how often they are computed."""

    computed = 0

    def windows_of(self, indices, seed, epoch):
        self.computed += 1
        return super().windows_of(indices, seed, epoch)


def test_windows_are_computed_for_many_batches_at_a_time(tokens):
    counted, plain = Asked(tokens, 9), NpyTokensDataset(tokens, 9)
    got = batches(counted, shuffle=True)
    order = EpochOrder(BatchSampler(len(plain), 4), 0, 0, True)
    assert len(got) == len(plain) // 4 > 100 * counted.computed
    for number, batch in enumerate(got):
        wanted = plain.fetch(order(number), seed=0, epoch=0)
        assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))


def indices_and_epoch(indices, *, seed=None, epoch=None):
    return torch.as_tensor(indices), torch.full((len(indices),), epoch)


class Own(Asked):
    """Random windows whose class gives something else for a batch."""

    fetch = staticmethod(indices_and_epoch)


def test_what_a_class_or_an_object_of_windows_changes_in_fetch_counts(tokens):
    changed = NpyTokensDataset(tokens, 9)
    changed.fetch = indices_and_epoch
    for dataset in (Own(tokens, 9), changed):
        assert [x.tolist() for x, _ in batches(dataset)][1] == [4, 5, 6, 7]


def test_what_a_class_changes_in_fetch_windows_counts_too(tokens):
    class Doubled(Own):
        def fetch_windows(self, windows, *, out=None):
            x, y = super().fetch_windows(windows, out=out)
            return 2 * x, 2 * y

    (x, _), (plain, _) = batches(Doubled(tokens, 9))[3], batches(NpyTokensDataset(tokens, 9))[3]
    assert torch.equal(x, 2 * plain)


def test_a_dataset_of_ones_own_may_give_windows(tokens):
    class Squares:
        """No relative of ours: sample ``i`` is window ``i * i``, and all its tokens are that."""

        seq_len = 3

        def __init__(self):
            self.advised = []

        def __len__(self):
            return 10

        def __getitem__(self, index):
            raise AssertionError("nobody asks for single samples")

        def windows_of(self, indices, seed, epoch):
            return indices**2 + epoch

        def fetch_windows(self, windows, *, out=None):
            both = np.empty((2, len(windows), 3), np.int64) if out is None else out
            both[:] = windows[:, None]
            return torch.from_numpy(both).unbind()

        def advise_windows(self, windows):
            self.advised += windows.tolist()

    dataset = Squares()
    loader = AsyncDataLoader(dataset, batch_size=4, shuffle=False, seed=0)
    for epoch in range(2):
        dataset.advised.clear()
        assert [k for batch in loader for k in values(batch)] == [k * k + epoch for k in range(10)]
        assert dataset.advised == [k * k + epoch for k in range(10)]


def test_a_wrapper_that_knows_less_than_its_dataset_gets_only_indices(tokens):
    class Wrapped:
        """A dataset around another one, that knows less than it."""

        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            return getattr(self.dataset, name)

        def __len__(self):
            return len(self.dataset)

        def fetch(self, indices):
            return self.dataset.fetch(indices)

    inner = MmapDataset(tokens, 9)
    for got, wanted in zip(batches(Wrapped(inner)), batches(inner), strict=True):
        assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("form", FETCHES)
def test_transforms_see_single_samples_of_whatever_form_fetch_has(form):
    def negated(sample):
        n, minus = sample.values() if isinstance(sample, dict) else sample
        return minus - n

    whole = batches(FetchedWith(FETCHES[form]), transforms=[negated], seed=0)
    assert torch.cat(whole).tolist() == list(range(0, -40, -2))


def test_transforms_act_on_each_sample_in_order():
    loader = AsyncDataLoader(Numbers(8), batch_size=4, shuffle=False, transforms=[lambda s: s + 1])
    assert loader.with_transform(lambda s: s * 10) is loader
    assert [values(batch) for batch in loader] == [[10, 20, 30, 40], [50, 60, 70, 80]]


def test_a_transform_that_is_added_acts_from_the_next_epoch_on():
    loader = AsyncDataLoader(Numbers(8), batch_size=4, shuffle=False, seed=0)
    iterator = iter(loader)
    loader.with_transform(lambda s: -s)
    assert [values(b) for b in iterator] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert values(next(iter(loader))) == [0, -1, -2, -3]


def test_a_transform_may_make_several_parts_of_one():
    batch = batches(Numbers(4), transforms=[lambda s: (s, {"twice": 2 * s})])[0]
    assert batch[1]["twice"].tolist() == [0, 2, 4, 6]


def test_the_rng_of_a_transform_is_the_same_whatever_the_workers():
    def noisy(sample, rng):
        return float(sample) + rng.random()

    runs = [
        torch.cat(
            batches(Numbers(64), shuffle=True, transforms=[noisy], num_workers=w, prefetch_factor=f)
        )
        for w, f in [(0, 0), (0, 2), (1, 3), (4, 4), (8, 8)]
    ]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert len(set((runs[0] % 1).tolist())) == 64


def test_the_rng_differs_between_epochs_seeds_samples_and_transforms():
    def draw(sample, rng):
        return torch.cat((torch.atleast_1d(sample), torch.tensor([rng.random()])))

    drawn = []
    for seed in (0, 1):
        loader = AsyncDataLoader(Numbers(8), seed=seed, transforms=[draw, draw])
        drawn += [number for _ in range(2) for row in next(iter(loader))[:, 1:] for number in row]
    assert len(set(map(float, drawn))) == 64


def test_the_rng_belongs_to_the_sample_not_to_its_place():
    def draw(sample, rng):
        return torch.stack((sample.double(), torch.tensor(rng.random(), dtype=torch.float64)))

    runs = [
        torch.cat(batches(Numbers(32), transforms=[draw], shuffle=shuffle, batch_size=size))
        for shuffle, size in [(True, 4), (False, 5)]
    ]
    assert torch.equal(*(run[run[:, 0].argsort()] for run in runs))


def test_an_object_with_an_rng_parameter_gets_one_too():
    class Crop:
        def __call__(self, sample, *, rng):
            return sample * 0 + int(rng.integers(10, 20))

    assert all(10 <= value < 20 for value in values(batches(Numbers(4), transforms=[Crop()])[0]))
    assert not accepts(torch.nn.Identity(), "rng")
    assert not accepts(max, "rng")


def test_transforms_of_token_windows_see_pairs(tokens):
    def swap(sample):
        x, y = sample
        return y, x

    for dataset in (MmapDataset(tokens, 9), NpyTokensDataset(tokens, 9)):
        plain = batches(dataset, shuffle=True)
        swapped = batches(dataset, shuffle=True, transforms=[swap])
        for (x, y), (a, b) in zip(plain, swapped, strict=True):
            assert torch.equal(x, b)
            assert torch.equal(y, a)


def test_collate_fn_gets_the_transformed_samples():
    assert batches(Numbers(4), transforms=[int, str], collate_fn="".join)[0] == "0123"


def test_dtype_casts_floats_to_floats_and_integers_to_integers():
    mixed = Given(
        lambda i: (torch.tensor(float(i)), torch.tensor(i), torch.tensor(i > 1), torch.tensor(1j))
    )
    floats, integers, bools, comp = batches(mixed, dtype=torch.float64)[0]
    assert [p.dtype for p in (floats, integers, bools)] == [torch.float64, torch.int64, torch.bool]
    assert comp.is_complex()
    floats, integers, bools, comp = batches(mixed, dtype=torch.int16)[0]
    assert [p.dtype for p in (floats, integers, bools)] == [torch.float32, torch.int16, torch.bool]
    assert comp.is_complex()


def test_without_a_dtype_tensors_stay_as_they_are():
    batch = batches(Given(lambda i: (torch.tensor(i, dtype=torch.uint8), 0.5)))[0]
    assert [part.dtype for part in batch] == [torch.uint8, torch.float64]


def test_dtype_reaches_into_dicts_and_leaves_other_things_alone():
    batch = batches(Given(lambda i: {"v": torch.tensor(1.0), "s": "a"}), dtype=torch.bfloat16)[0]
    assert (batch["v"].dtype, batch["s"]) == (torch.bfloat16, ["a"] * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_dtype_over_token_windows_is_refused(tokens, dtype):
    for dataset in (MmapDataset(tokens, 9), NpyTokensDataset(tokens, 9)):
        with pytest.raises(LoaderError, match="would lose ids"):
            AsyncDataLoader(dataset, dtype=dtype)


def test_token_windows_may_be_narrowed_while_every_id_fits(tokens):
    x, y = batches(MmapDataset(tokens, 9), dtype=torch.int32)[0]
    assert x.dtype == y.dtype == torch.int32
    assert torch.equal(x + 1, y)


@pytest.mark.parametrize(
    "values, given, dtype, culprit",
    [
        ([-1, 5], torch.int64, torch.uint8, "-1, expected 0 to 255"),
        ([5, 256, 300], torch.int64, torch.uint8, "256, expected 0 to 255"),
        ([5, -1], torch.int64, torch.uint64, "-1, expected 0 to"),
        ([-1], torch.int8, torch.uint16, "-1, expected 0 to 65535"),
        ([2**62, 2**63], torch.uint64, torch.int64, f"{2**63}, expected"),
        ([[1, 2], [70_000, 3]], torch.uint32, torch.uint16, "70000, expected 0 to 65535"),
    ],
)
def test_an_integer_that_does_not_fit_a_dtype_is_named(values, given, dtype, culprit):
    with pytest.raises(LoaderError, match=f"dtype={dtype} cannot hold {culprit}"):
        cast({"ids": torch.tensor(values, dtype=given)}, dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint64, torch.int64])
def test_integers_at_the_ends_of_a_dtype_fit(dtype):
    ends = torch.tensor(
        [max(torch.iinfo(dtype).min, -(2**63)), min(torch.iinfo(dtype).max, 2**63 - 1)]
    )
    assert cast(ends, dtype).tolist() == ends.tolist()
    assert cast(torch.empty(0, dtype=torch.int64), dtype).dtype == dtype


def test_a_dataset_with_fetch_is_advised_of_every_sample_ahead_and_once():
    class Advised(Numbers):
        def __init__(self, length):
            super().__init__(length)
            self.advised, self.ahead, self.options = [], [], set()

        def will_need(self, indices, *, epoch):
            self.advised += list(indices)
            self.options.add(epoch)

        def fetch(self, indices, *, seed):
            self.ahead.append(len(self.advised) - indices[0])
            self.options.add(seed)
            return torch.from_numpy(indices)

    dataset = Advised(200)
    batches(dataset, prefetch_factor=0, seed=9)
    assert dataset.advised == list(range(200))
    assert min(dataset.ahead[: 50 - ADVISED_BATCHES]) >= 4 * ADVISED_BATCHES
    assert dataset.options == {9, 0}


def test_a_dataset_of_windows_is_advised_of_those_that_come(tokens):
    class Advised(NpyTokensDataset):
        advised = ()

        def advise_windows(self, windows):
            self.advised = (*self.advised, *windows.tolist())

    dataset = Advised(tokens, 9)
    batches(dataset, shuffle=True, seed=5)
    order = EpochOrder(BatchSampler(4096, 4096), 5, 0, True)
    assert list(dataset.advised) == dataset.windows_of(order(0), 5, 0).tolist()


def test_a_loader_advises_of_all_batches_that_it_may_have_at_a_time():
    class Advised(Numbers):
        advised = ()

        def will_need(self, indices):
            self.advised = (*self.advised, len(indices))

        def fetch(self, indices):
            return torch.from_numpy(indices)

    dataset = Advised(1000)
    loader = AsyncDataLoader(dataset, batch_size=2, num_workers=4, prefetch_factor=8)
    with iter(loader) as batches:
        next(batches)
    assert dataset.advised[0] == 2 * (2 * 32 + 1)


def test_a_larger_window_of_batches_is_advised_of_as_a_whole():
    advised = []
    ahead = ReadAhead(advised.append, count=100, distance=16)
    for number in range(100):
        ahead.before(number)
    assert advised[0] == range(33)
    assert [k for numbers in advised for k in numbers] == list(range(100))
