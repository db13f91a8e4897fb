"""Names use the field's words: what npydata once called things by itself is gone from the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "npydata"

OURS_BY_THE_FIELDS = {
    "metadata, serialized state": "told, told_bytes, TOLD_BYTES",
    "coordinator, rendezvous": "meeting, Meeting, meet, preside",
    "send, recv, delete; heartbeat": "sign_of_life, distributed: tell, distributed: hear, "
    "distributed: forget",
    "abort_on_error, abort, cancel": "giving_up, give_up, checkpointer: drop, distributed: drop",
    "watermark; staging task": "filling, Filling, Fill, checkpointer: fill",
    "file layout, staging buffer": "image, Image, image_buffer, ImageBuffer",
    "in_flight": "flight",
    "flatten_state_dict, unflatten_state_dict": "take_tensors, put_back",
    "tree spec": "nest",
    "to_local, storage pointer": "held_here, checkpointer: place",
    "validate_*": "misfit, reader: fault, distributed: fault",
    "shard, chunk": "Piece, Part, Box, reader: box, reader: boxes, distributed: piece, "
    "distributed: pieces, distributed: part, distributed: parts, reader.sharded: part, "
    "reader.sharded: parts",
    "dedup_save_plans": "share_out",
    "reorder buffer": "OrderedWindow, ordered_window",
    "batches per handoff": "hop, hops",
    "chunk of batches": "loader: run, loader: runs, make_run",
    "worker_seconds": "effort, Effort",
    "prefetcher, synchronous": "Background, Inline",
    "exception wrapper": "loader: Failure",
    "fetcher, batch sampler": "BatchMaker, batch_maker, Schedule, loader: schedule",
    "positions, cursor": "loader: Place, loader: place, loader: places",
    "advise (WILLNEED)": "announce, want, system: hint, dataset: hint, loader: hint",
    "readahead, no readahead": "system: usual, system: exact, reader: usual, reader: exact",
    "metastack; memo put, get": "reader: below, remember, recall",
    "find_class": "reader.pickle_machine: find, reader.torch_rebuild: find, Find",
    "persistent_load": "reader.pickle_machine: load, reader.torch_rebuild: load",
    "reduce": "reader.pickle_machine: call, reader.torch_rebuild: call, Call",
    "apply_tensor_flags": "dressed",
    "baseline, method": "contender, contenders, Contender, Way, WAYS, bench: way, bench: ways",
    "module": "rooms, ROOMS",
}
"""The field's word, and identifiers that stood for it; `part: name` forbids one in a part only."""

IN_SENTENCES = (
    "batch_maker contender contenders dressed effort filling give_up giving_up held_here "
    "hop hops image_buffer meeting misfit ordered_window preside put_back share_out take_tensors "
    "told_bytes"
)
"""Those that no test's name may hold; the others are English words as well."""


class Name(NamedTuple):
    """An identifier, and the module that has it."""

    module: str
    identifier: str


def names_in(path: Path) -> Iterator[Name]:
    """Yield what a module defines or binds: its own name, functions, classes, parameters, ..."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    yield Name(module, path.stem)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                yield Name(module, found)
            case ast.ClassDef(name=found) | ast.arg(arg=found) | ast.alias(asname=str(found)):
                yield Name(module, found)
            case ast.Name(id=found, ctx=ast.Store()) | ast.Attribute(attr=found, ctx=ast.Store()):
                yield Name(module, found)


def stands_for(entry: str, name: Name) -> bool:
    """Whether an entry of the table forbids a name."""
    part, _, identifier = entry.rpartition(": ")
    inside = not part or f"{name.module}.".startswith(f"{part}.")
    return inside and name.identifier.strip("_") == identifier


NAMES = {name for path in PACKAGE.rglob("*.py") for name in names_in(path)}


@pytest.mark.parametrize("word", OURS_BY_THE_FIELDS)
def test_the_package_uses_the_field_s_word(word):
    entries = OURS_BY_THE_FIELDS[word].split(", ")
    found = {".".join(name) for name in NAMES if any(stands_for(entry, name) for entry in entries)}
    assert not found, f"say {word!r} for {sorted(found)}"


def test_no_test_is_named_by_a_word_of_our_own():
    pattern = re.compile(rf"_({'|'.join(IN_SENTENCES.split())})(?=_|$)")
    tests = list((ROOT / "tests").rglob("test_*.py"))
    named = [f"_{path.stem}" for path in tests]
    for path in tests:
        named += re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    assert [name for name in named if pattern.search(name)] == []
