"""The name of everything in a checkpoint: flattened, without collisions, in bounded time."""

import math
import time
from collections import Counter, OrderedDict

import pytest
import torch
from checkpoint_files import checkpoint_records, payload, stored_zip
from pickle_code import (
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    Code,
    build,
    call,
    get,
    name,
    program,
    put,
    storage,
    tensor,
    unicode,
    value,
)

from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint
from npydata.reader.naming import (
    HEAVY,
    MAX_DEPTH,
    MOST_OTHERS,
    MOST_SHARED,
    TENSORS_PER_ENTRY,
    Members,
    Weights,
    count_entries,
    name_entries,
    nested,
)
from npydata.reader.stored import Global, Opaque, StoredTensor

ENOUGH = 10_000
ONE = StoredTensor(None, torch.float32, (), (), 0)
TWO = StoredTensor(None, torch.float32, (), (), 0)


def named(root):
    return name_entries(root, ENOUGH)


def open_pickle(folder, *code):
    """A zip file with this pickle and one storage of four floats."""
    records = checkpoint_records(program(*code), {"0": payload(16)})
    return open_checkpoint(stored_zip(folder / "a.pt", records))


WEIGHT = tensor(storage("0", 4))


@pytest.mark.parametrize(
    "root, names",
    [
        ({"a": ONE, "b": TWO}, ["a", "b"]),
        ({"model": {"fc": {"weight": ONE}}}, ["model.fc.weight"]),
        ({"model": OrderedDict({"fc.weight": ONE})}, ["model.fc.weight"]),
        ([ONE, [TWO, ONE]], ["0", "1.0", "1.1"]),
        ({"state": {0: {"step": ONE}, 1: {"step": TWO}}}, ["state.0.step", "state.1.step"]),
        (((ONE,), {"a": (TWO, 5)}), ["0.0", "1.a.0", "1.a.1"]),
        (ONE, ["tensor"]),
        (5, ["tensor"]),
        ({"": ONE}, ["tensor"]),
        ({"": {"": ONE}}, ["."]),
        ({None: ONE, (1, 2): TWO, 1.5: ONE, b"b": TWO}, ["None", "(1, 2)", "1.5", "b'b'"]),
    ],
    ids=str,
)
def test_nested_containers_are_flattened_with_dots(root, names):
    assert list(named(root)) == names


@pytest.mark.parametrize("leaf", [[], [1, 2], (1, "a"), {}, (), {1, 2}, b"x", None, Counter()])
def test_a_value_without_tensors_in_it_is_one_entry(leaf):
    assert named({"a": leaf}) == {"a": leaf}


@pytest.mark.parametrize(
    "root, names",
    [
        ({"a": {"b": ONE}, "a.b": TWO}, ["a.b", "a\\.b"]),
        ({"a.b": ONE, "a": {"b": TWO}}, ["a.b", "a.b'1"]),
        ({1: ONE, "1": TWO}, ["1", "1'1"]),
        ({"1": ONE, 1: TWO}, ["1", "\\1"]),
        ({"1": ONE, 1: TWO, "\\1": ONE}, ["1", "\\1", "\\\\1"]),
        ({"tensor": ONE, "": TWO}, ["tensor", ""]),
        ({"a.b": {"c": ONE}, "a": {"b.c": TWO, "b": {"c": ONE}}}, ["a.b.c", "a.b\\.c", "a.b.c'2"]),
    ],
    ids=str,
)
def test_a_later_path_to_a_name_that_is_taken_gets_another_name(root, names):
    assert list(named(root)) == names


def test_colliding_names_each_keep_their_own_value():
    root = {"a": {"b": 1}, "a.b": 2, 1: {"x": 3}, "1": {"x": 4}, 1.5: 5, "1.5": 6}
    assert sorted(named(root).values()) == [1, 2, 3, 4, 5, 6]


def test_keys_that_cannot_be_told_apart_by_name_are_numbered():
    root = {float("nan"): number for number in range(5)}
    found = named(root)
    assert list(found.values()) == [0, 1, 2, 3, 4]
    assert len(found) == 5


def test_numbering_many_keys_takes_no_time():
    root = {float("nan"): 0 for _ in range(50_000)}
    begin = time.process_time()
    names = list(name_entries(root, 100_000))
    assert time.process_time() - begin < 2
    assert max(map(len, names)) < 20


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_containers_may_be_nested_as_deep_as_the_limit(kind):
    def wrapped(depth):
        inner = ONE
        for _ in range(depth):
            inner = {"k": inner} if kind is dict else kind([inner])
        return inner

    assert len(named(wrapped(MAX_DEPTH))) == 1
    with pytest.raises(CheckpointError, match=f"nested more than {MAX_DEPTH} deep"):
        named(wrapped(MAX_DEPTH + 1))


def test_a_container_that_holds_itself_is_refused():
    dictionary, sequence = {"a": ONE}, [ONE]
    dictionary["self"], sequence[0:0] = dictionary, [sequence]
    for root in (dictionary, sequence, {"a": {"b": [dictionary]}}):
        with pytest.raises(CheckpointError, match="holds a container that holds itself"):
            named(root)


