"""torchdata's StatefulDataLoader and ours, through the same scenarios: what is seen is the same.

The names are those of torchdata's own tests.
"""

import itertools
import json
import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, get_worker_info

from npydata import AsyncDataLoader

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

LENGTH, BATCH = 23, 4


class Map(Dataset):
    """Sample ``i`` is ``i``."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


class Fails(Map):
    def __getitem__(self, index):
        if index == 9:
            raise ValueError("nine")
        return index


class Stream(IterableDataset):
    """0 to 22, from wherever its state says."""

    stateful, draws = True, False

    def __init__(self):
        self.at, self.begun = 0, 0

    def __iter__(self):
        self.begun += 1
        for number in range(self.at, LENGTH):
            self.at = number + 1
            yield number + (random.random() if self.draws else 0)
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "random": random.getstate() if self.draws else None}

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.draws:
            random.setstate(state["random"])


class Plain(IterableDataset):
    def __iter__(self):
        yield from range(LENGTH)


class Drawn(Stream):
    draws = True


class Shares(IterableDataset):
    """Cut by worker, where there are any."""

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, LENGTH, info.num_workers) if info else range(LENGTH)


def ours(dataset, **options):
    if not isinstance(dataset, IterableDataset):
        options.setdefault("shuffle", False)
    options.pop("persistent_workers", None)  # there is no such argument: threads need none
    return AsyncDataLoader(dataset, options.pop("batch_size", BATCH), collate_fn=list, **options)


def theirs(dataset, **options):
    return stateful.StatefulDataLoader(dataset, options.pop("batch_size", BATCH), collate_fn=list,
                                       **options)  # fmt: skip


def taken(loader, count):
    return list(itertools.islice(loader, count))


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def begun(new, batches):
    """Return a loader that gave so many batches, its iterator, and what it gave."""
    loader = new()
    iterator = iter(loader)
    return loader, iterator, taken(iterator, batches)


def with_state_of(new, loader):
    """Return a new loader with the state of another."""
    other = new()
    other.load_state_dict(loader.state_dict())
    return other


# What each scenario does with the loaders that ``new`` makes, and what is seen


def resumed(new, after):
    loader, _iterator, head = begun(new, after)
    return [head, list(with_state_of(new, loader))]


def through_json(new):
    loader, _iterator, _ = begun(new, 2)
    other = new()
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return list(other)


def epochs_after_the_end(new):
    first = new()
    list(first)
    second = with_state_of(new, first)
    return [list(second) or list(second), list(second)]


def interleaved(new):
    one, two = new(), new()
    batches = list(zip(one, two, strict=True))
    return [batches, len(list(with_state_of(new, one))) in (0, 6)]


def states_do_not_disturb(new, every):
    loader, found = new(), []
    for number, batch in enumerate(loader):
        if number % every == 0:
            loader.state_dict()
        found.append(batch)
    return found


def initial_state(new):
    loader = new()
    return [list(with_state_of(new, loader)), list(loader)]


def load_after_state(new):
    donor, _iterator, _ = begun(new, 3)
    loader = new()
    loader.state_dict()
    loader.load_state_dict(donor.state_dict())
    return list(loader)


def load_then_state(new):
    donor, _iterator, _ = begun(new, 3)
    return list(with_state_of(new, with_state_of(new, donor)))


def many_epochs(new):
    loader = new()
    return [list(loader) for _ in range(3)]


def state_in_the_second_epoch(new):
    loader = new()
    list(loader)
    iterator = iter(loader)
    taken(iterator, 2)
    other = with_state_of(new, loader)
    return [list(other), list(other)]


def error_in_a_sample(new):
    found = []
    with pytest.raises(ValueError, match="nine"):
        found.extend(new())
    return found


def shuffled(new, after):
    """The same samples once each, and the same ones after a resume as without."""
    torch.manual_seed(4)
    loader, iterator, head = begun(new, after)
    other, rest = with_state_of(new, loader), list(iterator)
    return [list(other) == rest, sorted(flat(head + rest)) == list(range(LENGTH))]


def random_state(new):
    """A stream that draws: after a resume it draws what it would have drawn."""
    random.seed(5)
    loader, iterator, _ = begun(new, 2)
    state, rest = loader.state_dict(), list(iterator)
    other = new()
    other.load_state_dict(state)
    return list(other) == rest


class Sampled(Map):
    """Read in the order of a sampler without a state of its own."""

    @property
    def options(self):
        generator = torch.Generator().manual_seed(3)
        return {"sampler": RandomSampler(range(LENGTH), generator=generator)}


def scenario(name, *what, kinds=(Map, Stream, Plain), **options):
    return [
        pytest.param(kind, options, what[0], what[1:], id=f"{name} {kind.__name__}")
        for kind in kinds
    ]


WORKER, LIVING = {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}
SCENARIOS = [
    *(one for after in (0, 1, 3, 5) for one in scenario(f"no_mp {after}", resumed, after)),
    *scenario("SnapshotEnd", epochs_after_the_end),
    *scenario("two_dataloaders", interleaved),
    *scenario("fast_state_dict_request", states_do_not_disturb, 1),
    *scenario("fast_state_dict_request_skip_steps", states_do_not_disturb, 3),
    *scenario("json_serde_single_process", through_json),
    *scenario("initial_state", initial_state),
    *scenario("load_state_after_initial_state_dict", load_after_state),
    *scenario("load_then_state", load_then_state, kinds=(Map, Stream)),
    *scenario("multi_epoch_sdl", many_epochs),
    *scenario("MultiEpochState inline", state_in_the_second_epoch),
    *scenario("end_of_epoch_behavior", resumed, 4, drop_last=True),
    *scenario("iteration_error", error_in_a_sample, kinds=[Fails]),
    *scenario("notstatefulSDL", resumed, 2, kinds=[Sampled]),
    *scenario("map_shuffle", shuffled, 0, kinds=[Map], shuffle=True),
    *scenario("map_iterrupted_shuffle", shuffled, 3, kinds=[Map], shuffle=True),
    *scenario("random_state", random_state, kinds=[Drawn]),
    # Their worker processes take seconds to start, so that only some scenarios have any.
    *scenario("mp_x 1", resumed, 3, **WORKER),
    *scenario("mp_x 2", resumed, 3, kinds=[Map], num_workers=2),
    *scenario("mp_pw", resumed, 3, kinds=(Map, Stream), **LIVING),
    *scenario("map_shuffle mp", shuffled, 2, kinds=[Map], shuffle=True, num_workers=2),
    *scenario("json_serde_multi_process_map", through_json, kinds=[Map], num_workers=2),
    *scenario("MultiEpochState pw", state_in_the_second_epoch, kinds=[Map], **LIVING),
    *scenario("iteration_error mp", error_in_a_sample, kinds=[Fails], num_workers=2),
]


@pytest.mark.parametrize(("kind", "options", "what", "arguments"), SCENARIOS)
def test_what_is_seen_is_what_torchdatas_loader_shows(kind, options, what, arguments):
    found = []
    for make in (ours, theirs):

        def new(make=make):
            dataset = kind()
            return make(dataset, **options, **getattr(dataset, "options", {}))

        found.append(what(new, *arguments))
    assert found[0] == found[1]


def test_a_batch_of_nothing_is_refused_by_both():
    for make in (ours, theirs):
        with pytest.raises(ValueError, match="batch_size"):
            make(Map(), batch_size=0)


def test_a_stream_is_begun_once_an_epoch_by_both():
    for make in (ours, theirs):
        dataset = Stream()
        list(make(dataset))
        assert dataset.begun == 1


def test_a_state_of_another_number_of_workers_resumes_where_theirs_refuses():
    def moved(make):
        loader, _iterator, _ = begun(lambda: make(Map(), num_workers=2), 3)
        return list(with_state_of(lambda: make(Map(), num_workers=1), loader))

    assert moved(ours) == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]
    with pytest.raises(AssertionError):
        moved(theirs)


def test_a_state_that_was_loaded_and_saved_again_is_the_same_place():
    """Theirs counts the batches of a stream without state twice, and has none left."""
    found = load_then_state(lambda: ours(Plain()))
    assert found == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


def test_a_stream_cut_by_worker_comes_whole_whatever_the_number():
    for make in (ours, theirs):
        assert sorted(flat(make(Shares(), num_workers=2))) == list(range(LENGTH))
