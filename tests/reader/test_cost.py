"""What a short file can cost: a climb over recipes of costly files, in calls, not in seconds."""

import pytest
from fuzz_cost import COUNTED, MEASURED, fuzz, warm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cost")
    warm(made)
    return made


def test_no_short_file_that_a_climb_finds_costs_more_than_is_allowed(folder):
    found = fuzz(seed=2, climbs=2, steps=5, folder=folder, limits=COUNTED)
    assert found["failures"] == []
    assert found["worst"][0]["share"] > 0.01


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_what_climbs_find_costs_no_more_seconds_and_memory_than_is_allowed(folder, seed):
    assert fuzz(seed, climbs=12, steps=30, folder=folder, limits=MEASURED)["failures"] == []
