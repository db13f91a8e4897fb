"""Save while training goes on: a snapshot now, the disk later.

Built in ``notebooks/05_async_checkpointer``.
"""

import json
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from npydata.checkpoint.background import BackgroundSave, FileImage, Fill, Write, finish_all
from npydata.checkpoint.buffers import ImageBuffer
from npydata.checkpoint.commit import clear_stale, make_root, require_replaceable
from npydata.checkpoint.flatten import as_json, refuse_tensor, take_tensors
from npydata.checkpoint.image import lay_out
from npydata.checkpoint.manifest import MAX_TOLD_BYTES, MODEL, OPTIMIZER, integer
from npydata.checkpoint.overlap import Overlap, held_here, place
from npydata.checkpoint.snapshot import Copy, DeviceCopier, Pending, copies_into
from npydata.checkpoint.state import TrainingState
from npydata.errors import CheckpointError

if TYPE_CHECKING:
    from npydata.distributed.meeting import ShardingConfig

SNAPSHOTS = ("host", "overlap", "device")


class AsyncCheckpointer:
    """Saves checkpoints in the background; training waits only while a snapshot is made.

    Args:
        keep_last: Keep so many of the newest checkpoints in a root; ``None`` keeps all.
        snapshot: ``"host"`` copies everything before ``save`` returns (for tensors on a GPU: starts
            to copy, and later steps wait on the device). ``"overlap"`` copies what a protected
            optimizer owns while the next forward and backward run. ``"device"`` copies to memory
            of the GPU first.

    One save is in flight at a time: the next one waits for it. What went wrong in the background is
    raised once, by the next ``save`` (which then saves nothing), by ``wait``, or at the end of a
    ``with`` block. Leaving the interpreter or dropping the checkpointer waits for the write.
    """

    def __init__(self, *, keep_last: int | None = None, snapshot: str = "host") -> None:
        if snapshot not in SNAPSHOTS:
            raise CheckpointError(f"snapshot={snapshot!r}, expected one of {', '.join(SNAPSHOTS)}")
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise CheckpointError(f"keep_last={keep_last!r}, expected None or 1 at least")
        self.keep_last, self.snapshot = keep_last, snapshot
        self._buffers: dict[str, ImageBuffer] = defaultdict(ImageBuffer)
        self._roots: set[Path] = set()
        self._copier = DeviceCopier()
        self._overlap = Overlap()
        self._flight: list[BackgroundSave] = []
        self._finalizer = weakref.finalize(self, finish_all, self._flight)

    def save(
        self,
        dir: str | os.PathLike[str],
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        training_state: TrainingState | None = None,
    ) -> None:
        """Take a snapshot of the state, and begin to write it into the folder ``dir``.

        The tensors may be changed as soon as this returns (with ``"overlap"``, by the protected
        optimizer). When the write is done, ``dir`` holds ``model.safetensors``,
        ``optimizer.safetensors`` (if there is an optimizer), ``training_state.json`` and
        ``manifest.json``, and ``latest`` beside it names it. A checkpoint that ``dir`` held before
        is loadable until then. Killed at any moment, or after a power cut, the newest complete
        checkpoint is still there.

        Raises:
            CheckpointError: Something in the state can't be stored, or ``dir`` holds other files.
            OSError: The previous save failed; this one was not begun.
        """
        self.wait()
        folder = Path(os.path.abspath(dir))  # noqa: PTH100
        require_replaceable(folder)
        files, told = self._lay_out(model_state, optimizer_state, training_state)
        make_root(folder.parent)
        if folder.parent not in self._roots:
            clear_stale(folder.parent)
            self._roots.add(folder.parent)
        step = 0 if training_state is None else training_state.step
        self._start(files, Write(folder, files, told, step, self.keep_last))

    def save_distributed(
        self,
        dir: str | os.PathLike[str],
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        training_state: TrainingState | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        sharding: "ShardingConfig | None" = None,
    ) -> None:
        """Save as :meth:`save` does, together with the other ranks of a process group.

        Every rank calls it, with its own part of the state: replicated tensors are written once,
        parts of a ``DTensor`` (FSDP2, tensor parallel) by a rank that has them. All ranks write
        into one folder, on a file system that they share. ``dir`` then holds ``model/`` and
        ``optimizer/``, each readable by :func:`npydata.open_checkpoint` and by torch's
        ``HuggingFaceStorageReader``, and ``rng/rank_N.json`` if ``training_state.rng`` is given;
        the rest of the training state is rank 0's. :func:`npydata.load_distributed` loads it on any
        number of ranks.

        All or nothing: if a rank fails or dies before the commit, ``dir`` and ``latest`` stay what
        they were, and each other rank raises within the time-outs of ``sharding``: here, or in
        :meth:`wait` and the next save. ``rank`` and ``world_size`` are only compared with those of
        the process group.

        Raises:
            CheckpointError: A rank's state can't be stored, the ranks don't save the same, or one
                gave no word in time; the message names it.
            OSError: The previous save failed on this rank; nobody began this one.
        """
        from npydata.distributed.save import begin_saving

        folder = Path(os.path.abspath(dir))  # noqa: PTH100
        saving = begin_saving(folder, sharding, rank, world_size)
        with saving.meeting.giving_up("plan"):
            self.wait()
        clear = folder.parent not in self._roots
        states = model_state, optimizer_state, training_state
        write = saving.plan(*states, self._buffers, self.keep_last, clear)
        self._roots.add(folder.parent)
        with write.abandoned_on_error():
            self._start(write.files, write)

    def _start(self, files: list[FileImage], write: Callable[[], None]) -> None:
        """Begin the snapshot and its writing."""
        fill, in_background = self._begin(files)
        try:
            BackgroundSave(write, self._flight)
            if in_background:
                self._overlap.begin(fill, self._copier.streams)
            else:  # before training goes on; the writer follows close behind
                fill()
        except BaseException as error:
            fill.give_up(error, elsewhere=in_background)
            self._give_up()
            raise

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise what went wrong with it, once."""
        for save in list(self._flight):
            save.wait()
            self._flight.clear()

    def done(self) -> bool:
        """Whether no save is in flight."""
        return all(save.done() for save in self._flight)

    def prepare(
        self,
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Make and touch the memory that a save of this state needs, so that the first is fast.

        Of tensors that are spread over processes, the part that is here.
        """
        self.wait()
        for name, state in ((MODEL, model_state), (OPTIMIZER, optimizer_state)):
            if state is not None:
                tensors = {name: held_here(one) for name, one in take_tensors(state)[0].items()}
                pin = any(tensor.is_cuda for tensor in tensors.values())
                self._buffers[name].reserve(lay_out(tensors).capacity, pin=pin, touch=True)

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``"overlap"`` copy what this optimizer changes until its next step, which waits."""
        self._overlap.protect(optimizer)

    def __enter__(self) -> "AsyncCheckpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        if error is None:
            self.wait()
        else:
            finish_all(self._flight)

    def _lay_out(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
        training: TrainingState | None,
    ) -> tuple[list[FileImage], bytes]:
        """Return the files to write, and what stands beside the tensors."""
        files, told = [], {}
        states = {"model": (MODEL, model), "optimizer": (OPTIMIZER, optimizer)}
        for key, (name, state) in states.items():
            if state is None:
                continue
            if not isinstance(state, Mapping):
                raise CheckpointError(f"{key}_state is a {type(state).__name__}, expected a dict")
            try:
                tensors, told[key] = take_tensors(state)
                image = lay_out(tensors)
            except CheckpointError as error:
                raise CheckpointError(f"{key}_state: {error}") from None
            pin = any(tensor.is_cuda for tensor in tensors.values())
            memory = self._buffers[name].reserve(image.capacity, pin=pin)
            files.append(FileImage(name, image, memory, copies_into(memory, image, tensors)))
        told["training_state"] = training_json(TrainingState() if training is None else training)
        return files, told_bytes(told)

    def _begin(self, files: list[FileImage]) -> tuple[Fill, bool]:
        """Begin the copies that can't wait; return the others, and whether they can."""
        there = [copy for file in files for copy in file.copies if copy.source.is_cuda]
        overlap = self.snapshot == "overlap"
        owned = self._overlap.owned() if overlap else set()
        if overlap or there:
            for file in files:
                here = [copy for copy in file.copies if not copy.source.is_cuda]
                file.copies = [copy for copy in here if place(copy.source) in owned]
                for copy in here:
                    if place(copy.source) not in owned:
                        copy.run()
        if not there:
            return Fill(files), overlap
        return Fill(files, self._begin_on_device(there, owned)), True

    def _begin_on_device(self, copies: list[Copy], owned: set[Any]) -> Pending:
        """Queue copies from devices; what training may change next, it changes after its copy."""
        if self.snapshot == "device":
            return self._copier.start(copies, on_device=True)
        pending = self._copier.start(copy for copy in copies if place(copy.source) not in owned)
        pending.order(self._copier.streams)
        pending.add(self._copier.start(copy for copy in copies if place(copy.source) in owned))
        return pending

    def _give_up(self) -> None:
        """Wait for a write that can't succeed; why is known already."""
        for save in self._flight:
            save.give_up()
        self._flight.clear()


