"""One checkpoint by many ranks: each writes its share, and all of it appears at once or nothing.

The ranks meet twice. In the foreground rank 0 hears what each has and answers who writes what; then
training goes on. In the background each tells what it wrote, and rank 0 commits, when every part is
on the disk, or says why not. Built in ``notebooks/06_scale_out``.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from npydata.atomic import sync_folder
from npydata.checkpoint.background import FileImage
from npydata.checkpoint.buffers import ImageBuffer
from npydata.checkpoint.checkpointer import told_bytes, training_json
from npydata.checkpoint.commit import (
    TEMPORARY,
    clear_stale,
    commit,
    make_root,
    next_sequence,
    require_replaceable,
    temporary_beside,
    write_small,
)
from npydata.checkpoint.direct import write_durably
from npydata.checkpoint.flatten import as_json, refuse_tensor
from npydata.checkpoint.image import Image, lay_out
from npydata.checkpoint.manifest import TRAINING, FileEntry, Manifest, checksums, rng_file
from npydata.checkpoint.snapshot import copies_into
from npydata.checkpoint.state import TrainingState
from npydata.distributed.meeting import Group, Meeting, ShardingConfig
from npydata.distributed.plan import LocalState, Piece, merged_nests, share_told
from npydata.errors import CheckpointError
from npydata.lazy.convert import header_bytes
from npydata.lazy.safetensors_archive import COMPLEX_AS_REAL, NOTES
from npydata.lazy.sharded import OFFSETS, SHARDING
from npydata.lazy.training_folder import PARTS


@dataclass(slots=True)
class Commit:
    """What only rank 0 does in a save."""

    told: bytes
    step: int
    keep_last: int | None
    resources: ExitStack
    """Holds the temporary folder, and its lock."""

    def __call__(self, folder: Path, temporary: Path, meeting: Meeting) -> None:
        """Commit when every rank has written its share, and let all know."""
        entries = gather_entries(temporary, meeting)
        write_small(temporary / TRAINING, self.told, 0o600)
        entries[TRAINING] = FileEntry(len(self.told), checksums(self.told))
        manifest = Manifest(next_sequence(folder.parent), self.step, entries)
        commit(temporary, folder, manifest, self.keep_last)


def gather_entries(temporary: Path, meeting: Meeting) -> dict[str, FileEntry]:
    """Return what all ranks wrote; each file must be here, too."""
    entries: dict[str, FileEntry] = {}
    for rank, said in enumerate(meeting.gather("done")):
        for name, (size, crc32) in said["files"].items():
            entries[name] = FileEntry(size, tuple(crc32))
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise CheckpointError(
                    f"rank {rank} wrote {name}, which rank 0 does not see: is {temporary.parent} "
                    "on a file system that all of them share?"
                )
    return entries


@dataclass(slots=True)
class ShardWrite:
    """The background half of one rank's share in a save."""

    folder: Path
    temporary: Path
    files: list[FileImage]
    rng: bytes
    meeting: Meeting
    commit: Commit | None
    """For rank 0."""

    def __call__(self) -> None:
        """Write this rank's files, tell the others, and see to it that all know how it ended."""
        try:
            with self.abandoned_on_error():
                self.meeting.tell("done", {"files": self.written()})
                if self.commit is not None:
                    self.commit(self.folder, self.temporary, self.meeting)
            self.release()
            self.part()
        except BaseException as error:
            self.clear_away()
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{self.folder}: not saved: {error}") from error.__cause__
            raise

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """If something goes wrong here, tell the others and let go of everything."""
        try:
            with self.meeting.giving_up("done"):
                yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go of the temporary folder; what is still in it goes with it."""
        if self.commit is not None:
            self.commit.resources.close()

    def clear_away(self) -> None:
        """Remove the temporary folder if rank 0 gave it up, which may have met this rank's writes.

        A rank 0 that only gave no word may still commit it.
        """
        with suppress(CheckpointError):
            ours = self.temporary.name.endswith(TEMPORARY)
            if ours and self.commit is None and self.meeting.gave_up("outcome"):
                shutil.rmtree(self.temporary, ignore_errors=True)

    def written(self) -> dict[str, Any]:
        """Write the files; if rank 0 gave up and took the folder away, that is what went wrong."""
        try:
            return self.write_files()
        except FileNotFoundError:
            if self.meeting.gave_up("outcome"):
                self.meeting.hear("outcome")
            raise

    def write_files(self) -> dict[str, Any]:
        """Write every file as it fills; return sizes and checksums."""
        entries: dict[str, Any] = {}
        for file in self.files:
            memory, nbytes = file.memory.numpy().data, file.image.nbytes
            wait_for = partial(self.wait_for, file)
            crc32 = write_durably(self.temporary / file.name, memory, nbytes, wait_for)
            entries[file.name] = [nbytes, crc32]
        if self.rng:
            name = rng_file(self.meeting.group.rank)
            write_small(self.temporary / name, self.rng, 0o600)
            entries[name] = [len(self.rng), checksums(self.rng)]
        for inner in {Path(name).parent for name in entries}:
            sync_folder(self.temporary / inner)
        return entries

    def wait_for(self, file: FileImage, upto: int) -> None:
        """Wait until so much of a file is filled; called before each piece that is written."""
        self.meeting.show_life()
        file.filling.wait_for(upto)

    def part(self) -> None:
        """Rank 0 says that the checkpoint is there; the others wait for its word.

        The store may live in rank 0's process, which therefore leaves last.
        """
        if self.commit is None:
            with self.meeting.giving_up("done"):  # a rank 0 that wakes up must not commit then
                self.meeting.hear("outcome")
            self.meeting.forget("life", self.meeting.group.rank)
            self.meeting.tell("left", {})
            return
        self.meeting.tell("outcome", {})
        with suppress(CheckpointError):  # who dies now had nothing more to do
            self.meeting.gather_from("left", range(1, self.meeting.group.world_size))
            self.meeting.forget("outcome", 0)
            self.meeting.forget("life", 0)


@dataclass(slots=True)
class Saving:
    """The foreground half of a save: from the states of all ranks to one rank's share."""

    folder: Path
    meeting: Meeting
    states: dict[str, LocalState] = field(default_factory=dict)

    def plan(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None,
        training: TrainingState | None,
        buffers: dict[str, ImageBuffer],
        keep_last: int | None,
        clear: bool,
    ) -> ShardWrite:
        """Meet the other ranks; return what this one writes.

        Raises:
            CheckpointError: A rank's state can't be stored, or the ranks don't fit together; all of
                them raise then.
        """
        training = TrainingState() if training is None else training
        with self.meeting.giving_up("plan"):
            require_replaceable(self.folder)
            for part, state in zip(PARTS, (model, optimizer), strict=True):
                if state is not None:
                    self.states[part] = local_state(part, state)
            told = {"training_state": training_json(without_rng(training)),
                    "world_size": self.meeting.group.world_size}  # fmt: skip
            rng = rng_bytes(training)
        self.meeting.tell("plan", self.told(training.step))
        commit = None
        if self.meeting.group.rank == 0:
            commit = self.preside(told, training.step, keep_last, clear)
        write = ShardWrite(self.folder, self.folder, [], rng, self.meeting, commit)
        with write.abandoned_on_error():
            answer = self.meeting.hear("answer", self.meeting.group.rank)
            self.meeting.forget("answer", self.meeting.group.rank)
            write.temporary = self.folder.with_name(answer["temporary"])
            for part in self.states:
                write.files += self.images(part, answer[part], buffers)
        return write

    def told(self, step: int) -> dict[str, Any]:
        """Return what rank 0 must know of this rank."""
        parts = {
            part: {
                "pieces": json.dumps([piece.to_json() for piece in state.pieces]),
                "nest": state.nest,
            }
            for part, state in self.states.items()
        }
        return {"folder": str(self.folder), "step": step, "parts": parts}

    def preside(
        self, told: dict[str, Any], step: int, keep_last: int | None, clear: bool
    ) -> Commit:
        """Hear all plans, share out the work, and make the folder for it."""
        with ExitStack() as resources, self.meeting.giving_up("plan"):
            said = self.meeting.gather("plan")
            require_one_save(said)
            shares = {}
            with self.meeting.at_work():  # with a thousand ranks it takes a quarter of a minute
                for part in said[0]["parts"]:
                    every = [one["parts"][part] for one in said]
                    shares[part] = share_told(tuple(one["pieces"] for one in every))
                    told[part] = merged_nests([one["nest"] for one in every])
            content = told_bytes(told)
            make_root(self.folder.parent)
            if clear:
                clear_stale(self.folder.parent)
            temporary = resources.enter_context(temporary_beside(self.folder))
            for inner in (*shares, "rng"):
                (temporary / inner).mkdir(mode=0o700)
            for rank in range(self.meeting.group.world_size):
                mine = {part: share[rank] for part, share in shares.items()}
                self.meeting.tell("answer", {"temporary": temporary.name, **mine}, to=rank)
            return Commit(content, step, keep_last, resources.pop_all())

    def images(
        self, part: str, chosen: list[int], buffers: dict[str, ImageBuffer]
    ) -> Iterator[FileImage]:
        """Yield the files of a part that this rank writes, each with its memory and copies."""
        state = self.states[part]
        rank = self.meeting.group.rank
        files = state.files(chosen) or [[]] * (rank == 0)  # a state without tensors has a file, too
        for number, pieces in enumerate(files, start=1):
            more = f"-{number}" if number > 1 else ""
            name = f"{part}/rank_{rank}{more}.safetensors"
            tensors = {state.pieces[k].name: state.part(k) for k in pieces}
            image = with_places(lay_out(tensors), [state.pieces[k] for k in pieces])
            pin = any(tensor.is_cuda for tensor in tensors.values())
            memory = buffers[f"{part}{more}.safetensors"].reserve(image.capacity, pin=pin)
            yield FileImage(name, image, memory, copies_into(memory, image, tensors))


