"""What notebook 07 promises, kept by the modules and by the notebook's own cells."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

import npydata
from npydata.checkpointer.background import Calls
from npydata.system.page_cache import page_faults

pytestmark = pytest.mark.notebook_07


def a_state():
    embedding = torch.randn(40, 32).bfloat16()
    return {
        "mask": torch.arange(901) % 3 == 0,
        "embedding": embedding,
        "weight": torch.randn(24, 32).T,
        "counter": torch.arange(150),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "head": embedding,
    }


def fill(taught, state):
    """The bytes of the file that holds a state."""
    layout = taught.lay_out(state)
    memory = taught.StagingBuffer().reserve(layout.capacity)
    for copy in taught.plan_copies(memory, layout, state):
        copy.run()
    return layout, memory


@pytest.fixture
def calls(monkeypatch):
    """The fsyncs and renames of this process, in order: (what, name)."""
    log = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def logged(what, call):
        def wrapper(first, *others, **options):
            owned = isinstance(first, int)
            path = Path(f"/proc/self/fd/{first}").readlink() if owned else others[0]
            log.append((what, Path(path).name))
            return call(first, *others, **options)

        return wrapper

    monkeypatch.setattr(os, "fsync", logged("sync", sync))
    monkeypatch.setattr(os, "rename", logged("rename", rename))
    monkeypatch.setattr(os, "replace", logged("rename", replace))
    return log


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


def commit_one(taught, folder, step=1, keep_last=None, state=None):
    """Write a checkpoint with the taught functions alone."""
    state = a_state() if state is None else state
    layout, memory = fill(taught, state)
    with taught.temporary_beside(folder) as temporary:
        sums = taught.write_durably(
            temporary / "model.safetensors", memory.numpy().data, layout.nbytes
        )
        content = b"{}"
        (temporary / "training_state.json").write_bytes(content)
        entries = {
            "model.safetensors": taught.FileEntry(layout.nbytes, tuple(sums)),
            "training_state.json": taught.FileEntry(len(content), taught.checksums(content)),
        }
        taught.commit(temporary, folder, taught.Manifest(step, step, entries), keep_last)


@pytest.mark.promise
class TestPromises:
    def test_the_snapshot_is_the_file(self, taught, tmp_path):
        state = a_state()
        layout, memory = fill(taught, state)
        path = tmp_path / "whole.safetensors"
        path.write_bytes(memory[: layout.nbytes].numpy().tobytes())
        with npydata.open_checkpoint(path) as saved:
            assert set(saved) == set(state)
            assert all(torch.equal(saved[name], state[name]) for name in state)

    def test_every_element_lies_at_a_multiple_of_its_size(self, taught):
        layout = taught.lay_out(a_state())
        assert len(layout.header) % 4096 == 0
        assert all(slot.begin % slot.dtype.itemsize == 0 for slot in layout.slots)

    def test_slots_leave_no_gap(self, taught):
        layout, end = taught.lay_out(a_state()), 0
        for slot in layout.slots:
            assert slot.begin == end
            end += slot.nbytes
        assert layout.nbytes == len(layout.header) + end
        assert layout.capacity % 4096 == 0
        assert 0 <= layout.capacity - layout.nbytes < 4096

    def test_tied_tensors_have_one_slot(self, taught):
        state = a_state()
        assert taught.find_ties(state) == {"head": "embedding"}
        assert "head" not in [slot.name for slot in taught.lay_out(state).slots]

    def test_weights_that_change_after_the_copies_leave_the_file_alone(self, taught):
        state = {"weight": torch.zeros(5000)}
        layout, memory = fill(taught, state)
        state["weight"].fill_(7)
        assert not memory[len(layout.header) :].any()

    def test_the_next_save_uses_the_same_memory(self, taught):
        buffer = taught.StagingBuffer()
        first = buffer.reserve(1 << 20)
        assert buffer.reserve(1 << 20).data_ptr() == first.data_ptr()
        assert buffer.reserve(1 << 12).data_ptr() == first.data_ptr()
        assert buffer.reserve(1 << 21).numel() == 1 << 21

    def test_memory_that_was_touched_costs_no_page_faults(self, taught):
        memory = taught.StagingBuffer().reserve(16 << 20, touch=True)
        before = page_faults()
        memory.fill_(1)
        assert page_faults() - before < (16 << 20) // 4096 // 10

    def test_the_bytes_written_durably_are_the_bytes_in_memory(self, taught, tmp_path):
        layout, memory = fill(taught, a_state())
        path = tmp_path / "file"
        sums = taught.write_durably(path, memory.numpy().data, layout.nbytes)
        content = path.read_bytes()
        assert content == memory[: layout.nbytes].numpy().tobytes()
        assert tuple(sums) == taught.checksums(content)

    @needs_proc
    def test_a_file_is_synced_before_it_counts_as_written(self, taught, tmp_path, calls):
        layout, memory = fill(taught, a_state())
        taught.write_durably(tmp_path / "file", memory.numpy().data, layout.nbytes)
        assert calls == [("sync", "file")]

    @needs_proc
    def test_names_and_bytes_are_synced_before_the_folder_gets_its_name(
        self, taught, tmp_path, calls
    ):
        commit_one(taught, tmp_path / "step_1")
        place = calls.index(("rename", "step_1"))
        before = [name for what, name in calls[:place] if what == "sync"]
        assert before[:2] == ["model.safetensors", "manifest.json"]
        assert len(before) == 3
        assert before[2].endswith(".npydata-tmp")
        assert calls[place + 1] == ("sync", tmp_path.name)

    @needs_proc
    def test_latest_moves_after_the_folder_is_in_place(self, taught, tmp_path, calls):
        commit_one(taught, tmp_path / "step_1")
        assert calls.index(("rename", "latest")) > calls.index(("sync", tmp_path.name))
        assert (tmp_path / "latest").read_text() == "step_1"

    def test_what_is_left_of_a_failed_save_bears_no_name(self, taught, tmp_path):
        def half_a_save():
            with taught.temporary_beside(tmp_path / "a") as temporary:
                (temporary / "model.safetensors").write_bytes(b"half")
                raise OSError("full")

        with pytest.raises(OSError, match="full"):
            half_a_save()
        assert list(tmp_path.iterdir()) == []

    def test_latest_is_advice_and_the_manifest_decides(self, taught, tmp_path):
        for step in (1, 2):
            npydata.save_checkpoint(tmp_path / f"step_{step}", a_state())
        assert taught.latest_in(tmp_path).name == "step_2"
        (tmp_path / "latest").write_text("step_9")
        assert taught.latest_in(tmp_path).name == "step_2"
        (tmp_path / "step_2/manifest.json").unlink()
        (tmp_path / "latest").write_text("step_2")
        assert taught.latest_in(tmp_path).name == "step_1"

    def test_the_newest_is_kept_and_what_is_not_ours(self, taught, tmp_path):
        (tmp_path / "notes").mkdir()
        for step in (1, 2, 3):
            npydata.save_checkpoint(tmp_path / f"step_{step}", a_state())
        taught.remove_old(tmp_path, 1, tmp_path / "step_3")
        assert {path.name for path in tmp_path.iterdir()} == {"latest", "notes", "step_3"}

    def test_a_file_of_another_size_is_refused_by_name(self, taught, tmp_path):
        npydata.save_checkpoint(tmp_path / "a", a_state())
        manifest = npydata.verify_checkpoint(tmp_path / "a")
        taught.check_sizes(tmp_path / "a", manifest)
        with open(tmp_path / "a/model.safetensors", "ab") as file:
            file.write(b"x")
        with pytest.raises(npydata.CheckpointError, match=r"model\.safetensors: has"):
            taught.check_sizes(tmp_path / "a", manifest)

    def test_an_error_of_the_background_is_raised_once(self, taught):
        def work():
            raise OSError("the disk is full")

        save = taught.BackgroundTask(work, "a save")
        save.start()
        with pytest.raises(OSError, match="full"):
            save.result()
        save.result()
        assert save.done()

    def test_only_what_a_protected_optimizer_changes_can_wait(self, taught):
        norm = torch.nn.BatchNorm1d(4)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        overlap = taught.Overlap(Calls())
        with pytest.raises(npydata.CheckpointError, match="protect"):
            overlap.optimizer_storages()
        overlap.protect(optimizer)
        owned = {one.data_ptr() for one in taught.tensors_of(optimizer)}
        assert owned == {norm.weight.data_ptr(), norm.bias.data_ptr()}
        assert {address for _, address in overlap.optimizer_storages()} == owned

    def test_protecting_does_not_keep_an_optimizer_alive(self, taught):
        overlap = taught.Overlap(Calls())
        optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        overlap.protect(optimizer)
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
