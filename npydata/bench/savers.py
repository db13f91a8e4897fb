"""Ways to save a checkpoint, side by side: each has a stall, and a time until the disk has it all.

``python -m npydata.bench.savers WAY MIB FOLDER`` saves twice in a process of its own and prints the
MiB of memory that took at its peak.
"""

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import staging

from npydata.checkpoint.checkpointer import AsyncCheckpointer
from npydata.checkpoint.state import TrainingState

State = dict[str, torch.Tensor]
MIB = 1 << 20
TENSOR_BYTES = 16 * MIB

OURS, OVERLAP, UNPREPARED = "ours", "ours, overlap", "ours, not prepared"
SAVE_FILE, TORCH_SAVE = "save_file + fsync", "torch.save + fsync"
DCP, DCP_ASYNC, DCP_CACHED = "dcp.save", "dcp.async_save", "dcp.async_save, reused stager"


class Saver(Protocol):
    """One way of saving."""

    def save(self, folder: Path) -> None:
        """Save a checkpoint; training goes on when this returns."""

    def finish(self) -> None:
        """Wait until the disk has everything."""

    def close(self) -> None:
        """Give back what it holds."""


class Ours:
    """``AsyncCheckpointer``."""

    def __init__(self, state: State, *, snapshot: str = "host", prepared: bool = True) -> None:
        self._state, self._saver = state, AsyncCheckpointer(snapshot=snapshot)
        self._optimizer = torch.optim.SGD(list(state.values()), lr=0.1)
        if snapshot == "overlap":
            self._saver.protect(self._optimizer)
        if prepared:
            self._saver.prepare(state)

    def save(self, folder: Path) -> None:
        """Copy, and begin to write."""
        self._saver.save(folder, self._state, None, TrainingState(step=1))

    def finish(self) -> None:
        """Wait for the commit."""
        self._saver.wait()

    def close(self) -> None:
        """Wait."""
        self._saver.wait()


class Blocking:
    """A function that writes a file, and a flush to the disk."""

    def __init__(self, state: State, write: Callable[[State, Path], Any]) -> None:
        self._state, self._write = state, write

    def save(self, folder: Path) -> None:
        """Write and flush."""
        folder.mkdir()
        path = folder / "model"
        self._write(self._state, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing to give back."""


class Distributed:
    """``torch.distributed.checkpoint`` in one process."""

    def __init__(self, state: State, *, background: bool, cached: bool = False) -> None:
        import torch.distributed.checkpoint as dcp

        self._dcp, self._state, self._background = dcp, state, background
        self._stager = cached_stager() if cached else None
        self._flight: Any = None

    def save(self, folder: Path) -> None:
        """Save, or begin to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not self._background:
                self._dcp.save(self._state, checkpoint_id=folder)  # type: ignore[attr-defined]
            else:
                options = {} if self._stager is None else {"async_stager": self._stager}
                begin = self._dcp.async_save  # type: ignore[attr-defined]
                self._flight = begin(self._state, checkpoint_id=folder, **options)

    def finish(self) -> None:
        """Wait for the upload."""
        if self._flight is not None:
            getattr(self._flight, "upload_completion", self._flight).result()
            self._flight = None

    def close(self) -> None:
        """Give back the stager's memory."""
        if self._stager is not None:
            self._stager.close()


def cached_stager() -> Any:
    """Return a stager that keeps its memory from save to save."""
    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def write_safetensors(state: State, path: Path) -> None:
    """Write with safetensors' own writer, which wants plain tensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach() for name, tensor in state.items()}, path)


SAVERS: dict[str, Callable[[State], Saver]] = {
    OURS: Ours,
    OVERLAP: lambda state: Ours(state, snapshot="overlap"),
    UNPREPARED: lambda state: Ours(state, prepared=False),
    SAVE_FILE: lambda state: Blocking(state, write_safetensors),
    TORCH_SAVE: lambda state: Blocking(state, torch.save),
    DCP: lambda state: Distributed(state, background=False),
    DCP_ASYNC: lambda state: Distributed(state, background=True),
    DCP_CACHED: lambda state: Distributed(state, background=True, cached=True),
}
if not hasattr(staging, "DefaultStager"):  # as in torch 2.6
    del SAVERS[DCP_CACHED]


def make_state(nbytes: int, tensor_bytes: int = TENSOR_BYTES) -> State:
    """Return parameters of so many bytes in all, in tensors of a layer's size."""
    shape = (tensor_bytes // 4096, 1024)
    return {
        f"layers.{k}.weight": torch.nn.Parameter(torch.randn(shape))
        for k in range(max(1, nbytes // tensor_bytes))
    }


def peak_of_child(way: str, mib: int, folder: Path) -> float:
    """Return the MiB that two saves take at their peak, beside the state, in a fresh process."""
    import subprocess

    args = [sys.executable, "-m", "npydata.bench.savers", way, str(mib), str(folder)]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main(way: str, mib: int, folder: Path) -> None:
    """Save twice and print the memory that took."""
    state = make_state(mib * MIB)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        save_and_remove(way, make_state(1, 4096), Path(name))  # what is imported is no one's fault
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        before = status_kib("VmRSS")
        saver = save_and_remove(way, state, Path(name))
        print((status_kib("VmHWM") - before) / 1024)
        saver.close()


def save_and_remove(way: str, state: State, folder: Path) -> Saver:
    """Save twice; return the saver, which holds what it will use again."""
    saver = SAVERS[way](state)
    for k in range(2):
        saver.save(folder / str(k))
        saver.finish()
        shutil.rmtree(folder / str(k))
    return saver


def status_kib(field: str) -> int:
    """Return a figure of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
