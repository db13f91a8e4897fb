"""The HF Trainer: a callback that saves through ``AsyncCheckpointer``, and resumes bit for bit.

Example::

    save = SaveCheckpoints("run", every_n_steps=100, keep_last=3)
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[save])
    trainer.train(resume_from_checkpoint=save.latest())

Use ``TrainingArguments(save_strategy="no")``, or the Trainer saves as well. Each checkpoint is a
folder whose ``model.safetensors`` has the names that ``from_pretrained`` expects.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from npydata.checkpointer.checkpointer import SnapshotMode
from npydata.checkpointer.commit import latest_checkpoint
from npydata.checkpointer.load import load_checkpoint
from npydata.checkpointer.state import TrainingState, capture_rng, restore_rng
from npydata.distributed.save import AsyncCheckpointer
from npydata.errors import CheckpointError, LoaderError
from npydata.loader.loader import AsyncDataLoader


class LoaderBatches(IterableDataset[Any]):
    """A loader's batches as a dataset, for a torch ``DataLoader`` that hands them on as they are.

    The Trainer knows how to resume that: it sets the epoch, and skips what was already given.
    """

    def __init__(self, loader: AsyncDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch."""
        self.loader.set_epoch(epoch)


def train_dataloader(trainer: Trainer, loader: AsyncDataLoader) -> DataLoader[Any]:
    """Return a loader's batches as ``Trainer.get_train_dataloader`` should give them.

    Raises:
        LoaderError: Of several processes, each would get a share of this rank's share.
    """
    if trainer.accelerator.num_processes > 1 and loader.world_size > 1:
        raise LoaderError(
            f"a loader for {loader.world_size} ranks, expected one with rank=0, world_size=1: the "
            "Trainer hands its batches out"
        )
    batches: DataLoader[Any] = DataLoader(LoaderBatches(loader), batch_size=None)
    prepared: DataLoader[Any] = trainer.accelerator.prepare(batches)
    return prepared


class SaveCheckpoints(TrainerCallback):
    """Saves ``root/step-000100`` and so on every few optimizer steps, with random generators.

    Args:
        root: The folder of this run's checkpoints.
        every_n_steps: Optimizer steps between checkpoints; the last step is saved as well.
        keep_last: How many of the newest to keep; ``None`` keeps all.
        snapshot: As in :class:`~npydata.AsyncCheckpointer`.

    Model, optimizer, learning rate schedule and the Trainer's own state are saved; the Trainer
    finds the next batches by counting. What other callbacks count, as an ``EarlyStoppingCallback``
    does, and fp16's loss scale begin anew. A step's checkpoint is written when the next step or
    epoch begins, after an evaluation. For one process or DDP, where rank 0 saves, and gets its
    generators back.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_n_steps: int,
        keep_last: int | None = None,
        snapshot: SnapshotMode = "host",
    ) -> None:
        if type(every_n_steps) is not int or every_n_steps < 1:
            raise CheckpointError(f"every_n_steps={every_n_steps!r}, expected 1 or more")
        self.root, self.every_n_steps = Path(root), every_n_steps
        self.checkpointer = AsyncCheckpointer(keep_last=keep_last, snapshot=snapshot)
        self._saved = 0
        self._resumed: tempfile.TemporaryDirectory[str] | None = None
        self._state: tuple[Any, TrainingState] | None = None

    def latest(self) -> str | None:
        """Return what to pass as ``resume_from_checkpoint=``; ``None`` if nothing was saved yet.

        That is a private folder with the Trainer's state in its own format, and a link to the
        weights; it is removed with this callback.
        """
        self.checkpointer.wait()
        found = latest_checkpoint(self.root)
        if found is None:
            return None
        _, optimizer, state = load_checkpoint(found)
        if optimizer is None or "trainer_state" not in state.extra:
            raise CheckpointError(f"{found}: holds no state of the Trainer's beside the weights")
        self._state = optimizer, state
        self._resumed = tempfile.TemporaryDirectory(prefix="npydata-resume-")
        folder = Path(self._resumed.name)
        (folder / "trainer_state.json").write_text(state.extra["trainer_state"])
        (folder / "model.safetensors").symlink_to(found.absolute() / "model.safetensors")
        return str(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore optimizer and schedule in a run that was resumed from here."""
        self._saved = state.global_step
        self.checkpointer.protect(kwargs["optimizer"].optimizer)
        if self._state is None or state.global_step != self._state[1].step:
            self._state = None
            return
        optimizer, saved = self._state
        kwargs["optimizer"].load_state_dict(optimizer)
        kwargs["lr_scheduler"].load_state_dict(saved.extra["lr_scheduler"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore random generators in a resumed run; save if the last step's checkpoint is due."""
        if self._state is not None and state.is_world_process_zero:
            restore_rng(self._state[1].rng or {})
        self._state = None
        if state.global_step % self.every_n_steps == 0:
            self._save(state, **kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do the same before a new epoch draws its order, as the end of training may save there."""
        # Without a length, the epoch is a share of ``max_steps``.
        if not (state.epoch or 0) % 1 and has_length(kwargs["train_dataloader"]):
            self.on_step_begin(args, state, control, **kwargs)

    def _save(self, state: TrainerState, **kwargs: Any) -> None:
        """Save the step that was just taken, unless it is saved."""
        if state.global_step == self._saved or not state.is_world_process_zero:
            return
        self._saved = state.global_step
        now = TrainingState(
            step=state.global_step,
            epoch=int(state.epoch or 0),
            rng=capture_rng(),
            extra={
                "trainer_state": json.dumps(asdict(state)),
                "lr_scheduler": kwargs["lr_scheduler"].state_dict(),
            },
        )
        folder = self.root / f"step-{state.global_step:06d}"
        weights, moments = kwargs["model"].state_dict(), kwargs["optimizer"].state_dict()
        self.checkpointer.save(folder, weights, moments, now)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the last step, and wait until it is on the disk."""
        self._save(state, **kwargs)
        self.checkpointer.wait()
