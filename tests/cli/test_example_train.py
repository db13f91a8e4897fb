"""`examples/train.py`, killed as often as you like, ends with the losses and weights of one run."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tutorial.sync import ROOT

from npydata import latest_checkpoint, write_tokens

TRAIN = ROOT / "examples" / "train.py"
KILLED = ROOT / "materials" / "course" / "play" / "killed.py"
TOKENS = ROOT / "materials" / "train_smoke.npy"
SAVE_EVERY = 4
CALLS_OF_A_SAVE = 14
"""Calls to the system that a save makes, about: a kill after each of them should come to pass."""
PATIENCE = 60.0


def command(out, steps, killed_at=None):
    """Return how to start a run; `killed_at` has it die after so many calls of its saves."""
    words = [TRAIN, "--tokens", TOKENS, "--out", out, "--steps", steps, "--save-every", SAVE_EVERY]
    launcher = [KILLED, killed_at, "any"] if killed_at else []
    return [sys.executable, *map(str, launcher + words)]


def start(*words):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command(*words), env=env, stderr=subprocess.PIPE, text=True)


def logged(out):
    """Return the lines of the log so far: step and loss, exactly."""
    log = out / "losses.csv"
    return log.read_text().splitlines() if log.exists() else []


def finish(out, steps):
    """Start it once more, and let it come to its end."""
    child = start(out, steps)
    _, printed = child.communicate(timeout=PATIENCE * 4)
    assert child.returncode == 0, printed


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
    """Let a run die right after a random call of its first save or its second."""
    child = start(out, steps, chance.randint(1, 2 * CALLS_OF_A_SAVE))
    child.communicate(timeout=PATIENCE * 2)
    assert child.returncode == -9


def what_is_left(out):
    """Return all losses and the newest checkpoint's files: what decides the next step."""
    newest = latest_checkpoint(out)
    files = [file for file in newest.iterdir() if file.name != "manifest.json"]  # it counts saves
    return newest.name, set(logged(out)), {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """What a run of so many steps leaves that nobody killed."""
    known = {}

    def left(steps):
        if steps not in known:
            out = tmp_path_factory.mktemp("whole")
            finish(out, steps)
            assert len(logged(out)) == steps
            known[steps] = what_is_left(out)
        return known[steps]

    return left


def killed_again_and_again(out, steps, kinds, chance):
    """Kill a run in each of these ways, then let it finish; return what the kills met."""
    met = {"before any checkpoint": 0, "within a save": 0, "repeated steps": 0}
    for kill in kinds:
        kill(out, steps, chance)
        met["before any checkpoint"] += latest_checkpoint(out) is None
        met["within a save"] += any(entry.name.startswith(".") for entry in out.iterdir())
    finish(out, steps)
    met["repeated steps"] = len(logged(out)) - steps
    return met


def test_killed_4_times_it_ends_with_the_same_losses_and_weights(tmp_path, whole_run):
    kinds = [kill_at_a_moment, kill_in_a_save] * 2
    met = killed_again_and_again(tmp_path, 64, kinds, random.Random(0))
    assert met["within a save"], met
    assert met["repeated steps"], met
    assert what_is_left(tmp_path) == whole_run(64)


def test_signals_have_it_save_at_the_next_step_and_end(tmp_path):
    child, patience = start(tmp_path, 1_000_000), time.monotonic() + PATIENCE
    for number in (signal.SIGUSR1, signal.SIGTERM):
        known = latest_checkpoint(tmp_path) if tmp_path.exists() else None
        while len(logged(tmp_path)) < 3 and child.poll() is None and time.monotonic() < patience:
            threading.Event().wait(0.001)
        child.send_signal(number)
        while latest_checkpoint(tmp_path) == known and time.monotonic() < patience:
            threading.Event().wait(0.001)
    _, printed = child.communicate(timeout=PATIENCE)
    assert child.returncode == 143, printed
    steps = len(logged(tmp_path))
    assert latest_checkpoint(tmp_path).name == f"step-{steps:06}"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_50_times_it_ends_with_the_same_losses_and_weights(tmp_path, whole_run):
    chance = random.Random(1)
    kinds = [chance.choice([kill_at_a_moment, kill_in_a_save]) for _ in range(50)]
    met = killed_again_and_again(tmp_path, 700, kinds, chance)
    print(f"50 kills: {met}")
    assert met["within a save"] >= 5, met
    assert met["repeated steps"] >= 50, met
    assert what_is_left(tmp_path) == whole_run(700)


# In this process: what the state holds, and what a wrong start is told


def load(path):
    """Import a file as the script that it is."""
    spec = importlib.util.spec_from_file_location("example_train", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TRAIN.parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TRAIN.parent))
    return module


@pytest.fixture
def train():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(TRAIN)
    torch.set_num_threads(threads)


