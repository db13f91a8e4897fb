"""What a short file can cost: hypothesis climbs over recipes of costly files."""

import cProfile
import gc
import json
import tracemalloc
from contextlib import suppress

import pytest
from attacks.containers import FORMS
from attacks.recipes import AGAIN, SAID, recipe_program
from checkpoint_files import safetensors_file
from checkpoint_reading import measured, read_everything
from fuzz import zipped_again
from hypothesis import given, settings, target
from hypothesis import strategies as st

from npydata import CheckpointError, open_checkpoint
from npydata.reader.inspect import as_table, inspect_checkpoint

SMALL_KIB = 4
"""A shorter file counts as one of this size: to open any takes a millisecond or two."""


def in_zip_again(folder, code):
    """A zip file with compressed records."""
    path = folder / "again.pt"
    path.write_bytes(zipped_again(FORMS["zip"](folder, code)))
    return path


def in_safetensors(folder, code):
    """A header of as many tensors of no bytes."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {str(k): entry for k in range(len(code) // 60)} | {"__metadata__": {"a": "\0" * 1000}}
    return safetensors_file(folder / "a.safetensors", header)


CONTAINERS = {**FORMS, "again": in_zip_again, "safetensors": in_safetensors}


def used(path):
    """Read all of a file, inspect it and convert it, unless it is refused."""
    read_everything(path)
    with suppress(CheckpointError):
        report = inspect_checkpoint(path)
        list(as_table(report))
        json.dumps(report)
    with suppress(CheckpointError), open_checkpoint(path) as checkpoint:
        checkpoint.to_safetensors(path.with_name("out.safetensors"))


def seconds_and_mebibytes(path):
    return measured(lambda: used(path))[1:]


def calls_and_mebibytes(path):
    """Calls, those of C included, and MiB that Python holds: the same wherever it runs."""
    profile = cProfile.Profile()
    gc.collect()
    tracemalloc.start()
    try:
        profile.runcall(used, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return sum(one.callcount for one in profile.getstats()), peak / 2**20


@pytest.mark.parametrize(
    "cost, per_kib, most, most_bytes, examples",
    [
        (calls_and_mebibytes, 250_000, 2.5e7, 1 << 14, 12),  # so many calls take some 20 ms
        pytest.param(seconds_and_mebibytes, 0.020, 2.0, 1 << 20, 4000,
                     marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)  # fmt: skip
def test_no_short_file_that_a_climb_finds_costs_more_than_is_allowed(
    tmp_path, cost, per_kib, most, most_bytes, examples
):
    shares = []
    often = st.integers(0, (most_bytes // 4).bit_length() - 1).map(lambda bits: 1 << bits)

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(
        st.tuples(st.sampled_from(sorted(SAID)), often, st.sampled_from(sorted(AGAIN)), often),
        st.sampled_from(sorted(CONTAINERS)),
    )
    def climb(recipe, container):
        path = CONTAINERS[container](tmp_path, recipe_program(*recipe))
        if path.stat().st_size > most_bytes:
            return
        kibibytes = max(SMALL_KIB, path.stat().st_size / 1024)
        work, mebibytes = cost(path)
        share = max(work / min(most, per_kib * kibibytes), mebibytes / min(256, kibibytes))
        shares.append(target(share))
        assert share <= 1, f"{recipe} in {container}: {work}, {mebibytes} MiB"

    used(CONTAINERS["zip"](tmp_path, recipe_program("tensor", 1, "listed", 2)))  # imports
    climb()
    assert max(shares) > 0.01
