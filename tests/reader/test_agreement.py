"""What a file shows here is what torch loads from it, or it is refused: every hostile file asked.

Where torch and we differ and torch is wrong, a test says so by name.
"""

import functools
import struct

import pytest
import torch
from agreement import answer
from attacks import FAMILIES, family
from checkpoint_files import (
    TarTensor,
    checkpoint_records,
    payload,
    small_tar,
    stored_zip,
    tar_file,
    tar_members,
)
from children import answers
from pickle_code import NONE, call, name, persistent, program, storage

from npydata import open_checkpoint

DIFFERENT = {"safetensors_and_a_pickle_that_runs", "one_key_typed_and_untyped"}
"""Files that torch does not read, and that are shown; materials/docs/limits.md says why."""
OTHER_READERS = {"index", "shards", "places", "bombs"}
"""Families of files that torch does not read, or that would exhaust it."""
ASKED = [
    attack
    for title in FAMILIES if title not in OTHER_READERS
    for attack in family(title)
    if "at_every_byte" not in attack.name and "first_bytes" not in attack.name
]  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """How torch and we see each file of a family."""

    @functools.cache
    def of(title):
        asked = []
        for attack in ASKED:
            if attack.family == title:
                folder = tmp_path_factory.mktemp(attack.name[:60])
                asked += [(attack.name, path) for path in attack.files(folder)]
        found = {}
        for (attack_name, _), one in zip(
            asked, answers("agreement", "answer", [p for _, p in asked]), strict=True
        ):
            found.setdefault(attack_name, []).append(one)
        return found

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("attack", [pytest.param(a, id=f"{a.family}-{a.name}") for a in ASKED])
def test_torch_loads_what_is_shown_here_or_it_is_refused(seen, attack):
    for one in seen(attack.family)[attack.name]:
        named = one["end"] == "alone" and one["unsafe"]  # what only code could make is listed
        named = named or attack.name in DIFFERENT
        assert one["end"] in ("agree", "refused", "two dtypes") or named, one


def test_torch_forgets_to_swap_big_endian_numbers_of_a_dtype_given_apart(tmp_path):
    """torch is wrong: it swaps by the storage, which is of bytes, and the dtype comes later."""
    untyped = storage("0", 8, name("torch.storage.UntypedStorage"))
    tensor = call("torch._utils._rebuild_tensor_v3", untyped, 0, (2,), (1,), False, NONE,
                  name("torch.uint32"))  # fmt: skip
    records = checkpoint_records(
        program(tensor), {"0": struct.pack(">2I", 7, 2**24)}, byteorder="big"
    )
    path = stored_zip(tmp_path / "big.pt", records)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["tensor"].tolist() == [7, 2**24]
    assert torch.load(path, weights_only=True).tolist() == [7 << 24, 1]


def test_torch_reads_a_tar_file_only_where_everything_may_run(tmp_path):
    """Not a difference in content: ``weights_only`` refuses every file of before 0.1.10."""
    path = small_tar(tmp_path / "a.tar")
    with pytest.raises(RuntimeError, match="weights_only"):
        torch.load(path, weights_only=True)
    with open_checkpoint(path) as checkpoint:
        assert bytes(checkpoint["weight"].view(torch.uint8).numpy().tobytes()) == payload(16)


def test_a_view_of_a_view_is_counted_from_the_view(tmp_path):
    """As torch reads it: element 1 of the elements from 2 on."""
    members = tar_members(
        program(persistent("30", python=2)),
        [(10, "FloatStorage", 4, struct.pack("<4f", 0, 1, 2, 3))],
        [TarTensor(key=30, storage=12, size=(1,), stride=(1,))],
        views=[(11, 10, 2, 2), (12, 11, 1, 1)],
    )
    path = tar_file(tmp_path / "a.tar", members)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["tensor"].tolist() == [3.0]
    assert answer(path)["end"] == "agree"
