"""The opcode machine: what pickle writes comes back, what it would call does not run."""

import collections
import pickle
import struct

import pytest

from npydata.errors import CheckpointError
from npydata.reader.archive import read_pickle
from npydata.reader.opcodes import HANDLERS
from npydata.reader.pickle_machine import MAX_LINE_BYTES, PickleMachine
from npydata.reader.stored import Global, Opaque
from npydata.reader.torch_rebuild import Rebuilder

PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**200)],
    "floats": [0.0, -0.0, 1.5, float("inf"), -float("inf"), 5e-324],
    "texts": ["", "a", "ü€😀", "x" * 300, "line\nbreak", "back\\slash", "\ud800"],
    "bytes": [b"", b"abc", bytes(range(256)), b"y" * 300, bytearray(b"buffer")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
    "nested": {"a": [1, {"b": (2, [3])}], 5: None, (1, "k"): 2},
    "sets": [set(), {1, 2, 3}, frozenset({4}), frozenset()],
    "complex": 1 + 2j,
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": collections.Counter("abca"),
    "many": list(range(3000)),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_as_they_were(name, protocol):
    value = PLAIN[name]
    data = pickle.dumps(value, protocol)
    read, after, _ = read_pickle(data)
    assert read == value
    assert after == len(data)
    assert repr(read) == repr(value)


def test_every_opcode_of_pickle_but_out_of_band_buffers_has_a_handler():
    import pickletools

    codes = {op.code.encode("latin-1") for op in pickletools.opcodes}
    assert codes - HANDLERS.keys() == {pickle.NEXT_BUFFER, pickle.READONLY_BUFFER}


def test_an_object_that_is_shared_is_one_object():
    shared = [1]
    read, _, _ = read_pickle(pickle.dumps([shared, shared]))
    assert read[0] is read[1]


def test_a_machine_runs_with_as_few_handlers_as_the_pickle_needs():
    few = {code: HANDLERS[code] for code in (pickle.PROTO, pickle.BININT1, pickle.STOP)}
    machine = PickleMachine(
        pickle.dumps(7, 2), few, find_class=None, persistent_load=None, reduce=None
    )
    assert machine.run() == 7
    machine = PickleMachine(
        pickle.dumps("x", 2), few, find_class=None, persistent_load=None, reduce=None
    )
    with pytest.raises(CheckpointError, match=r"byte 2 of the pickle is b'X', expected an opcode"):
        machine.run()


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_becomes_a_record(protocol, capsys):
    read, _, reader = read_pickle(pickle.dumps([Evil(), 1], protocol))
    assert capsys.readouterr().out == ""
    assert read[1] == 1
    assert isinstance(read[0], Opaque)
    assert read[0].function == Global("builtins", "print")
    assert reader.unknown == {"builtins.print"}


class Thing:
    def __init__(self):
        self.size = 3


@pytest.mark.parametrize("protocol", range(6))
def test_an_object_keeps_what_would_be_set_on_it(protocol):
    read, _, _ = read_pickle(pickle.dumps(Thing(), protocol))
    assert read.state == {"size": 3}
    assert read.cause.endswith("Thing") or read.cause == "copyreg._reconstructor"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the pickle ends at byte 0"),
        (b"\x80\x02K", "opcode b'K' at byte 2"),
        (b"\x80\x06N.", "protocol 6, at most 5"),
        (b".", "ends with 0 values"),
        (b"NN.", "ends with 2 values"),
        (b"N(.", "ends behind a mark"),
        (b"0.", "no mark was set"),
        (b"t.", "no mark was set"),
        (b"(N.", "ends behind a mark"),
        (b"K\x01\x86.", "needs 2 values, found 1"),
        (b"Na.", "opcode b'a' at byte 1"),
        (b"NNa.", "appends to a NoneType"),
        (b"}K\x01N(u.", "stores in a NoneType"),
        (b"}(K\x01u.", "1 keys and values"),
        (b"}]Ns.", "unhashable"),
        (b"}((K\x01tttNs.", "no mark"),
        (b"h\x05.", "index 5 of the memo is empty"),
        (b"Nq\x02h\x01.", "index 1 of the memo is empty"),
        (b"Nq\x02\x94.", "a memo with empty places"),
        (b"Nq\x04.", "index 4 of the memo, which has 0 values"),
        (b"Nr\xff\xff\xff\xff.", "index 4,294,967,295 of the memo"),
        (b"\x8b\x00\x10\x00\x00.", "an integer of 4,096 bytes"),
        (b"\x8b\xff\xff\xff\xff.", "needs -1 bytes"),
        (b"X\xff\xff\xff\x7fab.", "needs 2,147,483,647 bytes, 3 are left"),
        (b"X\x02\x00\x00\x00\xff\xff.", "codec can't decode"),
        (b"I1", "its line does not end"),
        (b"I" + b"1" * (MAX_LINE_BYTES + 1) + b"\n.", "its line does not end"),
        (b"I" + b"1" * 5000 + b"\n.", "an integer of 5,000 digits"),
        (b"F-1e400\n.", "is too large for a float"),
        (b"I010\n.", "b'010' is not an integer"),
        (b"L-01L\n.", "b'-01' is not an integer"),
        (b"S'a\n.", "without quotes"),
        (b"\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", "a frame of 255 bytes"),
        (b"K\x01K\x02\x93.", "a name that is not text"),
        (b"K\x01)R.", "calls 1, expected a name"),
        (b"cos\nsystem\nK\x01R.", r"calls os\.system with 1"),
        (b"cbuiltins\nset\n(](K\x01et\x81.", "arguments, which only a call would look at"),
        (b"\x97.", "expected an opcode"),
        (b"K\x01Q.", "persistent id 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_malformed_pickle_is_refused_with_the_place(data, why):
    with pytest.raises(CheckpointError, match=why):
        read_pickle(data)


def test_a_pickle_ends_where_it_says_and_what_follows_is_left():
    data = pickle.dumps([1]) + pickle.dumps("next")
    first, after, _ = read_pickle(data)
    second, end, _ = read_pickle(data, after)
    assert (first, second, end) == ([1], "next", len(data))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_may_not_read_beyond_the_end_it_was_given(protocol):
    data = pickle.dumps(["four letters", 300, 70_000, 1.5, 2**70], protocol)
    for end in range(len(data)):
        with pytest.raises(CheckpointError):
            read_pickle(data + b"more" * 9, 0, end)


def test_a_key_that_takes_forever_to_hash_is_refused():
    doubled = b")" + b"2\x86" * 60
    with pytest.raises(CheckpointError, match="more than 32 parts"):
        read_pickle(b"}" + doubled + b"Ns.")


def test_names_cannot_be_far_longer_than_the_pickle():
    rebuilder = Rebuilder(1000)
    for number in range(10):
        rebuilder.find_class("module" * 1000, f"name{number}")
    with pytest.raises(CheckpointError, match="far longer than the pickle"):
        rebuilder.find_class("module" * 3000, "name")


def test_calls_cannot_multiply_what_a_short_pickle_holds():
    text = "x" * 50_000
    head = b"\x80\x02X" + struct.pack("<I", len(text)) + text.encode() + b"q\x000("
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    with pytest.raises(CheckpointError, match="far more than the pickle holds"):
        read_pickle(head + call * 50 + b"l.")


def test_python_2_strings_are_text_or_else_bytes():
    read, _, _ = read_pickle(b"(U\x02abT\x02\x00\x00\x00\xff\xfeS'c\\n'\nl.")
    assert read == ["ab", b"\xff\xfe", "c\n"]
