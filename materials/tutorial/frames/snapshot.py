"""Your checkpointer: the snapshot is the file, and a thread writes it while training goes on."""

# ruff: noqa: F401, F821 - the builds stand behind this text
import math
import mmap

import torch

from npydata.system.accelerator import is_queued
from tutorial.kept import AsyncCheckpointer, CheckpointError
from tutorial.kept.checkpointer.background import THREAD_NAME, BackgroundTask, Watermark
from tutorial.kept.checkpointer.file_layout import (
    FileLayout,
    TensorSlot,
    find_ties,
    flatten_state_dict,
    metadata_of,
    stored_as,
)
from tutorial.kept.checkpointer.overlap import Overlap, storage_pointer
from tutorial.kept.checkpointer.staging import Copy, StagedFile, plan_copies
from tutorial.kept.reader.containers.safetensors import LENGTH_BYTES, header_text


class MyCopy(Copy):
    """A tensor, and the place in memory where its slot is."""

    def jobs(self):
        yield self.end, self.run

    @property
    def batch_dtype(self):
        return None


class MyTask(BackgroundTask):
    """The thread that writes a save."""


class MyWatermark(Watermark):
    """How much of a file has been copied."""


class MyOverlap(Overlap):
    """Copies that the next step waits for."""

    def optimizer_storages(self):
        if not self._optimizers:
            return super().optimizer_storages()
        return {
            storage_pointer(tensor)
            for optimizer in self._optimizers
            for tensor in tensors_of(optimizer)
        }


def lay_out(tensors):
    """Return the layout of a file, with your slots and your header; tied tensors have one slot."""
    stored = {name: stored_as(name, tensor) for name, tensor in tensors.items()}
    ties = find_ties(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ties}
    slots = slots_for(kept, stored)
    text = header_text({slot.name: slot.header for slot in slots}, metadata_of(kept, ties))
    return FileLayout(page_header(text), tuple(slots))


def staged(name, tensors, buffer):
    """Return a file with its memory, and your copies, which are still to be made."""
    layout = lay_out(tensors)
    pin = any(is_queued(tensor) for tensor in tensors.values())
    memory = buffer.reserve(layout.capacity, pin=pin)
    copies = [
        MyCopy(one.slot, one.source, one.end, one.name, one.version)
        for one in plan_copies(memory, layout, tensors)
    ]
    return StagedFile(name, layout.nbytes, memory, MyWatermark(), copies, layout, buffer.pinned)


class MyCheckpointer(AsyncCheckpointer):
    """Saves while training goes on, with your pieces; used like the library's."""

    def __init__(self, **options):
        super().__init__(**options)
        self._overlap = MyOverlap(self._calls)

    def _file(self, name, state):
        tensors, tree_spec = flatten_state_dict(state)
        return staged(name, tensors, self._buffers[name]), tree_spec

    def _task(self, writer):
        return MyTask(writer, THREAD_NAME)
