"""Page counters, and when advising the kernel is worth its cost."""

import mmap
import os

import numpy as np
import pytest

from npydata import MmapDataset, NpyTokensDataset, open_tokens, write_tokens
from npydata.system import page_cache as pages
from npydata.system.page_cache import (
    AdviceBackoff,
    advise_willneed,
    bytes_read,
    evict,
    page_faults,
    resident_pages,
)

PAGE = mmap.PAGESIZE
TOKENS = 4_000_000


@pytest.fixture
def cold(tmp_path):
    """Return a file of 8 MB that is not in memory, or skip where that can't be had."""
    path = tmp_path / "cold.npy"
    write_tokens(path, [np.arange(TOKENS, dtype=np.uint16)])
    if evict(path) > 0:
        pytest.skip("this file system keeps files in memory (tmpfs)")
    return path


def test_evicted_pages_come_back_one_touch_at_a_time(cold):
    assert not resident_pages(cold).any()
    read_before, faults_before = bytes_read(), page_faults()
    tokens = open_tokens(cold)
    tokens.read(TOKENS // 2, 1).tolist()
    touched = resident_pages(cold)
    assert touched[TOKENS // 2 * 2 // PAGE]
    assert bytes_read() - read_before >= PAGE
    assert page_faults() > faults_before


@pytest.mark.parametrize("kernel", ["with cachestat", "without"])
def test_to_ask_for_a_page_says_whether_it_is_there(cold, monkeypatch, kernel):
    """And brings none, or that one only where the kernel knows no better question.

    A fast disk may then bring it before the answer is given.
    """
    brings = kernel == "without"
    if brings:
        monkeypatch.setattr(pages, "SYSCALL", None)
    with open(cold, "rb") as file:
        descriptor = file.fileno()
        assert not pages.is_cached(descriptor, TOKENS) or brings
        assert resident_pages(cold).sum() <= brings
        os.pread(descriptor, 1, TOKENS)
        assert pages.is_cached(descriptor, TOKENS)
        assert not pages.is_cached(descriptor, TOKENS, 9 * PAGE) or brings
        os.pread(descriptor, 10 * PAGE, TOKENS)
        assert pages.is_cached(descriptor, TOKENS, 9 * PAGE)
        assert not pages.is_cached(descriptor, 10 * TOKENS)


def test_an_empty_file_has_no_pages(tmp_path):
    (tmp_path / "empty").touch()
    assert len(resident_pages(tmp_path / "empty")) == 0
    assert evict(tmp_path / "empty") == 0


def test_a_warm_file_gets_no_advice_and_is_looked_at_ever_more_rarely(tmp_path, monkeypatch):
    write_tokens(tmp_path / "warm.npy", [np.arange(100_000, dtype=np.uint16)])
    ds = NpyTokensDataset(tmp_path / "warm.npy", 64, seed=0)
    ds.fetch(range(len(ds)))
    looks, look, advice = [], AdviceBackoff.record, []
    monkeypatch.setattr(AdviceBackoff, "record", lambda *a, **k: looks.append(1) or look(*a, **k))
    monkeypatch.setattr(os, "posix_fadvise", lambda *asked: advice.append(asked))
    for k in range(1000):
        ds.will_need(range(k, k + 32))
    assert 5 < len(looks) < 20
    assert not advice


def test_the_backoff_doubles_while_pages_are_resident_and_ends_when_they_are_not():
    backoff = AdviceBackoff()

    def calls_until_due():
        return next(k for k in range(1000) if backoff.is_due())

    skipped = []
    for _ in range(10):
        skipped.append(calls_until_due())
        backoff.record(was_resident=True)
    assert skipped == [0, 1, 3, 7, 15, 31, 63, 127, 255, 255]
    assert calls_until_due() == 255
    backoff.record(was_resident=False)
    assert calls_until_due() == 0


def test_after_advice_for_cold_pages_a_fault_reads_what_it_touches_and_no_more(cold):
    ds = MmapDataset(cold, 1024)
    ds.will_need([40])
    ds.fetch([3000])
    present = np.flatnonzero(resident_pages(cold)[TOKENS // PAGE :])
    assert 0 < len(present) <= 4  # readahead would bring 32 or, on some disks, all that follow


def test_pages_of_a_file_of_another_user_are_not_judged(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(PAGE))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match="does not say which pages"):
        resident_pages(tmp_path / "a")


def test_one_cold_range_among_warm_ones_is_noticed(tmp_path):
    (tmp_path / "a").write_bytes(bytes(8 * PAGE))
    begins, lengths = np.arange(8) * PAGE, np.full(8, PAGE)
    with open(tmp_path / "a", "rb") as file:
        for cold_page in range(8):
            cold = cold_page * PAGE
            warm = advise_willneed(
                file.fileno(), begins, lengths, lambda begin, cold=cold: begin != cold
            )
            assert warm is False


def test_a_file_that_was_just_written_can_be_evicted(cold):
    cold.with_name("dirty").write_bytes(os.urandom(16 << 20))
    assert evict(cold.with_name("dirty")) == 0


def test_other_systems_say_what_they_cannot_do(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    monkeypatch.setattr(pages, "CAN_FADVISE", False)
    with pytest.raises(OSError, match="cold files need Linux"):
        evict(tmp_path / "a")
