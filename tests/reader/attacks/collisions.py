"""Keys that differ, and so do their hashes; but their places in Python's tables are taken.

Where a place is taken, a dictionary of 2^m places goes from place ``i`` to ``5 i + p + 1``, modulo
2^m; ``p`` is what is left of the hash, five bits less each time (CPython, ``Objects/dictobject.c``,
``perturb``). Keys that fill a long piece of the way for ``p = 0`` make others walk along it.
"""

from functools import cache

import numpy as np
from checkpoint_files import entry, payload, safetensors_file
from pickle_code import (
    MARK,
    NO_HOOKS,
    NONE,
    POP,
    dict_of,
    get,
    integer,
    kept,
    list_of,
    name,
    put,
    storage,
    unicode,
    value,
)

from attacks import of_family
from attacks.containers import programs

refused, harmless = of_family(__name__)

FILLED, PLACES = 120_000, 1 << 18
"""A table of 2^18 places is for 87,382 to 174,762 keys."""


@cache
def way():
    """The first places of the way, which keys of the same numbers fill."""
    places = [12345]
    while len(places) < FILLED:
        places.append((5 * places[-1] + 1) % PLACES)
    return np.array(places)


def walkers(candidates):
    """Those of which every place is taken until they come to the way, from its beginning on."""
    order = np.full(PLACES, FILLED)
    order[way()] = np.arange(FILLED)
    keys, place, left = candidates, candidates % PLACES, candidates
    while left.any():
        taken = order[place] < FILLED
        keys, place, left = keys[taken], place[taken], left[taken] >> 5
        place = (5 * place + left + 1) % PLACES
    met = order[place]
    return keys[np.argsort(met)][: np.count_nonzero(met < FILLED)]


@cache
def colliding(count=54_000):
    """Integers of which as many walk as ``count`` says; no smaller ones than 2^17."""
    dice = np.random.default_rng(0)
    some = np.empty(0, np.int64)
    while len(some) < count:
        some = np.union1d(some, walkers(dice.integers(PLACES, 1 << 31, 1 << 22)))
    return [*way().tolist(), *dice.permutation(some)[:count].tolist()]


def keys_whose_places_are_taken():
    """Have 54,000 keys whose places are taken."""
    keys = b"".join(integer(key) + NONE for key in colliding())
    return dict_of(keys)


def places_of_the_memo_that_are_taken():
    """Have 27,000 places in the memo that are taken."""
    found = walkers(np.arange(PLACES, 1 << 20))[:27_000]
    return unicode("a" * (1 << 20)) + b"".join(put(b"", n) for n in (*way(), *found))


def states_whose_places_are_taken():
    """Have 50 tensors with a state of 62,000 keys whose places are taken."""
    keys = b"".join(integer(key) + NONE for key in [*way().tolist(), *colliding()[FILLED:][:2000]])
    given = (
        name("torch._utils._rebuild_tensor_v2"), name("foo.T"),
        value((storage("0", 4), 0, (4,), (1,), False, NO_HOOKS)),
        dict_of(keys),
    )  # fmt: skip
    said = b"".join(kept(one, n) for n, one in enumerate(given))
    call = kept(name("torch._tensor._rebuild_from_type_v2"), 9)
    one = get(9) + MARK + get(0) + get(1) + get(2) + get(3) + b"tR"
    padding = unicode("a" * 500_000) + POP  # of which copies are allowed
    return said + call + padding + list_of(one * 50)


programs(refused, {
    "keys_whose_places_are_taken": keys_whose_places_are_taken,
    "states_whose_places_are_taken": states_whose_places_are_taken,
}, forms=["zip"])  # fmt: skip
programs(harmless, {
    "places_of_the_memo_that_are_taken": places_of_the_memo_that_are_taken,
}, forms=["zip"])  # fmt: skip


@harmless  # in some seconds
def notes_whose_places_are_taken(folder):
    """Have notes with 7,000 keys whose places are taken."""
    pairs = ",".join(f"[{key},0]" for key in colliding()[: FILLED + 7000])
    notes = '{"values":{"v":{"$dict":[' + pairs + "]}}}"
    header = {"__metadata__": {"npydata": notes}, "w": entry("U8", [1], 0, 1)}
    return safetensors_file(folder / "a.safetensors", header, payload(1))
