"""What the tests on a GPU and those on the simulated accelerator share."""

from functools import partial

import torch

SNAPSHOTS = ["host", "overlap", "device"]
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def same(got, wanted):
    """Whether batches on a device hold what those on the host do."""
    return all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))
