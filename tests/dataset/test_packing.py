"""How documents fill rows, by their lengths alone: of real files, and of millions of tiny ones."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from npydata.dataset.packing import LEAST_ROWS, pack
from npydata.dataset.text import PYTHON_CORPUS_SKIPS, list_sources

SEQ_LEN, BLOCK = 2048, 4096
BYTES_PER_TOKEN = 4


@pytest.fixture(scope="module")
def library():
    """Where documents end that are as long as the standard library's files."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = list_sources([folder], suffix=".py", skip_folders=PYTHON_CORPUS_SKIPS).files
    return np.cumsum([one.path.stat().st_size // BYTES_PER_TOKEN for one in files])


def used_once(table, ends):
    """Require that spans lie apart and inside their documents; return the tokens they have."""
    starts, documents, lengths = table.spans.T
    lengths = np.abs(lengths)
    order = np.argsort(starts)
    stops = starts[order] + lengths[order]
    assert (stops[:-1] <= starts[order][1:]).all()
    assert (starts >= np.append(0, ends)[documents]).all()
    assert (starts + lengths <= ends[documents]).all()
    return int(lengths.sum())


def filled(table):
    """Return how many tokens each row has."""
    return np.add.reduceat(np.abs(table.spans[:, 2]), table.row_begins[:-1])


@pytest.mark.parametrize("seed", range(3))
def test_files_of_the_standard_library_fill_rows_and_little_is_cropped(library, seed):
    table = pack(library, SEQ_LEN, BLOCK, "tail", seed)
    tokens = filled(table)
    assert used_once(table, library) == table.used == tokens.sum()
    assert tokens.mean() >= 0.99 * SEQ_LEN
    assert table.used >= 0.9 * library[-1]
    blocks = -(-len(library) // BLOCK)
    assert (tokens < SEQ_LEN).sum() <= blocks
    assert tokens.max() == SEQ_LEN


@pytest.mark.parametrize("seed", range(3))
def test_with_nothing_cropped_every_token_of_the_standard_library_is_used(library, seed):
    table = pack(library, SEQ_LEN, BLOCK, "none", seed)
    assert used_once(table, library) == table.used == library[-1]
    assert filled(table).max() == SEQ_LEN


@pytest.mark.parametrize("count", [50_000, pytest.param(5_000_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("crop", ["tail", "none"])
def test_tiny_documents_by_the_million_are_used_once(count, crop):
    ends = np.cumsum(np.random.default_rng(0).integers(0, 4, count))
    table = pack(ends, SEQ_LEN, BLOCK, crop, 0)
    assert used_once(table, ends) == table.used >= 0.99 * ends[-1]
    tokens = filled(table)
    assert (tokens < SEQ_LEN).sum() <= -(-len(tokens) // LEAST_ROWS)