def run(module, out, *stops, tokens=TOKENS, **options):
    """Train up to each of these steps, from the checkpoint of the one before."""
    for steps in stops:
        module.train(tokens, out, steps=steps, **options)
    return what_is_left(out)


@pytest.mark.parametrize("snapshot", ["host", "overlap", "device"])
def test_a_run_in_three_pieces_is_the_run_in_one(train, tmp_path, snapshot):
    whole = run(train, tmp_path / "whole", 12)
    assert run(train, tmp_path / "pieces", 5, 6, 12, snapshot=snapshot) == whole


def test_it_goes_on_across_the_end_of_an_epoch(train, tmp_path):
    tokens = tmp_path / "few.npy"
    write_tokens(tokens, [range(64)] * 10, dtype="uint16")
    large = {"context": 8, "batch_size": 1024}  # few tokens make 4,096 windows: an epoch of 4 steps
    whole = run(train, tmp_path / "whole", 9, tokens=tokens, **large)
    assert run(train, tmp_path / "pieces", 3, 4, 8, 9, tokens=tokens, **large) == whole


FORGETS = {
    "to save the generators": ("rng=rng", "rng=None"),
    "to save the loader's place": ("loader=place", "loader=None"),
    "to save the optimizer": ("optimizer.state_dict(), now)", "None, now)"),
    "to set the generators": ("npydata.restore_rng(state.rng)", "pass"),
    "to set the loader": ("loader.load_state_dict(state.loader)", "pass"),
    "to set the optimizer": ("optimizer.load_state_dict(moments)", "pass"),
    "to set the weights": ("model.load_state_dict(weights)", "pass"),
    "that a step was done": (
        "return state.step, newest.name",
        "return state.step - 1, newest.name",
    ),
}
"""What such a script may forget, as a change of its text."""


@pytest.mark.parametrize("part", FORGETS)
def test_a_script_that_forgets_one_part_goes_on_differently(part, train, tmp_path):
    text, (line, instead) = TRAIN.read_text(), FORGETS[part]
    assert text.count(line) == 1
    (tmp_path / "forgets.py").write_text(text.replace(line, instead))
    forgets, pieces = load(tmp_path / "forgets.py"), tmp_path / "pieces"
    losses = run(train, tmp_path / "whole", 12)[1]
    for steps in (6, 12):
        forgets.train(TOKENS, pieces, steps=steps)
    assert set(logged(pieces)) != losses


def test_the_log_is_of_the_exact_losses(train, tmp_path):
    seen = []
    train.train(TOKENS, tmp_path, steps=5, show=seen.append)
    lines = dict(line.split(",") for line in logged(tmp_path))
    assert {int(step): float(loss) for step, loss in lines.items()} == {
        one.step: one.loss for one in seen
    }


def test_progress_says_which_checkpoint_is_safe(train, tmp_path):
    seen = []
    train.train(TOKENS, tmp_path, steps=4, save_every=2, show=seen.append)
    assert [one.saved for one in seen[:1] + seen[-1:]] == ["none", "step-000004"]
    assert "step 4 of 4" in str(seen[-1])
    assert "checkpoint step-000004" in str(seen[-1])


def test_it_keeps_the_newest_checkpoints(train, tmp_path):
    train.train(TOKENS, tmp_path, steps=8, save_every=2, keep_last=2)
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == [
        "step-000006",
        "step-000008",
    ]


WRONG = {
    "no such file": (["--tokens", "nowhere.npy"], "nowhere.npy"),
    "not tokens": (["--tokens", __file__], "test_example_train.py: cannot tell its format"),
    "a window too long": (["--context", "1000000"], "expected at least 1000001 tokens"),
    "too few ids": (["--vocab-size", "10"], "expected 0 to 9"),
    "no steps": (["--steps", "0"], "0: expected 1 or more"),
    "no number": (["--batch-size", "many"], "invalid positive value: 'many'"),
    "no such device": (["--device", "toaster"], "--device: toaster"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_told_in_one_line(wrong, train, tmp_path, capsys):
    words, message = WRONG[wrong]
    given = ["--tokens", str(TOKENS), "--out", str(tmp_path / "out"), *words]
    try:
        code = train.main(given)
    except SystemExit as ended:  # argparse leaves so
        code = ended.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert message in lines[-1]
    assert lines[-1].startswith("train.py: ") or lines[0].startswith("usage: ")


def test_a_run_that_was_made_with_other_settings_is_not_continued(train, tmp_path, capsys):
    train.train(TOKENS, tmp_path, steps=2)
    words = ["--tokens", str(TOKENS), "--out", str(tmp_path), "--batch-size", "8"]
    assert train.main(words) == 2
    assert "was made with batch_size 16, not 8" in capsys.readouterr().err


def test_a_run_that_is_done_says_so_and_changes_nothing(train, tmp_path, capsys):
    before = run(train, tmp_path, 3)
    assert run(train, tmp_path, 2) == before
    assert "step-000003: 3 steps are done already" in capsys.readouterr().err
