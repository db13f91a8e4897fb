"""One checkpoint by many ranks: each writes its share, and all of it appears at once or nothing.

The ranks exchange messages twice. In the foreground rank 0 gathers what each has and answers who
writes what; then training goes on. In the background each sends what it wrote, and rank 0 commits,
when every shard is on the disk, or sends why not. Built in ``notebooks/09_scale_out``.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from npydata.checkpointer.checkpointer import serialized, training_json
from npydata.checkpointer.commit import (
    clear_stale,
    commit,
    make_root,
    next_sequence,
    require_replaceable,
    temporary_beside,
)
from npydata.checkpointer.file_layout import (
    FileLayout,
    as_json,
    lay_out,
    refuse_tensor,
)
from npydata.checkpointer.manifest import TRAINING, FileEntry, Manifest, rng_file
from npydata.checkpointer.staging import StagedFile, StagingBuffer, stage
from npydata.checkpointer.training_state import TrainingState
from npydata.checkpointer.writer import Writer
from npydata.distributed.coordinator import Coordinator, Group, RankError, ShardingConfig
from npydata.distributed.save_plan import LocalState, Shard, dedup_cached, merged_tree_specs
from npydata.errors import CheckpointError
from npydata.reader.containers.safetensors import COMPLEX_AS_REAL, NOTES, header_bytes
from npydata.reader.sharded import OFFSETS, SHARDING
from npydata.reader.training_folder import PARTS


@dataclass(frozen=True, slots=True)
class CommitAll:
    """What only rank 0 does in a save."""

    step: int
    keep_last: int | None

    def __call__(self, folder: Path, temporary: Path, coordinator: Coordinator) -> None:
        """Commit when every rank has written its shards."""
        entries = gather_entries(temporary, coordinator)
        manifest = Manifest(next_sequence(folder.parent), self.step, entries)
        commit(temporary, folder, manifest, self.keep_last)


def gather_entries(temporary: Path, coordinator: Coordinator) -> dict[str, FileEntry]:
    """Return what all ranks wrote; each file must be here, too."""
    entries: dict[str, FileEntry] = {}
    for rank, message in enumerate(coordinator.gather("done")):
        for name, (size, crc32) in message["files"].items():
            entries[name] = FileEntry(size, tuple(crc32))
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise RankError(
                    f"rank {rank} wrote {name}, which rank 0 does not see: is {temporary.parent} "
                    "on a file system that all of them share?"
                )
    return entries


@dataclass(frozen=True, slots=True)
class RankCommit:
    """The commit of a save by many ranks: rank 0 commits what all of them wrote."""

    folder: Path
    written_to: Path
    """The temporary folder that rank 0 made for all."""
    coordinator: Coordinator
    resources: ExitStack
    """On rank 0, holds the temporary folder and its lock."""
    commit_all: CommitAll | None
    """For rank 0."""

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Give the folder to all ranks' writers, and see to it that all know how it ended."""
        try:
            with self.cancelled_on_error():
                try:
                    yield self.written_to
                except FileNotFoundError:  # rank 0 may have aborted, and taken the folder away
                    if self.coordinator.aborted("outcome"):
                        self.coordinator.recv("outcome")
                    raise
            self.resources.close()
            self.finish()
        except BaseException as error:
            self.clear_away()
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{self.folder}: not saved: {error}") from error.__cause__
            raise

    def heartbeat(self) -> None:
        """Let the others know that this rank is at work."""
        self.coordinator.heartbeat()

    def commit(self, temporary: Path, entries: Mapping[str, FileEntry]) -> None:
        """Send what this rank wrote; rank 0 gathers it and commits."""
        files = {name: [entry.size, entry.crc32] for name, entry in entries.items()}
        self.coordinator.send("done", {"files": files})
        if self.commit_all is not None:
            self.commit_all(self.folder, temporary, self.coordinator)

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """If something goes wrong here, let the others know, and let go of everything."""
        try:
            with self.coordinator.abort_on_error("done"):
                yield
        except BaseException:
            self.resources.close()  # what is still in the temporary folder goes with it
            raise

    def clear_away(self) -> None:
        """Remove the temporary folder if rank 0 aborted, which may have met this rank's writes.

        A rank 0 that only sent nothing may still commit it.
        """
        with suppress(CheckpointError):
            if self.commit_all is None and self.coordinator.aborted("outcome"):
                shutil.rmtree(self.written_to, ignore_errors=True)

    def finish(self) -> None:
        """Rank 0 sends that the checkpoint is there; the others wait for that.

        The store may live in rank 0's process, which therefore leaves last.
        """
        coordinator = self.coordinator
        if self.commit_all is None:
            with coordinator.abort_on_error("done"):  # a rank 0 that wakes up must not commit then
                coordinator.recv("outcome")
            coordinator.delete("heartbeat", coordinator.group.rank)
            coordinator.send("left", {})
            return
        coordinator.send("outcome", {})
        with suppress(CheckpointError):  # who dies now had nothing more to do
            coordinator.gather_from("left", range(1, coordinator.group.world_size))
            coordinator.delete("outcome", 0)
            coordinator.delete("heartbeat", 0)


