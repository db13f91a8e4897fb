"""What a short file can cost: a climb over recipes of costly files, in calls, not in seconds."""

import pytest
from fuzz_cost import COUNTED, MEASURED, fuzz, tried, warm

from npydata.reader import inspect as inspecting
from npydata.reader import naming, torch_rebuild


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("cost")
    warm(made)
    return made


def test_no_short_file_that_a_climb_finds_costs_more_than_is_allowed(folder):
    found = fuzz(seed=2, climbs=2, steps=5, folder=folder, limits=COUNTED)
    assert found["failures"] == []
    assert found["worst"][0]["share"] > 0.02


BROKEN = {
    "copies": (torch_rebuild, "COPIED_PER_BYTE", 1 << 20, ["numbers", 200, "to_set", 600]),
    "names": (naming, "NAME_CHARACTERS", 1 << 30, ["texts", 1500, "keys", 200]),
    "shown": (inspecting, "SHOWN_PER_BYTE", 1 << 20, ["controls", 3000, "named", 600]),
}


@pytest.mark.parametrize("bound", BROKEN)
def test_a_bound_that_is_broken_costs_more_than_is_allowed(folder, monkeypatch, bound):
    module, limit, most, recipe = BROKEN[bound]
    assert tried([*recipe, "zip"], folder, COUNTED)["share"] < 1
    monkeypatch.setattr(module, limit, most)
    assert tried([*recipe, "zip"], folder, COUNTED)["share"] > 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_what_climbs_find_costs_no_more_seconds_and_memory_than_is_allowed(folder, seed):
    assert fuzz(seed, climbs=12, steps=30, folder=folder, limits=MEASURED)["failures"] == []
