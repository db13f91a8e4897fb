"""Ways for many processes to save one state: ours, and the stock writers of torch.

All of them end on the disk: the stock writers flush their files, and here their folders as well.
"""

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

from npydata.atomic import sync_folder
from npydata.bench.savers import (
    DCP,
    DCP_ASYNC,
    DCP_CACHED,
    OURS,
    OVERLAP,
    SAVERS,
    Distributed,
    Ours,
    Saver,
    State,
    make_state,
)
from npydata.checkpoint.state import TrainingState
from npydata.distributed import ShardingConfig

HUGGING_FACE = "dcp.save, safetensors"
THREADS = (1, 2, 4)
"""Of ``FileSystemWriter``; torch's default is one."""
PATIENCE_S = 600
SHARDED, REPLICATED = "sharded", "replicated"

Way = tuple[str, str]
"""A name and a setting."""


class OursTogether(Ours):
    """``AsyncCheckpointer.save_distributed``."""

    def __init__(self, state: State, *, snapshot: str = "host") -> None:
        super().__init__(state, snapshot=snapshot, prepared=False)

    def save(self, folder: Path) -> None:
        """Agree on who writes what, copy, and begin to write."""
        sharding = ShardingConfig(timeout_s=PATIENCE_S)
        self._saver.save_distributed(folder, self._state, None, TrainingState(step=1),
                                     sharding=sharding)  # fmt: skip


class Stock(Distributed):
    """``torch.distributed.checkpoint``, and a flush of the folders that it leaves to the system."""

    def __init__(
        self,
        state: State,
        *,
        background: bool = False,
        cached: bool = False,
        writer: Callable[[Path], Any] | None = None,
    ) -> None:
        super().__init__(state, background=background, cached=cached)
        self._writer, self._folder = writer, Path()

    def save(self, folder: Path) -> None:
        """Save, or begin to."""
        self._folder = folder
        if self._writer is None:
            super().save(folder)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._dcp.save(self._state, storage_writer=self._writer(folder))

    def finish(self) -> None:
        """Wait for the upload, and flush what names the files."""
        super().finish()
        if dist.get_rank() == 0:
            sync_folder(self._folder)
            sync_folder(self._folder.parent)


def with_threads(count: int, folder: Path) -> FileSystemWriter:
    """Return torch's own writer, with so many threads in each process."""
    return FileSystemWriter(folder, thread_count=count)


def as_safetensors(folder: Path) -> Any:
    """Return torch's writer of safetensors, one file for each process."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


WAYS: dict[Way, Callable[[State], Saver]] = {
    (OURS, ""): OursTogether,
    (OVERLAP, ""): partial(OursTogether, snapshot="overlap"),
    **{(DCP, f"{count} thread{'s' * (count > 1)}{' (default)' * (count == 1)}"):
       partial(Stock, writer=partial(with_threads, count)) for count in THREADS},
    (DCP_ASYNC, ""): partial(Stock, background=True),
}  # fmt: skip
"""A saver is made anew for each measurement, which saves twice."""
if DCP_CACHED in SAVERS:  # an older torch has neither
    WAYS[DCP_CACHED, ""] = partial(Stock, background=True, cached=True)
if find_spec("torch.distributed.checkpoint.hf_storage"):
    WAYS[HUGGING_FACE, ""] = partial(Stock, writer=as_safetensors)


def state_of(case: str, nbytes: int, tensor_bytes: int) -> State:
    """Return parameters of so many bytes in all: spread over the ranks, or the same on each."""
    torch.manual_seed(0)
    if case == REPLICATED:
        return make_state(nbytes, tensor_bytes)
    mesh, shape = init_device_mesh("cpu", (dist.get_world_size(),)), (tensor_bytes // 4096, 1024)
    state: State = {}
    for k in range(max(1, nbytes // tensor_bytes)):
        tensor = empty(shape, device_mesh=mesh, placements=[Shard(0)])
        tensor.to_local().normal_()
        state[f"layers.{k}.weight"] = torch.nn.Parameter(tensor)
    return state
