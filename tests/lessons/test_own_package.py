"""`import mine`: the package from all lessons trains, dies, and resumes to the same bits."""

import os
import subprocess
import sys
import threading
import time

import notebook_tools as tools
import pytest
from tutorial import keeping
from tutorial.lessons import PARTS
from tutorial.solving import solutions
from tutorial.sync import ROOT

from npydata import latest_checkpoint

OWN = ROOT / "materials" / "tutorial" / "own_training.py"
KILLED = ROOT / "materials" / "tutorial" / "killed_training.py"
TOKENS = ROOT / "materials" / "train_smoke.npy"
STEPS, SAVE_EVERY = 24, 6
PATIENCE = 120.0
CORE = {"training"}  # the others build parts that are kept in kept/
"""The parts that a run on one processor needs."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A lab in which every lesson was solved."""
    folder = tmp_path_factory.mktemp("lab")
    before = os.environ.get("NPYDATA_LAB")
    os.environ["NPYDATA_LAB"] = str(folder)
    answers = {
        name: text
        for lesson in tools.read_lessons()
        for name, text in solutions(lesson.cells).items()
    }
    for part in PARTS.values():
        keeping.write(part, {
            build.name: answers[build.name]
            + (f"\n\n\n{build.owner}.{build.name} = {build.name}" if build.owner else "")
            for build in part.kept() if build.name in answers
        })  # fmt: skip
    yield folder
    if before is None:
        del os.environ["NPYDATA_LAB"]
    else:
        os.environ["NPYDATA_LAB"] = before


def start(out, *launcher):
    words = [*launcher, OWN, "--tokens", TOKENS, "--out", out, "--steps", STEPS]
    words += ["--save-every", SAVE_EVERY, "--keep-last", 10]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env=env, stdout=pipe, stderr=pipe, text=True
    )


def finish(out):
    child = start(out)
    printed, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, errors
    return printed


def logged(out):
    log = out / "losses.csv"
    return log.read_text().splitlines() if log.exists() else []


def kill_in_a_step(out):
    child, patience = start(out), time.monotonic() + PATIENCE
    while len(logged(out)) < SAVE_EVERY + 2 and child.poll() is None:
        assert time.monotonic() < patience
        threading.Event().wait(0.002)
    child.kill()
    _, errors = child.communicate()
    assert child.returncode == -9, errors


def kill_in_a_save(out):
    child = start(out, KILLED, 2, "fsync optimizer.safetensors")
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == -9, errors
    assert any(entry.name.startswith(".") for entry in out.iterdir())


def what_is_left(out):
    newest = latest_checkpoint(out)
    files = [file for file in newest.iterdir() if file.name != "manifest.json"]
    return newest.name, set(logged(out)), {file.name: file.read_bytes() for file in files}


@pytest.mark.timeout(600)
def test_killed_in_a_step_and_in_a_save_it_ends_with_the_bits_of_a_run_that_was_not(lab, tmp_path):
    printed = finish(tmp_path / "whole")
    for part in PARTS.values():
        assert keeping.owned_by(part) == f"{part.name}: all {len(part.kept())} pieces are yours"
        assert keeping.owned_by(part) in printed
    kill_in_a_step(tmp_path / "killed")
    kill_in_a_save(tmp_path / "killed")
    finish(tmp_path / "killed")
    assert len(logged(tmp_path / "killed")) > STEPS
    assert what_is_left(tmp_path / "killed") == what_is_left(tmp_path / "whole")


TRACED = """
import sys, threading
import mine, train
from tutorial import own_training

called = set()

def note(frame, event, argument):
    if event == "call" and frame.f_globals.get("__name__", "").startswith("mine."):
        called.add(frame.f_globals["__name__"] + "." + frame.f_code.co_name)

threading.setprofile(note), sys.setprofile(note)
own_training.compose(mine, train)
assert train.main(sys.argv[1:]) == 0
sys.setprofile(None)
print("called:", *sorted(called))
"""
"""Prints which functions of the package ran."""


def test_a_run_goes_through_every_part_of_the_package(lab, tmp_path):
    words = [*map(str, ["--tokens", TOKENS, "--out", tmp_path, "--save-every", 1])]
    path = map(str, [ROOT, ROOT / "materials", ROOT / "examples", lab])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    called = set()
    for steps in ("2", "4"):  # the second start resumes
        command = [sys.executable, "-c", TRACED, *words, "--steps", steps]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        called |= set(done.stdout.partition("called:")[2].split())
    print(*sorted(called))
    built = {f"mine.{part.name}.{build.name}" for part in PARTS.values() for build in part.kept()}
    assert CORE & set(PARTS) <= {name.split(".")[1] for name in called & built}
