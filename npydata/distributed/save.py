"""One checkpoint by many ranks: each writes its share, and all of it appears at once, or none.

The ranks exchange messages twice. In the foreground each sends what it has, and rank 0 answers who
writes what; then training goes on. In the background each sends what it wrote, and rank 0 commits
when every shard is on the disk, or says why not. The package's docstring lists the messages.
"""

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from npydata.checkpointer import checkpointer
from npydata.checkpointer.checkpointer import Save, exclusive
from npydata.checkpointer.commit import Root, destination, require_replaceable
from npydata.checkpointer.snapshot import Snapshot
from npydata.checkpointer.state import TrainingState, encode_training, serialized
from npydata.checkpointer.writer import write_files
from npydata.distributed.coordinator import LEAVE_S, Coordinator, RankError, ShardingConfig
from npydata.reader.formats.training import PARTS, TRAINING, FileEntry, encode
from npydata.system.atomic import new_temporary, sync_folder


class AsyncCheckpointer(checkpointer.AsyncCheckpointer):  # noqa: D101
    __doc__ = checkpointer.AsyncCheckpointer.__doc__

    @exclusive
    def save_distributed(
        self,
        dir: str | os.PathLike[str],
        model_state: Mapping[str, Any],
        optimizer_state: Mapping[str, Any] | None = None,
        training_state: TrainingState | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        sharding: ShardingConfig | None = None,
    ) -> None:
        """Save as :meth:`save` does, together with the other ranks of a process group.

        Every rank calls it, with its own shards of the state: replicated tensors are written once,
        shards of a ``DTensor`` (FSDP2, tensor parallel) by a rank that has them. All ranks write
        into one folder, on a file system that they share. ``dir`` then holds ``model/`` and
        ``optimizer/``, each readable by :func:`npydata.open_checkpoint` and by torch's
        ``HuggingFaceStorageReader``, and ``rng/rank_N.json`` if ``training_state.rng`` is given;
        the rest of the training state is rank 0's. :func:`npydata.load_distributed` loads it on
        any number of ranks.

        All or nothing: if a rank fails or dies before the commit, ``dir`` and ``latest`` stay what
        they were, and each other rank raises within the time-out of ``sharding`` (within twice
        that if rank 0 died): here, or in :meth:`wait` and the next save. Replicas are not compared:
        of a replicated tensor, one rank's is written. ``rank`` and ``world_size`` are only compared
        with the process group's.

        Raises:
            CheckpointError: A rank's state can't be stored, the ranks don't save the same, or one
                did not answer in time; the message names it.
            OSError: The previous save failed on this rank; no rank began this one.
        """
        from npydata.distributed.plan import (  # torch's planners: 1 s
            LocalState,
            merged,
            require_names,
            share_out,
        )

        begun = time.perf_counter()
        folder = destination(dir)
        coordinator = Coordinator(sharding, rank, world_size)
        training = TrainingState() if training_state is None else training_state
        root = self._roots.get(folder.parent) or Root(folder.parent)
        states: dict[str, LocalState] = {}
        small: dict[str, bytes] = {}

        def plan() -> dict[str, Any]:  # ``agree`` tells the other ranks what it raises
            self._wait()
            self._roots[folder.parent] = root
            require_replaceable(folder)
            for part, state in zip(PARTS, (model_state, optimizer_state), strict=True):
                if state is not None or part == "model":
                    states[part] = LocalState(part, state)
            encode_training(training)  # raises if something can't be stored
            if training.rng is not None:
                small[f"rng/rank_{coordinator.rank}.json"] = serialized(encode(training.rng))
            return {
                "does": f"saves step {training.step} of {' and '.join(states)} into {folder}",
                "parts": {part: state.to_json() for part, state in states.items()},
            }

        with ExitStack() as resources:
            # Runs on rank 0 only: ``resources`` holds the private folder there, and nothing
            # elsewhere.
            def decide(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
                values = {
                    "training_state": encode_training(replace(training, rng=None)),
                    "world_size": coordinator.world_size,
                }
                chosen = {}
                for part in states:
                    every = [one["parts"][part] for one in plans]
                    chosen[part] = share_out(tuple(one["shards"] for one in every))
                    values[part] = merged([one["tree"] for one in every])
                if "optimizer" in values:
                    models = [one["parts"]["model"]["tree"] for one in plans]
                    require_names(models, values["optimizer"])
                small[TRAINING] = serialized(values)
                temporary = resources.enter_context(root.temporary())
                for inner in (*chosen, "rng"):
                    (temporary / inner).mkdir(mode=0o700)
                return [
                    {"temporary": temporary.name, "chosen": {p: c[k] for p, c in chosen.items()}}
                    for k in range(len(plans))
                ]

            answer = coordinator.agree(plan, decide)
            temporary = folder.with_name(answer["temporary"])
            cleanup = resources.pop_all()
        try:
            files = {}
            for part, state in states.items():
                layout, tensors = state.file(answer["chosen"][part])
                if tensors or coordinator.rank == 0:  # rank 0 writes a file even without any
                    files[f"{part}/rank_{coordinator.rank}.safetensors"] = layout, tensors
            snapshot = Snapshot(files, self._buffer)
            keep = self.keep_last, self.keep_every

            def write() -> None:
                with cleanup:
                    entries = write_share(coordinator, temporary, snapshot, small)
                    if coordinator.rank == 0:
                        root.commit(temporary, folder, training.step, entries, *keep)

            save = Save(
                snapshot,
                folder,
                lambda: with_outcome(coordinator, temporary, write),
                self.stats,
                begun,
            )
            self._start(save)
        except BaseException as error:
            if not coordinator.in_background:  # else with_outcome does this, in the worker
                with suppress(RankError):
                    exchange_outcome(coordinator, error)
            cleanup.close()
            raise


def write_share(
    coordinator: Coordinator, temporary: Path, snapshot: Snapshot, small: Mapping[str, bytes]
) -> dict[str, FileEntry]:
    """Write this rank's files, and tell rank 0; on rank 0, return what all ranks wrote."""
    entries = write_files(temporary, snapshot, small)
    for inner in {Path(name).parent for name in entries} - {Path()}:
        sync_folder(temporary / inner)
    snapshot.require_verdict(lambda: os.utime(temporary))
    if coordinator.rank:
        files = {name: [entry.size, entry.crc32] for name, entry in entries.items()}
        coordinator.send("done", {"files": files})
        return entries
    for rank, message in enumerate(coordinator.gather("done"), start=1):
        for name, (size, crc32) in message["files"].items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise RankError(
                    f"rank {rank} wrote {name}, which rank 0 does not see: is {temporary.parent} "
                    "on a file system that all of them share?"
                )
            entries[name] = FileEntry(size, tuple(crc32))
    return entries


def with_outcome(coordinator: Coordinator, temporary: Path, write: Any) -> None:
    """Call ``write``, and exchange its outcome with the other ranks.

    Raises:
        CheckpointError: Another rank failed, or the outcome of the save is unknown.
    """
    coordinator.in_background = True
    failed: BaseException | None = None
    try:
        write()
    except BaseException as error:
        failed = error
    try:
        exchange_outcome(coordinator, failed)
    except RankError as error:
        if failed is None or isinstance(failed, FileNotFoundError):
            failed = error  # rank 0 gave up first, and has removed the folder
    if failed is None:
        return
    if coordinator.rank:  # rank 0's removal may have raced with this rank's writes
        with suppress(OSError):  # renamed first: rank 0 can't commit what is half removed
            shutil.rmtree(temporary.rename(new_temporary(temporary.parent)), ignore_errors=True)
    raise failed


def exchange_outcome(coordinator: Coordinator, failed: BaseException | None) -> None:
    """Make the outcome of the save known to all ranks; ``failed`` is what went wrong on this one.

    Rank 0 publishes it, and waits until the others know. They tell rank 0 what failed, unless it
    has given up, and wait for the outcome.

    Raises:
        RankError: Not on rank 0: the save failed on some rank, or rank 0 did not answer.
    """
    mine, message = coordinator.rank, {}
    if failed is not None:
        message = coordinator.error_message(failed)
    if mine == 0:
        for rank in coordinator.others:
            coordinator.send("outcome", message, rank)
        with suppress(RankError):  # a rank that dies now had nothing more to do
            coordinator.gather("left", LEAVE_S)
        coordinator.delete("done", *coordinator.others)
        return
    if message and coordinator.missing("outcome", [mine], 0):
        coordinator.send("done", message)
    if coordinator.missing("outcome", [mine], 2 * coordinator.timeout_s):
        raise RankError(
            f"rank 0 did not answer within {2 * coordinator.timeout_s:g} s: it may be saved or not"
        )
    try:
        coordinator.take("outcome", mine)
    finally:
        coordinator.send("left", {})
