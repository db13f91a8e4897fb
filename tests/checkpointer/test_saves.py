"""Saving in the background: what a save promises, and what it refuses."""

import enum
import resource
import threading
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from checkpoint_tools import FILES, bitwise, small_state

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


def test_a_save_gives_the_files_and_load_gives_the_tensors_and_step_50(tmp_path):
    checkpointer = AsyncCheckpointer()
    checkpointer.save(tmp_path / "c", small_state(), None, TrainingState(step=50))
    checkpointer.wait()
    assert {path.name for path in (tmp_path / "c").iterdir()} == FILES - {"optimizer.safetensors"}
    model, optimizer, state = load_checkpoint(tmp_path / "c")
    assert bitwise(model) == bitwise(small_state())
    assert (optimizer, state.step) == (None, 50)


WAITS = {
    "wait": lambda held: held[0].wait(),
    "the next save": lambda held: held[0].save(held[1] / "next", small_state()),
    "the end of a block": lambda held: held[0].__exit__(None, None, None),
    "dropping it": lambda held: held.clear(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_save_returns_before_the_checkpoint_is_there_for_which_these_wait(tmp_path, gate, what):
    held = [AsyncCheckpointer(), tmp_path]
    held[0].save(tmp_path / "c", small_state())
    gate.wait()
    assert not (tmp_path / "c").exists()
    assert not held[0].done()
    threading.Timer(0.05, gate.open).start()
    WAITS[what](held)
    assert verify_checkpoint(tmp_path / "c").step == 0


def test_a_relative_folder_means_the_one_at_the_time_of_the_save(tmp_path, monkeypatch, gate):
    monkeypatch.chdir(tmp_path)
    checkpointer = AsyncCheckpointer()
    checkpointer.save("c", small_state())
    monkeypatch.chdir("/")
    gate.open()
    checkpointer.wait()
    assert (tmp_path / "c" / "manifest.json").exists()


def test_prepare_makes_the_memory_that_the_save_then_uses_in_any_mode(tmp_path):
    state = {"w": torch.ones(20_000_000)}
    with AsyncCheckpointer() as checkpointer:
        with torch.inference_mode():
            checkpointer.prepare(state, {"state": {}})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        checkpointer.save(tmp_path / "c", state, {"state": {}})
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000
    assert bitwise(load_checkpoint(tmp_path / "c")[0]) == bitwise(state)


def test_stats_count_saves_seconds_and_bytes(tmp_path):
    with AsyncCheckpointer() as checkpointer:
        assert checkpointer.stats["saves"] == 0
        for step in (1, 2):
            checkpointer.save(tmp_path / f"{step}", {"w": torch.ones(10_000)})
            checkpointer.wait()
        stats = checkpointer.stats
        assert (stats["saves"], stats["bytes"]) == (2, 4096 + 40_000)
        assert 0 < stats["stall_s"] <= stats["write_s"]


def itself():
    state = {}
    state["me"] = state
    return state


def freed():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "itself": (itself(), None, None, r"\['me'\]\['me'\].*nested more than"),
    "memory elsewhere": ({"w": freed()}, None, None, "w: a Tensor on cpu without memory"),
    "object": ({"a": [1, {"b": object()}]}, None, None, r"model_state.*\['a'\]\[1\]\['b'\]"),
    "tensor as key": ({}, {"state": {torch.ones(1): 1}}, None, r"optimizer_state: \['state'\]"),
    "function": ({}, {"lr_lambdas": [len]}, None, r"\['lr_lambdas'\]\[0\]"),
    "sparse": ({"m": {"w": torch.eye(2).to_sparse()}}, None, None, "m.w: a torch.sparse_coo"),
    "quantized": ({"w": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, None, None,
                  "w: safetensors has no code for torch.qint8"),
    "nested": ({"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, None, None,
               "w: a nested tensor"),
    "half a character": ({"a": {"\ud800": torch.ones(1)}}, None, None, r"\['a'\]\['\\ud800'\]"),
    "not a dict": ([torch.ones(1)], None, None, "model_state of type list"),
    "a module": (torch.nn.Linear(1, 1), None, None, r"dict; pass model.state_dict\(\)"),
    "tensor in the training state": ({}, None, TrainingState(extra={"x": torch.ones(1)}),
                                     r"training_state: \['extra'\]\['x'\]: a tensor"),
    "negative step": ({}, None, TrainingState(step=-1), r"\['step'\]: -1 is not a count"),
    "a dict as training state": ({}, None, {"step": 1}, "training_state of type dict"),
    "endless digits": ({}, None, TrainingState(extra={"x": 2**20_000}), "JSON can't hold"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_raises_in_save_names_its_place_and_writes_nothing(tmp_path, case):
    model, optimizer, training, message = REFUSED[case]
    checkpointer = AsyncCheckpointer()
    with pytest.raises(CheckpointError, match=message):
        checkpointer.save(tmp_path / "root" / "c", model, optimizer, training)
    assert checkpointer.done()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_every": 1.0}, {"snapshot": "Host"}],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused(settings):
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))}="):
        AsyncCheckpointer(**settings)


def test_all_tensors_go_to_the_device_that_is_given(tmp_path):
    save_checkpoint(tmp_path / "c", small_state(), {"state": {0: {"m": torch.ones(2)}}})
    model, optimizer, _ = load_checkpoint(tmp_path / "c", device="meta")
    assert all(one.is_meta for one in (*model.values(), optimizer["state"][0]["m"]))


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Counts(defaultdict):
    pass


BASES = {
    "StrEnum": (Colour.RED, str), "IntEnum": (Level.HIGH, int), "tuple": ((1,), tuple),
    "numpy": (np.float64(2), float), "Counter": (Counter("aab"), Counter),
    "defaultdict": (defaultdict(int, a=1), dict), "Size": (torch.Size([2]), torch.Size),
    "a class of one's own": (Counts(int, a=1), dict),
    "OrderedDict": (OrderedDict(a=1), OrderedDict),
}  # fmt: skip


@pytest.mark.parametrize("case", BASES)
def test_a_subclass_comes_back_as_its_base(tmp_path, case):
    value, kind = BASES[case]
    save_checkpoint(tmp_path / "c", {}, None, TrainingState(extra={"x": value}))
    found = load_checkpoint(tmp_path / "c")[2].extra["x"]
    assert type(found) is kind
    assert found == value
