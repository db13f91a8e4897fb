"""Lightning: checkpoints written by ``AsyncCheckpointer``, and resumed bit for bit.

Example::

    save = SaveCheckpoints("run", every_n_train_steps=100, keep_last=3)
    trainer = Trainer(callbacks=[save], max_steps=1000)
    trainer.fit(module, AsyncDataLoader(dataset, batch_size=32, seed=0), ckpt_path=save.latest())

Each checkpoint is a folder whose ``model.safetensors`` any safetensors reader opens. For one
process or DDP, where rank 0 saves; sharded strategies save in ways of their own.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO

from npydata.checkpointer.checkpointer import SnapshotMode
from npydata.checkpointer.commit import latest_checkpoint, make_folder, remove_checkpoint
from npydata.checkpointer.load import load_checkpoint
from npydata.checkpointer.state import TrainingState, capture_rng, restore_rng
from npydata.distributed.save import AsyncCheckpointer
from npydata.errors import CheckpointError
from npydata.reader.formats.training import encode


class AsyncCheckpointIO(CheckpointIO):
    """Writes Lightning's checkpoints in the background: ``Trainer(plugins=[AsyncCheckpointIO()])``.

    The weights are ``model.safetensors``; everything else that Lightning saves is beside them.
    Lightning names what it saves and removes what it no longer wants; ``keep_last`` and
    ``snapshot`` are those of :class:`~npydata.AsyncCheckpointer`; for ``"overlap"``, call
    ``checkpointer.protect(optimizer)`` before the first save.

    Raises:
        CheckpointError: Something that Lightning or a hook put into the checkpoint is neither a
            tensor nor a plain value; the message names its place.
    """

    def __init__(self, *, keep_last: int | None = None, snapshot: SnapshotMode = "host") -> None:
        self.checkpointer = AsyncCheckpointer(keep_last=keep_last, snapshot=snapshot)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Take a snapshot, and begin to write it into the folder ``path``."""
        if storage_options is not None:
            raise CheckpointError(
                f"storage_options={storage_options!r}, expected None: checkpoints"
                " are written into a folder"
            )
        rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        state = TrainingState(step=checkpoint.get("global_step", 0), epoch=rest.get("epoch", 0))
        make_folder(Path(path).parent)  # Lightning may make a link in it right away
        self.checkpointer.save(path, checkpoint["state_dict"], rest, state)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint, on ``map_location`` if that is a device; nothing is ever unpickled.

        Raises:
            CheckpointError: The folder is not a complete checkpoint of this plug-in.
        """
        if not isinstance(map_location, str | torch.device | None):
            raise CheckpointError(f"map_location={map_location!r}, expected a device or None")
        self.checkpointer.wait()
        weights, rest, _ = load_checkpoint(path, device=map_location or "cpu")
        if rest is None or "pytorch-lightning_version" not in rest:
            raise CheckpointError(f"{path}: holds no state of Lightning's beside the weights")
        return {**rest, "state_dict": weights}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder that this plug-in wrote; anything else stays."""
        self.checkpointer.wait()
        with suppress(CheckpointError):
            remove_checkpoint(Path(path))

    def teardown(self) -> None:
        """Wait until the last checkpoint is on the disk; raise what went wrong with it."""
        self.checkpointer.wait()


class SaveCheckpoints(Checkpoint):
    """Saves ``root/step-000100`` and so on every few optimizer steps, with random generators.

    Args:
        root: The folder of this run's checkpoints.
        every_n_train_steps: Optimizer steps between checkpoints; the last step is saved as well,
            unless a run stops early.
        keep_last: How many of the newest of its own to keep; ``None`` keeps all.
        snapshot: As in :class:`~npydata.AsyncCheckpointer`.

    It installs :class:`AsyncCheckpointIO`, unless the trainer has one. Lightning itself saves no
    random generators: without this callback a resumed run draws other dropout masks. With it, a
    validation leaves the generators as they were. Of several ranks, only the first has its
    generators restored.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_n_train_steps: int,
        keep_last: int | None = None,
        snapshot: SnapshotMode = "host",
    ) -> None:
        if type(every_n_train_steps) is not int or every_n_train_steps < 1:
            raise CheckpointError(
                f"every_n_train_steps={every_n_train_steps!r}, expected 1 or more"
            )
        self.root, self.every_n_train_steps = Path(root), every_n_train_steps
        self._io = AsyncCheckpointIO(keep_last=keep_last, snapshot=snapshot)
        self._saved, self.keep_last = 0, keep_last
        self._rng: dict[str, Any] | None = None
        self._after_step: dict[str, Any] | None = None

    def latest(self) -> str | None:
        """Return the newest checkpoint, to pass as ``ckpt_path=``; ``None`` if there is none."""
        found = latest_checkpoint(self.root)
        return None if found is None else str(found)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the trainer write and read through :class:`AsyncCheckpointIO`."""
        if not isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io = self._io
            self._io.checkpointer.keep_last = None  # others may save through it, too
        self._saved, self._after_step = 0, None
        for owner in (pl_module, trainer.datamodule) if stage == "fit" else ():
            try:
                encode({**getattr(owner, "hparams", {})}, lambda *_: "")
            except CheckpointError as error:  # the first save would raise it, perhaps after hours
                raise CheckpointError(
                    f"save_hyperparameters() keeps {error}: name it in ignore="
                ) from None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Let every optimizer wait for a snapshot that overlaps with training."""
        writer: Any = trainer.strategy.checkpoint_io
        for optimizer in trainer.optimizers:
            writer.checkpointer.protect(optimizer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Restore the random generators before the first step of a resumed run."""
        if self._rng is not None and trainer.is_global_zero:
            restore_rng(self._rng)
        self._rng = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if a checkpoint is due, or at the last step."""
        # Here already: a validation's DataLoader draws its seed before ``on_validation_start``.
        self._after_step = capture_rng() if trainer.enable_validation else None
        step, epoch = trainer.global_step, trainer.current_epoch + 1
        last = 0 < trainer.max_steps <= step or (
            trainer.is_last_batch and epoch == trainer.max_epochs
        )
        # A batch may take several optimizer steps, and pass over a multiple.
        is_due = step // self.every_n_train_steps > self._saved // self.every_n_train_steps
        if step == self._saved or not (is_due or last):
            return
        self._saved = step
        writer: Any = trainer.strategy.checkpoint_io
        others, writer.checkpointer.keep_last = writer.checkpointer.keep_last, self.keep_last
        try:
            trainer.save_checkpoint(self.root / f"step-{step:06d}")
        finally:
            writer.checkpointer.keep_last = others

    def on_validation_end(self, *_: Any) -> None:
        """Restore the random generators of the last step: a resumed run skips its validation."""
        if self._after_step is not None:
            restore_rng(self._after_step)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Wait until the last checkpoint is on the disk."""
        writer: Any = trainer.strategy.checkpoint_io
        writer.teardown()

    def state_dict(self) -> dict[str, Any]:
        """Return the random generators, which Lightning puts into the checkpoint."""
        return {"saved": self._saved, "rng": capture_rng()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the generators for the first step."""
        self._saved, self._rng = state_dict["saved"], state_dict["rng"]
