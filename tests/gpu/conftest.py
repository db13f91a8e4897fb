"""Tests for a real GPU: `make gpu`. Without one they are skipped, aloud."""

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    if not torch.accelerator.is_available():
        pytest.skip("torch finds no accelerator")
    return torch.accelerator.current_accelerator()


@pytest.fixture
def keep_busy(device):
    """Give a function that queues work of some 0.1 s, so that all that follows is late."""
    torch.accelerator.synchronize()
    module = torch.get_device_module(device)

    def spin():
        if hasattr(module, "_sleep"):
            module._sleep(200_000_000)  # clock cycles

    yield spin
    torch.accelerator.synchronize()
