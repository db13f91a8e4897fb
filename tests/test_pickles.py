"""The helpers of the figures and counters of lessons 05 and 06."""

import io
import pickle

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from notebook_tools import read_lesson
from tutorial import counters, pickles, predictions, sync

from npydata.reader.opcodes import HANDLERS
from npydata.reader.pickle_machine import PickleMachine
from npydata.reader.torch_rebuild import Rebuilder


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "one.pt"
    torch.save(torch.arange(6).reshape(2, 3), path)
    return path


def machine_for(data):
    return pickles.machine(PickleMachine, HANDLERS, Rebuilder, data)


@pytest.fixture
def axes():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def test_steps_show_the_stack_after_each_opcode_and_leave_out_the_memo(saved):
    data = pickles.record(saved, "data.pkl")
    shown = list(pickles.steps(data, machine_for(data)))
    assert "BINPUT" not in {step.name for step in shown}
    assert shown[-1].name == "STOP"
    assert shown[-1].stack == ("tensor 2x3",)
    assert [step.stack for step in shown if step.name == "MARK"] == [
        ("_rebuild…", "("),
        ("_rebuild…", "(", "("),
    ]
    assert all(data[step.at : step.at + len(step.raw)] == step.raw for step in shown)


def test_the_parts_of_a_zip_file_cover_it_without_a_gap(saved):
    parts = pickles.zip_parts(saved)
    ends = [0, *(end for _, _, end, _ in parts)]
    assert [begin for _, begin, _, _ in parts] == ends[:-1]
    assert ends[-1] == saved.stat().st_size
    (payload,) = (part for part in parts if part[3] == "payload")
    content = saved.read_bytes()[payload[1] : payload[2]]
    assert np.frombuffer(content, np.int64).tolist() == [0, 1, 2, 3, 4, 5]


def test_elements_are_those_of_the_view():
    view = ((2, 3), (6, 2), 6)
    assert pickles.elements(*view).tolist() == torch.arange(24).as_strided(*view).tolist()


def test_figures_are_drawn(saved, axes):
    data = pickles.record(saved, "data.pkl")
    pickles.draw_steps(axes, list(pickles.steps(data, machine_for(data))), 5)
    pickles.draw_bytes(axes, pickles.zip_parts(saved))
    pickles.draw_view(axes, (4, 6), ((2, 3), (6, 2), 6), (24, 68), itemsize=4)
    axes.figure.savefig(io.BytesIO())


def test_a_tensor_is_read_from_its_description(saved):
    described = machine_for(pickles.record(saved, "data.pkl")).run()
    assert pickles.tensor_of(saved, described).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_endings_tell_the_kinds_of_errors_apart():
    whole = pickle.dumps(300, 2)
    assert pickles.endings(machine_for, whole) == f"one kind: CheckpointError {len(whole)} times"


def test_the_storages_of_an_old_file_begin_behind_its_pickles():
    path = pickles.saved({"a": torch.ones(3)}, old=True)
    assert path.stat().st_size - pickles.end_of_pickles(path) == 8 + 3 * 4


def test_read_calls_are_counted_and_maps_are_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert 1 << 20 <= counters.bytes_copied_in(path.read_bytes) < 1 << 21
    assert counters.bytes_copied_in(lambda: np.memmap(path, np.uint8, "r").sum()) < 1 << 19


def test_the_hostile_file_of_lesson_05_may_be_loaded_again(capsys):
    cells = read_lesson(sync.NOTEBOOKS / "05_pickle_program.ipynb").code
    (first,) = [k for k, cell in enumerate(cells) if "class Surprise" in cell.source]
    scope = {"pickles": pickles, "torch": torch, "reveal": predictions.reveal}
    scope["predict"] = predictions.predict
    for cell in [cells[first], cells[first + 1], cells[first + 1]]:
        exec(cell.source, scope)
    assert capsys.readouterr().out.count("it is: yes") == 2
