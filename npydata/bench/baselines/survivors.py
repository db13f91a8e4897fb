"""Savers under attack: what people write themselves, torch's own, and ours.

Each saves as its documentation or its best known user shows; a setting that is documented as safer
is a row of its own. Those of whole frameworks are in :mod:`npydata.bench.baselines.frameworks`.
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from npydata import AsyncCheckpointer, TrainingState, latest_checkpoint, load_checkpoint
from npydata.bench.baselines import OURS, baseline
from npydata.bench.survival.training import Survivor, Training, tensors_of
from npydata.system.atomic_write import sync_folder

Save = Callable[[Training, int], object]

OVER, STEPS = "over the last one", "a folder per step"


def by_function(
    save: Save, load: Callable[[Path], Any], checkpoints: str = "", cost: int = 1
) -> Survivor:
    """Return a saver that is one function, called after each step and by a signal's handler."""

    def train(training: Training) -> None:
        for step in training.steps():
            save(training, step)

    return Survivor(train=train, load=load, checkpoints=checkpoints, cost=cost, again=save)


def newest(root: Path, pattern: str) -> Path:
    """Return what has the highest number in its name."""
    found = max(root.glob(pattern), key=lambda path: int(re.findall(r"\d+", path.name)[0]),
                default=None)  # fmt: skip
    if found is None:
        raise FileNotFoundError(f"no {pattern} in {root.name}")
    return found


@baseline("survival", "torch.save", "naive", settings={OVER: {}})
def plain_torch_save() -> Survivor:
    """One file, written over, as nanoGPT and most scripts do."""
    return by_function(
        lambda training, step: torch.save(training.state(step), training.root / "ckpt.pt"),
        lambda root: torch.load(root / "ckpt.pt", weights_only=True),
    )


@baseline("survival", "torch.save", "naive", settings={"fsync and rename": {}})
def synced_torch_save() -> Survivor:
    """A temporary file, flushed and renamed; the folder flushed."""

    def save(training: Training, step: int) -> None:
        with open(training.root / "ckpt.tmp", "wb") as file:
            torch.save(training.state(step), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(training.root / "ckpt.tmp", training.root / "ckpt.pt")  # noqa: PTH105
        sync_folder(training.root)

    return by_function(save, lambda root: torch.load(root / "ckpt.pt", weights_only=True))


@baseline("survival", "safetensors.save_file", "naive", settings={OVER: {}})
def plain_save_file() -> Survivor:
    """Weights and moments in one file each, as Hugging Face's tools lay them out."""

    def save(training: Training, step: int) -> None:
        state = training.state(step)
        save_file(state["model"], training.root / "model.safetensors")
        moments = {str(k): one for k, one in enumerate(tensors_of(state["optimizer"]))}
        save_file(moments, training.root / "optimizer.safetensors", {"step": str(step)})

    def load(root: Path) -> dict[str, Any]:
        with safe_open(root / "optimizer.safetensors", "pt") as file:
            step = int(file.metadata()["step"])
        moments = load_file(root / "optimizer.safetensors")
        return {"model": load_file(root / "model.safetensors"), "optimizer": moments, "step": step}

    return by_function(save, load)


@baseline("survival", "nanochat", "naive", settings={"files per step": {}})
def nanochat() -> Survivor:
    """Weights, then a JSON of facts, then the optimizer; the newest is the highest model_*.pt."""

    def save(training: Training, step: int) -> None:
        state = training.state(step)
        torch.save(state["model"], training.root / f"model_{step:06d}.pt")
        (training.root / f"meta_{step:06d}.json").write_text(json.dumps({"step": step}))
        torch.save(state["optimizer"], training.root / f"optim_{step:06d}_rank0.pt")

    def load(root: Path) -> dict[str, Any]:
        model = newest(root, "model_*.pt")
        mark = model.stem.removeprefix("model_")
        optimizer = torch.load(root / f"optim_{mark}_rank0.pt", weights_only=True)
        meta = json.loads((root / f"meta_{mark}.json").read_text())
        weights = torch.load(model, weights_only=True)
        return {"model": weights, "optimizer": optimizer, "step": meta["step"]}

    return by_function(save, load, "model_*.pt")


def has_metadata(root: Path) -> Path:
    """Return the newest folder that DCP finished, as torchtitan looks for it."""
    finished = [path.parent for path in root.glob("step-*/.metadata")]
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")))


def load_dcp(find: Callable[[Path], Path], root: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    state = Training(root).state(0)
    dcp.load(state, checkpoint_id=find(root), no_dist=True)  # type: ignore[attr-defined]
    return state


@baseline("survival", "dcp.save", "peer",
          settings={OVER: {"per_step": False}, STEPS: {"per_step": True}})  # fmt: skip
@baseline("survival", "dcp.async_save", "peer",
          settings={OVER: {"per_step": False, "background": True},
                    STEPS: {"per_step": True, "background": True}})  # fmt: skip
def with_dcp(*, per_step: bool, background: bool = False) -> Survivor:
    import torch.distributed.checkpoint as dcp

    def save(training: Training, step: int) -> None:
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        if background:
            done: Any = dcp.async_save(training.state(step), checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
            getattr(done, "upload_completion", done).result()
        else:
            dcp.save(training.state(step), checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]

    find = has_metadata if per_step else lambda root: root / "checkpoint"
    return by_function(save, partial(load_dcp, find), "step-*" if per_step else "")


@baseline("survival", OURS, "ours",
          settings={STEPS: {"per_step": True}, OVER: {"per_step": False}})  # fmt: skip
def ours(*, per_step: bool) -> Survivor:
    keepers: list[AsyncCheckpointer] = []

    def save(training: Training, step: int) -> None:
        if not keepers:
            keepers.append(AsyncCheckpointer(keep_last=2))
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        state = training.state(step)
        keepers[0].save(folder, state["model"], state["optimizer"], TrainingState(step=step))
        keepers[0].wait()

    def load(root: Path) -> dict[str, Any]:
        folder = latest_checkpoint(root) if per_step else root / "checkpoint"
        if folder is None:
            raise FileNotFoundError(f"no checkpoint in {root.name}")
        model, optimizer, training = load_checkpoint(folder)
        return {"model": model, "optimizer": optimizer, "step": training.step}

    return by_function(save, load, "step-*" if per_step else "")
