"""What ``torchrun`` starts: saves, loads what it saved, and what another number of ranks saved."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_distributed import load_everything, save_everything

if __name__ == "__main__":
    folder, tokens = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saved, taken, rest = save_everything(folder / "run" / "a", tokens)
    assert load_everything(folder / "run" / "a", tokens)[0] == saved
    load_everything(folder / "other" / "a", tokens)
    torch.save([*taken, *rest], folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
