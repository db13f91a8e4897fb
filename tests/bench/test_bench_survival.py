"""The page of verdicts: a saver known to lose is shown as losing, one known to be safe as safe."""

import argparse
import contextlib
import json
import os
import pickle
import signal
from pathlib import Path

import pytest

from npydata.bench import survival
from npydata.bench.survival import faults, power, report, resuming
from npydata.bench.survival.process import Process, ask
from npydata.bench.survival.resuming import SAMPLES, Stream
from npydata.bench.survival.strace import SystemCall, calls_of, cannot_trace
from npydata.bench.survival.training import Survivor, Training, verdict_on
from npydata.errors import NpyDataError

Training(Path())  # imports what every forked process would import again
needs_strace = pytest.mark.skipif(bool(cannot_trace()), reason=cannot_trace() or "-")


def tiny(save):
    """A saver that is one function, with a loader that trusts what it reads."""

    def train(training):
        for step in training.steps():
            save(training.root, pickle.dumps(training.state(step)))

    def load(root):
        return pickle.loads((root / "state").read_bytes())

    return Survivor(train=train, load=load)


def over(root, content):
    (root / "state").write_bytes(content)


def replaced(root, content):
    with open(root / "new", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    (root / "new").replace(root / "state")


def ignoring(root, content):
    """Replace the file whether or not it reached the disk."""
    with open(root / "new", "wb") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(OSError):
            os.fsync(file.fileno())
    (root / "new").replace(root / "state")


LOSES, SAFE, DEAF = tiny(over), tiny(replaced), tiny(ignoring)


@needs_strace
@pytest.mark.parametrize(("fault", "saver", "most", "expected"), [
    ("kill", LOSES, 20, {"error"}),
    ("kill", SAFE, 20, set()),
    ("power cut", LOSES, 4, {"error"}),
    ("power cut", SAFE, 4, set()),
    ("disk full", LOSES, 20, {"error"}),
    ("disk full", SAFE, 20, set()),
    ("fsync fails", SAFE, 5, set()),
    ("fsync fails", DEAF, 5, {"unnoticed"}),
    ("fork", SAFE, 2, set()),
    ("signal", SAFE, 10, set()),
])  # fmt: skip
def test_a_column_finds_who_loses_and_only_those(tmp_path, fault, saver, most, expected):
    cell = faults.attack(saver, fault, tmp_path, most)
    assert cell.trials >= 1, cell.note
    assert set(cell.outcomes) - {*faults.COMPLETE} == expected, cell
    assert not list(tmp_path.iterdir()), "roots are left"


def test_a_reader_sees_whole_states_of_a_saver_that_replaces(tmp_path):
    cell = faults.attack(SAFE, "reader", tmp_path, 10)
    assert cell.outcomes == {"whole": 10}


@needs_strace
def test_a_saver_that_saves_nothing_is_said_to(tmp_path):
    def refuse(training):
        raise ValueError("not today")

    cell = faults.attack(Survivor(train=refuse, load=lambda root: {}), "kill", tmp_path, 5)
    assert cell.trials == 0
    assert "ValueError: not today" in cell.note


@pytest.mark.parametrize(("change", "expected"), [
    (lambda state: None, "whole"),
    (lambda state: state["model"]["0.bias"].fill_(1), "mixed"),
    (lambda state: state.pop("optimizer"), "mixed"),
    (lambda state: state["model"]["0.weight"][3].zero_(), "garbage"),
    (lambda state: state.update(step=1), "mixed"),
])  # fmt: skip
def test_a_state_is_whole_only_if_every_element_is_of_its_step(tmp_path, change, expected):
    training = Training(tmp_path)
    training.fill(2)
    state = training.state(2)
    change(state)
    assert verdict_on(state, known=2)[0] == expected


def test_a_trace_is_read_also_where_threads_interrupt_each_other(tmp_path):
    trace = f"""\
1 openat(AT_FDCWD, "{tmp_path}/a", O_WRONLY|O_CREAT, 0666) = 3
1 write(3<{tmp_path}/a>, "..."..., 5 <unfinished ...>
2 write(1</dev/null>, ""..., 1) = 1
2 write(4<{tmp_path}/b>, ""..., 2) = 2
1 <... write resumed>) = 5
1 rename("{tmp_path}/gone", "{tmp_path}/b") = -1 ENOENT (No such file)
"""
    calls = calls_of(trace, tmp_path)
    assert [(call.name, call.number) for call in calls] == [
        ("openat", 1), ("write", 2), ("write", 1)]  # fmt: skip


def recording(root, *calls):
    texts = [text.replace("ROOT", str(root)) for text in calls]
    traced = [SystemCall(text.partition("(")[0], 1, text.partition("(")[2]) for text in texts]
    return power.recorded(traced, root, {str(root / "old"): power.Inode(b"old")})


def test_names_may_reach_the_disk_before_the_data(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    saved = recording(
        tmp_path, 'openat(AT_FDCWD</>, "ROOT/t", O_WRONLY|O_CREAT, 0666) = 3<ROOT/t>',
        "write(3<ROOT/t>, ..., 5) = 5", 'rename("ROOT/t", "ROOT/a") = 0',
    )  # fmt: skip
    left = {state.get(str(tmp_path / "a")) for _, state in power.cuts(saved, 200)}
    assert {None, b"", b"12345"} <= left


def test_what_was_flushed_before_its_rename_is_whole_or_not_there(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    saved = recording(
        tmp_path, 'openat(AT_FDCWD</>, "ROOT/t", O_WRONLY|O_CREAT, 0666) = 3<ROOT/t>',
        "write(3<ROOT/t>, ..., 5) = 5", "fsync(3<ROOT/t>) = 0", 'rename("ROOT/t", "ROOT/a") = 0',
    )  # fmt: skip
    left = {state.get(str(tmp_path / "a")) for _, state in power.cuts(saved, 200)}
    assert left == {None, b"12345"}


def test_a_process_that_never_ends_is_found_hung_and_killed():
    process = Process(lambda inside: signal.pause())
    process.end(patience=0.2)
    assert process.hung


def test_what_a_process_raises_is_reported():
    assert ask(lambda inside: 1 / 0) == ["raised ZeroDivisionError: division by zero"]


def numbers(forgets=0):
    """A loader that resumes where it was, or a few batches behind."""

    def opened(setting, state):
        at = [state or 0]

        def batches():
            while at[0] < SAMPLES:
                first, at[0] = at[0], at[0] + setting.batch_size * setting.world_size
                begin = first + setting.rank * setting.batch_size
                yield list(range(begin, min(begin + setting.batch_size, SAMPLES)))

        return Stream(batches(), lambda: at[0] - forgets * setting.batch_size)

    return opened


def test_a_loader_that_forgets_is_found_to_repeat_and_an_exact_one_is_exact(tmp_path):
    exact = resuming.resumed(numbers(), tmp_path, kills=1)
    assert {report.case_text(case) for case in exact.values()} == {"exact"}
    forgetful = resuming.resumed(numbers(forgets=2), tmp_path, kills=1)
    assert forgetful["as it was"]["repeated"] == 16
    assert report.case_text(forgetful["as it was"]) == "repeated 16"


@needs_strace
def test_the_command_measures_one_cell_and_its_table_json_and_picture_agree(tmp_path):
    args = argparse.Namespace(saver="torch.save, fsync", fault="disk full", loader=None, trials=20,
                              quick=False)  # fmt: skip
    found = survival.measure(args, tmp_path)
    (row,) = json.loads(json.dumps(found.as_json()))["savers"]
    assert row["name"] == "torch.save, fsync and rename"
    assert row["cells"]["disk full"]["trials"] == row["cells"]["disk full"]["complete"] == 2
    assert "| torch.save, fsync and rename | 100 % (of 2) |" in found.text(targets=False)
    pytest.importorskip("matplotlib")
    survival.draw(found, tmp_path / "survival.png")
    assert (tmp_path / "survival.png").stat().st_size > 1000


def test_an_unknown_saver_is_refused_with_the_names_there_are():
    with pytest.raises(NpyDataError, match=r"'pigz': expected a part of one of .*nanochat"):
        survival.chosen("survival", "pigz")


@pytest.mark.parametrize(("complete", "text"), [(0, "0 %"), (1, "1 %"), (199, "99 %"),
                                                (200, "100 %")])  # fmt: skip
def test_only_all_is_called_all(complete, text):
    assert report.percent({"complete": complete, "trials": 200}) == text


def test_what_is_not_installed_is_said_to_be_so():
    assert report.cell_text(None) == report.case_text(None) == "not installed"
