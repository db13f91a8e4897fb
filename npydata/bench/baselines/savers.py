"""Savers: ours, ``torch.distributed.checkpoint`` (DCP), and functions that write one file.

All of them end on the disk: DCP flushes its files, and many processes flush the folders here.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from npydata import AsyncCheckpointer, ShardingConfig, TrainingState
from npydata.bench.baselines import OURS, baseline
from npydata.bench.states import Saver, State
from npydata.system.atomic_write import sync_folder

OVERLAP, NOT_PREPARED = "ours, overlap", "ours, not prepared"
OVERLAPPED = {"": {"snapshot": "overlap"}}

DCP, DCP_ASYNC = "dcp.save", "dcp.async_save"
DCP_CACHED = "dcp.async_save, reused stager"
HUGGING_FACE = "dcp.save, safetensors"
BACKGROUND = {"": {"background": True}}
CACHED = {"": {"background": True, "cached": True}}
THREADS = {f"{count} thread{'s' * (count > 1)}{' (default)' * (count == 1)}": {"threads": count}
           for count in (1, 2, 4)}  # fmt: skip

SAVE_FILE, TORCH_SAVE, NO_SAVES = "save_file + fsync", "torch.save + fsync", "no saves"


@baseline("checkpoint, checkpoint loop, checkpoint memory, checkpoint cache", OURS, "ours")
@baseline("checkpoint, checkpoint loop", OVERLAP, "ours", settings=OVERLAPPED)
@baseline("checkpoint", NOT_PREPARED, "ours", settings={"": {"prepared": False}})
def ours(state: State, *, snapshot: str = "host", prepared: bool = True) -> Saver:
    checkpointer = AsyncCheckpointer(snapshot=snapshot)
    if prepared:
        checkpointer.prepare(state)

    def save(folder: Path) -> None:
        checkpointer.save(folder, state, None, TrainingState(step=1))

    return our_saver(state, checkpointer, save, snapshot)


@baseline("checkpoint distributed", OURS, "ours")
@baseline("checkpoint distributed", OVERLAP, "ours", settings=OVERLAPPED)
@baseline("checkpoint distributed", NOT_PREPARED, "ours", settings={"": {"prepared": False}})
def ours_together(state: State, *, snapshot: str = "host", prepared: bool = True) -> Saver:
    """Many processes save one state."""
    checkpointer, sharding = AsyncCheckpointer(snapshot=snapshot), ShardingConfig(timeout_s=600)
    if prepared:
        checkpointer.prepare(state)

    def save(folder: Path) -> None:
        checkpointer.save_distributed(folder, state, None, TrainingState(step=1), sharding=sharding)

    return our_saver(state, checkpointer, save, snapshot)


def our_saver(
    state: State, checkpointer: AsyncCheckpointer, save: Callable[[Path], object], snapshot: str
) -> Saver:
    optimizer = torch.optim.SGD(list(state.values()), lr=0.1)  # only one that lives is protected
    if snapshot == "overlap":
        checkpointer.protect(optimizer)
    return Saver(save=save, finish=lambda folder: checkpointer.wait(), close=checkpointer.wait,
                 holds=optimizer)  # fmt: skip


@cache
def has_stager() -> bool:
    """Whether torch has a stager that can be reused; 2.6 has none."""
    from torch.distributed.checkpoint import staging

    return hasattr(staging, "DefaultStager")


@baseline("checkpoint, checkpoint memory, checkpoint cache", DCP, "peer")
@baseline("checkpoint, checkpoint memory", DCP_ASYNC, "peer", settings=BACKGROUND)
@baseline("checkpoint, checkpoint loop, checkpoint memory", DCP_CACHED, "peer", settings=CACHED,
          available=has_stager)  # fmt: skip
def with_dcp(
    state: State, *, background: bool = False, cached: bool = False,
    writer: Callable[[Path], Any] = lambda folder: None,
) -> Saver:  # fmt: skip
    """One process saves; ``writer`` makes what writes the files, None for torch's own choice."""
    import torch.distributed.checkpoint as dcp

    # One process is meant. What saves in the background warns from a thread of its own, later.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    stager = {"async_stager": reusable_stager()} if cached else {}
    uploads: list[Any] = []

    def save(folder: Path) -> None:
        if background:
            uploads.append(dcp.async_save(state, checkpoint_id=folder, **stager))  # type: ignore[attr-defined]
        else:
            dcp.save(state, checkpoint_id=folder, storage_writer=writer(folder))  # type: ignore[attr-defined]

    def finish(folder: Path) -> None:
        while uploads:
            upload = uploads.pop()
            getattr(upload, "upload_completion", upload).result()

    return Saver(save=save, finish=finish, close=lambda: [one.close() for one in stager.values()])


def reusable_stager() -> Any:
    """Return a stager that keeps its memory from save to save."""
    from torch.distributed.checkpoint import staging

    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


@baseline("checkpoint distributed", DCP, "peer", settings=THREADS)
@baseline("checkpoint distributed", DCP_ASYNC, "peer", settings=BACKGROUND)
@baseline("checkpoint distributed", DCP_CACHED, "peer", settings=CACHED, available=has_stager)
@baseline("checkpoint distributed", HUGGING_FACE, "peer", settings={"": {"safetensors": True}},
          available=lambda: find_spec("torch.distributed.checkpoint.hf_storage") is not None
          )  # fmt: skip
def with_dcp_together(
    state: State, *, threads: int = 0, safetensors: bool = False, **options: bool
) -> Saver:
    """Many processes save one state, and flush the folders that torch leaves to the system."""

    def writer(folder: Path) -> Any:
        if safetensors:
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

            return HuggingFaceStorageWriter(str(folder), save_distributed=True)
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(folder, thread_count=threads) if threads else None

    alone = with_dcp(state, writer=writer, **options)

    def finish(folder: Path) -> None:
        alone.finish(folder)
        if dist.get_rank() == 0:
            sync_folder(folder)
            sync_folder(folder.parent)

    return Saver(save=alone.save, finish=finish, close=alone.close)


def one_file(write: Callable[[Path], object]) -> Saver:
    """Write a file and flush it while training waits."""

    def save(folder: Path) -> None:
        folder.mkdir()
        write(folder / "model")
        with open(folder / "model", "rb") as file:
            os.fsync(file.fileno())

    return Saver(save=save)


@baseline("checkpoint, checkpoint loop, checkpoint memory, checkpoint cache", SAVE_FILE, "naive")
def with_save_file(state: State) -> Saver:
    return one_file(lambda path: save_file({k: one.detach() for k, one in state.items()}, path))


@baseline("checkpoint, checkpoint loop, checkpoint memory", TORCH_SAVE, "naive")
def with_torch_save(state: State) -> Saver:
    return one_file(lambda path: torch.save(state, path))


@baseline("checkpoint loop", NO_SAVES, "limit")
def no_saves(state: State) -> Saver:
    """What a training loop would be without checkpoints."""
    return Saver(save=lambda folder: None)
