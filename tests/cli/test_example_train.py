"""`examples/train.py`, killed as often as you like, ends with the losses and weights of one run."""

import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from npydata import latest_checkpoint, load_checkpoint, write_tokens

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "train.py"
KILLED = ROOT / "materials" / "course" / "play" / "killed.py"
TOKENS = ROOT / "materials" / "train_smoke.npy"
SAVE_EVERY = 4
SYNCS_OF_A_SAVE = 8
"""About: a kill after each of them should come to pass."""
PATIENCE = 60.0


def command(out, steps, killed_at=None):
    """Return how to start a run; `killed_at` has it die after so many syncs of its saves."""
    words = [TRAIN, "--tokens", TOKENS, "--out", out, "--steps", steps, "--save-every", SAVE_EVERY]
    launcher = [KILLED, killed_at, "any"] if killed_at else []
    return [sys.executable, *map(str, launcher + words)]


def start(*words):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(*words), env=env, stderr=subprocess.PIPE, text=True)


def logged(out):
    """Return the lines of the log so far: step and loss, exactly."""
    log = out / "losses.csv"
    return log.read_text().splitlines() if log.exists() else []


def kill_at_a_moment(out, steps, chance):
    """Kill a run after a random step, at a random moment of the next one or two."""
    lines, pause = len(logged(out)) + chance.randint(1, 2 * SAVE_EVERY), threading.Event()
    child, patience = start(out, steps), time.monotonic() + PATIENCE
    while len(logged(out)) < lines and child.poll() is None and time.monotonic() < patience:
        pause.wait(0.001)
    pause.wait(chance.random() * 0.02)
    child.kill()
    assert child.wait(PATIENCE) == -9, child.stderr.read()
    child.stderr.close()


def kill_in_a_save(out, steps, chance):
    """Let a run die right after a random sync of its first save or its second."""
    child = start(out, steps, chance.randint(1, 2 * SYNCS_OF_A_SAVE))
    child.communicate(timeout=PATIENCE * 2)
    assert child.returncode == -9


def what_is_left(out):
    """Return all losses and the newest checkpoint's files: what decides the next step."""
    newest = latest_checkpoint(out)
    files = [file for file in newest.iterdir() if file.name != "manifest.json"]  # it counts saves
    return newest.name, set(logged(out)), {file.name: file.read_bytes() for file in files}


def test_sigterm_has_it_save_at_the_next_step_and_end(tmp_path):
    child, patience = start(tmp_path, 1_000_000), time.monotonic() + PATIENCE
    while len(logged(tmp_path)) < 3 and child.poll() is None and time.monotonic() < patience:
        threading.Event().wait(0.001)
    child.send_signal(signal.SIGTERM)
    _, printed = child.communicate(timeout=PATIENCE)
    assert child.returncode == 143, printed
    steps = len(logged(tmp_path))
    assert latest_checkpoint(tmp_path).name == f"step-{steps:06}"


def load(folder):
    """Import the script that lies in a folder, with its neighbours there."""
    sys.path.insert(0, str(folder))
    try:
        for name in ("gpt", "resume", "train"):
            sys.modules.pop(name, None)
        return importlib.import_module("train")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def train():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(TRAIN.parent)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """What a run of 12 steps leaves."""
    return run(train, tmp_path_factory.mktemp("whole"), 12)


