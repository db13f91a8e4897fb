"""What the frameworks' tests share: a token file, a small random model, and how to compare runs."""

import numpy as np
import pytest
import torch

from npydata import write_tokens

VOCABULARY, SEQ_LEN, WINDOWS = 64, 16, 40
NAMES = ("input_ids", "labels")


torch.set_num_threads(1)


class Interrupted(Exception):  # noqa: N818
    """Ends a run in the middle of a step, as a kill would."""


@pytest.fixture
def tokens(tmp_path):
    """Return a file of random tokens: an epoch of 10 batches of 4 windows."""
    drawn = np.random.default_rng(3).integers(0, VOCABULARY, WINDOWS * SEQ_LEN + 1, dtype=np.uint16)
    write_tokens(tmp_path / "tokens.npy", [drawn])
    return tmp_path / "tokens.npy"


class Tiny(torch.nn.Module):
    """A language model of a few thousand weights, with dropout: resumed bits need its generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.drop, self.head = torch.nn.Dropout(0.1), torch.nn.Linear(16, VOCABULARY)

    def forward(self, x, y):
        logits = self.head(self.drop(self.embed(x)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def same_bits(one, other):
    """Whether two states hold the same tensors under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
