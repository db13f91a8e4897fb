"""Staging memory: on a page, used again, and never pulled from under a tensor."""

import mmap
import os

import pytest
import torch

from npydata import AsyncCheckpointer
from npydata.checkpointer.staging import StagingBuffer


@pytest.mark.parametrize("capacity", [0, 4096, 4096 * 1000])
def test_the_memory_has_the_length_asked_for(capacity):
    assert StagingBuffer().reserve(capacity).numel() == capacity


@pytest.mark.parametrize("capacity", [4096, 3 << 20])
def test_the_memory_begins_on_a_page(capacity):
    assert StagingBuffer().reserve(capacity).data_ptr() % mmap.PAGESIZE == 0


def test_memory_that_is_large_enough_is_used_again():
    buffer = StagingBuffer()
    first = buffer.reserve(3 * 4096).data_ptr()
    assert [buffer.reserve(n).data_ptr() for n in (4096, 3 * 4096)] == [first, first]


def test_it_grows_when_more_is_asked_for():
    buffer = StagingBuffer()
    buffer.reserve(4096)
    grown = buffer.reserve(8 * 4096)
    grown.fill_(7)
    assert int(grown.sum()) == 7 * 8 * 4096


def test_memory_that_a_tensor_still_looks_into_outlives_growing_and_freeing():
    buffer = StagingBuffer()
    old = buffer.reserve(4096)
    old.fill_(5)
    buffer.reserve(1 << 22).fill_(1)
    buffer.free()
    assert old.eq(5).all()


def test_freed_memory_is_forgotten():
    buffer = StagingBuffer()
    buffer.reserve(4096)
    buffer.free()
    assert buffer.bytes.numel() == 0


def faults():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_touched_memory_meets_no_page_fault_when_it_is_written():
    buffer = StagingBuffer()
    memory = buffer.reserve(64 << 20, touch=True)
    before = faults()
    memory[:: mmap.PAGESIZE] = 1
    assert faults() - before < 500  # untouched: one for each of 32 huge or 16,384 small pages


def test_where_the_kernel_cannot_map_ahead_the_pages_are_written(monkeypatch):
    monkeypatch.setattr("npydata.checkpointer.staging.MADV_POPULATE_WRITE", 9999)
    buffer = StagingBuffer()
    buffer.reserve(4 * 4096).fill_(3)
    buffer.touch()
    assert torch.equal(buffer.bytes[::4096], torch.zeros(4, dtype=torch.uint8))


def test_touching_nothing_is_no_error():
    StagingBuffer().touch()


def test_a_forked_process_writes_into_a_copy_of_its_own():
    memory = StagingBuffer().reserve(4096)
    memory[:] = 1
    child = os.fork()
    if child == 0:
        memory[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (memory == 1).all()


def test_a_forked_process_saves_into_memory_of_its_own_and_never_a_snapshot_of_its_parent(tmp_path):
    keeper = AsyncCheckpointer()
    keeper.save(tmp_path / "a", {"w": torch.zeros(3)})
    keeper.wait()
    child = os.fork()
    if child == 0:
        keeper.wait()
        os._exit(len(keeper._buffers))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(keeper._buffers) == 1
