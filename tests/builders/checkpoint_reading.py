"""Read all that a checkpoint will give; say what it refused, and what that cost."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from npydata import CheckpointError, open_checkpoint

LARGE = 1 << 20
"""Elements beyond which a tensor is not looked through: a file may expand one number to 2**40."""
MANY = 300
"""Entries beyond which only the first are read."""


@dataclass
class Reading:
    """What one file gave."""

    stage: str = "opening"
    refused: list[CheckpointError] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    unsafe: tuple[str, ...] = ()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Note a refusal; every other exception is a fault of the reader."""
        try:
            yield
        except CheckpointError as error:
            self.refused.append(error)


def read_everything(path: Path) -> Reading:
    """Open, then read every tensor whole and by its first element, every value, and the tree."""
    reading = Reading()
    with reading.attempt(), open_checkpoint(path) as checkpoint:
        reading.stage = "reading"
        repr(checkpoint)
        reading.unsafe = checkpoint.unsafe_globals
        for name in list(checkpoint)[:MANY]:
            with reading.attempt():
                repr(checkpoint.info(name))
            with reading.attempt():
                reading.tensors[name] = checkpoint[name]
            with reading.attempt():
                first_element(checkpoint.get_slice(name))
        for name in list(checkpoint.metadata)[:MANY]:
            with reading.attempt():
                reading.values[name] = checkpoint.metadata[name]
        repr(checkpoint.metadata)
        with reading.attempt():
            checkpoint.tree()
    return reading


def first_element(part: Any) -> None:
    if math.prod(part.shape):
        part[tuple(0 for _ in part.shape)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes, as they lie in the file."""
    return b"" if tensor.numel() > LARGE or tensor.is_conj() or tensor.is_neg() else bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in order, as bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:  # torch copies no numbers of fewer bits
        plain = plain.view(torch.uint8)
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.flatten())
    return flat.view(torch.uint8).numpy().tobytes()


def measured(use: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, its CPU seconds, and the MiB that it took beyond those in use."""
    gc.collect()
    gc.freeze()  # or each collection would go through all that was imported
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = mebibytes("VmRSS"), time.process_time()
    result = use()
    return result, time.process_time() - begin, mebibytes("VmHWM") - before


def mebibytes(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024
