"""A saving process is killed at random moments: the newest confirmed checkpoint is always there."""

import pytest
from loader_tools import run_child

pytestmark = pytest.mark.timeout(120)

KILLS = """
import itertools, random, shutil, sys, threading
from pathlib import Path
import torch
from faults.children import Child
from faults.saving import holds, save_step, saves_again
from npydata import AsyncCheckpointer
from npydata.checkpointer import commit

times, seed, root, how = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
chance, pause = random.Random(seed), threading.Event()
if how == "fallback":
    commit.exchange = lambda one, other: False

def save_for_ever(report, first):
    keeper = AsyncCheckpointer(keep_last=2)
    for step in itertools.count(first):
        name = f"step{step}" if step % 3 == 0 else f"reused{step % 2}"
        save_step(keeper, root / name, step, elements=300_000)
        keeper.wait()
        report(step)

at, seen, newer = 0, set(), 0
for number in range(times):
    child = Child(lambda report: save_for_ever(report, at + 1))
    assert child.line() is not None
    pause.wait(chance.random() * 0.1)
    child.kill()
    confirmed = max([at + 1, *map(int, child.lines())])
    assert child.code == -9, child.code
    child.close()
    seen |= {entry.name.rsplit(".", 1)[-1] for entry in root.iterdir() if entry.name[0] == "."}
    at = holds(root, confirmed)
    newer += at > confirmed
    if number % 4 == 3:
        saves_again(root, f"reused{number % 2}", at := at + 1)
saves_again(root, "reused1", at + 1)
print(len(seen), newer)
"""


def killed(times, seed, root, how):
    child = run_child(KILLS, times, seed, root, how, seconds=60 + times)
    assert child.returncode == 0, child.stderr
    kinds, newer = map(int, child.stdout.split())
    return kinds, newer


@pytest.mark.parametrize("how", ["exchange", "fallback"])
def test_6_kills_at_random_moments_lose_nothing_that_was_confirmed(tmp_path, how):
    killed(6, 0, tmp_path, how)


@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["exchange", "fallback"])
def test_150_kills_at_random_moments_lose_nothing_that_was_confirmed(tmp_path, how):
    kinds, newer = killed(150, 1, tmp_path, how)
    assert kinds, "no kill came between the steps of a save: they prove nothing"
    assert newer, "no kill came between a commit and its confirmation"
