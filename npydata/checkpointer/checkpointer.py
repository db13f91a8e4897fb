"""Save while training goes on: a snapshot now, the disk later."""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import torch

from npydata.checkpointer.commit import Root, destination, require_replaceable
from npydata.checkpointer.device import DeviceCopier, PendingCopies
from npydata.checkpointer.snapshot import (
    PAGE,
    Copy,
    Files,
    Snapshot,
    StagingBuffer,
    flatten,
    lay_out,
    local,
    require_unchanged,
)
from npydata.checkpointer.state import TrainingState, encode_training, serialized
from npydata.checkpointer.writer import write_files
from npydata.errors import CheckpointError
from npydata.reader.formats.training import PARTS, TRAINING
from npydata.system.accelerator import is_queued
from npydata.system.atomic import name_file
from npydata.system.threads import InterruptSafeEvent, without_collecting

SnapshotMode = Literal["host", "overlap", "device"]
THREAD_NAME = "npydata-save"
"""Prefix of the names of all threads that a save runs in."""

LIVE: weakref.WeakSet["AsyncCheckpointer"] = weakref.WeakSet()
"""All checkpointers, for the hooks at exit and after a fork."""
ending = threading.Event()
"""Set when the interpreter exits: daemon threads then begin no more saves."""

Method = TypeVar("Method", bound=Callable[..., Any])


