"""What the learner's checkpointer must keep, and one-line changes that break it."""

import errno
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from tutorial.kept import CheckpointError, load_checkpoint
from tutorial.kept.checkpointer import staging, writer
from tutorial.kept.checkpointer.manifest import MODEL
from tutorial.mutation import Card
from tutorial.promised import expect

SOON_S = 5.0
"""How long a thread that must not do something has time to do it, if it doesn't say it waits."""
WRITERS = 2
"""The threads that wait for the copies of a file: one writes, one adds up."""


def a_state():
    """What makes trouble: one that is tied, scattered, empty, without dimensions, of odd length."""
    embedding = torch.arange(1280).reshape(40, 32).bfloat16()
    return {
        "mask": torch.arange(901) % 3 == 0,
        "embedding": embedding,
        "weight": torch.arange(768.0).reshape(24, 32).T,
        "counter": torch.arange(150),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "phase": torch.arange(6.0).to(torch.complex128).conj(),
        "head": embedding,
    }


@contextmanager
def folder_for(mine, **options):
    """A folder, and a checkpointer of the learner's."""
    with TemporaryDirectory() as folder:
        yield Path(folder), mine.MyCheckpointer(**options)


def same(state, other):
    return {name for name in state if not torch.equal(state[name], other[name])}


def cloned(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def a_snapshot_is_of_its_moment(mine):
    """A save holds the state as it was at the call, whatever is changed afterwards"""
    go, opened = threading.Event(), writer.open_direct

    def late(path):
        go.wait()
        return opened(path)

    with folder_for(mine) as (folder, keeper), patch.object(writer, "open_direct", late):
        state = a_state()
        wanted = cloned(state)
        keeper.save(folder / "a", state)
        for tensor in state.values():
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)
        go.set()
        keeper.wait()
        expect(same(wanted, load_checkpoint(folder / "a")[0]), set(), "changed in the file")


def every_tensor_comes_back(mine):
    """Tied, scattered and empty tensors come back as they were; what was tied still is"""
    with folder_for(mine) as (folder, keeper):
        state = a_state()
        keeper.save(folder / "a", state)
        keeper.wait()
        loaded = load_checkpoint(folder / "a")[0]
        expect(same(state, loaded), set(), "other elements")
        tied = loaded["head"].data_ptr() == loaded["embedding"].data_ptr()
        expect(tied, True, "the head is the embedding")


def others_read_the_file(mine):
    """Another library opens the file"""
    with folder_for(mine) as (folder, keeper):
        state = {name: one for name, one in a_state().items() if not one.is_complex()}
        keeper.save(folder / "a", state)
        keeper.wait()
        found = load_file(folder / "a" / MODEL)
        expect(same(found, state), set(), "read differently")
        expect(state.keys() - found.keys(), {"head"}, "has no place of its own")


def elements_lie_where_a_map_wants_them(mine):
    """The data begins on a page, and every element at a multiple of its size"""
    state = a_state()
    layout = mine.lay_out(state)
    expect(len(layout.header) % 4096, 0, "bytes of the header beyond a page")
    expect(
        8 + int.from_bytes(layout.header[:8], "little"), len(layout.header), "where the data begins"
    )
    for slot in layout.slots:
        at = slot.begin % state[slot.name].dtype.itemsize
        expect(at, 0, f"{slot.name}: bytes beyond a multiple of an element")


def memory_is_kept(mine):
    """The next save uses the same memory"""
    with folder_for(mine) as (folder, keeper):
        used = set()
        for number in range(3):
            keeper.save(folder / str(number), {"w": torch.ones(50_000)})
            used.add(keeper._buffers[MODEL].bytes.data_ptr())
        keeper.wait()
        expect(len(used), 1, "places in memory after three saves")


