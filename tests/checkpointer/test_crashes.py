"""A saving process is killed at random moments: the newest confirmed checkpoint is always there."""

import random
import shutil

import pytest
from children import run_child
from faults.children import Child
from faults.layer import Layer, be_killed
from faults.protocols import PROTOCOLS, Distributed

pytestmark = pytest.mark.timeout(120)
BY_ONE = {name: one for name, one in PROTOCOLS.items() if not isinstance(one, Distributed)}

KILLS = """
import random, sys, threading
from pathlib import Path
import torch
from faults.children import Child
from faults.saving import holds, save_for_ever, saves_again

times, seed, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
chance, pause = random.Random(seed), threading.Event()

at, seen, newer = 0, set(), 0
for number in range(times):
    child = Child(lambda report: save_for_ever(report, root, at + 1, elements=300_000))
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


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(2400)]


@pytest.mark.parametrize(
    "times, seed",
    [
        (6, 0),
        pytest.param(900, 1, marks=NIGHTLY),
        *(pytest.param(900, seed, marks=pytest.mark.soak) for seed in range(2, 7)),
    ],
)
def test_kills_at_random_moments_lose_nothing_that_was_confirmed(
    memory_folder, times, seed, record_property
):
    record_property("kills", times)
    child = run_child(KILLS, times, seed, memory_folder, seconds=60 + times)
    assert child.returncode == 0, child.stderr
    kinds, newer = map(int, child.stdout.split())
    if times > 6:
        assert kinds, "no kill came between the steps of a save: they prove nothing"
        assert newer, "no kill came between a commit and its confirmation"


def killed_at_calls(protocol, folder, choose):
    """Kill a protocol at the calls chosen; return how many kills that were."""
    (folder / "counted").mkdir()
    protocol.prepare(folder / "counted")
    with Layer(everywhere=True).installed() as layer:
        protocol.act(folder / "counted", lambda step: None)
    calls = choose(range(len(layer.calls)))
    for call in calls:
        left = folder / f"killed{call}"
        left.mkdir()
        protocol.prepare(left)
        with_kill = Layer(call, be_killed, everywhere=True)

        def die(report, left=left, layer=with_kill):
            with layer.installed():
                protocol.act(left, report)

        child = Child(die)
        confirmed = max([0, *map(int, child.lines())])
        child.close()
        assert child.code == -9, f"call {call} of {len(layer.calls)} was not made"
        protocol.check(left, confirmed)
        protocol.go_on(left)
        shutil.rmtree(left)
    return len(calls)


@pytest.mark.parametrize(
    "choose",
    [lambda calls: random.Random(3).sample(calls, 3), pytest.param(list, marks=NIGHTLY)],
    ids=["some", "every"],
)
@pytest.mark.parametrize("protocol", BY_ONE.values(), ids=list(BY_ONE))
def test_killed_at_a_call_every_protocol_keeps_what_it_promised(
    protocol, memory_folder, record_property, choose
):
    record_property("kills", killed_at_calls(protocol, memory_folder, choose))