def begin_saving(
    folder: Path, sharding: ShardingConfig | None, rank: int | None, world_size: int | None
) -> Saving:
    """Return a save that begins to meet the other ranks."""
    group = Group.of(sharding or ShardingConfig(), rank, world_size)
    return Saving(folder, group.meet(folder))


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


def local_state(part: str, state: Mapping[str, Any]) -> LocalState:
    """Return a state as this rank has it."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{part}_state is a {type(state).__name__}, expected a dict")
    try:
        return LocalState(state)
    except CheckpointError as error:
        raise CheckpointError(f"{part}_state: {error}") from None


def require_one_save(said: list[dict[str, Any]]) -> None:
    """Refuse ranks that save different things, as when one of them missed a call."""
    for what in ("folder", "step"):
        for rank, one in enumerate(said):
            if one[what] != said[0][what]:
                raise CheckpointError(
                    f"rank {rank} saves {what} {one[what]}, rank 0 {what} {said[0][what]}"
                )
    for rank, one in enumerate(said):
        if one["parts"].keys() != said[0]["parts"].keys():
            both = list(one["parts"]), list(said[0]["parts"])
            raise CheckpointError(f"rank {rank} saves {both[0]}, rank 0 {both[1]}")


def with_places(image: Image, pieces: list[Piece]) -> Image:
    """Return an image whose header says where in the whole tensors its parts belong."""
    dtypes, offsets, shapes = {}, {}, {}
    for piece in pieces:
        dtype = getattr(torch, piece.dtype.removeprefix("torch."))
        pair = (0,) if dtype in COMPLEX_AS_REAL else ()
        if pair:
            dtypes[piece.name] = piece.dtype.removeprefix("torch.")
        offsets[piece.name] = {OFFSETS: [*piece.offsets, *pair]}
        shapes[piece.name] = piece.whole
    notes = {"shapes": shapes, **({"dtypes": dtypes} if dtypes else {})}
    texts = {"format": "pt", SHARDING: json.dumps(offsets), NOTES: json.dumps(notes)}
    return Image(header_bytes(image.slots, texts), image.slots)
