"""Save while training goes on: a snapshot now, the disk later.

Built in ``notebooks/07_async_checkpointer``.
"""

import atexit
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from npydata.errors import CheckpointError
from npydata.system.accelerator import is_queued
from tutorial.kept.checkpointer.background import (
    THREAD_NAME,
    BackgroundTask,
    Calls,
    ending,
    finish_all,
)
from tutorial.kept.checkpointer.commit import LocalCommit, clear_stale, make_root
from tutorial.kept.checkpointer.destination import destination, require_replaceable
from tutorial.kept.checkpointer.device_copy import DeviceCopier
from tutorial.kept.checkpointer.file_layout import (
    flatten_state_dict,
    lay_out,
    require_state,
    to_local,
)
from tutorial.kept.checkpointer.manifest import MODEL, OPTIMIZER, TRAINING
from tutorial.kept.checkpointer.overlap import Overlap, storage_pointer
from tutorial.kept.checkpointer.staging import (
    Copy,
    PendingCopies,
    StagedFile,
    StagingBuffer,
    StagingTask,
    name_of_changed,
    refuse_changed,
    stage,
)
from tutorial.kept.checkpointer.training_state import TrainingState, serialized, training_json
from tutorial.kept.checkpointer.writer import Writer
from tutorial.kept.system.garbage import without_collecting

