"""A fingerprint tells data from other data: not where it lies, but what it is and how it is cut."""

import os

import numpy as np
import pytest

from npydata import MmapDataset, NpyTokensDataset, open_tokens, write_tokens
from npydata.dataset.fingerprint import BLOCK_BYTES, BLOCKS, fingerprint_of, spread_blocks

LENGTH = 200_000


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 2**16, LENGTH).astype(np.uint16)


@pytest.fixture
def write(tmp_path):
    def to_file(tokens, name="a.npy", dtype="uint16"):
        write_tokens(tmp_path / name, [tokens], dtype=dtype)
        return tmp_path / name

    return to_file


def test_a_moved_file_keeps_its_fingerprint(write, tokens, tmp_path):
    path = write(tokens)
    before = MmapDataset(path, 16).fingerprint()
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / "b.npy")
    assert MmapDataset(tmp_path / "elsewhere" / "b.npy", 16).fingerprint() == before


def test_a_touched_file_keeps_its_fingerprint(write, tokens):
    path = write(tokens)
    before = NpyTokensDataset(path, 16).fingerprint()
    os.utime(path, (0, 0))
    assert NpyTokensDataset(path, 16).fingerprint() == before


def test_retokenised_text_has_another_fingerprint(write, tokens):
    retokenised = (tokens + 1).astype(np.uint16)
    pair = [MmapDataset(write(t, n), 16) for t, n in [(tokens, "a.npy"), (retokenised, "b.npy")]]
    assert pair[0].fingerprint() != pair[1].fingerprint()


@pytest.mark.parametrize("place", [0, LENGTH - 1])
def test_one_other_token_at_either_end_is_seen(write, tokens, place):
    before = MmapDataset(write(tokens), 16).fingerprint()
    tokens[place] ^= 1
    assert MmapDataset(write(tokens), 16).fingerprint() != before


@pytest.mark.parametrize("settings", [(17, None), (16, 16), (16, 18)])
def test_other_windows_have_another_fingerprint(write, tokens, settings):
    path, (seq_len, stride) = write(tokens), settings
    usual = MmapDataset(path, 16).fingerprint()
    assert MmapDataset(path, seq_len, stride=stride).fingerprint() != usual


def test_another_dtype_or_shape_has_another_fingerprint(tmp_path):
    write_tokens(tmp_path / "narrow.npy", [np.zeros(1000, np.uint16)], dtype="uint16")
    write_tokens(tmp_path / "wide.npy", [np.zeros(1000, np.uint16)], dtype="uint32")
    write_tokens(tmp_path / "rows.npy", [np.zeros(1000, np.uint16)], dtype="uint16", row_len=100)
    prints = {MmapDataset(path, 16).fingerprint() for path in tmp_path.glob("*.npy")}
    assert len(prints) == 3


def test_the_order_of_files_counts(write, tokens):
    one, two = write(tokens, "a.npy"), write(tokens[::-1], "b.npy")
    assert MmapDataset([one, two], 8).fingerprint() != MmapDataset([two, one], 8).fingerprint()


def test_blocks_are_spread_over_all_files_from_the_first_byte_to_the_last(write, tokens):
    files = [open_tokens(write(tokens, f"{k}.npy")) for k in range(3)]
    blocks = spread_blocks(files)
    assert len(blocks) == BLOCKS
    assert [sum(file is wanted for file, _ in blocks) for wanted in files] == pytest.approx(
        [BLOCKS / 3] * 3, abs=1
    )
    assert blocks[0][1] == 0
    assert blocks[-1][1] == files[2].nbytes - BLOCK_BYTES


@pytest.mark.parametrize("length", [1, 5, BLOCK_BYTES // 2, BLOCK_BYTES // 2 + 1])
def test_a_file_shorter_than_its_blocks_has_a_fingerprint_of_all_its_tokens(write, length):
    prints = set()
    for place in range(0, length, max(1, length // 7)):
        tokens = np.zeros(length, np.uint16)
        tokens[place] = 1
        prints.add(fingerprint_of([open_tokens(write(tokens))]))
    assert len(prints) == len(range(0, length, max(1, length // 7)))


def test_the_same_data_has_the_same_fingerprint_between_versions(write):
    path = write(np.arange(50_000, dtype=np.uint16))
    assert MmapDataset(path, 16).fingerprint() == "9040a1b3d3089a5b940b74b52a0f5d5b"
