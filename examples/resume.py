"""What a run needs to resume bit for bit: seeded generators, and every part restored."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.optim import Optimizer

import npydata
from npydata import AsyncDataLoader, TrainingState


def repeatable(seed: int, device: str) -> None:
    """Make repeated runs draw the same numbers and compute the same bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if torch.device(device).type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def resume_from(
    out: Path,
    model: Module,
    optimizer: Optimizer,
    loader: AsyncDataLoader,
    settings: dict[str, Any],
) -> tuple[int, str]:
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


def restore(
    model: Module,
    optimizer: Optimizer,
    loader: AsyncDataLoader,
    weights: dict[str, Any],
    moments: dict[str, Any] | None,
    state: TrainingState,
) -> None:
    """Restore what a checkpoint holds; one that another program made may lack parts."""
    model.load_state_dict(weights)
    if moments is not None:
        optimizer.load_state_dict(moments)
    if state.loader is not None:
        loader.load_state_dict(state.loader)
    if state.rng is not None:
        npydata.restore_rng(state.rng)  # last: the calls before may draw numbers