def an_error_is_raised_once(mine):
    """An error of the write is raised once, by the next save or by `wait`"""

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with folder_for(mine) as (folder, keeper):
        state = {"w": torch.ones(9)}
        calls = {"save": lambda: keeper.save(folder / "b", state), "wait": keeper.wait}
        for name, call in calls.items():
            with patch.object(writer, "open_direct", full):
                keeper.save(folder / "a", state)
                heard = [error_of(call) for _ in range(2)]
                keeper.wait() if name == "wait" else error_of(keeper.wait)
            expect(heard, ["OSError", "nothing"], f"raised by {name}, called twice")
        keeper.save(folder / "c", state)
        keeper.wait()
        expect(same(state, load_checkpoint(folder / "c")[0]), set(), "saved after the errors")


def error_of(call):
    try:
        call()
    except (OSError, CheckpointError) as error:
        return type(error).__name__
    return "nothing"


def one_at_a_time(mine):
    """One save is in flight: the next one waits for it"""
    write, active, most = writer.Writer.__call__, [], [0]

    def slowly(self):
        active.append(self)
        most[0] = max(most[0], len(active))
        time.sleep(0.05)
        try:
            write(self)
        finally:
            active.remove(self)

    with (
        folder_for(mine) as (folder, keeper),
        patch.object(writer.Writer, "__call__", slowly),
    ):
        for number in range(3):
            keeper.save(folder / str(number), {"w": torch.ones(9)})
        keeper.wait()
        expect(active, [], "still written after `wait`")
        expect(most[0], 1, "written at once")


def the_writer_stays_behind(mine):
    """No byte is written before it was copied"""
    written, copy, early = threading.Event(), staging.run_all, []
    put = writer.write_all

    def noted(*arguments):
        written.set()
        put(*arguments)

    def late(copies, watermark, go_on):
        until = time.monotonic() + SOON_S
        while not written.wait(0.001) and time.monotonic() < until:
            if len(watermark._changed._waiters) == WRITERS:
                break
        early.append(written.is_set())
        copy(copies, watermark, go_on)

    with (
        folder_for(mine) as (folder, keeper),
        patch.object(writer, "write_all", noted),
        patch.object(staging, "run_all", late),
    ):
        keeper.save(folder / "a", {"w": torch.ones(9)})
        keeper.wait()
        expect(early, [False], "written before the copy")


def a_failed_copy_ends_the_save(mine):
    """A copy that fails ends the save with an error, and nobody waits for ever"""

    def fails(copies, watermark, go_on):
        raise MemoryError

    with folder_for(mine) as (folder, keeper):
        with patch.object(staging, "run_all", fails):
            try:
                keeper.save(folder / "a", {"w": torch.ones(9)})
            except MemoryError:
                pass
            else:
                raise AssertionError("the save went on, expected its error")
        expect((folder / "a").exists(), False, "a checkpoint is there")
        keeper.save(folder / "b", {"w": torch.ones(9)})
        keeper.wait()


class Momentum:
    """Does what an optimizer of torch does here, without the second that importing one takes."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]
        self.state = {
            one: {"momentum_buffer": torch.ones_like(one, requires_grad=False)}
            for one in self.param_groups[0]["params"]
        }
        self.hooks = []

    def register_step_pre_hook(self, hook):
        self.hooks.append(hook)

    def state_dict(self):
        return {"state": dict(enumerate(self.state.values()))}

    def step(self):
        for hook in self.hooks:
            hook(self, (), {})
        with torch.no_grad():
            for parameter, kept in self.state.items():
                parameter.sub_(kept["momentum_buffer"].add_(1))


def trained():
    """A model with a buffer, and an optimizer."""
    model = torch.nn.BatchNorm1d(4)
    return model, Momentum(model.parameters())


def only_what_a_step_changes_waits(mine):
    """With overlap, exactly what the optimizer changes is copied later"""
    later, copy = [], staging.run_all

    def noted(copies, watermark, go_on):
        later.extend(one.name for one in copies)
        copy(copies, watermark, go_on)

    with (
        folder_for(mine, snapshot="overlap") as (folder, keeper),
        patch.object(staging, "run_all", noted),
    ):
        model, optimizer = trained()
        keeper.protect(optimizer)
        keeper.save(folder / "a", model.state_dict(), optimizer.state_dict())
        keeper.wait()
        momentum = [f"state.{k}.momentum_buffer" for k in range(2)]
        expect(sorted(later), sorted(["bias", "weight", *momentum]), "copied later")


def a_step_waits_for_the_copies(mine):
    """With overlap, the optimizer's next step waits for the copies"""
    stepping, copy = threading.Event(), staging.run_all

    def late(copies, watermark, go_on):
        stepping.wait()
        time.sleep(0.1)
        copy(copies, watermark, go_on)

    with (
        folder_for(mine, snapshot="overlap") as (folder, keeper),
        patch.object(staging, "run_all", late),
    ):
        model, optimizer = trained()
        wanted = cloned(model.state_dict())
        keeper.protect(optimizer)
        keeper.save(folder / "a", model.state_dict())
        stepping.set()
        optimizer.step()
        expect(torch.equal(model.weight, wanted["weight"]), False, "unchanged by the step")
        keeper.wait()
        expect(same(wanted, load_checkpoint(folder / "a")[0]), set(), "changed in the file")


