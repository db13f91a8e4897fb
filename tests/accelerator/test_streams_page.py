"""What lesson 07 shows of a save without one of its waits is what happens here."""

import pytest
import torch
from course.play import streams


@pytest.mark.parametrize("number", streams.SAVED)
def test_the_saved_run_of_the_page_is_a_run(sim, number):
    assert streams.files_of(sim, streams.without(number)) == streams.SAVED[number].split()
    torch.accelerator.synchronize()
