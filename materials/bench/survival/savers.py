"""Savers under attack: what people write themselves, torch's, frameworks', and ours.

Each saves and loads as its documentation or its best known user shows. ``pip install accelerate
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
from torch.utils.data import DataLoader
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


def by_function(save, load, checkpoints: str = "") -> Saver:
    """Return a saver that is one function, called after each step."""

    def train(training: Training) -> None:
        for step in training.steps():
            save(training, step)

    return Saver(train, load, checkpoints)


def ours(*, per_step: bool) -> Saver:
    checkpointers: list[AsyncCheckpointer] = []

    def save(training: Training, step: int) -> None:
        if not checkpointers:
            checkpointers.append(AsyncCheckpointer(keep_last=2))
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        state = training.state(step)
        checkpointers[0].save(folder, state["model"], state["optimizer"], TrainingState(step=step))
        checkpointers[0].wait()

    def load(root: Path) -> dict[str, Any]:
        folder = latest_checkpoint(root) if per_step else root / "checkpoint"
        if folder is None:
            raise FileNotFoundError("no checkpoint")
        model, optimizer, training = load_checkpoint(folder)
        return {"model": model, "optimizer": optimizer, "step": training.step}

    return by_function(save, load, "step-*" if per_step else "")


def torch_save(*, rename: bool = False, careful: bool = True) -> Saver:
    """One file: written over, or a temporary that is flushed and renamed."""

    def save(training: Training, step: int) -> None:
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


def safetensors() -> Saver:
    """Weights and moments in one file each, as Hugging Face's tools lay them out."""

    def save(training: Training, step: int) -> None:
        state = training.state(step)
        save_file(state["model"], training.root / "model.safetensors")
        moments = {str(k): one for k, one in enumerate(tensors_of(state["optimizer"]))}
        save_file(moments, training.root / "optimizer.safetensors", {"step": str(step)})

    def load(root: Path) -> dict[str, Any]:
        with safe_open(root / "optimizer.safetensors", "pt") as file:
            step = int(file.metadata()["step"])
        return {
            "model": load_file(root / "model.safetensors"),
            "step": step,
            "optimizer": load_file(root / "optimizer.safetensors"),
        }

    return by_function(save, load)


def dcp(*, per_step: bool, background: bool = False) -> Saver:
    import torch.distributed.checkpoint as dcp

    def save(training: Training, step: int) -> None:
        folder = training.root / (f"step-{step}" if per_step else "checkpoint")
        call = dcp.async_save if background else dcp.save
        done: Any = call(training.state(step), checkpoint_id=folder, no_dist=True)
        if background:
            getattr(done, "upload_completion", done).result()

    def load(root: Path) -> dict[str, Any]:
        """Load the newest folder that DCP finished, as torchtitan looks for it."""
        state = Training(root).state(0)
        finished = [one.parent for one in root.glob("*/.metadata")]
        newest = max(finished, key=lambda one: int((re.findall(r"\d+", one.name) or [0])[0]))
        dcp.load(state, checkpoint_id=newest, no_dist=True)
        return state

    return by_function(save, load, "step-*" if per_step else "")


class Count:
    """A step that a framework saves with the rest."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def accelerate() -> Saver:
    """Its own numbered folders, the newest two of them kept."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    def accelerator(training: Training, count: Count) -> Any:
        project = ProjectConfiguration(
            str(training.root), total_limit=2, automatic_checkpoint_naming=True
        )
        made = Accelerator(project_config=project, cpu=True)
        made.prepare(training.model, training.optimizer)
        made.register_for_checkpointing(count)
        return made

    def train(training: Training) -> None:
        count = Count()
        made = accelerator(training, count)
        for count.step in training.steps():
            made.save_state()

    def load(root: Path) -> dict[str, Any]:
        training, count = Training(root), Count()
        accelerator(training, count).load_state()
        return training.state(count.step)

    return Saver(train, load, "checkpoints/checkpoint_*")


class Loaded(Exception):  # noqa: N818
    """Leaves a framework's training when it has resumed."""


def raise_loaded(*_: Any, **__: Any) -> None:
    raise Loaded


def lightning() -> Saver:
    """A file per step, the newest two of them kept; resumed from ``last``."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

    class Module(LightningModule):
        def __init__(self, training: Training) -> None:
            super().__init__()
            self.run, self.layers = [training], training.model

        def configure_optimizers(self) -> Any:
            return self.run[0].optimizer

        def training_step(self, batch: Any, index: int) -> Any:
            return sum(p.sum() for p in self.layers.parameters()) * 0.0

    def fit(training: Training, *callbacks: Any, **options: Any) -> Any:
        kept = ModelCheckpoint(
            training.root,
            "{step}",
            save_last=True,
            save_top_k=2,
            monitor="step",
            mode="max",
            every_n_train_steps=1,
        )
        trainer = Trainer(
            default_root_dir=training.root, max_steps=training.last, accelerator="cpu",
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*callbacks, kept],
        )  # fmt: skip
        with suppress(Loaded):
            trainer.fit(Module(training), DataLoader([0.0] * 64), **options)
        return trainer

    def train(training: Training) -> None:
        steps = training.steps()
        fit(training, LambdaCallback(on_train_batch_end=lambda *_: next(steps)))
        next(steps, None)

    def load(root: Path) -> dict[str, Any]:
        training = Training(root, last=60)
        resumed = LambdaCallback(on_train_start=raise_loaded)
        trainer = fit(training, resumed, ckpt_path=str(root / "last.ckpt"))
        return training.state(trainer.global_step)

    return Saver(train, load, "*.ckpt")


def hugging_face() -> Saver:
    """A folder per step, the newest two of them kept; resumed with ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self, training: Training) -> None:
            super().__init__()
            self.layers = training.model

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": sum(p.sum() for p in self.layers.parameters()) * 0.0}

    def trainer(training: Training, **hooks: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(training.root), max_steps=training.last, save_steps=1,
            save_total_limit=2, per_device_train_batch_size=1, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no", max_grad_norm=0.0,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer, 1.0)
        callback = type("Hooks", (TrainerCallback,), hooks)()
        return Trainer(
            Model(training),
            arguments,
            train_dataset=[{"x": torch.zeros(1)}] * 64,
            callbacks=[callback],
            optimizers=(training.optimizer, schedule),
        )

    def train(training: Training) -> None:
        steps = training.steps()
        trainer(training, on_step_end=lambda *_, **__: next(steps) and None).train()
        next(steps, None)

    def load(root: Path) -> dict[str, Any]:
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
    "accelerate save_state, total_limit=2": ("accelerate", accelerate),
    "Lightning ModelCheckpoint, save_last": ("lightning", lightning),
    "HF Trainer, save_total_limit=2": ("transformers", hugging_face),
    f"torch.save, {OVER}": ("torch", torch_save),
    "torch.save, fsync and rename": ("torch", partial(torch_save, rename=True)),
    "torch.save, failing fsync ignored": ("torch", partial(torch_save, rename=True,
                                                           careful=False)),
    f"safetensors.save_file, {OVER}": ("safetensors", safetensors),
}  # fmt: skip
"""For each row the package that it needs, and the saver. Those written over lose: the controls."""
