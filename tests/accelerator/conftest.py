"""The simulated accelerator for the tests of this folder; without a compiler they are skipped."""

import os

import pytest
import simulator
import torch

SEEDS = range(int(os.environ.get("NPYDATA_SEEDS", "50")))
"""The adversaries that each proof meets; ``make nightly`` asks for 200."""
FEW_SEEDS = SEEDS if "NPYDATA_SEEDS" in os.environ else range(12)
"""For proofs that write files: each of the adversary's ways once."""


@pytest.fixture(scope="session")
def _loaded():
    if reason := simulator.missing_tools():
        pytest.skip(reason)
    return simulator.load()


@pytest.fixture
def sim(_loaded):
    """The simulator with nothing queued, nothing counted, and an adversary that is always late."""
    _loaded.seed(0)
    synchronize()
    _loaded.reset_counts()
    return _loaded


def each_seed(sim, seeds):
    """Yield each adversary; what one left queued is done before the next begins."""
    for seed in seeds:
        sim.seed(seed)
        yield seed
        synchronize()


def synchronize():
    """Wait until all that is queued on every device is done."""
    for device in range(simulator.DEVICES):
        torch.accelerator.synchronize(device)


@pytest.fixture
def seeds(sim):
    return each_seed(sim, SEEDS)


@pytest.fixture
def few_seeds(sim):
    return each_seed(sim, FEW_SEEDS)
