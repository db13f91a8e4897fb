"""Train a small GPT on a token file. Killed at any moment, it resumes bit for bit.

    python examples/train.py --tokens materials/train_smoke.npy --out build/run

Run the same command again to continue from the newest checkpoint in ``build/run``: it gives the
losses and weights of an uninterrupted run (on the same machine, with the same number of threads).
For that, a checkpoint holds everything that decides the next step: weights, optimizer, random
generators and the loader's position. On SIGTERM it saves at the next step and ends.
"""

import argparse
import signal
import sys
from itertools import chain, islice, repeat
from pathlib import Path
from threading import Event
from typing import Literal

import torch
from gpt import GPT, train_step
from resume import repeatable, resume_from

from npydata import (
    AsyncCheckpointer,
    AsyncDataLoader,
    NpyDataError,
    NpyTokensDataset,
    TrainingState,
    capture_rng,
    open_tokens,
)


def train(
    tokens: Path,
    out: Path,
    *,
    steps: int = 200,
    batch_size: int = 16,
    context: int = 32,
    save_every: int = 20,
    keep_last: int = 3,
    seed: int = 0,
    device: str = "cpu",
    snapshot: Literal["host", "overlap", "device"] = "host",
    stop: Event | None = None,
) -> GPT:
    """Train until ``steps`` steps are done, including those before an interruption."""
    vocab = highest_id(tokens) + 1
    settings = {"vocab": vocab, "context": context, "batch_size": batch_size, "seed": seed}
    data = NpyTokensDataset(tokens, context)
    loader = AsyncDataLoader(data, batch_size=batch_size, seed=seed, device=device)
    repeatable(seed, device)
    model = GPT(vocab, context, dropout=0.1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first, saved = resume_from(out, model, optimizer, loader, settings)
    if first:
        done = "nothing is left to do"
        what = "the next batch is the one you would have had" if first < steps else done
        print(f"{out / saved}: resumed at step {first:,} of {steps:,}; {what}", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "losses.csv").open("a", buffering=1)  # line by line: a kill loses none
    batches = islice(chain.from_iterable(repeat(loader)), max(steps - first, 0))  # epoch by epoch
    with log, AsyncCheckpointer(keep_last=keep_last, snapshot=snapshot) as checkpointer:
        checkpointer.protect(optimizer)  # with snapshot="overlap" its step waits for the copies
        for step, (x, y) in enumerate(batches, first + 1):
            loss = train_step(model, optimizer, x, y)
            log.write(f"{step},{loss!r}\n")  # exactly; a repeated step is logged again
            last = step == steps or (stop is not None and stop.is_set())
            if last or (save_every and step % save_every == 0):
                # A learning-rate schedule would go into extra: schedule.state_dict().
                state = TrainingState(
                    step=step,
                    loss=loss,
                    extra=settings,
                    rng=capture_rng(),
                    loader=loader.state_dict(),
                )
                checkpointer.save(
                    out / f"step-{step:06}", model.state_dict(), optimizer.state_dict(), state
                )
                print(
                    f"step {step:,} of {steps:,} · loss {loss:.4f} · waits for data "
                    f"{loader.stats.wait_share:.1%}",
                    file=sys.stderr,
                )
            if last:
                break
    return model


def highest_id(path: Path) -> int:
    """Return the largest token id; this reads the file once."""
    tokens, piece = open_tokens(path), 1 << 22
    starts = range(0, tokens.num_tokens, piece)
    return max((int(tokens.read(start, piece).max()) for start in starts), default=0)


def main() -> int:
    """Train as the command line says; report an error in one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=Path, required=True, help="a token file")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the checkpoints")
    # The whole numbers among what train() takes, with its defaults.
    for name, default in (train.__kwdefaults__ or {}).items():
        if type(default) is int:
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, type=int, default=default, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--snapshot", choices=("host", "overlap", "device"), default="host")
    stop = Event()  # a signal handler must not save: it sets a flag for the next step
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        train(**vars(parser.parse_args()), stop=stop)
    except (NpyDataError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 128 + signal.SIGTERM if stop.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
