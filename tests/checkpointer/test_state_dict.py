"""Tensors out of a nested state and back into it."""

import gc
import json
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch

from npydata import CheckpointError, load_checkpoint, save_checkpoint
from npydata.checkpointer.file_layout import (
    MAX_DEPTH,
    as_json,
    flatten_state_dict,
    refuse_tensor,
    unflatten_state_dict,
)
from npydata.distributed.save_plan import merged_tree_specs

T = [torch.full((1,), float(k)) for k in range(4)]


def there_and_back(state):
    tensors, tree_spec = flatten_state_dict(state)
    return unflatten_state_dict(
        json.loads(json.dumps(tree_spec, allow_nan=False)), tensors.__getitem__
    )


def test_a_tensor_is_named_by_the_keys_that_lead_to_it():
    state = {"state": {0: {"exp_avg": T[0]}}, "list": [T[1], (T[2],)]}
    assert list(flatten_state_dict(state)[0]) == ["state.0.exp_avg", "list.0", "list.1.0"]


def test_each_tensor_comes_back_to_its_own_place():
    state = {"a.b": T[0], "a": {"b": T[1]}, 1: T[2], "1": T[3]}
    back = there_and_back(state)
    assert [back["a.b"], back["a"]["b"], back[1], back["1"]] == T


def test_tensors_in_lists_and_tuples_come_back_in_lists_and_tuples():
    state = {"a": [T[0], (T[1], None)], "b": (T[2],)}
    assert there_and_back(state) == state


def test_the_same_tensor_in_two_places_has_two_names():
    assert list(flatten_state_dict({"a": T[0], "b": T[0]})[0]) == ["a", "b"]


def test_a_name_that_safetensors_keeps_for_itself_is_not_used():
    assert list(flatten_state_dict({"__metadata__": T[0]})[0]) == ["__metadata__'"]


def test_it_does_not_take_the_name_of_another_instead():
    back = there_and_back({"__metadata__'": T[1], "__metadata__": T[0]})
    assert back == {"__metadata__'": T[1], "__metadata__": T[0]}


@pytest.mark.parametrize(
    "kind, wanted",
    [(OrderedDict, OrderedDict), (Counter, Counter), (MappingProxyType, dict),
     (lambda pairs: defaultdict(list, pairs), dict)],
)  # fmt: skip
def test_every_mapping_comes_back_in_its_order_and_those_of_torch_as_they_were(kind, wanted):
    back = there_and_back([kind({"b": T[0], "a": T[1]})])[0]
    assert type(back) is wanted
    assert list(back) == ["b", "a"]


class Migrates(torch.nn.Linear):
    """Notes the version of the state that it is given."""

    _version = 3

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        self.given = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("nested", [False, True])
def test_the_versions_of_modules_come_back_to_the_hooks_that_migrate(tmp_path, nested):
    model = torch.nn.Sequential(Migrates(2, 2), torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    save_checkpoint(tmp_path / "c", {"ema": state} if nested else state)
    back, _, _ = load_checkpoint(tmp_path / "c")
    back = back["ema"] if nested else back
    assert back._metadata == state._metadata
    model.load_state_dict(back)
    assert model[0].given == 3


def test_versions_that_can_t_be_stored_are_refused_by_their_place():
    state = torch.nn.Linear(1, 1).state_dict()
    state._metadata[""]["hook"] = object()
    with pytest.raises(CheckpointError, match=r"\['_metadata'\]: a object"):
        flatten_state_dict(state)


def test_stages_of_a_pipeline_keep_the_versions_of_all_their_modules():
    specs = []
    for stage in ("one", "two"):
        model = torch.nn.ModuleDict({stage: Migrates(1, 1)})
        specs.append(flatten_state_dict(model.state_dict())[1])
    versions = unflatten_state_dict(merged_tree_specs(specs), lambda name: name)._metadata
    assert versions == {"": {"version": 1}, "one": {"version": 3}, "two": {"version": 3}}


def test_what_looks_like_a_stored_tensor_is_a_dict_again():
    assert there_and_back({"x": {"$tensor": "a"}}) == {"x": {"$tensor": "a"}}


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "state, place",
    [
        ({"a": [0, {1: object()}]}, r"\['a'\]\[1\]\[1\]"),
        ({"a": {object(): 1}}, r"\['a'\]: a object"),
        ({"a": {(1, object()): 1}}, r"\['a'\]: a object"),
        ({"a": Point(1, T[0])}, r"\['a'\]: a Point"),
        ({"a": {torch.ones}}, r"\['a'\]: a set|\['a'\]: a builtin"),
        (object(), "the state: a object"),
    ],
    ids=["value", "key", "part of a key", "named tuple", "in a set", "root"],
)
def test_what_cannot_be_stored_is_refused_with_its_place(state, place):
    with pytest.raises(CheckpointError, match=place):
        flatten_state_dict(state)


def test_an_unflattened_state_frees_its_tensors_without_the_collector():
    gc.disable()
    try:
        tensor = torch.ones(1)
        gone = weakref.ref(tensor)
        state = unflatten_state_dict({"a": [{"$tensor": "a"}]}, {"a": tensor}.__getitem__)
        del tensor, state
        assert gone() is None
    finally:
        gc.enable()


def test_a_tensor_among_plain_values_is_refused_with_its_place():
    with pytest.raises(CheckpointError, match=r"\['a'\]\[0\]: a tensor"):
        as_json({"a": [T[0]]}, refuse_tensor)


def chain(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_is_nested_as_deep_as_allowed_comes_back():
    assert there_and_back(chain(MAX_DEPTH)) == chain(MAX_DEPTH)


def test_what_is_nested_deeper_is_refused():
    with pytest.raises(CheckpointError, match="nested more than"):
        flatten_state_dict(chain(MAX_DEPTH + 1))


def test_a_long_key_is_shortened_in_the_message():
    with pytest.raises(CheckpointError) as caught:
        flatten_state_dict({"x" * 10_000: object()})
    assert len(str(caught.value)) < 200
