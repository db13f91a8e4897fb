"""Mutated checkpoint files: each is read or refused at little cost, and shown as torch loads it."""

from itertools import chain

import fuzz
import pytest
from checkpoint_reading import read_everything
from children import answers

RIGHT = {
    "read": {"read", "refused"},
    "compared": {"agree", "refused", "explained", "crashed"},  # torch crashes, not the reader
}


def failures(question, seed, count):
    """The cases that went wrong; ``python tests/builders/fuzz.py SEED NUMBER`` shows one again."""
    cases = [f"{seed} {number}" for number in range(count)]
    found = dict(zip(cases, answers("fuzz", question, cases), strict=True))
    return {case: one for case, one in found.items() if one["end"] not in RIGHT[question]}


@pytest.mark.parametrize("question, count", [("read", 500), ("compared", 150)])
def test_mutated_files_are_read_or_refused_and_shown_as_torch_loads_them(question, count):
    assert failures(question, 0, count) == {}


@pytest.mark.soak
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("seed", range(1, 11))
def test_500_000_mutated_files_are_read_or_refused_and_shown_as_torch_loads_them(seed):
    assert failures("read", seed, 50_000) == failures("compared", seed, 50_000) == {}


def test_the_files_that_are_mutated_are_good(tmp_path):
    for suffix, part, write in chain.from_iterable(fuzz.good_parts()):
        reading = read_everything(write(tmp_path / f"a.{suffix}", part))
        assert reading.tensors or reading.values
        assert all("is not called here" in str(error) for error in reading.refused)