def exclusive(method: Method) -> Method:
    """Let one thread at a time into a method, and refuse calls from within another.

    A second thread waits its turn. A signal handler or a ``__del__`` runs within the call that it
    interrupts, which can't continue until it returns: its call is refused, because it would wait
    for ever.
    """

    @wraps(method)
    def call(self: "AsyncCheckpointer", /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:  # reentrant: it lets a handler in, to be refused
            if self._inside:
                raise CheckpointError(
                    f"{method.__name__} was called within {self._inside} of the same checkpointer: "
                    "let the signal handler only set a flag, and save at the next step"
                )
            if ending.is_set():
                raise CheckpointError(
                    f"{method.__name__}: the interpreter is exiting, too late to save"
                )
            try:
                self._inside = method.__name__
                return method(self, *args, **kwargs)
            finally:
                self._inside = ""

    return call  # type: ignore[return-value]


class AsyncCheckpointer:
    """Saves checkpoints in the background; training waits only while a snapshot is made.

    Args:
        keep_last: Keep this many of the newest checkpoints in a root; None keeps all. Only what
            this run committed is removed: by this process, and by earlier ones if this one loaded
            one of their checkpoints from that root before it saves. Copies under other names,
            renamed checkpoints and those that hold other files stay.
        keep_every: With ``keep_last``, also keep those whose step is a multiple of it: milestones.
        snapshot: ``"host"`` copies everything before ``save`` returns (for tensors on a GPU: starts
            to copy, and later steps wait on the device). ``"overlap"`` copies what a protected
            optimizer owns while the next forward and backward run. ``"device"`` copies to GPU
            memory first.

    Only one save is in flight: the next one waits for it. An error in the background is raised
    once, by the next ``save`` (which then saves nothing), by ``wait``, or at the end of a ``with``
    block; at exit it is printed. Exiting the interpreter or dropping the checkpointer waits for the
    write.

    With ``"overlap"`` a save is committed only after the training thread has found, at its next
    protected step, in ``wait``, in ``save`` or at exit, that no tensor has changed. If one has (an
    ``Embedding(max_norm=...)`` in a forward pass, swapped weights), the save fails and names it.
    Until then ``done()`` is False, and a kill loses this save. torch counts in-place changes, but
    not those made through ``.data``, numpy or C, by ``fused=True`` optimizers that aren't
    protected, or to inference tensors or a DTensor's shard.

    Threads take turns. A signal handler must not save: let it set a flag, and save at the next
    step, as ``examples/train.py`` does. A forked process has nothing in flight.
    """

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        snapshot: SnapshotMode = "host",
    ) -> None:
        if snapshot not in get_args(SnapshotMode):
            modes = ", ".join(get_args(SnapshotMode))
            raise CheckpointError(f"snapshot={snapshot!r}, expected one of {modes}")
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"{name}={value!r}, expected None or at least 1")
        self.keep_last, self.keep_every, self.snapshot = keep_last, keep_every, snapshot
        self.stats: dict[str, float] = {"saves": 0, "stall_s": 0.0, "write_s": 0.0, "bytes": 0}
        """``saves`` on the disk so far; for the last one: seconds that training stood still,
        seconds until it was on the disk, and its bytes."""
        self._protected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_flight: list[Save] = []
        self._roots: dict[Path, Root]
        self._start_afresh()
        self._finalizer = weakref.finalize(self, wait_and_report, self._in_flight)
        self._finalizer.atexit = False  # finish_at_exit does it, with the lock
        LIVE.add(self)

    @exclusive
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
        begun = time.perf_counter()
        self._wait()
        folder = destination(dir)
        require_replaceable(folder)
        if self.keep_every and training_state is None:
            raise CheckpointError(
                f"keep_every={self.keep_every} goes by steps, and there is no training_state"
            )
        training = TrainingState() if training_state is None else training_state
        files, values = plan_files(model_state, optimizer_state)
        small = serialized(values | {"training_state": encode_training(training)})
        snapshot = Snapshot(files, self._buffer)
        root = self._roots.setdefault(folder.parent, Root(folder.parent))
        keep = self.keep_last, self.keep_every

        def write() -> None:  # without self: dropping the checkpointer waits for it
            with root.temporary() as temporary:
                entries = write_files(temporary, snapshot, {TRAINING: small})
                # Meanwhile os.utime tells clear_stale, on other machines, that it is in use.
                snapshot.require_verdict(lambda: os.utime(temporary))
                root.commit(temporary, folder, training.step, entries, *keep)

        self._start(Save(snapshot, folder, write, self.stats, begun))

    @exclusive
    def wait(self) -> None:
        """Wait until the last save is on the disk; raise what went wrong with it, once."""
        self._wait()

    def done(self) -> bool:
        """Whether no save is in flight."""
        return all(save.ended.is_set() for save in self._in_flight)

    @exclusive
    def prepare(
        self, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None = None
    ) -> None:
        """Allocate the memory that saving this state needs, so that the first save is fast too."""
        self._wait()
        files, _ = plan_files(model_state, optimizer_state, of_a_rank=True)
        Snapshot(files, self._buffer).memory[::PAGE] = 0  # pays for the page faults now

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``"overlap"`` copy what this optimizer changes until its next step, which waits."""
        if optimizer not in self._protected:
            me = weakref.ref(self)
            optimizer.register_step_pre_hook(lambda *_: judge_in_flight(me()))
            self._protected.add(optimizer)

    def __repr__(self) -> str:
        now = "no save in flight" if self.done() else "a save in flight"
        settings = f"keep_last={self.keep_last}, snapshot={self.snapshot!r}"
        return f"{type(self).__name__}({settings}, {now})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        else:
            wait_and_report(self._in_flight)

    # Running a save

    def _wait(self) -> None:
        """Wait for the last save; afterwards nothing fills its memory."""
        while self._in_flight:
            error = self._in_flight[0].finish()
            self._in_flight.clear()
            if error is not None:
                self._roots = {}  # a failed commit may have changed one: look again
                raise error

    def _start(self, save: "Save") -> None:
        """Begin the copies and the write; return when the tensors may change.

        With ``"overlap"`` that is now, as the protected optimizer waits in ``judge_in_flight``.
        Otherwise it is when the copies in memory are made; those of a device are ordered by its
        streams.
        """
        snapshot = save.snapshot
        self._in_flight.append(save)
        try:
            self._begin_copies(snapshot)
            save.thread.start()
            if self.snapshot != "overlap":
                snapshot.copied.wait()
                if snapshot.error is not None:
                    raise snapshot.error
                save.judge(training_waits=False)
        except BaseException:
            save.cancel()
            save.join()
            snapshot.join()  # or a device could copy into memory that the next save uses
            self._in_flight.clear()
            raise
        self.stats["stall_s"] = time.perf_counter() - save.begun

    def _begin_copies(self, snapshot: Snapshot) -> None:
        """Queue the copies that a device makes, and make those that can't wait for the worker.

        Without ``"overlap"`` all copies are ``first``, and ``_start`` waits until the worker's
        threads have made those in memory. With it, copies of what a protected optimizer changes
        come ``later``, and the others are made here: buffers, such as the statistics of a batch
        norm, change in the forward pass.

        Tensors that may change until they are copied are watched, that is, compared at the verdict:
        not those copied here, which are compared at once, nor those that training waits for on the
        device.
        """
        overlap, clone = self.snapshot == "overlap", self.snapshot == "device"
        if overlap and not self._protected:
            raise CheckpointError(
                'snapshot="overlap" needs an optimizer that waits: call protect(optimizer) first'
            )
        owned = storages_of(self._protected) if overlap else set()
        first: list[Copy] = []
        later: list[Copy] = []
        for copy in snapshot.copies:
            (later if owned and storage_of(copy.source) in owned else first).append(copy)
        if any(map(on_device, snapshot.copies)):
            snapshot.pending = PendingCopies()
            self._copier.start(snapshot.pending, filter(on_device, first), clone=clone)
            self._copier.start(snapshot.pending, filter(on_device, later), training_waits=False)
        first = [copy for copy in first if not on_device(copy)]
        if overlap:
            for copy in first:
                copy.run()
            require_unchanged(first)
            snapshot.watched = later
            snapshot.copies = [copy for copy in later if not on_device(copy)]
        else:
            snapshot.watched = snapshot.copies = first

    def _start_afresh(self) -> None:
        """Start with nothing in flight; in a forked process, all of that belongs to the parent."""
        self._lock, self._inside = threading.RLock(), ""
        self._in_flight.clear()
        self._buffer, self._copier = StagingBuffer(), DeviceCopier()
        self._roots = {}


def save_checkpoint(
    dir: str | os.PathLike[str],
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    training_state: TrainingState | None = None,
) -> None:
    """Save a checkpoint and wait until it is on the disk; see :meth:`AsyncCheckpointer.save`."""
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(dir, model_state, optimizer_state, training_state)


class Save:
    """One save in flight: its snapshot, and the worker thread that writes and commits it.

    The worker, ``thread``, starts the copies, runs ``write``, and sets ``ended``. The training
    thread calls ``judge``, then ``join`` (``finish`` does both); or ``cancel``, then ``join``.

    The worker is not a daemon thread: the interpreter waits for it. An interrupt may come at any
    moment: the next call waits for what is left.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        folder: Path,
        write: Callable[[], object],
        stats: dict[str, float],
        begun: float,
    ) -> None:
        self.snapshot, self.folder, self.begun = snapshot, folder, begun
        self.error: BaseException | None = None
        self.ended = InterruptSafeEvent()
        self._stats = stats
        self._judged = False
        self._work = [write]  # whoever pops it decides: the thread runs it, cancel() drops it
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)

    def _run(self) -> None:
        try:
            write = self._work.pop()
        except IndexError:  # cancelled
            return
        try:
            self.snapshot.start()
            write()
            self._stats["saves"] += 1
            self._stats["write_s"] = time.perf_counter() - self.begun
            self._stats["bytes"] = sum(file.nbytes for file in self.snapshot.files)
        except BaseException as error:
            if isinstance(error, OSError):
                name_file(error, self.folder)
            if isinstance(error, CheckpointError) and str(self.folder) not in str(error):
                error.args = (f"{self.folder}: {error}",)
            self.error = error
        finally:
            self.snapshot.join()
            self.ended.set()

    def judge(self, *, training_waits: bool = True) -> None:
        """Wait for the copies in memory; let the worker commit if no tensor has changed.

        With ``training_waits``, work queued for training from now on waits, on the device, for the
        device's copies.
        """
        if not self._judged:
            self.snapshot.copied.wait()
            if training_waits and self.snapshot.pending is not None:
                self.snapshot.pending.make_training_wait()
            self.snapshot.judge()
            self._judged = True

    def cancel(self) -> None:
        """Copy no more, and commit nothing."""
        self.snapshot.cancel()
        with suppress(IndexError):
            self._work.pop()
            self.ended.set()

    def join(self) -> None:
        """Wait until the worker has ended, however it ends."""
        self.ended.wait()
        if self.thread.is_alive():
            self.thread.join()

    def finish(self) -> BaseException | None:
        """Give the verdict and wait for the worker; return what went wrong.

        For a cancelled save that is None: what stopped it has been raised already.
        """
        if not self.snapshot.cancelled:
            self.judge()
        self.join()
        return None if self.snapshot.cancelled else self.error


