"""Savers under attack: what people write themselves, torch's, frameworks', and ours.

Each saves and loads as its documentation or its best known user shows. ``pip install
lightning transformers`` adds those of frameworks.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from disk import sync_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training import Training, tensors_of

from npydata import AsyncCheckpointer, TrainingState, latest_checkpoint, load_checkpoint


@dataclass(frozen=True)
class Saver:
    """A saver under attack."""

    train: Callable[[Training], object]
    load: Callable[[Path], Any]
    """Finds the newest checkpoint in a root, and returns its state."""
    checkpoints: str = ""
    """A pattern of what one may delete by hand when the newest does not load."""


def by_function(save, load, checkpoints=""):
    """Return a saver that is one function, called after each step."""

    def train(training):
        for step in training.steps():
            save(training, step)

    return Saver(train, load, checkpoints)


def ours(*, per_step):
    checkpointers = []

    def save(training, step):
        if not checkpointers:
            checkpointers.append(AsyncCheckpointer(keep_last=2))
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        state = training.state(step)
        checkpointers[0].save(folder, state["model"], state["optimizer"], TrainingState(step=step))
        checkpointers[0].wait()

    def load(root):
        folder = latest_checkpoint(root) if per_step else root / "checkpoint"
        if folder is None:
            raise FileNotFoundError("no checkpoint")
        model, optimizer, training = load_checkpoint(folder)
        return {"model": model, "optimizer": optimizer, "step": training.step}

    return by_function(save, load, "step-*" if per_step else "")


def torch_save(*, rename=False, careful=True):
    """One file: written over, or a temporary that is flushed and renamed."""

    def save(training, step):
        path = training.root / "ckpt.pt"
        if not rename:
            torch.save(training.state(step), path)
            return
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(training.state(step), file)
            file.flush()
            with suppress(*() if careful else (OSError,)):
                os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)
        sync_folder(training.root)

    return by_function(save, lambda root: torch.load(root / "ckpt.pt", weights_only=True))


def safetensors():
    """Weights and moments in one file each, as Hugging Face's tools lay them out."""

    def save(training, step):
        state = training.state(step)
        save_file(state["model"], training.root / "model.safetensors")
        moments = {str(k): one for k, one in enumerate(tensors_of(state["optimizer"]))}
        save_file(moments, training.root / "optimizer.safetensors", {"step": str(step)})

    def load(root):
        with safe_open(root / "optimizer.safetensors", "pt") as file:
            step = int(file.metadata()["step"])
        return {
            "model": load_file(root / "model.safetensors"),
            "step": step,
            "optimizer": load_file(root / "optimizer.safetensors"),
        }

    return by_function(save, load)


def dcp(*, per_step, background=False):
    import torch.distributed.checkpoint as dcp

    def save(training, step):
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        call = dcp.async_save if background else dcp.save
        done = call(training.state(step), checkpoint_id=folder, no_dist=True)
        if background:
            getattr(done, "upload_completion", done).result()

    def load(root):
        """Load the newest folder that DCP finished, as torchtitan looks for it."""
        state = Training(root).state(0)
        finished = [one.parent for one in root.glob("*/.metadata")]
        newest = max(finished, key=lambda one: int((re.findall(r"\d+", one.name) or [0])[0]))
        dcp.load(state, checkpoint_id=newest, no_dist=True)
        return state

    return by_function(save, load, "step-*" if per_step else "")


class Loaded(Exception):  # noqa: N818
    """Leaves a framework's training when it has resumed."""


def raise_loaded(*_, **__):
    raise Loaded


def hugging_face():
    """A folder per step, the newest two of them kept; resumed with ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self, training):
            super().__init__()
            self.layers = training.model

        def forward(self, x):
            return {"loss": sum(p.sum() for p in self.layers.parameters()) * 0.0}

    def trainer(training, **hooks):
        arguments = TrainingArguments(
            output_dir=str(training.root),
            max_steps=training.last,
            save_steps=1,
            save_total_limit=2,
            per_device_train_batch_size=1,
            report_to=[],
            use_cpu=True,
        )
        callback = type("Hooks", (TrainerCallback,), hooks)()
        return Trainer(
            Model(training),
            arguments,
            train_dataset=[{"x": torch.zeros(1)}] * 64,
            callbacks=[callback],
            optimizers=(training.optimizer, None),
        )

    def train(training):
        steps = training.steps()
        trainer(training, on_step_end=lambda *_, **__: next(steps) and None).train()
        next(steps, None)

    def load(root):
        training = Training(root, last=60)
        resumed = trainer(training, on_train_begin=raise_loaded)
        with suppress(Loaded):
            resumed.train(resume_from_checkpoint=True)
        return training.state(resumed.state.global_step)

    return Saver(train, load, "checkpoint-*")


OVER, STEPS = "over the last one", "a folder per step"
SAVERS: dict[str, tuple[str, Callable[[], Saver]]] = {
    f"ours, {STEPS}": ("npydata", partial(ours, per_step=True)),
    f"ours, {OVER}": ("npydata", partial(ours, per_step=False)),
    f"dcp.save, {OVER}": ("torch", partial(dcp, per_step=False)),
    f"dcp.async_save, {STEPS}": ("torch", partial(dcp, per_step=True, background=True)),
    "HF Trainer, save_total_limit=2": ("transformers", hugging_face),
    f"torch.save, {OVER}": ("torch", torch_save),
    "torch.save, fsync and rename": ("torch", partial(torch_save, rename=True)),
    "torch.save, failing fsync ignored": ("torch", partial(torch_save, rename=True,
                                                           careful=False)),
    f"safetensors.save_file, {OVER}": ("safetensors", safetensors),
}  # fmt: skip
"""For each row the package that it needs, and the saver. Those written over lose: the controls."""
