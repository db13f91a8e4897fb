"""Train a small GPT on several processes that share one model's weights, with FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --out build/fsdp

Run the same command again to continue from the newest checkpoint in ``build/fsdp``, with any number
of processes. ``--batch-size`` counts the windows of all of them together, so that each step sees
the same samples on 2 and on 4. With as many processes as before, the run continues bit for bit;
with another number, sums are taken in another order and dropout draws other numbers.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, train_step
from resume import repeatable, require_same
from torch.distributed.fsdp import fully_shard
from train import highest_id

import npydata
from npydata import AsyncCheckpointer, AsyncDataLoader, NpyTokensDataset, TrainingState

SMOKE = Path(__file__).resolve().parents[1] / "materials" / "train_smoke.npy"


def sharded(model: GPT) -> GPT:
    """Spread a model over all ranks: each keeps its rows of every weight."""
    for block in model.blocks:
        fully_shard(block)  # gathered for its own forward and backward, then freed
    fully_shard(model)
    return model


def train(
    spread: Callable[[GPT], Any],
    tokens: Path,
    out: Path,
    *,
    device: torch.device,
    steps: int = 100,
    batch_size: int = 24,
    context: int = 32,
    save_every: int = 20,
    seed: int = 0,
    seen: Callable[[int, torch.Tensor], object] = lambda step, x: None,
) -> GPT:
    """Train until ``steps`` steps are done, including those before an interruption.

    ``seen`` is called with each batch of this rank when its step is done.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if batch_size % world_size:
        raise npydata.LoaderError(f"batch size {batch_size} is no multiple of {world_size} ranks")
    repeatable(seed, device.type)  # all ranks begin with the same weights
    settings = {"context": context, "batch_size": batch_size, "seed": seed}
    loader = AsyncDataLoader(
        NpyTokensDataset(tokens, context),
        batch_size=batch_size // world_size,
        seed=seed,
        device=device,
        drop_last=True,
    )
    model = GPT(highest_id(tokens) + 1, context, dropout=0.1).to(device)
    learner = spread(model)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)

    first = resume(out, model, optimizer, loader, settings)
    batches = islice(chain.from_iterable(repeat(loader)), max(steps - first, 0))  # epoch by epoch
    with AsyncCheckpointer(keep_last=3) as checkpointer:
        for step, (x, y) in enumerate(batches, first + 1):
            loss = torch.tensor(train_step(learner, optimizer, x, y), device=device)
            dist.all_reduce(loss)
            seen(step, x)
            if step % save_every == 0 or step == steps:
                state = TrainingState(
                    step=step,
                    loss=loss.item() / world_size,
                    extra=settings,
                    rng=npydata.capture_rng(),
                    loader=loader.state_dict(),
                )
                checkpointer.save_distributed(
                    out / f"step-{step:06}", model.state_dict(), optimizer.state_dict(), state
                )
                if rank == 0:
                    print(f"step {step:,} of {steps:,} · loss {state.loss:.4f}", file=sys.stderr)
    return model


def resume(
    out: Path,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    loader: AsyncDataLoader,
    settings: dict[str, Any],
) -> int:
    """Continue from the newest checkpoint, if there is one; return its step."""
    rank = dist.get_rank()
    torch.manual_seed(settings["seed"] + 1 + rank)  # different dropout on each rank
    if (newest := npydata.latest_checkpoint(out)) is None:
        return 0
    if rank:
        warnings.simplefilter("ignore", RuntimeWarning)  # rank 0 warns for all
    state = npydata.load_distributed(newest, model, optimizer)
    require_same(settings, state.extra, newest)
    if state.loader is not None:
        loader.load_state_dict(state.loader)
    if state.rng is not None:  # as many ranks as saved it
        npydata.restore_rng(state.rng)
    if rank == 0:
        print(f"{newest}: resumed at step {state.step:,}, world size {dist.get_world_size()}")
    return state.step


def main(spread: Callable[[GPT], Any] = sharded) -> int:
    """Run as one of the ranks that torchrun starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, default=SMOKE, help="a token file")
    parser.add_argument("--out", type=Path, required=True, help="on a disk that all ranks share")
    for name in ("steps", "batch-size", "context", "save-every", "seed"):
        parser.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = vars(parser.parse_args())
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 ...")
    device = torch.device(options.pop("device"), int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(spread, **options, device=device)
    except (npydata.NpyDataError, OSError) as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