def test_an_object_that_holds_itself_is_refused():
    opaque = Opaque(Global("a", "b"), state={"x": 1})
    opaque.state["self"] = opaque
    with pytest.raises(CheckpointError, match="holds itself"):
        named({"a": opaque})


def test_a_shared_container_is_named_under_each_of_its_paths():
    shared = {"w": ONE}
    assert named({"a": shared, "b": shared}) == {"a.w": ONE, "b.w": ONE}


def test_containers_shared_again_and_again_are_refused_at_once():
    root = {"w": ONE}
    for _ in range(60):
        root = [root, root]
    with pytest.raises(CheckpointError, match="more than 10,000 entries"):
        named(root)


def test_a_long_key_repeated_in_many_names_is_refused():
    key = "k" * (1 << 16)
    with pytest.raises(CheckpointError, match="names are far longer"):
        named([{key: 0} for _ in range(1000)])


def test_many_ordinary_names_are_not_too_long():
    root = {f"transformer.layers.{n}.self_attention.query.weight": ONE for n in range(ENOUGH)}
    assert len(name_entries(root, TENSORS_PER_ENTRY * ENOUGH)) == ENOUGH
    with pytest.raises(CheckpointError, match="more names of tensors than"):
        name_entries(root, ENOUGH)


def test_a_module_is_named_as_its_state_dict_names_it(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(module, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert sorted(checkpoint) == sorted(module.state_dict())
        assert torch.equal(checkpoint["0.weight"], module[0].weight)
        assert checkpoint.unsafe_globals


def test_a_module_inside_a_dictionary_keeps_its_place(tmp_path):
    torch.save({"net": torch.nn.Linear(2, 3), "step": 4}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert sorted(checkpoint) == ["net.bias", "net.weight"]
        assert checkpoint.metadata["step"] == 4


def test_an_object_is_an_entry_that_is_refused_and_its_tensors_can_be_read(tmp_path):
    made = build(call(name("some.module", "Holder")), {"weight": WEIGHT, "note": "text"})
    with open_pickle(tmp_path, value({"held": made})) as checkpoint:
        assert list(checkpoint) == ["held.weight"]
        assert checkpoint["held.weight"].shape == (4,)
        assert checkpoint.metadata["held.note"] == "text"
        with pytest.raises(UnsafeCheckpointError, match=r"held needs some\.module\.Holder"):
            checkpoint.metadata["held"]


def test_an_objects_slots_items_and_pairs_are_named(tmp_path):
    holder = call(name("some.module", "Holder"))
    slots = build(holder, (None, {"slot": WEIGHT}))
    items = Code(holder + b"(" + WEIGHT + b"e")
    pairs = Code(holder + b"(" + unicode("key") + WEIGHT + b"u")
    state = build(holder, [WEIGHT])
    with open_pickle(tmp_path, value({"s": slots, "i": items, "p": pairs, "l": state})) as found:
        assert list(found) == ["s.slot", "i.0", "p.key", "l.state.0"]


def test_a_whole_checkpoint_that_is_one_tensor_is_called_tensor(tmp_path):
    with open_pickle(tmp_path, WEIGHT) as checkpoint:
        assert list(checkpoint) == ["tensor"]


@pytest.mark.parametrize("empty", [EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE])
def test_an_empty_checkpoint_has_no_tensors(tmp_path, empty):
    with open_pickle(tmp_path, empty) as checkpoint:
        assert len(checkpoint) == 0


def test_the_same_tensor_twice_has_two_names(tmp_path):
    code = value({"a": put(WEIGHT, 1), "b": get(1)})
    with open_pickle(tmp_path, code) as checkpoint:
        assert checkpoint.info("a").aliases == ("b",)
        assert checkpoint.ties() == {"b": "a"}


def test_a_number_that_python_cannot_tell_from_another_is_one_key(tmp_path):
    code = Code(EMPTY_DICT + b"(" + value(1) + value("int") + value(True) + value("bool") + b"u")
    with open_pickle(tmp_path, code) as checkpoint:
        assert dict(checkpoint.metadata) == {"1": "bool"}


def test_nested_keeps_the_containers_of_the_file():
    root = {"a": [ONE, {"b": (TWO, 5)}], "c": [1, 2], 3: {}}
    made = nested(root, lambda leaf: "tensor" if isinstance(leaf, StoredTensor) else leaf)
    assert made == {"a": ["tensor", {"b": ("tensor", 5)}], "c": [1, 2], 3: {}}


def test_nested_makes_a_shared_container_once():
    shared = {"w": ONE}
    made = nested({"a": shared, "b": shared}, lambda leaf: leaf)
    assert made["a"] is made["b"]


def test_a_key_that_is_not_a_number_does_not_equal_itself_and_is_still_named():
    assert list(named({math.nan: ONE})) == ["nan"]


class Looked(list):
    """Counts how often it is looked through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_what_is_shared_is_weighed_once_and_counts_each_time():
    shared, weights = Looked(["abc", "abc", 1 << 30]), Weights()
    each = 2 + 2 * 5 + 28
    assert weights.of((shared, {"k": shared})) == 2 + each + (2 + 3 + each)
    looked = shared.times
    assert weights.of([shared, frozenset({1.5})]) == 2 + each + (2 + 18)
    assert shared.times == looked


def test_what_weighs_more_than_can_be_counted_or_holds_itself_is_weighed():
    doubled = held = []
    for _ in range(5000):
        doubled = (doubled, doubled)
    assert Weights().of(doubled) == HEAVY
    held.append(held)
    assert Weights().of(held) == 4


def test_no_more_entries_are_looked_for_than_there_may_be():
    class Found(Members):
        def of(self, value):
            found.append(value)
            return super().of(value)

    found, most = [], 100
    state = {str(key): 1 for key in range(60)}
    objects = [Opaque("made.up", state=state) for _ in range(1000)]
    assert most < count_entries(objects, Found(), {}, 0, most) <= 2 * len(state)
    assert len(found) == 1 + 2


def test_members_of_modules_that_get_no_name_count_as_well():
    """Many modules may share a long group of parameters that are none."""
    group = dict.fromkeys(map(str, range(60)))
    state = {"_parameters": group | {"w": 1}, "_buffers": {}, "_modules": None}
    modules = [Opaque("made.up", state=state) for _ in range(1000)]
    assert list(name_entries(modules[:1], 61)) == ["0.w"]
    for most, some in ((60, modules[:1]), (1000, modules)):
        with pytest.raises(CheckpointError, match=f"more than {most:,} entries"):
            name_entries(some, most)


@pytest.mark.parametrize(("state", "names"), [
    (({"a": 1}, {"b": [ONE]}), ["0.a", "0.b.0", "0"]),
    ((None, {"b": 1}), ["0.b", "0"]),
    ((1, {"a": 1}, {"b": 1}), ["0.state.0", "0.state.1.a", "0.state.2.b", "0"]),
    ((1, 2, 3), ["0.state", "0"]),
])  # fmt: skip
def test_a_state_of_two_is_that_of_an_object_with_slots_and_no_other_is(state, names):
    assert sorted(named([Opaque("made.up", state=state), 5])) == sorted([*names, "1"])


def test_a_long_state_is_looked_through_once_however_many_objects_have_it():
    class State(tuple):
        __slots__ = ()

        def __iter__(self):
            looked.append(self)
            return super().__iter__()

    looked, state = [], State(range(60))
    objects = [Opaque("made.up", state=state) for _ in range(50)]
    assert len(name_entries(objects, 1000)) == 2 * 50
    assert len(looked) == 2  # for what has a name, and for what has none


MOST = 2 * MOST_SHARED
"""Entries, of a file so small that ``MOST_OTHERS`` may be more than plain values."""


@pytest.mark.parametrize(("root", "size"), [
    (lambda n: [{} for _ in range(n - 1)], 1),
    (lambda n: dict.fromkeys(range(n - 1), (1, 2)), 1),
    (lambda n: [[{}] for _ in range(n // 2)], 2),
    (lambda n: [Opaque("made.up") for _ in range(n - 1)], 1),
    (lambda n: [set()] * (n - 1), 1),
    (lambda n: {1: (1j,) * (n - 2)}, 1),
    (lambda n: {1: {(((k,),),) for k in range(n // 3)}}, 3),
    (lambda n: [{(k,)} for k in range(n // 2)], 2),
], ids=["dicts", "names", "nested", "objects", "sets", "complex", "members", "listed"])  # fmt: skip
def test_more_containers_and_objects_than_a_file_has_room_for_are_refused(root, size):
    assert name_entries(root(MOST_OTHERS - size + 1), MOST)
    with pytest.raises(CheckpointError, match="more containers and objects than"):
        name_entries(root(MOST_OTHERS + size), MOST)


T = torch.ones(2)
SHORT = {
    "numbers by number": {"t": T, "ids": {k: 9999 - k for k in range(10_000)}},
    "counts": {"t": T, "counts": Counter({f"{k:x}": k for k in range(60_000)})},
    "small numbers": {"t": T, "ids": {k: k % 200 for k in range(3000)}},
    "nothing by number": {"t": T, "ids": dict.fromkeys(range(3000))},
    "nothings beside a tensor": [None] * 1300 + [T],
    "numbers beside a tensor": (1,) * 3000 + (T,),
    "empty ones": [{} for _ in range(100_000)],
    "twenty names of one state": {str(k): {"a": T, "b": T, "c": [T] * 200} for k in range(20)},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("content", SHORT)
def test_entries_may_be_short(tmp_path, content, legacy):
    torch.save(SHORT[content], tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        tensors = list(checkpoint.values())
        assert all(torch.equal(one, T) for one in tensors)
        values = len(checkpoint.metadata)
    assert (len(tensors), values) == counted(SHORT[content])


def counted(value):
    """How many tensors and other values are in nested containers."""
    if isinstance(value, torch.Tensor):
        return 1, 0
    if isinstance(value, dict | list | tuple) and value:
        found = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
        return sum(one for one, _ in found), sum(one for _, one in found)
    return 0, 1
