"""The token file of several tests."""

import numpy as np
import pytest
from token_builders import write


@pytest.fixture
def tokens(tmp_path):
    """A file of 20,000 tokens that differ from each other."""
    return write(tmp_path / "a.npy", ids=np.arange(20_000))
