"""Train a small GPT on a token file. Killed at any moment, it goes on with the same bits: copy it.

    python examples/train.py --tokens materials/train_smoke.npy --out build/run

The same command again continues from the newest checkpoint in ``build/run``, and gives the losses
and weights that a run without the interruption would have given (on the same machine, with the same
number of threads). For that a checkpoint holds all that decides the next step: weights, optimizer,
random generators, and the place of the loader. SIGUSR1 has it save at the next step, and SIGTERM
save and end.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from gpt import GPT
from terminal import Progress, ProgressLine, positive, usable_device
from torch.nn.functional import cross_entropy

import npydata
from npydata import (
    AsyncCheckpointer,
    AsyncDataLoader,
    NpyTokensDataset,
    TrainingState,
    capture_rng,
)


def train(
    tokens: Path, out: Path, *, steps: int = 200, batch_size: int = 16, context: int = 32,
    save_every: int = 20, keep_last: int | None = 3, seed: int = 0, device: str = "cpu",
    snapshot: Literal["host", "overlap", "device"] = "host", dropout: float = 0.1,
    learning_rate: float = 3e-3,
    vocab_size: int | None = None, log: Path | None = None,
    show: Callable[[Progress], object] = lambda progress: None, asked: "Asked | None" = None,
) -> GPT:  # fmt: skip
    """Train until ``steps`` steps are done, those before an interruption included."""
    repeatable(seed, device)
    asked = asked or Asked()
    vocab_size = vocab_size or highest_id(tokens) + 1
    data = NpyTokensDataset(tokens, context, vocab_size=vocab_size)
    loader = AsyncDataLoader(data, batch_size=batch_size, seed=seed, device=device)
    model = GPT(vocab_size, context, dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    settings = {"vocab_size": vocab_size, "context": context, "batch_size": batch_size,
                "seed": seed, "dropout": dropout, "learning_rate": learning_rate}  # fmt: skip

    first, saved = resume_from(out, model, optimizer, loader, settings)
    if first >= steps:
        print(f"{out / saved}: {first:,} steps are done already", file=sys.stderr)
    elif first:
        print(f"{out / saved}: resumed at step {first:,}; the next batch is the one you would have "
              "had", file=sys.stderr)  # fmt: skip
    begun = time.monotonic()
    with (
        AsyncCheckpointer(keep_last=keep_last, snapshot=snapshot) as checkpointer,
        open_log(log or out / "losses.csv") as losses,
    ):
        checkpointer.protect(optimizer)  # with snapshot="overlap" its step waits for the copies
        for step, (x, y) in enumerate(islice(epochs(loader), max(steps - first, 0)), first + 1):
            loss = train_step(model, optimizer, x, y)
            losses.write(f"{step},{loss!r}\n")  # exactly; and no checkpoint is ahead of the log
            if step == first + 1:  # now the optimizer has its state
                checkpointer.prepare(model.state_dict(), optimizer.state_dict())
            last = step == steps or asked.end
            if step % save_every == 0 or last or asked.save:
                asked.save = False
                saved = f"step-{step:06}"
                now = training_state(step, loader, settings, tokens=step * batch_size * context,
                                     loss=loss, lr=learning_rate)  # fmt: skip
                checkpointer.save(out / saved, model.state_dict(), optimizer.state_dict(), now)
            if last:
                checkpointer.wait()
            speed = (step - first) * batch_size * context / (time.monotonic() - begun)
            newest = saved if checkpointer.done() else f"({saved})"
            show(Progress(step, steps, loss, speed, loader.stats.wait_share, newest))
            if last:
                break
    return model


class Asked:
    """What signals ask for: a handler may come in the middle of a step, so it only sets a flag."""

    save = end = False

    def listen(self) -> None:
        """From now on SIGUSR1 asks for a checkpoint, and SIGTERM for a last one."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        """Remember a signal until the step is done."""
        self.save = True
        self.end |= number == signal.SIGTERM


def training_state(
    step: int, loader: AsyncDataLoader, settings: dict[str, Any], **shown: Any
) -> TrainingState:
    """Return what decides the next step beside weights and optimizer; ``shown`` is for people.

    A learning-rate schedule would go into ``extra``: ``{"schedule": schedule.state_dict()}``.
    """
    rng, place = capture_rng(), loader.state_dict()
    return TrainingState(step=step, rng=rng, loader=place, extra=settings, **shown)


def resume_from(out: Path, model: GPT, optimizer: torch.optim.Optimizer, loader: AsyncDataLoader,
                settings: dict[str, Any]) -> tuple[int, str]:  # fmt: skip
    """Continue from the newest checkpoint, if there is one; return its step and its name."""
    newest = npydata.latest_checkpoint(out)
    if newest is None:
        return 0, "none"
    weights, moments, state = npydata.load_checkpoint(newest)
    require_same(settings, state.extra, newest)
    restore(model, optimizer, loader, weights, moments, state)
    return state.step, newest.name


def require_same(settings: dict[str, Any], saved: dict[str, Any], checkpoint: Path) -> None:
    """Raise if a checkpoint was made with other settings."""
    for name, value in settings.items():
        if (was := saved.get(name, value)) != value:
            raise npydata.CheckpointError(
                f"{checkpoint}: was made with {name} {was}, not {value}: continue with that, or "
                "begin in another folder"
            )


def restore(model: GPT, optimizer: torch.optim.Optimizer, loader: AsyncDataLoader,
            weights: dict[str, Any], moments: dict[str, Any] | None,
            state: TrainingState) -> None:  # fmt: skip
    """Put back what a checkpoint holds; one that another program made may lack some of it."""
    model.load_state_dict(weights)
    if moments is not None:
        optimizer.load_state_dict(moments)
    if state.loader is not None:
        loader.load_state_dict(state.loader)
    if state.rng is not None:
        npydata.restore_rng(state.rng)  # last: what came before may draw numbers


def train_step(
    model: GPT, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> float:
    """Learn from one batch; return its loss."""
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def epochs(loader: AsyncDataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the batches of one epoch after the other, without end."""
    while True:
        yield from loader


