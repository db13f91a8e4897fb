"""Train a small GPT on several processes that share one model's weights, with FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py --out build/fsdp

The same command again continues from the newest checkpoint in ``build/fsdp``, also with another
number of processes. ``--batch-size`` counts the windows of all of them together, so that each step
sees the same samples on 2 and on 4. With as many processes as before, the run goes on bit for bit;
with others, sums are taken in another order and dropout draws other numbers.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT
from terminal import Progress, ProgressLine, positive
from torch.distributed.fsdp import fully_shard
from train import epochs, highest_id, repeatable, train_step

import npydata
from npydata import AsyncCheckpointer, AsyncDataLoader, NpyTokensDataset, TrainingState

SMOKE = Path(__file__).resolve().parents[1] / "materials" / "train_smoke.npy"


def sharded(model: GPT) -> GPT:
    """Spread a model over all ranks: each keeps its rows of every weight."""
    for block in model.blocks:
        fully_shard(block)  # gathered for its own forward and backward, and let go of again
    fully_shard(model)
    return model


def train(
    spread: Callable[[GPT], Any], tokens: Path, out: Path, *, device: torch.device,
    steps: int = 100, batch_size: int = 24, context: int = 32, save_every: int = 20,
    keep_last: int = 3, seed: int = 0, dropout: float = 0.1, learning_rate: float = 3e-3,
    show: Callable[[Progress], object] = lambda progress: None,
    seen: Callable[[int, torch.Tensor], object] = lambda step, x: None,
) -> GPT:  # fmt: skip
    """Train until ``steps`` steps are done, those before an interruption included.

    ``seen`` is given each batch of this rank when its step is done.
    """
    world_size = dist.get_world_size()
    if batch_size % world_size:
        raise npydata.LoaderError(f"batch size {batch_size} is no multiple of {world_size} ranks")
    repeatable(seed, device.type)  # all ranks begin with the same weights
    vocab_size = highest_id(tokens) + 1
    data = NpyTokensDataset(tokens, context, vocab_size=vocab_size)
    loader = AsyncDataLoader(data, batch_size=batch_size // world_size, seed=seed, device=device,
                             drop_last=True)  # a short batch might not go round  # fmt: skip
    model = GPT(vocab_size, context, dropout=dropout).to(device)
    learner = spread(model)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=learning_rate)
    settings = {"vocab_size": vocab_size, "context": context, "batch_size": batch_size,
                "seed": seed, "dropout": dropout, "learning_rate": learning_rate}  # fmt: skip

    first, saved = resume(out, model, optimizer, loader, settings)
    begun = time.monotonic()
    with AsyncCheckpointer(keep_last=keep_last) as checkpointer:
        for step, (x, y) in enumerate(islice(epochs(loader), max(steps - first, 0)), first + 1):
            loss = mean(train_step(learner, optimizer, x, y), device)
            seen(step, x)
            if step % save_every == 0 or step == steps:
                saved = f"step-{step:06}"
                now = TrainingState(step=step, tokens=step * batch_size * context, loss=loss,
                                    lr=learning_rate, rng=npydata.capture_rng(),
                                    loader=loader.state_dict(), extra=settings)  # fmt: skip
                state = model.state_dict(), optimizer.state_dict()
                checkpointer.save_distributed(out / saved, *state, now)
            if step == steps:
                checkpointer.wait()
            speed = (step - first) * batch_size * context / (time.monotonic() - begun)
            newest = saved if checkpointer.done() else f"({saved})"
            show(Progress(step, steps, loss, speed, loader.stats.wait_share, newest))
    return model


def resume(out: Path, model: GPT, optimizer: torch.optim.Optimizer, loader: AsyncDataLoader,
           settings: dict[str, Any]) -> tuple[int, str]:  # fmt: skip
    """Continue from the newest checkpoint, if there is one; return its step and its name."""
    rank = dist.get_rank()
    torch.manual_seed(settings["seed"] + 1 + rank)  # dropout of its own for each rank
    newest = npydata.latest_checkpoint(out)
    if newest is None:
        return 0, "none"
    if rank:
        warnings.simplefilter("ignore", RuntimeWarning)  # rank 0 speaks for all
    state = npydata.load_distributed(newest, model, optimizer)
    for name, value in settings.items():
        if (was := state.extra.get(name, value)) != value:
            raise npydata.CheckpointError(f"{newest}: was made with {name} {was}, not {value}")
    if state.loader is not None:
        loader.load_state_dict(state.loader)
    if state.rng is not None:  # as many ranks as saved it
        npydata.restore_rng(state.rng)
    if rank == 0:
        print(f"{newest}: going on after step {state.step:,}, world size {dist.get_world_size()}")
    return state.step, newest.name


def mean(loss: float, device: torch.device) -> float:
    """Return the mean of all ranks' losses, each of as many windows."""
    total = torch.tensor(loss, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def arguments(argv: list[str] | None) -> dict[str, Any]:
    """Read the command line; the names are those of :func:`train`."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=Path, metavar="FILE", default=SMOKE, help="a token file")
    add("--out", type=Path, required=True, metavar="FOLDER", help="on a disk that all ranks share")
    for name, default, meaning in [
        ("--steps", 100, "how many in all"),
        ("--batch-size", 24, "windows per step, of all ranks together"),
        ("--context", 32, "tokens per window"),
        ("--save-every", 20, "steps between checkpoints"),
        ("--keep-last", 3, "checkpoints to keep"),
    ]:
        add(name, type=positive, metavar="N", default=default, help=meaning)
    add("--seed", type=int, metavar="N", default=0, help="decides all that is random")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="with cuda, a GPU for each rank")
    options = vars(parser.parse_args(argv))
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 ...")
    return options


def main(spread: Callable[[GPT], Any] = sharded, argv: list[str] | None = None) -> int:
    """Be one of the ranks that torchrun starts."""
    options = arguments(argv)
    device = torch.device(options.pop("device"), int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    show = ProgressLine() if dist.get_rank() == 0 else lambda progress: None
    try:
        train(spread, **options, device=device, show=show)
    except (npydata.NpyDataError, OSError) as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
