"""Values as JSON: what Python tells apart comes back apart."""

import json
import math
from collections import Counter, OrderedDict
from enum import Enum, IntEnum, StrEnum

import numpy as np
import pytest
import torch

from npydata.reader.typed_json import decode, encode

VALUES = [
    None, True, False, 0, -1, 2**80, 0.0, -0.0, 1e-320, 1.5, "", "text", "\ud800", "\0\x1b",
    math.inf, -math.inf, [], [1, [2, []]], {}, {"a": {"b": [1]}}, (), (1,), (1, (2, [3])), b"",
    b"\0\xff", bytearray(b"\0\xff"), {1, 2}, frozenset({"a"}), frozenset({(1, 2)}), set(), 1 + 2j,
    complex(0, math.inf), {1: 2}, {1: "int", "1": "text"}, {None: 1, True: 2, 1.5: 3, (1, 2): 4},
    {"$tuple": [1]}, {"$": 1}, {"$a": 1, "b": 2}, {"a": {"$dict": []}}, torch.Size([2, 3]),
    torch.float8_e5m2, torch.device("cuda", 1), [{"a": (1, {2: b"x"})}], OrderedDict(b=1, a=[2]),
    OrderedDict(), OrderedDict({1: OrderedDict()}), Counter("abba"), Counter({(1, 2): -1}),
    np.float64(0.1), np.float32(0.1), np.float16(-0.0), np.float64(math.inf), np.int64(-(2**63)),
    np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 + 2j), {np.int8(3): np.uint8(4)},
]  # fmt: skip


def types(value):
    """The value with the type of each part, so that 1 is not True and a Size is no tuple."""
    if isinstance(value, dict):
        return type(value), [(types(key), types(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(one) for one in value]
    return type(value), repr(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_strict_json_with_its_types(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert types(decode(json.loads(text))) == types(value)


def test_nan_comes_back():
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan), allow_nan=False))))


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None]}, "text", [True], {"lr": 0.1}], ids=repr)
def test_what_json_has_words_for_is_written_as_one_would_expect(value):
    assert encode(value) == value


class Grade(IntEnum):
    GOOD = 1


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize("value, plain", [(Grade.GOOD, 1), (Colour.RED, "red")])
def test_a_member_of_somebody_s_enumeration_comes_back_as_what_it_equals(value, plain):
    for one, wanted in ((value, plain), ({value: [value]}, {plain: [plain]})):
        assert types(decode(json.loads(json.dumps(encode(one))))) == types(wanted)


class Mode(Enum):
    ON = 1


@pytest.mark.parametrize(
    "value",
    [object(), {object(): 1}, [range(3)], torch.zeros(2), int, Mode.ON, np.longdouble(1)],
)
def test_a_value_of_another_type_is_refused(value):
    with pytest.raises(TypeError, match="no place in JSON"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        {"$what": 1}, {"$tuple": 1}, {"$tuple": [1], "b": 2}, {"$set": [[1]]}, {"$bytes": "?"},
        {"$bytes": 5}, {"$complex": [1]}, {"$complex": 1}, {"$size": ["a"]},
        {"$dtype": "os.system"},
        {"$device": "nowhere"}, {"$float": "1"}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$": 1},
        {"$ordered": {"$ordered": {}}}, {"$counter": {"$ordered": {}}}, {"$ordered": []},
        {"$ordered": [["a", 1]]}, {"$counter": "abc"}, {"$state_dict": [{}]},
        {"$state_dict": [{}, 1]}, {"$numpy": ["float64", "1"]}, {"$numpy": ["object", 1]},
        {"$numpy": ["int8", 300]}, {"$numpy": ["float64", [1]]}, {"$numpy": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_tag_that_does_not_fit_is_refused(data):
    with pytest.raises(ValueError, match=r"^\$"):
        decode(data)
