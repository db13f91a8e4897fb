"""Savers of whole frameworks under attack: they are imported where they are installed.

``pip install lightning accelerate transformers orbax-checkpoint torch_checkpointing``
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from npydata.bench.baselines import baseline
from npydata.bench.baselines.survivors import STEPS, by_function, newest
from npydata.bench.survival.training import Survivor, Training


def installed(module: str) -> Callable[[], bool]:
    return lambda: find_spec(module) is not None


class Count:
    """A step that a framework saves with the rest."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Loaded(Exception):  # noqa: N818
    """Leaves a framework's training when it has resumed."""


class Zeros(Dataset[dict[str, torch.Tensor]]):
    """Data of which nothing is learnt."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(1)}


@baseline("survival", "torch_checkpointing", "peer", settings={STEPS: {}},
          available=installed("torch_checkpointing"))  # fmt: skip
def meta() -> Survivor:
    """Its asynchronous saver, in the setting that its documentation gives for CPUs."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig

    managers: list[Any] = []

    def manager() -> Any:
        if not managers:
            staging = CheckpointStagerConfig(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
            process = CheckpointProcessConfig(subprocess_init_timeout_secs=600)
            saver = AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)
            managers.append(CheckpointManager.Config(save=saver).build())
        return managers[0]

    def save(training: Training, step: int) -> None:
        written = manager().save(str(training.root / f"step-{step}"), training.state(step))
        if written is not None:
            written.result()

    def load(root: Path) -> dict[str, Any]:
        config = CheckpointManager.Config.with_sync_save()
        state = Training(root).state(0)
        return dict(config.build().load(newest(root, "step-*"), into=state))

    return by_function(save, load, "step-*", cost=10)


@baseline("survival", "accelerate save_state", "peer", settings={"automatic naming": {}},
          available=installed("accelerate"))  # fmt: skip
def accelerate() -> Survivor:
    """Its own numbered folders, the newest two of them kept."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    def accelerator(training: Training, count: Count) -> Any:
        project = ProjectConfiguration(project_dir=str(training.root), total_limit=2,
                                       automatic_checkpoint_naming=True)  # fmt: skip
        made = Accelerator(project_config=project, cpu=True)
        made.prepare(training.model, training.optimizer)
        made.register_for_checkpointing(count)
        return made

    def train(training: Training) -> None:
        count = Count()
        made = accelerator(training, count)
        for count.step in training.steps():
            made.project_configuration.set_directories(str(training.root))
            made.save_state()

    def load(root: Path) -> dict[str, Any]:
        training, count = Training(root), Count()
        accelerator(training, count).load_state()
        return training.state(count.step)

    return Survivor(train=train, load=load, checkpoints="checkpoints/checkpoint_*")


@baseline("survival", "Lightning ModelCheckpoint", "peer", settings={"save_last": {}},
          available=installed("lightning"))  # fmt: skip
def lightning() -> Survivor:
    """A file per step, the newest two of them kept; resumed from ``last``."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(LightningModule):
        def __init__(self, training: Training) -> None:
            super().__init__()
            self.training_run, self.layers = [training], training.model

        def configure_optimizers(self) -> Any:
            return self.training_run[0].optimizer

        def training_step(self, batch: Any, index: int) -> Any:
            return sum(p.sum() for p in self.layers.parameters()) * 0.0

    class SetWeights(Callback):
        def __init__(self, steps: Iterator[int], training: Training, saver: Any) -> None:
            self.steps, self.training, self.saver = steps, training, saver

        def on_train_batch_end(self, *_: Any) -> None:
            next(self.steps)
            self.saver.dirpath = str(self.training.root)

        def on_train_end(self, *_: Any) -> None:
            next(self.steps, None)

    class Resumed(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            raise Loaded

    def trainer(training: Training, *callbacks: Any) -> Any:
        return Trainer(
            default_root_dir=training.root, max_steps=training.last, accelerator="cpu",
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=list(callbacks),
        )  # fmt: skip

    def saver(root: Path) -> Any:
        return ModelCheckpoint(root, "{step}", save_last=True, save_top_k=2, monitor="step",
                               mode="max", every_n_train_steps=1)  # fmt: skip

    def train(training: Training) -> None:
        kept = saver(training.root)
        callbacks = SetWeights(training.steps(), training, kept), kept
        data = DataLoader(Zeros(), batch_size=1)
        trainer(training, *callbacks).fit(Module(training), data)

    def load(root: Path) -> dict[str, Any]:
        training = Training(root, last=1 << 30)
        fit = trainer(training, saver(root), Resumed())
        try:
            fit.fit(Module(training), DataLoader(Zeros()), ckpt_path=str(root / "last.ckpt"))
        except Loaded:
            return training.state(fit.global_step)
        raise RuntimeError("nothing was resumed")

    return Survivor(train=train, load=load, checkpoints="*.ckpt")


@baseline("survival", "HF Trainer", "peer", settings={"save_total_limit=2": {}},
          available=installed("transformers"))  # fmt: skip
def hugging_face() -> Survivor:
    """A folder per step; resumed with ``resume_from_checkpoint=True``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self, training: Training) -> None:
            super().__init__()
            self.layers = training.model

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            zero = sum((p.sum() for p in self.layers.parameters()), torch.zeros(())) * 0.0
            return {"loss": zero}

    class SetWeights(TrainerCallback):
        def __init__(self, training: Training) -> None:
            self.steps, self.training = training.steps(), training

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            next(self.steps)
            args.output_dir = str(self.training.root)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            next(self.steps, None)

    class Resumed(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise Loaded

    def trainer(training: Training, callback: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(training.root), max_steps=training.last, save_steps=1,
            save_total_limit=2, per_device_train_batch_size=1, report_to=[], use_cpu=True,
            disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no",
            max_grad_norm=0.0,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ConstantLR(training.optimizer, 1.0)
        return Trainer(Model(training), arguments, train_dataset=Zeros(), callbacks=[callback],
                       optimizers=(training.optimizer, schedule))  # fmt: skip

    def load(root: Path) -> dict[str, Any]:
        training = Training(root, last=1 << 20)
        resumed = trainer(training, Resumed())
        try:
            resumed.train(resume_from_checkpoint=True)
        except Loaded:
            return training.state(resumed.state.global_step)
        raise RuntimeError("nothing was resumed")

    return Survivor(
        train=lambda training: trainer(training, SetWeights(training)).train(),
        load=load,
        checkpoints="checkpoint-*",
    )


@baseline("survival", "Orbax", "peer", settings={"max_to_keep=2": {}},
          available=installed("orbax"))  # fmt: skip
def orbax() -> Survivor:
    """Its manager, of arrays of JAX: asynchronous, awaited after each step."""
    import orbax.checkpoint as ocp

    def manager(root: Path) -> Any:
        return ocp.CheckpointManager(
            root.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def arrays(training: Training, step: int) -> dict[str, Any]:
        import jax

        state = training.state(step)
        kept = {"model": state["model"], "optimizer": state["optimizer"]["state"]}
        return {"step": step, **jax.tree.map(lambda one: one.numpy().copy(), kept)}

    def train(training: Training) -> None:
        made, root = manager(training.root), training.root
        for step in training.steps():
            if training.root != root:
                made, root = manager(training.root), training.root
            made.save(step, args=ocp.args.StandardSave(arrays(training, step)))
            made.wait_until_finished()

    def load(root: Path) -> dict[str, Any]:
        made = manager(root)
        template = arrays(Training(root), 0)
        return dict(made.restore(made.latest_step(), args=ocp.args.StandardRestore(template)))

    return Survivor(train=train, load=load, checkpoints="[0-9]*")
