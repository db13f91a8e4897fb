"""Hostile files: each is refused quickly, in little memory; no foreign byte is read, nothing runs.

The files are in ``attacks/``. A few child processes try a share each.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from attacks import FAMILIES, OTHER_READERS, family
from children import answers

CHILDREN = os.cpu_count() or 1
SECONDS = 20.0
MEBIBYTES = 1024
REFUSED = {"opening", "reading"}
ALLOWED = {"refused": REFUSED, "system": REFUSED | {"OSError"}, "harmless": REFUSED | {"read"}}
DIFFERENT = {
    "safetensors_and_a_pickle_that_runs", "one_key_typed_and_untyped", "array_a_key",
    "dtype_with_the_state_none", "defaultdict_that_makes_storages",
    *(f"frame_{kind}_in_{container}"
      for kind in ("beyond_the_file", "longer_than_it_is") for container in ("zip", "tar")),
}  # fmt: skip
"""Files that torch does not read, and that are shown; materials/docs/limits.md says why."""
LONG = re.compile(
    r"bombs \w+_in_(legacy|tar)"
    r"|.*(pairs_with_one_hash|equal_texts|notes_whose|100_000_names|one_long_state|of_one_call"
    r"|tuple_keys|of_one_number)"
)
"""Attacks that take seconds, and bombs in other containers than zip."""


def marks(attack):
    if attack.family == "recipes":
        return pytest.mark.soak
    return pytest.mark.nightly if LONG.match(str(attack)) else ()


ATTACKS = [
    pytest.param(attack, id=str(attack).replace(" ", "-"), marks=marks(attack))
    for name in FAMILIES
    for attack in family(name)
]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory there"),
]


@pytest.fixture(scope="module")
def outcomes(request):
    """What became of each attack that this run asks for."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked = list(dict.fromkeys(str(item.callspec.params["attack"]) for item in items))
    shares = [asked[k::CHILDREN] for k in range(CHILDREN)]
    with ThreadPoolExecutor(CHILDREN) as pool:
        found = list(pool.map(partial(answers, "attacks.outcome", "outcome"), shares))
    return dict(zip(chain(*shares), chain(*found), strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_is_refused_quickly_in_little_memory(outcomes, attack):
    outcome = outcomes[str(attack)]
    assert outcome.get("end") != "crashed", outcome
    for end, detail in outcome["ends"]:
        assert end in ALLOWED[attack.caught], f"{end}: {detail}"
        assert "a_good_" not in attack.name or end == "read"
    assert outcome["events"] == []
    assert outcome["seconds"] < SECONDS
    assert outcome["mebibytes"] < MEBIBYTES


@pytest.mark.parametrize(
    "attack", [one for one in ATTACKS if one.values[0].family not in OTHER_READERS]
)
def test_torch_loads_what_is_shown_here_or_it_is_refused(outcomes, attack):
    for one in outcomes[str(attack)]["seen"]:
        named = one["end"] == "alone" and one["unsafe"]  # what only code could make is listed
        named = named or attack.name in DIFFERENT
        assert one["end"] in ("agree", "refused", "two dtypes") or named, one
