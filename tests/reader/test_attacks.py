"""Hostile files: each is refused quickly, in little memory, and no foreign byte is ever read.

The files are in ``attacks/``, one function each. A family is tried in one child process.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attacks import FAMILIES, Attack, family
from checkpoint_files import small_zip

SECONDS = 20.0
MEBIBYTES = 1024
ALLOWED = {
    "opening": {"opening", "reading"},
    "system": {"opening", "reading", "OSError"},
    "reading": {"opening", "reading"},
    "harmless": {"opening", "reading", "read"},
}
SHOWN = {
    "two_zip64_fields", "two_zip64_fields_that_agree", "five_thousand_overlapping_entries",
    "keys_of_long_texts_in_zip", "sets_of_one_byte_in_zip", "lists_of_one_number_in_zip",
    "pairs_with_one_hash_in_zip", "members_that_are_pairs_with_one_hash_in_zip",
    "members_with_equal_texts_in_zip", "one_key_with_two_dtypes",
    "one_key_with_two_integer_dtypes", "one_key_typed_and_untyped",
    "safetensors_and_a_pickle_that_runs", "notes_whose_places_are_taken",
}  # fmt: skip
"""Files that may be read as well: they cost some seconds, or `test_agreement.py` compares them."""
ATTACKS = [attack for name in FAMILIES for attack in family(name)]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory there"),
]


def each(attack: Attack) -> object:
    return pytest.param(attack, id=f"{attack.family}-{attack.name}")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[Attack, dict[str, object]]:
    """What became of each attack, of the families that this run asks for."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    families = sorted({item.callspec.params["attack"].family for item in items})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = zip(families, pool.map(outcomes_of, families), strict=True)
        return {attack: of[attack.name] for name, of in found for attack in family(name)}


@pytest.mark.parametrize("attack", [each(one) for one in ATTACKS])
def test_a_hostile_file_is_refused_quickly_in_little_memory(outcomes, attack):
    outcome = outcomes[attack]
    for end, detail in outcome["ends"]:
        caught = "harmless" if attack.name in SHOWN else attack.caught
        assert end in ALLOWED[caught], f"{end}: {detail}"
    assert outcome["seconds"] < SECONDS
    assert outcome["mebibytes"] < MEBIBYTES


@pytest.mark.parametrize("attack", [each(one) for one in ATTACKS if "_good_" in one.name])
def test_the_file_without_an_attack_is_read(outcomes, attack):
    assert outcomes[attack]["ends"] == [["read", ""]]


def outcomes_of(family_name: str) -> dict[str, dict[str, object]]:
    """What became of each attack of a family; after a crash, a fresh child goes on behind it."""
    left = [attack.name for attack in family(family_name)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        small_zip(Path(folder) / "warm")
        while left:
            lines, crash = one_child(family_name, folder, left)
            found |= dict(zip(left, map(json.loads, lines), strict=False))
            left = left[len(lines) :]
            if left:
                end = [["crashed", crash]]
                found[left.pop(0)] = {"ends": end, "seconds": 0, "mebibytes": 0}
    return found


def one_child(family_name: str, folder: str, names: list[str]) -> tuple[list[str], str]:
    """The answers to the first names, and how the child ended."""
    child = subprocess.run(
        [sys.executable, "-m", "attacks", family_name, tempfile.mkdtemp(dir=folder)],
        input="".join(f"{name}\n" for name in names),
        capture_output=True,
        text=True,
        timeout=280,
    )
    return child.stdout.splitlines(), f"exit status {child.returncode}: {child.stderr[-2000:]}"
