"""4,096 ranks over more than 10^12 samples of an 8 TiB file: simulated, sampled, counted."""

import itertools
import random

import numpy as np
import pytest
from loader_tools import run_child

from npydata.dataset.permutation import Permutation
from npydata.loader.sampler import BLOCK_SAMPLES, BatchSampler, EpochOrder

WORLD, BATCH = 4096, 32
FILE_BYTES, SEQ_LEN = 2**43, 3
SAMPLES = FILE_BYTES // 2 // (SEQ_LEN + 1)
assert SAMPLES > 10**12


def samplers(ranks, samples=SAMPLES, start=0):
    return [
        BatchSampler(samples, BATCH, rank=rank, world_size=WORLD, start=start) for rank in ranks
    ]


def sampled_batches(count, total):
    """Return numbers of global batches: the first, the last ones, and some between."""
    chance = random.Random(4)
    ends = [0, 1, total // 2, total - 2, total - 1]
    return sorted({*ends, *(chance.randrange(total) for _ in range(count))})


@pytest.mark.parametrize("samples", [SAMPLES, 10**12, 10**12 + WORLD * BATCH - 1, 10**12 + 5])
@pytest.mark.parametrize("start", [0, 7 * 10**11 + 13])
def test_the_ranks_positions_tile_every_sampled_global_batch(samples, start):
    every = samplers(range(WORLD), samples, start)
    count = len(every[0])
    assert {len(one) for one in every} == {count}
    for batch in sampled_batches(20, count):
        positions = [one.positions(batch) for one in every]
        first, last = every[0].samples_after(batch), every[0].samples_after(batch + 1)
        assert positions[0].start == first
        assert positions[-1].stop == last
        assert all(one.stop == two.start for one, two in itertools.pairwise(positions))
        assert len({len(one) for one in positions}) == 1
    assert samples - every[0].samples_after(count) == every[0].dropped < WORLD


def test_the_shuffled_samples_of_sampled_global_batches_are_disjoint_and_in_range():
    every = samplers([0])[0]
    shuffle = EpochOrder(every, 3, 1, True).permutation
    blocks = []
    for batch in sampled_batches(3, len(every)):
        first, last = every.samples_after(batch), every.samples_after(batch + 1)
        positions = np.arange(first, last)
        found = shuffle(positions)
        assert positions.dtype == found.dtype == np.int64
        blocks.append(found)
    together = np.concatenate(blocks)
    assert len(np.unique(together)) == len(together) > 6 * WORLD * BATCH
    assert together.min() >= 0
    assert together.max() < SAMPLES
    assert np.count_nonzero(together > 2**39) > len(together) // 3, "half of them lie up there"


def test_each_rank_computes_its_own_slice_alone(monkeypatch):
    """What a rank computes for a batch is a block of its own; no rank looks at all samples."""
    counted, original = [], Permutation.__call__

    def called(self, positions):
        counted.append(np.size(positions))
        assert np.asarray(positions).dtype == np.int64
        return original(self, positions)

    monkeypatch.setattr(Permutation, "__call__", called)
    batches = sampled_batches(3, len(samplers([0])[0]))
    for sampler in samplers([0, 1, 2047, 4094, 4095]):
        order = EpochOrder(sampler, 3, 1, True)
        for batch in batches:
            found = order(batch)
            assert found.dtype == np.int64
            positions = sampler.positions(batch)
            assert (
                found.tolist()
                == original(order.permutation, np.arange(positions.start, positions.stop)).tolist()
            )
    assert max(counted) <= BLOCK_SAMPLES


START_UP = """
import os, resource, sys, time
import numpy as np
from npydata import AsyncDataLoader, MmapDataset
from npydata.dataset.permutation import Permutation

path, world, seq_len = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
counted, original = [], Permutation.__call__
def called(self, positions):
    counted.append(np.size(positions))
    return original(self, positions)
Permutation.__call__ = called

small = MmapDataset(sys.argv[4], seq_len, dtype="uint16")
next(iter(AsyncDataLoader(small, batch_size=32, seed=1)))  # what is imported once
before, counted[:] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
times = []
for rank in (0, 1, world // 2, world - 1):
    began = time.perf_counter()
    data = MmapDataset(path, seq_len, dtype="uint16")
    loader = AsyncDataLoader(data, batch_size=32, seed=1, rank=rank, world_size=world)
    inputs, targets = next(iter(loader))
    times.append(time.perf_counter() - began)
    assert inputs.shape == targets.shape == (32, seq_len) and not inputs.any()
    assert len(loader) == -(-len(data) // (32 * world)), len(loader)
marked = os.open(path, os.O_WRONLY)
positions = [2**40 + 4, 2**41 + 8, 2**42 - 4]
for k, at in enumerate(positions):
    os.pwrite(marked, np.arange(4 * k + 1, 4 * k + 5, dtype="<u2").tobytes(), 2 * at)
inputs, targets = data.fetch(np.array(positions) // (seq_len + 1))
assert inputs.tolist() == [[1, 2, 3], [5, 6, 7], [9, 10, 11]], inputs
assert targets.tolist() == [[2, 3, 4], [6, 7, 8], [10, 11, 12]], targets
state = loader.state_dict()
loader.load_state_dict({**state, "samples": (len(data) // (32 * world) - 1) * 32 * world})
assert len(list(loader)) == 1 + (len(data) % (32 * world) >= world)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(len(data), max(counted), sum(counted), grown, min(times))
"""


def test_a_rank_of_4096_starts_on_an_8_tib_file_with_a_few_blocks_of_work(tmp_path):
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        try:
            file.truncate(FILE_BYTES)
        except OSError as error:
            pytest.skip(f"this file system holds no file of 8 TiB: {error}")
    small = tmp_path / "small.bin"
    small.write_bytes(bytes(100_000))
    child = run_child(START_UP, path, WORLD, SEQ_LEN, small)
    assert child.returncode == 0, child.stderr
    samples, largest, total, grown_kib, seconds = map(float, child.stdout.split())
    assert samples == SAMPLES
    assert largest <= BLOCK_SAMPLES
    assert total <= 5 * 5 * BLOCK_SAMPLES, "each start computes a few blocks, not the epoch"
    assert grown_kib < 64 * 1024
    print(f"open and first batch: {1000 * seconds:.1f} ms")
    assert path.stat().st_blocks * 512 < 2**20