@dataclass(slots=True)
class RankSave:
    """The foreground half of a save: from the states of all ranks to what this one writes."""

    folder: Path
    coordinator: Coordinator
    states: dict[str, LocalState] = field(default_factory=dict)

    def plan(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
        training: TrainingState | None,
        buffers: Mapping[str, StagingBuffer],
        keep_last: int | None,
        clear: bool,
    ) -> tuple[list[StagedFile], Writer, RankCommit]:
        """Agree with the other ranks; return what this one writes.

        Raises:
            CheckpointError: A rank's state can't be stored, or the ranks don't fit together; all of
                them raise then.
        """
        training = TrainingState() if training is None else training
        coordinator, rank = self.coordinator, self.coordinator.group.rank
        with coordinator.abort_on_error("plan"):
            require_replaceable(self.folder)
            for kind, state in zip(PARTS, (model, optimizer), strict=True):
                if state is not None:
                    self.states[kind] = local_state(kind, state)
            metadata = {"training_state": training_json(without_rng(training)),
                        "world_size": coordinator.group.world_size}  # fmt: skip
            small = {rng_file(rank): content} if (content := rng_bytes(training)) else {}
        coordinator.send("plan", self.local_plan(training.step))
        resources, commit_all = ExitStack(), None
        if rank == 0:
            resources, small[TRAINING] = self.make_global_plan(metadata, clear)
            commit_all = CommitAll(training.step, keep_last)
        with on_error(resources), coordinator.abort_on_error("done"):
            answer = coordinator.recv_answer()
            temporary = self.folder.with_name(answer["temporary"])
            files = [
                file for kind in self.states for file in self.stage(kind, answer[kind], buffers)
            ]
        strategy = RankCommit(self.folder, temporary, coordinator, resources, commit_all)
        return files, Writer(self.folder, files, small, strategy), strategy

    def local_plan(self, step: int) -> dict[str, Any]:
        """Return what rank 0 must know of this rank."""
        states = {
            kind: {
                "shards": json.dumps([shard.to_json() for shard in state.shards]),
                "tree_spec": state.tree_spec,
            }
            for kind, state in self.states.items()
        }
        return {"step": step, "states": states}

    def make_global_plan(self, metadata: dict[str, Any], clear: bool) -> tuple[ExitStack, bytes]:
        """Gather all plans, answer who writes what, and make the folder for it.

        Returns:
            What holds the folder, and what stands beside the tensors, serialized.
        """
        with ExitStack() as resources, self.coordinator.abort_on_error("plan"):
            plans = self.coordinator.gather("plan")
            validate_one_save(plans)
            chosen = {}
            with self.coordinator.heartbeats_beside():  # a thousand ranks take 15 s
                for kind in plans[0]["states"]:
                    every = [plan["states"][kind] for plan in plans]
                    chosen[kind] = dedup_cached(tuple(one["shards"] for one in every))
                    metadata[kind] = merged_tree_specs([one["tree_spec"] for one in every])
            content = serialized(metadata)
            make_root(self.folder.parent)
            if clear:
                clear_stale(self.folder.parent)
            temporary = resources.enter_context(temporary_beside(self.folder))
            for inner in (*chosen, "rng"):
                (temporary / inner).mkdir(mode=0o700)
            for rank in range(self.coordinator.group.world_size):
                mine = {kind: of_ranks[rank] for kind, of_ranks in chosen.items()}
                self.coordinator.send("answer", {"temporary": temporary.name, **mine}, to=rank)
            return resources.pop_all(), content

    def stage(
        self, kind: str, chosen: list[int], buffers: Mapping[str, StagingBuffer]
    ) -> Iterator[StagedFile]:
        """Yield the files of a kind that this rank writes, each with its memory and copies."""
        state = self.states[kind]
        rank = self.coordinator.group.rank
        files = state.files(chosen) or [[]] * (rank == 0)  # a state without tensors has a file, too
        for number, numbers in enumerate(files, start=1):
            more = f"-{number}" if number > 1 else ""
            shards = [state.shards[k] for k in numbers]
            tensors = {state.shards[k].name: state.local_tensor(k) for k in numbers}
            layout = with_offsets(lay_out(tensors), shards)
            buffer = buffers[f"{kind}{more}.safetensors"]
            yield stage(f"{kind}/rank_{rank}{more}.safetensors", layout, tensors, buffer)


