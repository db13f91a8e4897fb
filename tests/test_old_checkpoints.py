"""Checkpoints that were written before modules and names changed load as they did."""

import math
from pathlib import Path

import pytest
import torch

import npydata

OLD = Path(__file__).parent / "old_checkpoints"


@pytest.mark.parametrize("name", ["one", "ranks"])
def test_a_checkpoint_of_an_older_version_verifies_and_loads(name):
    assert npydata.verify_checkpoint(OLD / name).step == 7
    model, optimizer, training = npydata.load_checkpoint(OLD / name, verify=True)
    assert torch.equal(model["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(model["tied"], model["w"])
    assert torch.equal(model["z"], torch.tensor([1 + 2j], dtype=torch.complex128))
    assert torch.equal(model["n"]["a.b"], torch.ones(2, dtype=torch.bfloat16))
    assert model["n"]["k"] == (1, None)
    assert torch.equal(optimizer["state"][0]["exp_avg"], torch.zeros(2, 3))
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert (training.step, training.tokens, training.extra) == (7, 100, {"t": (1, b"x")})
    assert math.isnan(training.loss)


def test_the_latest_of_an_older_versions_root_is_found():
    assert npydata.latest_checkpoint(OLD) == OLD / (OLD / "latest").read_text()