def a_change_beside_the_copy_is_an_error(mine):
    """With overlap, a change outside of the step fails the save, with the tensor's name"""
    copy = staging.run_all
    with folder_for(mine, snapshot="overlap") as (folder, keeper):
        model, optimizer = trained()
        keeper.protect(optimizer)

        def changed(copies, watermark, go_on):
            with torch.no_grad():
                model.weight.add_(1)
            copy(copies, watermark, go_on)

        with patch.object(staging, "run_all", changed):
            keeper.save(folder / "a", model.state_dict())
            try:
                keeper.wait()
            except CheckpointError as error:
                expect(str(error).startswith("weight:"), True, "the message names the tensor")
            else:
                raise AssertionError("saved, expected an error that names the weight")


PROMISES = [
    a_snapshot_is_of_its_moment,
    every_tensor_comes_back,
    others_read_the_file,
    elements_lie_where_a_map_wants_them,
    memory_is_kept,
    an_error_is_raised_once,
    one_at_a_time,
    the_writer_stays_behind,
    a_failed_copy_ends_the_save,
    only_what_a_step_changes_waits,
    a_step_waits_for_the_copies,
    a_change_beside_the_copy_is_an_error,
]

CARDS = [
    Card(
        name="as they come",
        symbol="tutorial.kept.checkpointer.file_layout.slots_for",
        line="for name in sorted(tensors, key=lambda one: -tensors[one].dtype.itemsize):",
        mutant="for name in tensors:",
        promise=elements_lie_where_a_map_wants_them,
        symptoms=(
            "Files become longer.",
            "Other libraries refuse the files.",
            "Nothing, until an odd number of bytes stands before a weight: its copy fails.",
        ),
        right=3,
        reasons={
            1: "The tensors lie one behind the other, in whatever order.",
            2: "safetensors asks for no order, only for no gaps.",
        },
    ),
    Card(
        name="an error for ever",
        symbol="tutorial.kept.checkpointer.background.BackgroundTask.result",
        line="error, self.error = self.error, None",
        mutant="error = self.error",
        promise=an_error_is_raised_once,
        symptoms=(
            "The disk was full once; every later save fails, until the process is restarted.",
            "The disk was full, and nobody hears of it.",
            "The process ends at the first error.",
        ),
        right=1,
        reasons={
            2: "It is raised all the same; what is lost is only that it was raised before.",
            3: "The loop may catch what `save` raises, and go on.",
        },
    ),
    Card(
        name="too fast",
        symbol="tutorial.kept.checkpointer.background.Watermark.wait_for",
        line="self._changed.wait_for(lambda: self._upto >= upto or self._error is not None)",
        mutant="self._changed.wait_for(lambda: self._upto >= 0 or self._error is not None)",
        promise=the_writer_stays_behind,
        symptoms=(
            "Saves take longer.",
            "Some files hold weights of the save before: what lay in the memory.",
            "The file lacks its end.",
        ),
        right=2,
        reasons={
            1: "The writer waits for less, not for more.",
            3: "The writer knows how long the file is; it takes what lies in the memory.",
        },
    ),
]