@contextmanager
def on_error(resources: ExitStack) -> Iterator[None]:
    """Let go of resources if something goes wrong here."""
    try:
        yield
    except BaseException:
        resources.close()
        raise


def begin_saving(
    folder: Path, sharding: ShardingConfig | None, rank: int | None, world_size: int | None
) -> RankSave:
    """Return a save that begins to coordinate with the other ranks."""
    group = Group.of(sharding or ShardingConfig(), rank, world_size)
    return RankSave(folder, group.rendezvous(folder, f"saves {folder}"))


def without_rng(training: TrainingState) -> TrainingState:
    """Return a training state without the random generators, which each rank has of its own."""
    return replace(training, rng=None) if isinstance(training, TrainingState) else training


def rng_bytes(training: TrainingState) -> bytes:
    """Return the random generators of this rank as they are written; nothing if none are given."""
    if training.rng is None:
        return b""
    try:
        return json.dumps(as_json(training.rng, refuse_tensor)).encode()
    except CheckpointError as error:
        raise CheckpointError(f"training_state: ['rng']{error}") from None


def local_state(kind: str, state: Mapping[str, Any]) -> LocalState:
    """Return a state as this rank has it."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{kind}_state is a {type(state).__name__}, expected a dict")
    try:
        return LocalState(state)
    except CheckpointError as error:
        raise CheckpointError(f"{kind}_state: {error}") from None


def validate_one_save(plans: list[dict[str, Any]]) -> None:
    """Refuse ranks that save different things, as when one of them missed a call."""
    for rank, plan in enumerate(plans):
        if plan["step"] != plans[0]["step"]:
            raise RankError(
                f"rank {rank} saves step {plan['step']}, rank 0 step {plans[0]['step']}"
            )
        if plan["states"].keys() != plans[0]["states"].keys():
            both = list(plan["states"]), list(plans[0]["states"])
            raise RankError(f"rank {rank} saves {both[0]}, rank 0 {both[1]}")


def with_offsets(layout: FileLayout, shards: list[Shard]) -> FileLayout:
    """Return a layout whose header says where in the global tensors its shards belong."""
    dtypes, offsets, shapes = {}, {}, {}
    for shard in shards:
        dtype = getattr(torch, shard.dtype.removeprefix("torch."))
        pair = (0,) if dtype in COMPLEX_AS_REAL else ()
        if pair:
            dtypes[shard.name] = shard.dtype.removeprefix("torch.")
        offsets[shard.name] = {OFFSETS: [*shard.offsets, *pair]}
        shapes[shard.name] = shard.global_shape
    notes = {"shapes": shapes, **({"dtypes": dtypes} if dtypes else {})}
    texts = {"format": "pt", SHARDING: json.dumps(offsets), NOTES: json.dumps(notes)}
    entries = {slot.name: slot.header for slot in layout.slots}
    return FileLayout(header_bytes(entries, texts), layout.slots)
