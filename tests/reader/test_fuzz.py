"""Mutated checkpoint files open or are refused: no other exception, no hang, no crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_reading import read_everything
from fuzz_agreement import fuzz
from fuzz_checkpoints import case_file, good_files

SCRIPT = Path(__file__).parents[1] / "builders" / "fuzz_checkpoints.py"


def fuzzed(seed: int, cases: int) -> str:
    """What failed, in words that tell how to see it again; empty if nothing did."""
    child = subprocess.run(
        [sys.executable, SCRIPT, "--seed", str(seed), "--cases", str(cases)],
        capture_output=True,
        text=True,
    )
    if child.returncode:
        numbers = [line for line in child.stderr.splitlines() if line.isdigit()]
        return f"--seed {seed} --case {numbers[-1:]} ended it: {child.stderr[-3000:]}"
    failures = json.loads(child.stdout)["failures"]
    return "\n".join(
        f"--seed {one['seed']} --case {one['case']}: {one['end']}, {one['why']}" for one in failures
    )


def test_1_000_mutated_files_are_read_or_refused():
    assert fuzzed(seed=0, cases=1000) == ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 9))
def test_120_000_mutated_files_are_read_or_refused(seed):
    assert fuzzed(seed=seed, cases=15_000) == ""


def test_the_files_that_are_mutated_are_good(tmp_path):
    for kind, content in good_files(tmp_path).items():
        path = tmp_path / kind
        path.write_bytes(content)
        reading = read_everything(path)
        assert reading.tensors, kind
        assert all("is not called here" in str(error) for error in reading.refused)


def test_a_case_follows_from_its_seed_and_number(tmp_path):
    files = good_files(tmp_path)
    first = [case_file(files, 3, number, tmp_path) for number in range(50)]
    assert first == [case_file(files, 3, number, tmp_path) for number in range(50)]
    assert len({content for _, content in first}) > 45


@pytest.mark.timeout(300)
def test_300_mutated_files_are_shown_as_torch_loads_them():
    assert fuzz(0, range(300))["failures"] == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(1, 11))
def test_500_000_mutated_files_are_shown_as_torch_loads_them(seed):
    assert fuzz(seed, range(50_000))["failures"] == []