@without_collecting
def plan_files(
    model: Any, optimizer: Any, *, of_a_rank: bool = False
) -> tuple[Files, dict[str, Any]]:
    """Return the files of a save, and each part's state as a tree without its tensors.

    With ``of_a_rank`` tensors may be spread over processes; only the local part of each counts.
    """
    files: dict[str, Any] = {}
    trees = {}
    for part, state in zip(PARTS, (model, optimizer), strict=True):
        if state is None and part != "model":
            continue
        tensors, ties, trees[part] = flatten(part, state)
        if of_a_rank:
            tensors = {name: local(tensor) for name, tensor in tensors.items()}
        try:
            layout = lay_out(tensors, ties=ties)
        except CheckpointError as error:
            raise CheckpointError(f"{part}_state: {error}") from None
        files[f"{part}.safetensors"] = layout, tensors
    return files, trees


def on_device(copy: Copy) -> bool:
    """Whether a device makes a copy."""
    return is_queued(copy.source)


def storages_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[Any]:
    """Return the storages that the steps of optimizers change: parameters and their own state."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {storage_of(tensor) for tensor in group["params"]}
        for state in optimizer.state.values():
            found |= {storage_of(one) for one in state.values() if isinstance(one, torch.Tensor)}
    return found


def storage_of(tensor: torch.Tensor) -> Any:
    """Return where the memory of a tensor is."""
    return tensor.device, local(tensor).untyped_storage().data_ptr()


# Called by an optimizer's step, the garbage collector, at exit and after a fork


def judge_in_flight(checkpointer: AsyncCheckpointer | None) -> None:
    """Before a protected optimizer's step: wait for the copies of what it changes; judge them."""
    if checkpointer is not None:
        for save in list(checkpointer._in_flight):
            save.judge()


def wait_and_report(in_flight: list[Save]) -> None:
    """Wait for what is in flight; print errors, as there is no caller left to raise them to."""
    for save in list(in_flight):
        # The garbage collector runs in any thread; one that a save runs in would wait for itself.
        if threading.current_thread().name.startswith(THREAD_NAME):
            save.snapshot.abandoned = True
            return
        if (error := save.finish()) is not None:
            print(f"npydata: {save.folder}: was not saved: {error}", file=sys.stderr)
    in_flight.clear()


def finish_at_exit() -> None:
    """Wait for saves, including those of daemon threads; begin no more."""
    ending.set()
    for checkpointer in list(LIVE):
        # With the lock, as a daemon thread that is killed during a copy aborts the process.
        with checkpointer._lock:
            wait_and_report(checkpointer._in_flight)


def reset_after_fork() -> None:
    """Let a forked process start afresh: it has none of its parent's threads."""
    for checkpointer in list(LIVE):
        checkpointer._start_afresh()


os.register_at_fork(after_in_child=reset_after_fork)
atexit.register(finish_at_exit)