def training_json(training: TrainingState) -> Any:
    """Return the training state as typed JSON."""
    if not isinstance(training, TrainingState):
        raise CheckpointError(
            f"training_state is a {type(training).__name__}, expected a TrainingState"
        )
    try:
        integer(training.step)
    except ValueError as error:
        raise CheckpointError(f"training_state: ['step']: {error}") from None
    values = {field.name: getattr(training, field.name) for field in fields(training)}
    try:
        return as_json(values, refuse_tensor)
    except CheckpointError as error:
        raise CheckpointError(f"training_state: {error}") from None


def told_bytes(told: dict[str, Any]) -> bytes:
    """Return what stands beside the tensors as it is written."""
    try:
        content = json.dumps(told).encode()  # with an indent it takes three times as long
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointError(f"a value that JSON can't hold: {error}") from None
    if len(content) > MAX_TOLD_BYTES:
        raise CheckpointError(
            f"values beside the tensors make {len(content):,} bytes, at most {MAX_TOLD_BYTES:,}"
        )
    return content


def save_checkpoint(
    dir: str | os.PathLike[str],
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    training_state: TrainingState | None = None,
) -> None:
    """Save a checkpoint and wait until it is on the disk; see :meth:`AsyncCheckpointer.save`."""
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(dir, model_state, optimizer_state, training_state)
