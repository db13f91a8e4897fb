"""Headers of safetensors as writers make them are read at once, and as any header is read."""

import json
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import entry
from safetensors.torch import save_file

import npydata
from npydata import CheckpointError, open_checkpoint
from npydata.reader.containers import open_container
from npydata.reader.containers.safetensors import read_any, read_usual

COMPACT, SPACED = (",", ":"), (", ", ": ")
TEXTS = {"__metadata__": {"format": "pt", 'quotes " and {braces}': '{"a":{"dtype":"F32","x'}}
TWO = {"a": entry("F32", [2, 3], 0, 24), "b.c": entry("BF16", [4], 24, 32)}
USUAL = {
    "two": TWO,
    "texts": TEXTS | TWO,
    "no_texts": {"__metadata__": {}} | TWO,
    "scalar_and_empty": {"e": entry("I64", [0, 5], 0, 0), "s": entry("U8", [], 0, 1)},
    "backwards": {"b": entry("F64", [1], 32, 40), "a": entry("F32", [2, 4], 0, 32)},
    "half_bytes": {"f": entry("F4", [6], 0, 3), "g": entry("F6_E3M2", [2, 2], 3, 6)},
    "many_alike": {f"layer.{k}": entry("F16", [k % 3, 2], 0, 0) | {"data_offsets": [
        4 * (k // 3 * 3 + (k % 3 == 2)), 4 * (k // 3 * 3 + (0, 1, 3)[k % 3])]}
        for k in range(30)},
    "letters": {"größe": entry("C64", [1], 0, 8), "": entry("BOOL", [2], 8, 10)},
    "ties": {"__metadata__": {"npydata": json.dumps({"ties": {"z": "a"}})}} | TWO,
}  # fmt: skip
OTHER = {
    "a_dtype_to_come": {"a": entry("F99", [3], 0, 5)}, "nothing": {},
    "another_order": {"a": dict(reversed(entry("F32", [1], 0, 4).items()))},
    "an_escape": {'"': entry("F32", [1], 0, 4)},
}  # fmt: skip


def text_of(header, separators=COMPACT):
    return json.dumps(header, separators=separators, ensure_ascii=False).encode() + b"  "


def read_both(text, nbytes):
    """Return what the quick and the slow reading say; of an error its kind."""
    file = SimpleNamespace(size=8 + len(text) + nbytes)
    try:
        slow = read_any(file, text)
    except CheckpointError:
        slow = None
    return read_usual(file, text), slow


def facts(header):
    """Everything that a header says."""
    return [header.metadata, [(name, one.storage, one.dtype, one.shape, one.stride, one.offset,
                               one.kind) for name, one in header.root.items()],
            [(name, one.offset, one.nbytes) for name, one in header.extents.items()]]  # fmt: skip


def end_of(header):
    return max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"),
               default=0)  # fmt: skip


@pytest.mark.parametrize("separators", [COMPACT, SPACED], ids=["compact", "spaced"])
@pytest.mark.parametrize("name", USUAL)
def test_a_usual_header_says_what_it_says_entry_by_entry(name, separators):
    quick, slow = read_both(text_of(USUAL[name], separators), end_of(USUAL[name]))
    assert facts(quick) == facts(slow)


@pytest.mark.parametrize("name", OTHER)
def test_any_other_header_is_left_to_be_read_entry_by_entry(name):
    quick, slow = read_both(text_of(OTHER[name]), end_of(OTHER[name]))
    assert quick is None
    assert len(slow.root) == len(OTHER[name])


@pytest.mark.parametrize("ends", [(8, 12, 16), (4, 12, 16), (4, 8, 16)])
def test_each_of_many_alike_has_as_many_bytes_as_it_needs(ends):
    begins = (0, *ends)
    header = {one: entry("F32", [1], begins[k], ends[k]) for k, one in enumerate("abc")}
    assert read_both(text_of(header), ends[-1]) == (None, None)


PIECES = [
    *"{}[]\":, 019-ea\\", "", "\\u0061", "\\n", "\n", "\0", "é", '"a"', "__metadata__", "F32", "F4",
    "U8", "24", "32", "9" * 19, "9" * 30, "0.0", "true", "null", "[]", "{}", ",,", '},"', "dtype",
    "shape", "data_offsets", '"__metadata__":{},', '"x":1,', "1, 2", "\ufeff",
]  # fmt: skip


def spoiled(text, chance):
    """Return a header with some of its pieces replaced, doubled, swapped or left out."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        begin = chance.randrange(len(text) + 1)
        end = min(len(text), begin + chance.choice((0, 1, 1, 2, 3, 8, 40)))
        other = chance.randrange(len(text) + 1)
        piece = chance.choice([*PIECES, text[other : other + end - begin], text[begin:end] * 2])
        text = text[:begin] + piece + text[end:]
    return text


@pytest.mark.parametrize("name", USUAL)
def test_nothing_that_is_refused_entry_by_entry_is_usual(name):
    chance, agreed = random.Random(name), 0
    for _ in range(1_500):
        text = spoiled(text_of(USUAL[name], chance.choice((COMPACT, SPACED))).decode(), chance)
        quick, slow = read_both(text.encode(), end_of(USUAL[name]) + chance.choice((0, 0, 0, 1)))
        if quick is not None:
            assert slow is not None, text
            assert facts(quick) == facts(slow), text
            agreed += 1
    assert agreed > 5


WRITERS = {
    "safetensors": lambda path, state: save_file(state, path),
    "with texts": lambda path, state: save_file(state, path, {"format": "pt"}),
    "ours": lambda path, state: npydata.save_checkpoint(path, state),
    "converted": lambda path, state: converted(path, state | {"tied": state["w0"]}),
}


def converted(path, state):
    torch.save(state, path.with_suffix(".pt"))
    with open_checkpoint(path.with_suffix(".pt")) as checkpoint:
        checkpoint.to_safetensors(path)


@pytest.mark.parametrize("name", WRITERS)
def test_the_headers_of_writers_are_usual_and_opening_makes_nothing_for_a_tensor(tmp_path, name):
    state = {f"w{k}": torch.full((k % 7, 3), float(k)) for k in range(100)}
    WRITERS[name](path := tmp_path / "a", state)
    archive = open_container(path / "model.safetensors" if path.is_dir() else path)
    assert len(archive.root.made) == 2 * (name == "converted")
    with open_checkpoint(path) as checkpoint:
        model = "model." if name == "ours" else ""
        assert all(torch.equal(checkpoint[model + one], state[one]) for one in state)


def test_threads_that_ask_for_a_tensor_at_once_get_the_same_description(tmp_path):
    save_file({f"t{k}": torch.zeros(1) for k in range(2_000)}, tmp_path / "a.safetensors")
    root = open_container(tmp_path / "a.safetensors").root
    gate, found = threading.Barrier(4), []

    def ask():
        gate.wait()
        found.append([id(one) for one in root.values()])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [found[0]] * 4
