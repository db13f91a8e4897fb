"""The loader's promises (begun; see also the tests of its rooms)."""

import numpy as np
import torch

from npydata import AsyncDataLoader, MmapDataset, write_tokens


def test_every_sample_comes_once_and_in_the_seeds_order(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(5_000, dtype=np.uint16)])
    ds = MmapDataset(tmp_path / "a.npy", 9)
    orders = []
    for workers, factor in [(0, 0), (0, 2), (1, 1), (2, 2), (4, 8), (8, 3)]:
        loader = AsyncDataLoader(
            ds, batch_size=32, seed=1, num_workers=workers, prefetch_factor=factor
        )
        orders.append(torch.cat([x[:, 0] for x, _ in loader]))
    assert sorted(orders[0].tolist()) == list(range(0, 5_000, 10))
    assert all(torch.equal(order, orders[0]) for order in orders)
