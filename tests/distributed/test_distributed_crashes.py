"""Ranks that die, fail, hang or never come: the last checkpoint stays, the others know in time."""

import errno
import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from faults.layer import Layer, be_killed, failing
from faults.saving import ELEMENTS, holds, loaded_step, unfinished
from ranks import Ranks, on_ranks, report
from ranks.states import group, mesh, save_step

from npydata import AsyncCheckpointer, CheckpointError, latest_checkpoint
from npydata.distributed.coordinator import Coordinator
from npydata.distributed.save import with_outcome

pytestmark = pytest.mark.timeout(280)

TIMEOUT_S = 2.0
"""What a rank waits for another one in these tests."""
MARGIN_S = 30.0
"""What a busy machine may add."""


# What ranks do


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
        save_step(keeper, folder, step, ELEMENTS)


def count_messages(at):
    """Call ``at(n)`` before the n-th change of the store; how often it is asked varies."""
    original, counter = Coordinator._call, []  # all messages go through it

    def asked(self, method, *args):
        if method not in ("check", "get"):
            at(len(counter))
            counter.append(method)
        return original(self, method, *args)

    Coordinator._call = asked
    return counter


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


KINDS = ("call", "message")
MORE = 6
"""Calls that a save makes beyond those of the first one into a root, before all is done."""
HARM = {"dies": be_killed, "stops": stop, "fails": failing(errno.EIO)}


def save_and_suffer(folder, step, victim=None, harm="dies", kind="", when=None):
    """Save; one rank dies, stops or fails at a call of its background thread, or at a message."""
    hurt = kind if group()[0] == victim else ""
    layer = Layer(when if hurt == "call" else None, HARM[harm])
    messages = count_messages(lambda n: hurt == "message" and n == when and HARM[harm]())
    mesh()
    report("begins")
    keeper = AsyncCheckpointer(keep_last=2)

    def both():
        save_step(keeper, folder, step, ELEMENTS, TIMEOUT_S)
        keeper.wait()

    with layer.installed():
        outcome = outcome_of(both)
    return *outcome, len(layer.calls), len(messages)


# What must hold


def harmed(root, world, victim, harm, kind, when, step, name):
    """Harm one rank in a save of ``step``; check the others and the root; return the newest step.

    ``when`` is the number of a call, or seconds after the beginning.
    """
    before = set(unfinished(root))
    ranks = Ranks(world, save_and_suffer, root / name, step + 1, victim, harm, kind, when)
    if kind == "moment":
        assert ranks.next(victim) == ("reported", "begins")
        threading.Event().wait(when)
        ranks.processes[victim].kill()
    found = {rank: ranks.outcome(rank) for rank in range(world) if rank != victim}
    place = f"rank {victim} of {world} {harm}, {kind} {when}: {found}"
    if harm == "stops":
        ranks.processes[victim].kill()
    end = ranks.outcome(victim)
    reached = end[0] == "killed" or end[1][0] != "fine"
    if end[0] != "killed" and kind != "moment":
        assert harm == "fails" or end[1][KINDS.index(kind) + 2] <= when, (end, place)
    newest = holds(root, step)
    for kind_of_end, outcome in found.values():
        assert kind_of_end == "result", place
        message, seconds, *_ = outcome
        assert seconds < 2 * TIMEOUT_S + MARGIN_S, place
        if message == "fine":
            assert newest == loaded_step(root / name) == step + 1, place
        else:
            assert message.startswith("CheckpointError: "), place
            assert f"rank {victim}" in message, place
    if victim != 0:
        assert set(unfinished(root)) <= before, place
    return newest, reached


def saves_again(root, world, step, name):
    """Check that fresh ranks save, and clear away what the dead left."""
    on_ranks(world, save_well, root / name, step)
    assert latest_checkpoint(root) == root / name
    assert holds(root, step) == step
    assert unfinished(root) == []


