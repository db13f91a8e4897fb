"""What a file may have as keys, and how long it may take to find them."""

import itertools
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attacks.collisions import colliding
from checkpoint_files import checkpoint_records, stored_zip
from pickle_code import (
    EMPTY_DICT,
    MARK,
    NONE,
    SETITEM,
    SETITEMS,
    call,
    integer,
    name,
    program,
    unicode,
)

from npydata import CheckpointError, open_checkpoint
from npydata.reader.containers import tar
from npydata.reader.keys import (
    MAX_COMPARED,
    MAX_KEY_INTEGER,
    PORTION,
    SMALL,
    Insertion,
    Keys,
    count_parts,
    work_of,
)
from npydata.reader.stored import Global, Storage
from npydata.reader.torch_rebuild import Rebuilder


@pytest.mark.parametrize("key", [
    tuple(range(32)), ((),) * 32, (((1,) * 8,) * 8,) * 8, 2 ** (64 * 32), (2**1000, 2**1000),
    (frozenset(range(20)), frozenset(range(20))),
])  # fmt: skip
def test_keys_of_many_parts_are_refused(key):
    with pytest.raises(ValueError, match="a key of more than 32 parts"):
        Keys().safe(key)


@pytest.mark.parametrize("again", [0, 1, 99])
def test_keys_of_one_hash_are_counted_whichever_dictionary_they_are_in(again):
    same = [(MAX_KEY_INTEGER * number,) for number in range(1, 101)]
    assert len(set(map(hash, same))) == 1
    keys = Keys()
    for key in same:
        keys.safe(key)
    allowed = MAX_COMPARED // (count_parts(same[again]) * 99)
    for _ in range(int(0.95 * allowed)):
        keys.safe(same[again])
    with pytest.raises(ValueError, match="the same hash"):
        keys.add_all(set(), [same[again]] * int(0.1 * allowed))


@pytest.mark.parametrize(("key", "work"), [
    ((1, (2, 3)), 5), (("a" * 5120, 1), 13), (b"a" * 511, 1), (np.complex128(1), 50),
    ((np.float32(1),), 51), (2**640, 11),
])  # fmt: skip
def test_what_takes_long_to_compare_counts_for_more(key, work):
    assert work_of(key) == work


def test_equal_keys_are_one_key(monkeypatch):
    monkeypatch.setattr("npydata.reader.keys.MAX_COMPARED", 100)
    keys = Keys()
    for number in [*range(100)] * 3:
        keys.safe((number, 2**70))


@pytest.mark.parametrize("kind", [dict, OrderedDict, Counter])
def test_keys_whose_places_are_taken_are_refused_as_they_are_put_there(kind):
    with pytest.raises(ValueError, match="far longer to find"):
        Insertion().store_all(kind(), ((key, 0) for key in colliding()))


def test_a_tree_makes_no_table_of_what_was_in_none(tmp_path):
    keys = b"".join(integer(key) + NONE for key in colliding())
    code = program(
        EMPTY_DICT, unicode("v"), call(name("foo", "Bar")), MARK, keys, SETITEMS, SETITEM
    )
    checkpoint = open_checkpoint(stored_zip(tmp_path / "a.pt", checkpoint_records(code, {})))
    with pytest.raises(CheckpointError, match=r"a\.pt: keys that take far longer"):
        checkpoint.tree()


def filled(keys, count):
    """Put 2,560 keys into dictionaries: the clock is looked at for 8 portions of each."""
    for _ in range(count):
        keys.store_all({}, ((key, 0) for key in range(SMALL + 8 * PORTION)))


def test_what_takes_long_counts_in_all_dictionaries_of_a_file(monkeypatch):
    monkeypatch.setattr("npydata.reader.keys.thread_time", itertools.count(0, 0.01).__next__)
    keys = Keys()
    filled(keys, 3)
    with pytest.raises(ValueError, match=r"1,664 took 0\.3 s"):
        filled(keys, 1)


def test_what_else_is_done_meanwhile_hardly_counts(monkeypatch):
    times = itertools.count(0, 100)
    monkeypatch.setattr("npydata.reader.keys.thread_time", times.__next__)
    Keys().store_all({}, ((key, 0) for key in range(SMALL + 4 * PORTION)))
    assert next(times) == 800


NUMBERS = np.random.default_rng(0).integers(0, 2**61 - 1, 200_000).tolist()


@pytest.mark.parametrize("keys", [
    range(500_000), NUMBERS, [number << 20 for number in range(100_000)],
    [number / 7 for number in range(50_000)], [(number, -number) for number in range(50_000)],
    [*map(str, range(100_000))],
], ids=["small", "random", "multiples", "floats", "pairs", "texts"])  # fmt: skip
def test_large_tables_of_others_are_filled(keys):
    assert [*Keys().store_all({}, zip(keys, keys, strict=True))] == [*keys]
    assert Keys().add_all(set(), keys) == set(keys)


def test_a_dictionary_has_its_last_values_and_a_counter_does_not_add_them():
    pairs = [("a", 1), ("b", 2), ("a", 3)]
    for kind in (dict, OrderedDict, Counter):
        made = Keys().store_all(kind(), pairs)
        assert type(made) is kind
        assert [*made.items()] == [("a", 3), ("b", 2)]


def test_numbers_are_keys_as_text_where_only_the_library_looks():
    rebuilder = Rebuilder(1000)
    for key in (2, "2"):
        storage = Global("torch", "FloatStorage")
        rebuilder.persistent_load(("storage", storage, "0", "cpu", 4, (key, 0, 1)))
    assert [*rebuilder.views] == ["2", "'2'"]
    said = iter([1, (7, "s", "a type")])
    numbers = {"<2i": (0, 0), "<1q": (0,)}
    cursor = SimpleNamespace(pickle=said.__next__, numbers=numbers.__getitem__)
    assert [*tar.read_tensors(cursor, {"'s'": Storage("s", torch.float, 1)})] == ["7"]
    assert (tar.as_key(3), tar.as_key("3")) == ("3", "'3'")