SNAPSHOTS = ("host", "overlap", "device")
Snapshot = tuple[StagingTask, BackgroundTask]
Its = TypeVar("Its", bound="AsyncCheckpointer")
Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_turn(
    method: Callable[Concatenate[Its, Given], Result],
) -> Callable[Concatenate[Its, Given], Result]:
    """Let one thread at a time into a method, and none from within another."""

    @wraps(method)
    def call(self: Its, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self._calls.in_turn(method.__name__, lambda: method(self, *args, **kwargs))

    return call


class AsyncCheckpointer:
    """Saves checkpoints in the background; training waits only while a snapshot is made.

    Args:
        keep_last: Keep so many of the newest checkpoints in a root; ``None`` keeps all. Removed is
            only what this run committed: this process, and those before it, if it has loaded one of
            their checkpoints from that root before it saves. Copies, renamed checkpoints and such
            that hold other files stay, and so does what versions before 2 of the format saved.
        snapshot: ``"host"`` copies everything before ``save`` returns (for tensors on a GPU: starts
            to copy, and later steps wait on the device). ``"overlap"`` copies what a protected
            optimizer owns while the next forward and backward run. ``"device"`` copies to memory
            of the GPU first.

    One save is in flight at a time: the next one waits for it. What went wrong in the background is
    raised once, by the next ``save`` (which then saves nothing), by ``wait``, or at the end of a
    ``with`` block. Leaving the interpreter or dropping the checkpointer waits for the write.

    Threads take turns. A signal handler must not save: it may come in the middle of a step or of a
    save, and then raises. Let it set a flag, and save at the next step, as ``examples/train.py``
    does. A forked process has nothing in flight, and memory of its own; the save goes on in its
    parent.

    A tensor that changes while it is copied fails the save, by its name: one that another thread
    changes during ``save``, and with ``"overlap"`` one that changes outside of the protected step
    before the save is done (``Embedding(max_norm=...)`` in a forward pass, weights that are
    swapped). torch counts changes in place when they end; it counts none through ``.data``,
    numpy or C, none by ``fused=True`` optimizers that aren't protected, none of inference tensors
    or a DTensor's shard.
    """

    def __init__(self, *, keep_last: int | None = None, snapshot: str = "host") -> None:
        if snapshot not in SNAPSHOTS:
            raise CheckpointError(f"snapshot={snapshot!r}, expected one of {', '.join(SNAPSHOTS)}")
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise CheckpointError(f"keep_last={keep_last!r}, expected None or 1 at least")
        self.keep_last, self.snapshot = keep_last, snapshot
        self._buffers: dict[str, StagingBuffer] = defaultdict(StagingBuffer)
        self._roots: set[Path] = set()
        self._calls = Calls()
        self._copier, self._overlap = DeviceCopier(), Overlap(self._calls)
        self._snapshot: Snapshot | None = None
        self._in_flight: list[BackgroundTask] = []
        self._finalizer = weakref.finalize(self, finish_all, self._in_flight)
        self._finalizer.atexit = False  # see finish_at_exit
        LIVE.add(self)

    @in_turn
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
        self._wait()
        folder = destination(dir)
        require_replaceable(folder)
        stage = partial(self._stage, model_state, optimizer_state, training_state)
        files, serialized = without_collecting(stage)()
        make_root(folder.parent)
        if folder.parent not in self._roots:
            clear_stale(folder.parent)
            self._roots.add(folder.parent)
        step = 0 if training_state is None else training_state.step
        strategy = LocalCommit(folder, step, self.keep_last)
        self._start(files, Writer(folder, files, {TRAINING: serialized}, strategy))

    def _start(self, files: Sequence[StagedFile], writer: Writer) -> None:
        """Begin the snapshot and its writing.

        Both are threads that nothing interrupts, and which come to an end by themselves: whatever
        interrupts this one, and its wait for them, the next call waits for what is left.
        """
        staging, in_background = self._begin_staging(files)
        writer.validate = staging.validate
        copying = BackgroundTask(staging, f"{THREAD_NAME}-staging")
        self._snapshot = staging, copying
        try:
            copying.start()  # before the writer, which waits for it
            self._in_flight.append(task := self._task(writer))
            task.start()
            if in_background:
                self._overlap.begin(staging, self._copier.streams)
            else:  # before training goes on; the writer follows close behind
                copying.result()
                staging.validate()
        except BaseException:
            staging.given_up = True  # first of all, and in one step
            copying.join()
            staging.settle_after_error()
            self._cancel()
            raise

    def _task(self, writer: Writer) -> BackgroundTask:
        """Return the thread in which a save is written."""
        return BackgroundTask(writer, THREAD_NAME)

    @in_turn
    def wait(self) -> None:
        """Wait until the last save is on the disk; raise what went wrong with it, once."""
        self._wait()

    def _wait(self) -> None:
        """Wait for the last save; nothing fills its memory any more."""
        if self._snapshot is not None:
            staging, copying = self._snapshot
            copying.join()
            if staging.given_up or copying.error is not None:
                staging.settle_after_error()
            if staging.given_up:
                self._cancel()
            self._snapshot = None
        known, self._roots = self._roots, set()  # after an error, what it left is looked for
        for task in list(self._in_flight):
            task.result()
            self._in_flight.clear()
        self._roots = known

    def done(self) -> bool:
        """Whether no save is in flight."""
        return all(task.done() for task in self._in_flight)

    @in_turn
    def prepare(
        self,
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Make and touch the memory that a save of this state needs, so that the first is fast.

        Of tensors that are spread over processes, the part that is here.
        """
        self._wait()
        for name, state in ((MODEL, model_state), (OPTIMIZER, optimizer_state)):
            if state is not None:
                tensors, _ = flatten_state_dict(state)
                tensors = {key: to_local(tensor) for key, tensor in tensors.items()}
                pin = any(is_queued(tensor) for tensor in tensors.values())
                self._buffers[name].reserve(lay_out(tensors).capacity, pin=pin, touch=True)

    def __repr__(self) -> str:
        now = "no save in flight" if self.done() else "a save in flight"
        return (f"{type(self).__name__}(keep_last={self.keep_last}, "
                f"snapshot={self.snapshot!r}, {now})")  # fmt: skip

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``"overlap"`` copy what this optimizer changes until its next step, which waits."""
        self._overlap.protect(optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        if error is None:
            self.wait()
        else:
            self._calls.in_turn("exit", lambda: finish_all(self._in_flight))

    def _stage(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
        training: TrainingState | None,
    ) -> tuple[list[StagedFile], bytes]:
        """Return the files of tensors to write, and the rest of the state, serialized."""
        files, metadata = [], {}
        states = {"model": (MODEL, model), "optimizer": (OPTIMIZER, optimizer)}
        for key, (name, state) in states.items():
            if state is None:
                continue
            require_state(key, state)
            try:
                file, metadata[key] = self._file(name, state)
            except CheckpointError as error:
                raise CheckpointError(f"{key}_state: {error}") from None
            files.append(file)
        training = TrainingState() if training is None else training
        return files, serialized({**metadata, "training_state": training_json(training)})

    def _file(self, name: str, state: Mapping[str, Any]) -> tuple[StagedFile, Any]:
        """Return a file for the tensors of a state, not yet filled, and the tree spec."""
        tensors, tree_spec = flatten_state_dict(state)
        return stage(name, lay_out(tensors), tensors, self._buffers[name]), tree_spec

    def _begin_staging(self, files: Sequence[StagedFile]) -> tuple[StagingTask, bool]:
        """Begin the copies that can't wait; return the others, and whether they can."""
        overlap = self.snapshot == "overlap"
        owned = self._overlap.optimizer_storages() if overlap else set()
        queued, cloned = self._split_off_queued(files)
        owned |= {storage_pointer(copy.source) for copy in cloned}
        if overlap or queued or cloned:
            for file in files:
                now = [one for one in file.copies if storage_pointer(one.source) not in owned]
                file.copies = [one for one in file.copies if storage_pointer(one.source) in owned]
                for copy in now:
                    copy.run()
                refuse_changed(name_of_changed(now))
        watched = [copy for file in files for copy in file.copies]
        watched += [copy for copy in queued if storage_pointer(copy.source) in owned]
        if not queued:
            return StagingTask(files, watched=watched), overlap or bool(cloned)
        pending = self._begin_on_device(queued, owned)
        return StagingTask(files, pending, watched=watched), True

    def _split_off_queued(self, files: Sequence[StagedFile]) -> tuple[list[Copy], list[Copy]]:
        """Take out of the files, and return, the copies that a device makes by itself.

        Into memory that isn't pinned the host copies, through a ring. Also returned: such copies
        that are of clones, which nobody changes.
        """
        queued: list[Copy] = []
        cloned: list[Copy] = []
        for file in files:
            of_devices = [copy for copy in file.copies if is_queued(copy.source)]
            if not of_devices:
                continue
            rest = [copy for copy in file.copies if not is_queued(copy.source)]
            if file.pinned:
                queued += of_devices
            else:
                on_device = self.snapshot == "device"
                through_ring = self._copier.through_ring(of_devices, on_device=on_device)
                cloned += [copy for copy in through_ring if copy.clone_of is not None]
                rest = sorted([*rest, *through_ring], key=lambda copy: copy.end)
            file.copies = rest
        return queued, cloned

    def _begin_on_device(self, copies: list[Copy], owned: set[Any]) -> PendingCopies:
        """Queue copies from devices; what training may change next, it changes after its copy."""
        if self.snapshot == "device":
            return self._copier.start(copies, on_device=True)
        now: list[Copy] = []
        at_the_step: list[Copy] = []
        for copy in copies:
            (at_the_step if storage_pointer(copy.source) in owned else now).append(copy)
        pending = self._copier.start(now)
        pending.order(self._copier.streams)
        pending.add(self._copier.start(at_the_step))
        return pending

    def _cancel(self) -> None:
        """Wait for a write that can't succeed; why is known already."""
        for task in self._in_flight:
            task.cancel_or_join()
        self._in_flight.clear()

    def _leave_to_parent(self) -> None:
        """In a forked process: calls, what is in flight, and its memory belong to the parent."""
        self._calls = Calls()
        self._overlap.leave_to_parent(self._calls)
        self._snapshot = None
        self._in_flight.clear()
        self._buffers.clear()
        self._roots.clear()


LIVE: weakref.WeakSet[AsyncCheckpointer] = weakref.WeakSet()


def leave_all_to_parent() -> None:
    """Let a forked process start afresh: it has none of its parent's threads."""
    for checkpointer in LIVE:
        checkpointer._leave_to_parent()


def finish_at_exit() -> None:
    """Wait for the saves of threads that the interpreter does not wait for, and begin no more.

    A daemon would otherwise be ended within a copy, which aborts the process.
    """
    ending.set()
    for checkpointer in list(LIVE):
        checkpointer._calls.wait_for_end()
        finish_all(checkpointer._in_flight)


os.register_at_fork(after_in_child=leave_all_to_parent)
atexit.register(finish_at_exit)


def save_checkpoint(
    dir: str | os.PathLike[str],
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    training_state: TrainingState | None = None,
) -> None:
    """Save a checkpoint and wait until it is on the disk; see :meth:`AsyncCheckpointer.save`."""
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(dir, model_state, optimizer_state, training_state)
