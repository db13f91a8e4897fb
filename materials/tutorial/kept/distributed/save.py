"""One checkpoint by many ranks: each writes its share, and all of it appears at once or nothing.

The ranks exchange messages twice. In the foreground rank 0 gathers what each has and answers who
writes what; then training goes on. In the background each sends what it wrote, and rank 0 commits,
when every shard is on the disk, or sends why not. Built in ``notebooks/09_scale_out``.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.checkpointer.commit import (
    clear_stale,
    commit,
    make_root,
    new_manifest,
    temporary_beside,
)
from tutorial.kept.checkpointer.destination import require_replaceable
from tutorial.kept.checkpointer.file_layout import (
    FileLayout,
    as_json,
    lay_out,
    refuse_tensor,
    require_state,
)
from tutorial.kept.checkpointer.manifest import TRAINING, FileEntry, rng_file
from tutorial.kept.checkpointer.staging import StagedFile, StagingBuffer, stage
from tutorial.kept.checkpointer.training_state import TrainingState, serialized, training_json
from tutorial.kept.checkpointer.writer import Writer
from tutorial.kept.distributed.coordinator import Coordinator, RankError, coordinate
from tutorial.kept.distributed.group import Group, ShardingConfig
from tutorial.kept.distributed.replicas import Samples, draw_replicas, validate_equal
from tutorial.kept.distributed.save_plan import LocalState, Shard, dedup_cached, merged_tree_specs
from tutorial.kept.reader.containers.safetensors import COMPLEX_AS_REAL, NOTES, header_bytes
from tutorial.kept.reader.sharded import OFFSETS, SHARDING
from tutorial.kept.reader.training_folder import PARTS


@dataclass(frozen=True, slots=True)
class GlobalCommit:
    """The commit of all ranks' files, which rank 0 makes."""

    step: int
    keep_last: int | None

    def __call__(self, folder: Path, temporary: Path, coordinator: Coordinator) -> None:
        """Commit when every rank has written its shards."""
        commit_global(folder, temporary, coordinator, self.step, self.keep_last)


def commit_global(
    folder: Path, temporary: Path, coordinator: Coordinator, step: int, keep_last: int | None
) -> None:
    """Commit what all ranks wrote, or raise and commit nothing."""
    entries = gather_entries(temporary, coordinator)
    coordinator.begin_commit()
    manifest = new_manifest(folder, step, entries)
    commit(temporary, folder, manifest, keep_last)


def gather_entries(temporary: Path, coordinator: Coordinator) -> dict[str, FileEntry]:
    """Return what all ranks wrote; each file must be here, too."""
    entries: dict[str, FileEntry] = {}
    messages = coordinator.gather("done")
    validate_equal(message["replicas"] for message in messages)
    for rank, message in enumerate(messages):
        entries.update(entries_seen(temporary, rank, message["files"]))
    return entries


