"""Ranks that die, fail, hang or never come: the last checkpoint stays, the others know in time."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from faults.layer import Layer
from faults.saving import ELEMENTS, holds, loaded_step, model_at, optimizer_at, unfinished
from ranks import Ranks, on_ranks, report
from ranks.states import group, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    ShardingConfig,
    TrainingState,
    latest_checkpoint,
)
from npydata.distributed.coordinator import Coordinator

pytestmark = pytest.mark.timeout(280)

TIMEOUT_S = 2.0
"""What a rank waits for another one in these tests."""
MARGIN_S = 30.0
"""What a busy machine may add."""


# What ranks do


@cache
def mesh():
    """Return all ranks; the first call is one that all make."""
    return init_device_mesh("cpu", (group()[1],))


def save_step(keeper, folder, step, elements=ELEMENTS, timeout_s=TIMEOUT_S):
    """Save a step's state, of which every rank has a part."""
    model, optimizer = model_at(step, elements), optimizer_at(step)
    model["weight"] = part_of(model["weight"], mesh(), [Shard(0)])
    state = optimizer["state"][0]
    state["exp_avg"] = part_of(state["exp_avg"], mesh(), [Shard(0)])
    training = TrainingState(step=step, rng={"rank": group()[0]})
    sharding = ShardingConfig(timeout_s=timeout_s)
    keeper.save_distributed(folder, model, optimizer, training, sharding=sharding)


def outcome_of(call):
    """Return ``fine``, or what was raised; and the seconds that it took."""
    began, outcome = time.monotonic(), "fine"
    try:
        call()
    except (CheckpointError, OSError) as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else type(error)
        outcome = f"{kind.__name__}: {error}"
    return outcome, time.monotonic() - began


def save_well(folder, step):
    """Save with patience: what nothing happens to must succeed."""
    with AsyncCheckpointer(keep_last=2) as keeper:
        save_step(keeper, folder, step, timeout_s=60)


def count_messages(at):
    """Call ``at(n)`` before each message to the store, ``n`` from 0 on; looking is no message."""
    original, counter = Coordinator._call, []  # all messages go through it

    def asked(self, method, *args):
        if method != "check":
            at(len(counter))
            counter.append(method)
        return original(self, method, *args)

    Coordinator._call = asked
    return counter


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder, step, victim, kind, when):
    """Save; one rank dies at a chosen call of its background thread, or at a message."""
    layer = Layer()
    messages = []
    if group()[0] == victim and kind == "call":
        layer = Layer(when, die)
    elif group()[0] == victim and kind == "message":
        messages = count_messages(lambda number: number == when and die())
    mesh()
    report("begins")
    keeper = AsyncCheckpointer(keep_last=2)

    def both():
        save_step(keeper, folder, step)
        keeper.wait()

    with layer.installed():
        outcome = outcome_of(both)
    return *outcome, len(layer.calls), len(messages)


# What must hold


def killed(root, world, victim, kind, when, step, name):
    """Kill one rank in a save of ``step``; check the others and the root; return the newest step.

    ``when`` is the number of a call, or seconds after the beginning.
    """
    before = set(unfinished(root))
    ranks = Ranks(world, save_and_die, root / name, step + 1, victim, kind, when)
    if kind == "moment":
        assert ranks.reported(victim) == "begins"
        threading.Event().wait(when)
        ranks.kill(victim)
    found = [ranks.outcome(rank) for rank in range(world)]
    place = f"rank {victim} of {world}, {kind} {when}: {found}"
    if kind != "moment":
        assert found[victim] == ("killed", -signal.SIGKILL), place
    newest = holds(root, step)
    for rank, (kind_of_end, outcome) in enumerate(found):
        if rank == victim:
            continue
        assert kind_of_end == "result", place
        message, seconds, *_ = outcome
        if message == "fine":
            assert loaded_step(root / name) == step + 1, place
        assert seconds < 2 * TIMEOUT_S + MARGIN_S, place
        if message == "fine":
            assert newest == step + 1, place
        else:
            assert message.startswith("CheckpointError: "), place
            assert f"rank {victim}" in message, place
    if victim != 0:
        assert set(unfinished(root)) <= before, place
    return newest


def saves_again(root, world, step, name):
    """Check that fresh ranks save, and clear away what the dead left."""
    on_ranks(world, save_well, root / name, step)
    assert latest_checkpoint(root) == root / name
    assert holds(root, step) == step
    assert unfinished(root) == []


def killed_again_and_again(root, kills):
    """Kill by a list of ``(world, victim, kind, when)``; return how often the save was done."""
    step, done = 1, 0
    on_ranks(2, save_well, root / "a0", step)
    for number, (world, victim, kind, when) in enumerate(kills):
        name = f"a{number % 2}" if number % 3 else f"step{number}"
        newest = killed(root, world, victim, kind, when, step, name)
        done += newest > step
        step = newest
        if number % 4 == 3 or number == len(kills) - 1:
            step += 1
            saves_again(root, world, step, f"a{number % 2}")
    return done


def numbers_of_calls(tmp_path, world):
    """Return how many calls and messages a save takes of each rank."""
    counts = {}
    for kind in ("call", "message"):
        ranks = Ranks(world, counted, tmp_path / "counted" / f"{kind}{world}", kind)
        for rank in range(world):
            counts[rank, kind] = ranks.result(rank)
    assert all(counts.values())
    return counts


def counted(folder, kind):
    outcome, _, calls, messages = save_and_die(folder, 1, group()[0], kind, -1)
    assert outcome == "fine"
    return calls if kind == "call" else messages


def every_step(tmp_path, world):
    """Return a kill for every call and every message of every rank."""
    counts = numbers_of_calls(tmp_path, world)
    return [
        (world, rank, kind, when) for (rank, kind), count in counts.items() for when in range(count)
    ]


def spread_kills(tmp_path, kills, threads):
    """Kill in several roots at the same time, as survivors mostly wait."""
    with ThreadPoolExecutor(threads) as pool:
        work = [
            pool.submit(killed_again_and_again, tmp_path / f"root{k}", kills[k::threads])
            for k in range(threads)
        ]
        return sum(one.result() for one in work)


def test_ranks_that_are_killed_at_10_steps_cost_no_checkpoint(tmp_path, record_property):
    record_property("kills", 10)
    every = every_step(tmp_path, 2)
    kills = random.Random(0).sample(every, 7)
    kills += [(2, 0, "moment", 0.02), (2, 1, "moment", 0.05), (3, 2, "call", 2)]
    assert len(every) > 60
    spread_kills(tmp_path, kills, 5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_are_killed_at_every_step_cost_no_checkpoint(tmp_path, world, record_property):
    kills = every_step(tmp_path, world)
    record_property("kills", len(kills))
    assert len(kills) > 60
    done = spread_kills(tmp_path, kills, 4)
    assert 0 < done < len(kills), "some kills come after the commit"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ranks_that_are_killed_at_60_random_moments_cost_no_checkpoint(tmp_path, record_property):
    record_property("kills", 60)
    chance = random.Random(2)
    kills = []
    for number in range(60):
        world = 2 + number % 2
        kills.append((world, chance.randrange(world), "moment", chance.random() * 0.15))
    spread_kills(tmp_path, kills, 4)
