"""Survival: ours survives each fault, and beside it each fault has a saver that does not."""

import json

import bench_paths  # noqa: F401
import pytest
from run import main
from training import Training, verdict_on
from trials import FAULTS

pytestmark = pytest.mark.timeout(280)
LOSERS = {
    "kill": "torch.save, over the last one",
    "power cut": "torch.save, over the last one",
    "disk full": "torch.save, over the last one",
    "fsync fails": "torch.save, failing fsync ignored",
    "reader": "torch.save, over the last one",
}


def seen(tmp_path, *arguments):
    out = tmp_path / "out.json"
    assert main([*arguments, "--trials", "5", "--dir", str(tmp_path), "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=[] if fault == "fsync fails" else pytest.mark.nightly)
    for fault in FAULTS
])  # fmt: skip
def test_ours_survives_what_its_control_does_not(fault, tmp_path):
    for name, survives in (("ours, a folder per step", True), (LOSERS[fault], False)):
        (row,) = seen(tmp_path, "--row", name, "--column", fault)["savers"]
        outcomes = row["cells"][fault]
        assert isinstance(outcomes, dict), outcomes
        assert sum(outcomes.values()) >= 2
        assert (outcomes.keys() <= {"whole"}) is survives, (name, outcomes)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "exact"), [
    ("ours, AsyncDataLoader", True), ("DataLoader, begins again", False),
])  # fmt: skip
def test_ours_resumes_twice_exactly(name, exact, tmp_path):
    (row,) = seen(tmp_path, "--row", name)["loaders"]
    assert ({*row["cells"].values()} == {"exact"}) is exact, row["cells"]


def test_a_state_is_known_by_its_numbers(tmp_path):
    training = Training(tmp_path)
    state = training.state(2)
    training.fill(2.0)
    assert verdict_on(state, 2) == ("whole", 2)
    state["model"]["0.bias"] = state["model"]["0.bias"].clone().fill_(1.0)
    assert verdict_on(state, 2) == ("mixed", 2)
    state["model"]["0.bias"].fill_(7.0)
    assert verdict_on(state, 2)[0] == "garbage"
