"""torchdata's StatefulDataLoader and ours, through the same scenarios: what is seen is the same.

The names are those of torchdata's own tests.
"""

import itertools
import random

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from npydata import AsyncDataLoader

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore")

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
        self.at = 0

    def __iter__(self):
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


def ours(dataset, **options):
    if not isinstance(dataset, IterableDataset):
        options.setdefault("shuffle", False)
    options.pop("persistent_workers", None)  # there is no such argument: threads need none
    return AsyncDataLoader(dataset, options.pop("batch_size", BATCH), collate_fn=list, **options)


def theirs(dataset, **options):
    return stateful.StatefulDataLoader(
        dataset, options.pop("batch_size", BATCH), collate_fn=list, **options
    )


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


def epochs_after_the_end(new):
    first = new()
    list(first)
    second = with_state_of(new, first)
    return [list(second) or list(second), list(second)]


def states_do_not_disturb(new, every):
    loader, found = new(), []
    for number, batch in enumerate(loader):
        if number % every == 0:
            loader.state_dict()
        found.append(batch)
    return found


def load_then_state(new):
    donor, _iterator, _ = begun(new, 3)
    return list(with_state_of(new, with_state_of(new, donor)))


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
    *scenario("fast_state_dict_request_skip_steps", states_do_not_disturb, 3),
    *scenario("load_then_state", load_then_state, kinds=(Map, Stream)),
    *scenario("MultiEpochState inline", state_in_the_second_epoch),
    *scenario("end_of_epoch_behavior", resumed, 4, drop_last=True),
    *scenario("iteration_error", error_in_a_sample, kinds=[Fails]),
    *scenario("notstatefulSDL", resumed, 2, kinds=[Sampled]),
    *scenario("map_shuffle", shuffled, 0, kinds=[Map], shuffle=True),
    *scenario("map_iterrupted_shuffle", shuffled, 3, kinds=[Map], shuffle=True),
    *scenario("random_state", random_state, kinds=[Drawn]),
    # Their worker processes take seconds to start, so that only some scenarios have any.
    *scenario("mp_x 1", resumed, 3, **WORKER),
    *scenario("mp_pw", resumed, 3, kinds=(Map, Stream), **LIVING),
    *scenario("MultiEpochState pw", state_in_the_second_epoch, kinds=[Map], **LIVING),
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