def entries_seen(temporary: Path, rank: int, files: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Return what a rank wrote, if rank 0 sees it."""
    entries = {name: FileEntry(size, *map(tuple, sums)) for name, (size, *sums) in files.items()}
    for name, entry in entries.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise RankError(
                f"rank {rank} wrote {name}, which rank 0 does not see: is {temporary.parent} "
                "on a file system that all of them share?"
            )
    return entries


NOT_SAVED, IS_SAVED, NOT_KNOWN = "not saved", "is saved, but then", "not known to be saved"
"""What an error says has become of a save."""


@dataclass(slots=True)
class RankCommit:
    """The commit of a save by many ranks: rank 0 commits what all of them wrote."""

    folder: Path
    written_to: Path
    """The temporary folder that rank 0 made for all."""
    coordinator: Coordinator
    resources: ExitStack
    """On rank 0, holds the temporary folder and its lock."""
    global_commit: GlobalCommit | None
    """For rank 0."""
    samples: Samples
    """Of what other ranks have as well."""
    identity: tuple[int, int] = (0, 0)
    """Of the temporary folder, which the checkpoint will be."""
    has_written: bool = False
    """Whether rank 0 may know that this rank's files are on the disk, and commit them."""
    over: bool = False
    """Whether the background has no more to say to the other ranks."""

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Give the folder to all ranks' writers, and see to it that all know how it ended."""
        try:
            with self.coordinator.heartbeats_beside():
                self.identity = identity_of(self.written_to)
                yield self.written_to
                self.resources.close()
                self.finish()
            self.coordinator.close(failed=False)
        except BaseException as error:
            verdict, error = self.fail(error)
            if isinstance(error, CheckpointError) or verdict != NOT_SAVED:
                raise CheckpointError(f"{self.folder}: {verdict}: {error}") from error
            raise
        finally:
            self.over = True

    def heartbeat(self) -> None:
        """Heartbeats are sent beside the writer, which may be in one call for long."""

    def commit(self, temporary: Path, entries: Mapping[str, FileEntry]) -> None:
        """Send what this rank wrote; rank 0 gathers it and commits."""
        files = {name: [entry.size, entry.crc32, entry.lengths] for name, entry in entries.items()}
        self.has_written = True
        self.coordinator.send("done", {"files": files, "replicas": self.samples.checksums()})
        if self.global_commit is not None:
            self.global_commit(self.folder, temporary, self.coordinator)

    def finish(self) -> None:
        """Rank 0 sends that the checkpoint is there; the others wait for that.

        The store may live in rank 0's process, which therefore leaves last.
        """
        coordinator, world_size = self.coordinator, self.coordinator.group.world_size
        if self.global_commit is None:
            coordinator.recv("outcome")
        else:
            coordinator.send("outcome", {})
        with suppress(CheckpointError):  # who dies now had nothing more to do
            if self.global_commit is None:
                coordinator.send("left", {})
            else:
                coordinator.gather_from("left", range(1, world_size))
                coordinator.delete("outcome", 0)
                coordinator.delete("withdrawn", 0)

    @contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """If something goes wrong here, let the others know, and let go of everything."""
        try:
            yield
        except BaseException as error:
            if not self.over:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> tuple[str, BaseException]:
        """Let the others know what went wrong here; return what became of the save, and why."""
        is_sure = self.global_commit is not None or not self.has_written
        verdict = IS_SAVED if self.is_in_place() else NOT_SAVED if is_sure else NOT_KNOWN
        with suppress(CheckpointError):  # a store that is gone: nobody can be told, or asked
            verdict, error = self.agree_on_failure(verdict, error)
        self.resources.close()  # what is still in the temporary folder goes with it
        self.coordinator.close(failed=True)
        return verdict, error

    def agree_on_failure(self, verdict: str, error: BaseException) -> tuple[str, BaseException]:
        """As :meth:`fail`, by the messages: what rank 0 has decided holds for all."""
        coordinator = self.coordinator
        message = coordinator.error_message(error)
        if self.global_commit is not None:
            coordinator.send("outcome", {**message, "verdict": verdict})
            return verdict, error
        if coordinator.aborted("outcome"):
            outcome = coordinator.message("outcome")
            if outcome["verdict"] == NOT_SAVED:  # rank 0's removal may have met this rank's writes
                shutil.rmtree(self.written_to, ignore_errors=True)
            return outcome["verdict"], RankError(outcome["error"])
        coordinator.send("done", message)
        is_sure = coordinator.withdraw()
        return IS_SAVED if self.is_in_place() else NOT_SAVED if is_sure else NOT_KNOWN, error

    def is_in_place(self) -> bool:
        """Whether the folder that the ranks wrote into bears the name of the checkpoint."""
        with suppress(OSError):
            return identity_of(self.folder) == self.identity
        return False


def identity_of(folder: Path) -> tuple[int, int]:
    """Return what stays the same when a folder is renamed."""
    status = folder.stat()
    return status.st_dev, status.st_ino


@dataclass(slots=True)
class RankSave:
    """The foreground half of a save: from the states of all ranks to what this one writes."""

    folder: Path
    coordinator: Coordinator
    check_replicas: bool
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
        resources, global_commit = ExitStack(), None
        with coordinator.abort_on_error("plan"):
            require_replaceable(self.folder)
            for kind, state in zip(PARTS, (model, optimizer), strict=True):
                if state is not None:
                    self.states[kind] = local_state(kind, state)
            metadata = {"training_state": training_json(without_rng(training)),
                        "world_size": coordinator.group.world_size}  # fmt: skip
            small = {rng_file(rank): content} if (content := rng_bytes(training)) else {}
            plan = self.create_local_plan(training.step)
            if rank == 0:
                resources, small[TRAINING], answer = self.create_global_plan(plan, metadata, clear)
                global_commit = GlobalCommit(training.step, keep_last)
            else:
                answer = coordinator.ask(plan)
        temporary = self.folder.with_name(answer["temporary"])
        samples = Samples(answer["seed"])
        strategy = RankCommit(
            self.folder, temporary, coordinator, resources, global_commit, samples
        )
        with strategy.cancelled_on_error():
            for kind, numbers in answer["replicas"].items():
                samples.take(kind, self.states[kind], numbers)
            files = [
                file
                for kind, chosen in answer["chosen"].items()
                for file in self.stage(kind, chosen, buffers)
            ]
        return files, Writer(self.folder, files, small, strategy), strategy

    def create_local_plan(self, step: int) -> dict[str, Any]:
        """Return what rank 0 must know of this rank."""
        states = {
            kind: {
                "shards": json.dumps([shard.to_json() for shard in state.shards]),
                "tree_spec": state.tree_spec,
            }
            for kind, state in self.states.items()
        }
        return {"step": step, "states": states}

    def create_global_plan(
        self, plan: dict[str, Any], metadata: dict[str, Any], clear: bool
    ) -> tuple[ExitStack, bytes, dict[str, Any]]:
        """Gather all plans, answer who writes what, and make the folder for it.

        Returns:
            What holds the folder; what stands beside the tensors, serialized; rank 0's own answer.
        """
        with ExitStack() as resources:
            plans = self.coordinator.gather_plans(plan)
            validate_one_save(plans)
            chosen, replicas = {}, {}
            with self.coordinator.heartbeats_beside():  # a thousand ranks take 15 s
                for kind in plan["states"]:
                    every = [one["states"][kind] for one in plans]
                    shards = tuple(one["shards"] for one in every)
                    chosen[kind] = dedup_cached(shards)
                    if self.check_replicas:
                        replicas[kind] = draw_replicas(shards)
                    metadata[kind] = merged_tree_specs([one["tree_spec"] for one in every])
            content = serialized(metadata)
            make_root(self.folder.parent)
            if clear:
                clear_stale(self.folder.parent)
            temporary = resources.enter_context(temporary_beside(self.folder))
            for inner in (*chosen, "rng"):
                (temporary / inner).mkdir(mode=0o700)
            seed = secrets.randbits(32)
            answers = [
                {
                    "temporary": temporary.name,
                    "seed": seed,
                    "chosen": {kind: of_ranks[rank] for kind, of_ranks in chosen.items()},
                    "replicas": {kind: of_ranks[rank] for kind, of_ranks in replicas.items()},
                }
                for rank in range(len(plans))
            ]
            self.coordinator.answer(answers)
            return resources.pop_all(), content, answers[0]

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


def begin_saving(
    folder: Path, sharding: ShardingConfig | None, rank: int | None, world_size: int | None
) -> RankSave:
    """Return a save that begins to coordinate with the other ranks."""
    sharding = sharding or ShardingConfig()
    group = Group.of(sharding, rank, world_size)
    return RankSave(folder, coordinate(group, f"saves {folder}"), sharding.check_replicas)


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
    require_state(kind, state)
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
