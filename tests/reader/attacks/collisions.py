"""Keys that differ, and so do their hashes; but their places in Python's tables are taken.

Where a place is taken, a dictionary of 2^m places goes from place ``i`` to ``5 i + p + 1``, modulo
2^m; ``p`` is what is left of the hash, five bits less each time (CPython, ``Objects/dictobject.c``,
``perturb``). Keys that fill a long piece of the way for ``p = 0`` make others walk along it.
"""

from functools import cache

import numpy as np
from checkpoint_files import entry, payload, safetensors_file
from pickle_code import (
    APPENDS,
    EMPTY_DICT,
    EMPTY_LIST,
    MARK,
    NO_HOOKS,
    NONE,
    POP,
    SETITEMS,
    Code,
    get,
    integer,
    name,
    program,
    put,
    storage,
    unicode,
    value,
)

from attacks import of_family
from attacks.containers import pickles

each, refused, harmless = of_family(__name__)

FILLED, PLACES = 60_000, 1 << 17
"""A table of 2^17 places is for 43,691 to 87,381 keys."""


@cache
def way() -> np.ndarray:
    """The first places of the way, which keys of the same numbers fill."""
    places = [12345]
    while len(places) < FILLED:
        places.append((5 * places[-1] + 1) % PLACES)
    return np.array(places)


def walkers(candidates: np.ndarray) -> np.ndarray:
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
def colliding(count: int = 27_000) -> list[int]:
    """Integers of which as many walk as ``count`` says; no smaller ones than 2^17."""
    dice = np.random.default_rng(0)
    some: np.ndarray = np.empty(0, np.int64)
    while len(some) < count:
        some = np.union1d(some, walkers(dice.integers(PLACES, 1 << 31, 1 << 22)))
    return [*way().tolist(), *dice.permutation(some)[:count].tolist()]


def keys_whose_places_are_taken() -> bytes:
    """Have 27,000 keys whose places are taken."""
    keys = b"".join(integer(key) + NONE for key in colliding())
    return program(EMPTY_DICT, MARK, keys, SETITEMS)


def places_of_the_memo_that_are_taken() -> bytes:
    """Have 27,000 places in the memo that are taken", caught="harmless."""
    found = walkers(np.arange(PLACES, 1 << 20))[:27_000]
    return program(unicode("a" * (1 << 20)), *(put(b"", n) for n in (*way(), *found)))


def states_whose_places_are_taken() -> bytes:
    """Have 50 tensors with a state of 62,000 keys whose places are taken."""
    keys = b"".join(integer(key) + NONE for key in [*way().tolist(), *colliding()[FILLED:][:2000]])
    given = (
        name("torch._utils._rebuild_tensor_v2"), name("foo.T"),
        value((storage("0", 4), 0, (4,), (1,), False, NO_HOOKS)),
        EMPTY_DICT + MARK + keys + SETITEMS,
    )  # fmt: skip
    said = b"".join(put(Code(one), n) + POP for n, one in enumerate(given))
    call = put(name("torch._tensor._rebuild_from_type_v2"), 9) + POP
    one = get(9) + MARK + get(0) + get(1) + get(2) + get(3) + b"tR"
    padding = unicode("a" * 500_000) + POP  # of which copies are allowed
    return program(said, call, padding, EMPTY_LIST, MARK, one * 50, APPENDS)


pickles(each, {
    "keys_whose_places_are_taken": keys_whose_places_are_taken,
    "states_whose_places_are_taken": states_whose_places_are_taken,
}, forms=["zip"])  # fmt: skip
pickles(each, {"places_of_the_memo_that_are_taken": places_of_the_memo_that_are_taken},
        caught="harmless", forms=["zip"])  # fmt: skip


@harmless  # in some seconds
def notes_whose_places_are_taken(folder):
    """Have notes with 27,000 keys whose places are taken."""
    pairs = ",".join(f"[{key},0]" for key in colliding())
    notes = '{"values":{"v":{"$dict":[' + pairs + "]}}}"
    header = {"__metadata__": {"npydata": notes}, "w": entry("U8", [1], 0, 1)}
    return safetensors_file(folder / "a.safetensors", header, payload(1))
