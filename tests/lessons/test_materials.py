"""The smoke files are what the program beside them makes, and their entropy is what it says."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

MATERIALS = Path(__file__).parents[2] / "materials"
sys.path.append(str(MATERIALS))
import make_materials as grammar  # noqa: E402


@pytest.fixture(scope="module")
def train():
    return np.load(MATERIALS / "train_smoke.npy")


def test_committed_files_are_what_the_program_makes():
    for name, (split, rows) in grammar.FILES.items():
        found, made = np.load(MATERIALS / name), grammar.make_tokens(split, rows)
        assert (found.dtype, found.shape) == (made.dtype, made.shape)
        assert np.array_equal(found, made)


def test_smoke_files_are_small_and_share_no_row_and_all_64_words_occur(train):
    val = np.load(MATERIALS / "val_smoke.npy")
    assert train.dtype == val.dtype == np.uint16
    assert (train.shape, val.shape) == ((64, 4096), (8, 4096))
    assert len({row.tobytes() for row in np.concatenate([train, val])}) == 64 + 8
    assert len(set(grammar.WORDS)) == 64
    assert set(np.unique(train)) == set(range(64))


def test_weights_of_every_state_share_all_draws():
    shares = [sum(weight for _, weight, _ in grammar.choices(one)) for one in grammar.visits()]
    assert len(shares) == 1 + 2 + 2 + 16 + 16 + 8 + 8 + 1
    assert set(shares) == {grammar.DRAWS}


def surprises(row):
    """Follow the grammar through a row: minus log probability of each word, in nats."""
    state, nats = grammar.START, []
    for token in row.tolist():
        word = grammar.WORDS[token]
        weight, state = next(
            (w, after) for text, w, after in grammar.choices(state) if text == word
        )
        nats.append(-math.log(weight / grammar.DRAWS))
    return nats


def test_text_is_as_surprising_under_the_grammar_as_the_stated_entropy_rate(train):
    # Rows are independent, so the spread of their means gives the sampling error.
    means = np.array([np.mean(surprises(row)) for row in train])
    error = means.std(ddof=1) / math.sqrt(len(means))
    assert error < 0.002
    assert abs(means.mean() - grammar.entropy_rate()) < 4 * error