def run(module, out, *stops, tokens=TOKENS, **options):
    """Train up to each of these steps, from the checkpoint of the one before."""
    for steps in stops:
        module.train(tokens, out, steps=steps, **options)
    return what_is_left(out)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills, steps, within, repeated", [
    (2, 32, 1, 1), pytest.param(50, 700, 5, 50, marks=pytest.mark.nightly),
])  # fmt: skip
def test_killed_again_and_again_it_ends_with_the_same_losses_and_weights(
    train, tmp_path, kills, steps, within, repeated
):
    chance, in_saves, killed = random.Random(kills), 0, tmp_path / "killed"
    kinds = [kill_at_a_moment, kill_in_a_save] * (kills // 2)
    chance.shuffle(kinds)
    for kill in kinds:
        kill(killed, steps, chance)
        in_saves += any(entry.name.startswith(".") for entry in killed.iterdir())
    whole = run(train, tmp_path / "whole", steps, save_every=SAVE_EVERY)
    assert len(whole[1]) == len(logged(tmp_path / "whole")) == steps
    assert run(train, killed, steps, save_every=SAVE_EVERY) == whole
    assert in_saves >= within
    assert len(logged(killed)) >= steps + repeated


# What the state holds, and what a wrong start is told


@pytest.mark.parametrize("snapshot", ["host", "overlap", "device"])
def test_a_run_in_three_pieces_is_the_run_in_one(train, whole, tmp_path, snapshot):
    assert run(train, tmp_path, 5, 6, 12, snapshot=snapshot) == whole


def test_it_goes_on_across_the_end_of_an_epoch(train, tmp_path):
    tokens = tmp_path / "few.npy"
    write_tokens(tokens, [range(64)] * 10, dtype="uint16")
    large = {"context": 8, "batch_size": 1024}  # few tokens make 4,096 windows: an epoch of 4 steps
    whole = run(train, tmp_path / "whole", 9, tokens=tokens, **large)
    assert run(train, tmp_path / "pieces", 3, 4, 8, 9, tokens=tokens, **large) == whole


FORGETS = {
    "to save the generators": ("rng=capture_rng()", "rng=None"),
    "to save the loader's place": ("loader=loader.state_dict()", "loader=None"),
    "to save the optimizer": ("optimizer.state_dict(), state", "None, state"),
    "to set the generators": ("npydata.restore_rng(state.rng)", "pass"),
    "to set the loader": ("loader.load_state_dict(state.loader)", "pass"),
    "to set the optimizer": ("optimizer.load_state_dict(moments)", "pass"),
    "to set the weights": ("model.load_state_dict(weights)", "pass"),
    "that a step was done": ("state.step, newest.name", "state.step - 1, newest.name"),
}
"""What such a script may forget, as a change of its text."""


@pytest.mark.parametrize("part", FORGETS)
def test_a_script_that_forgets_one_part_goes_on_differently(part, whole, tmp_path):
    line, instead = FORGETS[part]
    texts = {path.name: path.read_text() for path in TRAIN.parent.glob("*.py")}
    assert (texts["train.py"] + texts["resume.py"]).count(line) == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(line, instead))
    _, losses, _ = run(load(tmp_path), tmp_path / "pieces", 6, 12)
    assert losses != whole[1]


def test_it_logs_exact_losses_keeps_the_newest_and_is_done_once(train, tmp_path, capsys):
    before = run(train, tmp_path, 8, save_every=2, keep_last=2)
    folders = sorted(one.name for one in tmp_path.iterdir() if one.is_dir())
    assert folders == ["step-000006", "step-000008"]
    last = load_checkpoint(latest_checkpoint(tmp_path))[2]
    assert logged(tmp_path)[-1] == f"{last.step},{last.loss!r}"
    assert run(train, tmp_path, 2) == before
    assert "step-000008: resumed at step 8" in capsys.readouterr().err


WRONG = {
    "--tokens nowhere.npy": "nowhere.npy",
    f"--tokens {__file__}": "test_example_train.py: cannot tell its format",
    "--context 1000000": "expected at least 1000001 in a row",
    "--batch-size 0": "batch_size",
    "--batch-size many": "invalid int value: 'many'",
    "--device toaster": "toaster",
    "--batch-size 8": "was made with batch_size 16, not 8",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_told_in_one_line(words, train, tmp_path, capsys, monkeypatch):
    train.train(TOKENS, tmp_path, steps=1)
    given = ["train.py", "--tokens", str(TOKENS), "--out", str(tmp_path), *words.split()]
    monkeypatch.setattr(sys, "argv", given)
    capsys.readouterr()
    try:
        code = train.main()
    except SystemExit as ended:  # argparse leaves so
        code = ended.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert WRONG[words] in lines[-1]
    assert lines[-1].startswith("train.py: ")