def harmed_again_and_again(root, cases):
    """Harm by ``(world, victim, harm, kind, when)``; return how often the save was done."""
    step, done = 1, 0
    on_ranks(2, save_well, root / "a0", step)
    for number, (world, *case) in enumerate(cases):
        name = f"a{number % 2}" if number % 3 else f"step{number}"
        newest, reached = harmed(root, world, *case, step, name)
        done += newest > step and reached
        step = newest
        if number % 4 == 3 or number == len(cases) - 1:
            step += 1
            saves_again(root, world, step, f"a{number % 2}")
    return done


def every_step(tmp_path, world, harm="dies"):
    """Return a harm for every call and every message of every rank."""
    cases = []
    found = on_ranks(world, save_and_suffer, tmp_path / "counted" / "a", 1)
    for rank, (outcome, _, calls, messages) in enumerate(found):
        assert outcome == "fine"
        counts = {"call": calls + MORE, "message": messages * (harm != "fails")}
        cases += [(world, rank, harm, kind, n) for kind in counts for n in range(counts[kind])]
    return cases


def spread_out(tmp_path, cases, threads):
    """Harm ranks in several roots at the same time, as survivors mostly wait."""
    with ThreadPoolExecutor(threads) as pool:
        work = [
            pool.submit(harmed_again_and_again, tmp_path / f"root{k}", cases[k::threads])
            for k in range(threads)
        ]
        return sum(one.result() for one in work)


def test_ranks_that_die_stop_or_fail_cost_no_checkpoint(tmp_path, record_property):
    record_property("kills", 9)
    cases = random.Random(0).sample(every_step(tmp_path, 2), 7)
    cases += [(2, 0, "dies", "moment", 0.02), (3, 2, "dies", "call", 2)]
    cases += [(2, k % 2, "stops", "message", k) for k in (2, 3)]
    cases += [(2, k % 2, "fails", "call", k) for k in (1, 2, 4)]
    spread_out(tmp_path, cases, 5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world, harm", [(2, "dies"), (3, "dies"), (2, "stops"), (2, "fails")])
def test_harmed_at_every_step_ranks_cost_no_checkpoint(tmp_path, world, harm, record_property):
    cases, chance = every_step(tmp_path, world, harm), random.Random(world)
    for _ in range(30 if harm == "dies" else 0):
        cases.append((world, chance.randrange(world), harm, "moment", chance.random() * 0.15))
    record_property("kills", len(cases))
    done = spread_out(tmp_path, cases, 4)
    assert 0 < done < len(cases), "some harm comes after the commit"


def save_late_and_again(folder):
    """Rank 1 misses a save; then both join a new group at the same store, and save."""
    rank, world = group()
    store = dist.distributed_c10d._get_default_store()
    late = "fine"
    if rank == 0:
        with AsyncCheckpointer() as keeper:
            late, _ = outcome_of(lambda: save_step(keeper, folder / "late", 1, ELEMENTS, 0.5))
        store.set("late", "")
    store.wait(["late"])
    before = store.num_keys()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh.cache_clear()
    save_well(folder / "again", 2)
    return late, before


def test_a_rank_that_does_not_come_is_named_and_a_new_group_at_the_store_saves(tmp_path):
    found = on_ranks(2, save_late_and_again, tmp_path)
    assert "rank 1 did not answer" in found[0][0]
    assert holds(tmp_path, 2) == 2
    assert latest_checkpoint(tmp_path) == tmp_path / "again"
    assert not (tmp_path / "late").exists()


def test_a_rank_that_gives_up_deletes_nothing_where_rank_0_may_still_commit(tmp_path, monkeypatch):
    shared, remove = tmp_path / "shared", Mock()
    shared.mkdir()
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(CheckpointError, match="rank 0 did not answer"):
        with_outcome(Mock(rank=1, timeout_s=1), shared, print)
    assert remove.called
    assert not shared.exists()
