"""The accelerator that torch found, if any: its streams and events, pinned memory, what CUDA adds.

CUDA, ROCm, XPU and other back ends look the same from here. Apple's MPS exposes no streams: its
tensors are copied like CPU tensors, by a call that returns when the copy is done.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


def accelerator_with_streams() -> torch.device | None:
    """Return the accelerator whose work is queued in streams, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None or found.type == "mps" else found


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued in streams."""
    found = accelerator_with_streams()
    return found is not None and device.type == found.type


def is_queued(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor is queued in a stream, and so may not be done yet."""
    return not tensor.is_cpu and has_streams(tensor.device)


def why_unusable(device: Any) -> str | None:
    """Return why no tensor can be on a device; ``None`` if one can be.

    Does not initialise the device: the process may still choose another one, or fork.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = str(error).split("\n")[0]
    else:
        count = device_count(wanted.type)
        if wanted.type in ("cpu", "meta") or (wanted.index or 0) < count:
            return None
        why = f"torch finds {count} such devices, counted from 0"
    return f"device={device!r}: {why}"


def device_count(kind: str) -> int:
    """Return how many devices of a kind there are; 1 where its back end does not count them."""
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    if hasattr(module, "is_available") and not module.is_available():
        return 0
    return int(module.device_count()) if hasattr(module, "device_count") else 1


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream, and its device, the current ones for a while.

    ``with stream:`` can be used by only one thread at a time.
    """
    on_its_device = torch.accelerator.current_stream(stream.device)
    on_current_device = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(on_its_device)
        torch.accelerator.set_stream(on_current_device)


class PinnedPages:
    """Pins existing memory, which only CUDA and ROCm can do.

    A device copies into pinned memory by itself, while the program goes on. Other back ends can
    only allocate new pinned memory.
    """

    def __init__(self) -> None:
        self._runtime: Any = None
        self._memory: torch.Tensor | None = None

    def pin(self, memory: torch.Tensor) -> None:
        """Lock the pages of a CPU tensor, where the back end has ``cudart``; no-op if it refuses.

        They stay locked, and the memory stays allocated, until :meth:`unpin`: if memory went back
        to the system while CUDA held it as pinned, copies into new memory at its address would be
        written to the old pages.
        """
        accelerator = accelerator_with_streams()
        runtime: Any = torch.get_device_module(accelerator).cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            self._runtime, self._memory = runtime, memory
            return
        with suppress(RuntimeError):  # clears the error, which the next launch would raise
            torch.ones((), device=accelerator).add_(1)

    def unpin(self) -> None:
        """Unlock what was locked, and release it."""
        if self._memory is not None:
            self._runtime.cudaHostUnregister(self._memory.data_ptr())
        self._memory = None
