"""Train a small GPT on several processes, each with the whole model: data parallel, with DDP.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --out build/ddp

All but one function comes from ``train_fsdp.py``; this variant is for models that fit on one GPU.
The checkpoints are the same, too: a tensor that all ranks have is written by one of them. So a run
can continue with the other script, on any number of ranks.

On two processes a resumed run is the same bit for bit. On three and four, the last bits of the
weights differed; on three, with ``torch.save`` in place of npydata as well.
"""

import sys

import torch
from gpt import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_fsdp import main


def replicated(model: GPT) -> nn.Module:
    """Give each rank all weights; gradients are averaged in every backward pass."""
    device: torch.device = model.head.weight.device
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


if __name__ == "__main__":
    sys.exit(main(replicated))
