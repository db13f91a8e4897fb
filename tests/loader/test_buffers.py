"""Memory that is lent again, once nobody looks at it any more, and never before."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from npydata.loader.buffer_pool import BufferPool

SHAPE = (2, 4, 3)


def pair(pool, value, batch_size=4):
    """Return two tensors that look at one lent array: a part by torch, and a part by numpy."""
    lent = pool.lend(batch_size)
    lent[:] = value
    return torch.from_numpy(lent)[0], torch.from_numpy(lent[1])


def address(array):
    return array.__array_interface__["data"][0]


class TestPromises:
    """What may never happen to a batch that somebody holds."""

    def test_memory_is_used_again_once_the_batch_is_gone(self, taught):
        pool = taught.BufferPool(SHAPE, 2)
        batch = pair(pool, 1)
        first = batch[0].data_ptr()
        del batch
        assert address(pool.lend(4)) == first

    @pytest.mark.parametrize(
        "kept",
        [
            lambda x, y: x,
            lambda x, y: y,
            lambda x, y: x[1:2],
            lambda x, y: y.view(-1)[-1],
            lambda x, y: x.numpy(),
            lambda x, y: y.numpy()[2:, :1],
            lambda x, y: memoryview(x.numpy()),
            lambda x, y: x.detach().T,
            lambda x, y: x.untyped_storage(),
        ],
        ids=["x", "y", "rows", "number", "numpy", "part", "memory", "turned", "storage"],
    )
    def test_memory_that_anything_looks_at_is_not_lent(self, taught, kept):
        pool = taught.BufferPool(SHAPE, 2)
        batch = pair(pool, 1)
        begin = batch[0].data_ptr()
        view = kept(*batch)
        del batch
        gc.collect()
        assert all(address(array) != begin for array in [pool.lend(4) for _ in range(5)])
        del view
        assert begin in {address(array) for array in [pool.lend(4) for _ in range(5)]}

    @pytest.mark.parametrize(
        "kept",
        [
            lambda lent: torch.from_numpy(lent[1]),
            lambda lent: lent[0][1:],
            lambda lent: lent.reshape(2, -1)[:, :1],
            lambda lent: torch.from_numpy(lent[0].view(np.uint8)),
        ],
        ids=["tensor of a part", "rows of a part", "shaped", "bytes"],
    )
    def test_memory_of_which_only_a_view_is_left_is_not_lent(self, taught, kept):
        pool = taught.BufferPool(SHAPE, 2)
        lent = pool.lend(4)
        begin = address(lent)
        view = kept(lent)
        del lent
        assert all(address(array) != begin for array in [pool.lend(4) for _ in range(5)])
        del view
        assert begin in {address(array) for array in [pool.lend(4) for _ in range(5)]}

    def test_every_batch_that_is_kept_keeps_its_content(self, taught):
        pool = taught.BufferPool(SHAPE, 3)
        kept = [pair(pool, value)[value % 2] for value in range(200)]
        assert all((part == value).all() for value, part in enumerate(kept))

    def test_a_short_batch_has_its_own_length_and_its_memory_returns_whole(self, taught):
        pool = taught.BufferPool(SHAPE, 1)
        x, y = pair(pool, 1, batch_size=2)
        assert x.shape == y.shape == (2, 3)
        assert x.is_contiguous()
        assert y.is_contiguous()
        begin = x.data_ptr()
        del x, y
        again = pool.lend(4)
        assert (again.shape, address(again)) == (SHAPE, begin)

    def test_no_more_than_the_spare_arrays_wait(self, taught):
        pool = taught.BufferPool(SHAPE, 2)
        lent = [pool.lend(4) for _ in range(10)]
        del lent
        assert len(pool._free) == 2

    def test_a_pool_without_spares_keeps_nothing(self, taught):
        pool = taught.BufferPool(SHAPE, 0)
        pool.lend(4)
        assert len(pool._free) == 0

    def test_arrays_on_their_way_to_the_caller_leave_less_room_for_those_that_wait(self, taught):
        delivered = [0]
        pool = taught.BufferPool(SHAPE, 3, lambda: delivered[0])
        had, on_their_way = [pool.lend(4) for _ in range(4)], [pool.lend(4) for _ in range(2)]
        delivered[0] = len(had)
        del had
        assert len(pool._free) == 1
        delivered[0] += len(on_their_way)
        del on_their_way
        assert len(pool._free) == 3

    def test_memory_never_waits_for_a_lock_on_its_way_back(self, taught):
        pool = taught.BufferPool(SHAPE, 2)
        lent = [pool.lend(4)]
        with pool._lock:
            drop = threading.Thread(target=lent.clear, daemon=True)
            drop.start()
            drop.join(5)
            assert not drop.is_alive()
        assert len(pool._free) == 0
        pool.lend(4)
        assert len(pool._free) == 1


def test_lent_arrays_are_int64_and_contiguous():
    lent = BufferPool(SHAPE, 1).lend(4)
    assert lent.dtype == np.int64
    assert lent.flags.c_contiguous


def test_a_pool_is_not_kept_alive_by_a_batch_that_is_gone():
    pool = BufferPool(SHAPE, 1)
    pair(pool, 1)
    ref = weakref.ref(pool)
    del pool
    assert ref() is None


def test_the_spare_arrays_are_never_one_too_many_when_threads_return_at_once():
    pool, turn = BufferPool(SHAPE, 3), threading.Barrier(8)

    def lend_and_return():
        for _ in range(300):
            lent = [pool.lend(4) for _ in range(3)]
            turn.wait(20)
            del lent
            turn.wait(20)
            assert len(pool._free) <= 3

    errors = []
    threads = [threading.Thread(target=guarded(lend_and_return, errors, turn)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []


def guarded(target, errors, turn):
    def run():
        try:
            target()
        except BaseException as error:
            errors.append(error)
            turn.abort()

    return run


@pytest.mark.gpu
def test_pinned_memory_is_lent_pinned():
    assert torch.from_numpy(BufferPool(SHAPE, 1, pinned=True).lend(4)).is_pinned()