def repeatable(seed: int, device: str) -> None:
    """Let the same run draw the same numbers and compute the same bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if torch.device(device).type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def highest_id(path: Path) -> int:
    """Return the largest token id; this reads the file once."""
    tokens, piece = npydata.open_tokens(path), 1 << 22
    starts = range(0, tokens.num_tokens, piece)
    return max((int(tokens.read(start, piece).max()) for start in starts), default=0)


def open_log(path: Path) -> TextIO:
    """Open the log of losses behind what is in it; steps that are done again appear again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)  # a line at a time: a kill loses none


def arguments(argv: list[str] | None = None) -> dict[str, Any]:
    """Read the command line; the names are those of :func:`train`."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=Path, required=True, metavar="FILE", help="a token file")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the checkpoints go")
    for name, default, meaning in [
        ("--steps", 200, "how many in all"),
        ("--batch-size", 16, "windows per step"),
        ("--context", 32, "tokens per window"),
        ("--save-every", 20, "steps between checkpoints"),
        ("--keep-last", 3, "checkpoints to keep"),
        ("--vocab-size", None, "spares reading the whole file for its highest id"),
    ]:
        add(name, type=positive, metavar="N", default=default, help=meaning)
    add("--seed", type=int, metavar="N", default=0, help="decides all that is random")
    add("--device", type=usable_device, default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--snapshot", choices=("host", "overlap", "device"), default="host", help="when to copy")
    add("--log", type=Path, metavar="FILE", help="losses, exactly; FOLDER/losses.csv if not given")
    return vars(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; what is wrong with it is said in one line."""
    asked = Asked()
    asked.listen()
    try:
        train(**arguments(argv), show=ProgressLine(), asked=asked)
    except (npydata.NpyDataError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain.py: interrupted; the same command goes on", file=sys.stderr)
        return 130
    if asked.end:
        print("\ntrain.py: ended by SIGTERM; the same command goes on", file=sys.stderr)
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
