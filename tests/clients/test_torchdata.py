"""torchdata's StatefulDataLoader and ours, through the same scenarios: what is seen is the same.

The names are those of torchdata's own tests; `materials/docs/scenarios.md` lists them all.
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


KINDS = {"map": Map, "iterable": Stream, "generator": Plain}


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


def resumed(make, kind, after, serde=lambda state: state, **options):
    """Return what a new loader gives that got the state behind so many batches."""
    first = make(KINDS[kind](), **options)
    iterator = iter(first)
    head = taken(iterator, after)
    state = serde(first.state_dict())
    second = make(KINDS[kind](), **options)
    second.load_state_dict(state)
    return [head, list(second)]


def epochs_after_the_end(make, kind, **options):
    first = make(KINDS[kind](), **options)
    list(first)
    second = make(KINDS[kind](), **options)
    second.load_state_dict(first.state_dict())
    return [list(second) or list(second), list(second)]


def interleaved(make, kind, **options):
    one, two = make(KINDS[kind](), **options), make(KINDS[kind](), **options)
    batches = list(zip(one, two, strict=True))
    other = make(KINDS[kind](), **options)
    other.load_state_dict(one.state_dict())
    return [batches, len(list(other)) in (0, 6)]


def states_do_not_disturb(make, kind, every=1, **options):
    loader = make(KINDS[kind](), **options)
    found = []
    for number, batch in enumerate(loader):
        if number % every == 0:
            loader.state_dict()
        found.append(batch)
    return found


def initial_state(make, kind, **options):
    loader = make(KINDS[kind](), **options)
    loader.state_dict()
    other = make(KINDS[kind](), **options)
    other.load_state_dict(loader.state_dict())
    return [list(other), list(loader)]


def load_after_state(make, kind, **options):
    donor = make(KINDS[kind](), **options)
    iterator = iter(donor)
    taken(iterator, 3)
    loader = make(KINDS[kind](), **options)
    loader.state_dict()
    loader.load_state_dict(donor.state_dict())
    return list(loader)


def load_then_state(make, kind, **options):
    donor = make(KINDS[kind](), **options)
    iterator = iter(donor)
    taken(iterator, 3)
    second = make(KINDS[kind](), **options)
    second.load_state_dict(donor.state_dict())
    third = make(KINDS[kind](), **options)
    third.load_state_dict(second.state_dict())
    return list(third)


def many_epochs(make, kind, **options):
    loader = make(KINDS[kind](), **options)
    return [list(loader) for _ in range(3)]


def state_in_the_second_epoch(make, kind, **options):
    loader = make(KINDS[kind](), **options)
    list(loader)
    iterator = iter(loader)
    taken(iterator, 2)
    other = make(KINDS[kind](), **options)
    other.load_state_dict(loader.state_dict())
    return [list(other), list(other)]


def error_in_a_sample(make, **options):
    loader, found = make(Fails(), **options), []
    with pytest.raises(ValueError, match="nine"):
        found.extend(batch for batch in loader)
    return found


def error_in_a_constructor(make):
    try:
        make(Map(), batch_size=0)
    except ValueError:
        return "refused"
    except Exception as error:
        return "refused" if type(error).__name__ == "LoaderError" else repr(error)


def sampler_without_state(make, **options):
    generator = torch.Generator().manual_seed(3)
    loader = make(Map(), sampler=RandomSampler(range(LENGTH), generator=generator), **options)
    whole = list(loader)
    again = torch.Generator().manual_seed(3)
    first = make(Map(), sampler=RandomSampler(range(LENGTH), generator=again), **options)
    iterator = iter(first)
    head = taken(iterator, 2)
    third = torch.Generator().manual_seed(3)
    second = make(Map(), sampler=RandomSampler(range(LENGTH), generator=third), **options)
    second.load_state_dict(first.state_dict())
    return [sorted(flat(whole)), head + list(second) == whole]


def shuffled(make, after, **options):
    """The same samples once each, and the same ones after a resume as without."""
    torch.manual_seed(4)
    loader = make(Map(), shuffle=True, **options)
    iterator = iter(loader)
    head = taken(iterator, after)
    state = loader.state_dict()
    rest = list(iterator)
    other = make(Map(), shuffle=True, **options)
    other.load_state_dict(state)
    return [list(other) == rest, sorted(flat(head + rest)) == list(range(LENGTH))]


def random_state(make, **options):
    """A stream that draws: after a resume it draws what it would have drawn."""
    random.seed(5)
    first = make(Drawn(), **options)
    iterator = iter(first)
    taken(iterator, 2)
    state = first.state_dict()
    rest = list(iterator)
    second = make(Drawn(), **options)
    second.load_state_dict(state)
    return list(second) == rest


def mismatch(make):
    """A state of so many workers, loaded with another number."""
    first = make(Map(), num_workers=2)
    iterator = iter(first)
    taken(iterator, 3)
    second = make(Map(), num_workers=1)
    second.load_state_dict(first.state_dict())
    return list(second)


def begun(make, **options):
    """How often the stream was begun in one epoch."""
    dataset = Stream()
    list(make(dataset, **options))
    return dataset.begun


def json_serde(state):
    return json.loads(json.dumps(state))


SCENARIOS = {
    **{f"{kind} no_mp {after}": (resumed, {"kind": kind, "after": after})
       for kind in KINDS for after in (0, 1, 3, 5)},
    **{f"SnapshotEnd {kind}": (epochs_after_the_end, {"kind": kind}) for kind in KINDS},
    **{f"two_dataloaders {kind}": (interleaved, {"kind": kind}) for kind in KINDS},
    **{f"fast_state_dict_request {kind}": (states_do_not_disturb, {"kind": kind})
       for kind in KINDS},
    **{f"fast_state_dict_request_skip_steps {kind}":
       (states_do_not_disturb, {"kind": kind, "every": 3}) for kind in KINDS},
    **{f"json_serde_single_process {kind}": (resumed, {"kind": kind, "after": 2,
                                                        "serde": json_serde})
       for kind in KINDS},
    **{f"initial_state {kind}": (initial_state, {"kind": kind}) for kind in KINDS},
    **{f"load_state_after_initial_state_dict {kind}": (load_after_state, {"kind": kind})
       for kind in KINDS},
    **{f"load_then_state {kind}": (load_then_state, {"kind": kind})
       for kind in ("map", "iterable")},
    **{f"multi_epoch_sdl {kind}": (many_epochs, {"kind": kind}) for kind in KINDS},
    **{f"MultiEpochState inline {kind}": (state_in_the_second_epoch, {"kind": kind})
       for kind in KINDS},
    **{f"end_of_epoch_behavior drop_last {kind}":
       (resumed, {"kind": kind, "after": 4, "drop_last": True}) for kind in KINDS},
    "iteration_error": (error_in_a_sample, {}),
    "init_error": (error_in_a_constructor, {}),
    "notstatefulSDL": (sampler_without_state, {}),
    "map_shuffle": (shuffled, {"after": 0}),
    "map_iterrupted_shuffle": (shuffled, {"after": 3}),
    "random_state": (random_state, {}),
    "inline_iter": (begun, {}),
}  # fmt: skip

WITH_WORKERS = {
    **{f"map mp_x {workers}": (resumed, {"kind": "map", "after": 3, "num_workers": workers})
       for workers in (1, 2)},
    "map mp_pw": (resumed, {"kind": "map", "after": 3, "num_workers": 1,
                            "persistent_workers": True}),
    "iterable mp_x 1": (resumed, {"kind": "iterable", "after": 3, "num_workers": 1}),
    "iterable mp_pw": (resumed, {"kind": "iterable", "after": 3, "num_workers": 1,
                                 "persistent_workers": True}),
    "generator mp_x 1": (resumed, {"kind": "generator", "after": 3, "num_workers": 1}),
    "map_shuffle mp": (shuffled, {"after": 2, "num_workers": 2}),
    "json_serde_multi_process_map": (resumed, {"kind": "map", "after": 2, "num_workers": 2}),
    "MultiEpochState pw": (state_in_the_second_epoch, {"kind": "map", "num_workers": 1,
                                                       "persistent_workers": True}),
    "iteration_error mp": (error_in_a_sample, {"num_workers": 2}),
}  # fmt: skip
"""Their worker processes take seconds to start, so that only some scenarios have any."""


@pytest.mark.parametrize("name", SCENARIOS | WITH_WORKERS)
def test_what_is_seen_is_what_torchdatas_loader_shows(name):
    scenario, options = (SCENARIOS | WITH_WORKERS)[name]
    assert scenario(ours, **options) == scenario(theirs, **options)


def test_a_state_of_another_number_of_workers_resumes_where_theirs_refuses():
    assert mismatch(ours) == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]
    with pytest.raises(AssertionError):
        mismatch(theirs)


def test_a_state_that_was_loaded_and_saved_again_is_the_same_place():
    """Theirs counts the batches of a stream without state twice, and has none left."""
    assert load_then_state(ours, "generator") == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


def test_a_stream_cut_by_worker_comes_whole_whatever_the_number():
    assert sorted(flat(ours(Shares(), num_workers=2))) == list(range(LENGTH))
    assert sorted(flat(theirs(Shares(), num_workers=2))) == list(range(LENGTH))
