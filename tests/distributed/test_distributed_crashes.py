"""Ranks that die, fail, hang or never come: the last checkpoint stays, the others know in time."""

import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from faults.layer import Layer, failing
from faults.saving import ELEMENTS, holds, loaded_step, model_at, optimizer_at, unfinished
from ranks import Ranks, on_ranks, report
from ranks.states import group, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from npydata import AsyncCheckpointer, CheckpointError, TrainingState, latest_checkpoint
from npydata.checkpointer import commit as commit_module
from npydata.distributed import ShardingConfig
from npydata.distributed import save as save_module
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
    original, counter = Coordinator.call_store, []

    def asked(self, method, *args):
        if method not in ("check", "add"):
            at(len(counter))
            counter.append(method)
        return original(self, method, *args)

    Coordinator.call_store = asked
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
        says_what_is_true(message, root / name, step + 1)
        assert seconds < 2 * TIMEOUT_S + MARGIN_S, place
        if message == "fine":
            assert newest == step + 1, place
        else:
            assert message.startswith("CheckpointError: "), place
            assert f"rank {victim}" in message, place
            assert str(root / name) in message or "no message" in message, place
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


# The store goes with rank 0


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("when", [0, 5, 9])
def test_rank_0_may_take_the_store_with_it(tmp_path, when):
    on_ranks(2, save_well, tmp_path / "a", 1)
    meet = f"tcp://localhost:{free_port()}"
    ranks = Ranks(3, save_and_die, tmp_path / "b", 2, 0, "message", when, meet=meet)
    assert ranks.outcome(0) == ("killed", -signal.SIGKILL)
    for rank in (1, 2):
        message, seconds, *_ = ranks.result(rank)
        assert message.startswith("CheckpointError: ")
        assert "store does not answer" in message or "rank 0: no message" in message
        assert seconds < 2 * TIMEOUT_S + MARGIN_S
    assert holds(tmp_path, 1) == 1
    saves_again(tmp_path, 3, 3, "b")


def test_without_faults_ranks_may_end_with_the_store_in_one_of_them(tmp_path):
    ranks = Ranks(3, save_well, tmp_path / "a", 1, meet=f"tcp://localhost:{free_port()}")
    assert [ranks.outcome(rank) for rank in range(3)] == [("result", None)] * 3
    assert holds(tmp_path, 1) == 1


# Failures that leave all ranks alive


def fail_and_save_again(folder, victim, when, number):
    """Save while one rank's system calls fail from ``when`` on; then save without."""
    keeper = AsyncCheckpointer(keep_last=2)
    mine = group()[0] == victim
    layer = Layer(when if mine else None, failing(number))

    def both():
        save_step(keeper, folder, 2, timeout_s=60)
        keeper.wait()

    with layer.installed():
        outcome, _ = outcome_of(both)
    torch.distributed.barrier()
    says_what_is_true(outcome, folder, 2)
    seen = loaded_step(latest_checkpoint(folder.parent)), unfinished(folder.parent)
    torch.distributed.barrier()
    save_step(keeper, folder.parent / "again", 3, timeout_s=60)
    keeper.wait()
    return outcome, seen, len(layer.calls)


def failed(root, world, victim, when):
    """Let one call of one rank fail; check what all say; return whether the save was done."""
    on_ranks(world, save_well, root / "a", 1)
    found = on_ranks(world, fail_and_save_again, root / "b", victim, when, errno.ENOSPC)
    place = f"rank {victim} of {world}, call {when}: {found}"
    outcomes = [outcome for outcome, *_ in found]
    steps = {seen[0] for _, seen, _ in found}
    if set(outcomes) == {"fine"}:
        assert steps == {2}, place
    else:
        assert steps <= {1, 2}, place
        assert "No space left on device" in outcomes[victim], place
        for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
            assert outcome == "fine" or (
                f"rank {victim}: " in outcome and "No space left" in outcome
            ), place
            assert outcome != "fine" or steps == {2}, place
    assert latest_checkpoint(root) == root / "again"
    assert holds(root, 3) == 3
    assert unfinished(root) == [], place
    return steps == {2}


def test_a_rank_whose_disk_is_full_says_so_to_all_and_all_save_again(tmp_path):
    done = [failed(tmp_path / f"{victim}-{when}", 2, victim, when)
            for victim in (0, 1) for when in (0, 2, 4)]  # fmt: skip
    assert not all(done)


def fail_and_leave(folder):
    """Save; rank 0 fails, and can't remove the folder that the others still write into."""
    if group()[0] == 0:
        commit_module.shutil.rmtree = lambda *args, **kwargs: None
    return fail_and_save_again(folder, 0, 0, errno.ENOSPC)


def test_what_rank_0_could_not_remove_while_others_wrote_they_do(tmp_path):
    on_ranks(2, save_well, tmp_path / "a", 1)
    found = on_ranks(3, fail_and_leave, tmp_path / "b")
    assert all("No space left" in outcome for outcome, *_ in found)
    assert {name for _, (_, left), _ in found for name in left} == set()
    assert holds(tmp_path, 3) == 3


def fail_at(folder, call):
    """Replace a checkpoint; rank 0 fails at a call of its own."""
    if group()[0] == 0:

        def fail(*_):
            raise OSError(errno.EIO, "Input/output error")

        setattr(save_module, call, fail)
    keeper = AsyncCheckpointer()

    def both():
        save_step(keeper, folder, 2, timeout_s=60)
        keeper.wait()

    return outcome_of(both)[0]


@pytest.mark.parametrize("call", ["make_root", "temporary_beside", "gather_entries", "commit"])
def test_a_save_that_fails_before_or_in_its_temporary_folder_leaves_what_it_was_to_replace(
    tmp_path, call
):
    on_ranks(2, save_well, tmp_path / "a", 1)
    for outcome in on_ranks(2, fail_at, tmp_path / "a", call):
        assert "Input/output error" in outcome
    assert holds(tmp_path, 1, ["a"]) == 1
    assert unfinished(tmp_path) == []


def fail_after(folder, call):
    """Replace a checkpoint; something fails once the new one is in place."""
    keeper = AsyncCheckpointer(keep_last=1)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    if group()[0] == 0 and call != "left":
        setattr(commit_module, call, fail)
    elif group()[0] == 1 and call == "left":
        original = Coordinator.send

        def send(self, topic, message):
            if topic == "left":
                raise CheckpointError("the process group's store does not answer")
            original(self, topic, message)

        Coordinator.send = send

    def both():
        save_step(keeper, folder, 2)
        keeper.wait()

    return outcome_of(both)[0]


@pytest.mark.parametrize("call", ["replacing", "remove_old", "left"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_save_that_fails_after_its_commit_is_said_to_be_saved(tmp_path, name, call):
    on_ranks(2, save_well, tmp_path / "a", 1)
    for outcome in on_ranks(2, fail_after, tmp_path / name, call):
        if call == "left":  # rank 1 has done all it had to
            assert outcome == "fine"
        else:
            assert f"{tmp_path / name}: is saved, but then: " in outcome
            assert "Input/output error" in outcome
    assert loaded_step(tmp_path / name) == 2


def die_after(folder, victim, call):
    """Replace a checkpoint; rank 0 dies before or after the commit puts it in place."""
    if group()[0] == victim:
        original = commit_module.put_in_place

        def put_in_place(*args):
            if call == "after":
                original(*args)
            die()

        commit_module.put_in_place = put_in_place
    keeper = AsyncCheckpointer()

    def both():
        save_step(keeper, folder, 2)
        keeper.wait()

    return outcome_of(both)[0]


@pytest.mark.parametrize("call", ["before", "after"])
def test_who_waits_for_a_rank_0_that_died_in_its_commit_says_what_it_knows(tmp_path, call):
    on_ranks(2, save_well, tmp_path / "a", 1)
    ranks = Ranks(2, die_after, tmp_path / "a", 0, call)
    assert ranks.outcome(0) == ("killed", -signal.SIGKILL)
    message = ranks.result(1)
    says_what_is_true(message, tmp_path / "a", 2)
    verdict = {"before": "not known to be saved", "after": "is saved, but then"}[call]
    assert f"{tmp_path / 'a'}: {verdict}: rank 0: no message" in message


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_whose_every_call_fails_in_turn_costs_nothing(tmp_path, world):
    counts = numbers_of_calls(tmp_path, world)
    done = [failed(tmp_path / f"{rank}-{when}", world, rank, when)
            for rank in range(world) for when in range(counts[rank, "call"])]  # fmt: skip
    assert len(done) > 50
    assert True in done
    assert False in done


def says_what_is_true(message, folder, step):
    """Check that an error that says what became of a save of ``step`` is right."""
    in_place = (folder / "manifest.json").exists() and loaded_step(folder) == step
    assert not in_place or ": not saved: " not in message, message
    assert in_place or ": is saved, " not in message, message


def save_past_a_limit(folder, victim):
    """Save while a rank's files may be no longer than a limit, which the kernel enforces."""
    keeper = AsyncCheckpointer()
    if group()[0] == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))

    def both():
        save_step(keeper, folder, 2, elements=1_000_000, timeout_s=60)
        keeper.wait()

    outcome, _ = outcome_of(both)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    torch.distributed.barrier()
    save_step(keeper, folder, 3, elements=1_000_000, timeout_s=60)
    keeper.wait()
    return outcome


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_the_kernel_refuses_names_the_file_and_the_rank(tmp_path, victim):
    on_ranks(2, save_well, tmp_path / "a", 1)
    outcomes = on_ranks(2, save_past_a_limit, tmp_path / "a", victim)
    assert "File too large" in outcomes[victim]
    assert f"model/rank_{victim}.safetensors" in outcomes[victim]
    assert outcomes[1 - victim].startswith("CheckpointError: ")
    assert f"rank {victim}: [Errno 27] File too large" in outcomes[1 - victim]
    assert holds(tmp_path, 3) == 3
    assert unfinished(tmp_path) == []


# Ranks that don't come, or stand still


def miss_one(root, who):
    """All but one rank save; then all do."""
    mesh()
    with AsyncCheckpointer() as keeper:
        outcome = "missed", 0.0
        if group()[0] != who:
            outcome = outcome_of(lambda: save_step(keeper, root / "b", 2))
        torch.distributed.barrier()
        save_step(keeper, root / "c", 3, timeout_s=60)
    return outcome


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_never_comes_is_named_and_all_are_in_step_at_the_next_folder(tmp_path, who):
    on_ranks(2, save_well, tmp_path / "a", 1)
    for rank, (message, seconds) in enumerate(on_ranks(3, miss_one, tmp_path, who)):
        if rank != who:
            assert message.startswith("CheckpointError: ")
            assert f"rank {who}: no message" in message
            assert seconds < 2 * TIMEOUT_S + MARGIN_S
    assert holds(tmp_path, 3) == 3
    assert unfinished(tmp_path) == []


def stand_still(root, step):
    """Save; the test stops a rank meanwhile; then save again."""
    keeper = AsyncCheckpointer()
    mesh()
    report("begins")

    def both():
        save_step(keeper, root / "b", step)
        keeper.wait()

    first = outcome_of(both)
    torch.distributed.barrier()
    save_step(keeper, root / "c", step + 1, timeout_s=60)
    keeper.wait()
    return first


def hold_before_writing(root, step, who):
    """As ``stand_still``; a rank stops itself in the thread that writes."""
    if group()[0] == who:
        original = os.pwrite
        stopped = []

        def pwrite(*args):
            if not stopped:
                stopped.append(1)
                report("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args)

        os.pwrite = pwrite
    return stand_still(root, step)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_stands_still_is_given_up_and_may_come_back(tmp_path, who):
    on_ranks(2, save_well, tmp_path / "a", 1)
    ranks = Ranks(2, hold_before_writing, tmp_path, 2, who)
    assert ranks.reported(who) == "begins"
    assert ranks.reported(who) == "stops"
    other = 1 - who
    assert ranks.reported(other) == "begins"
    threading.Event().wait(2.5 * TIMEOUT_S)
    assert holds(tmp_path, 1) == 1
    os.kill(ranks.pids[who], signal.SIGCONT)
    message, _ = ranks.result(other)
    assert message.startswith("CheckpointError: ")
    assert f"rank {who}: no message" in message
    mine, _ = ranks.result(who)
    assert mine != "fine"
    assert holds(tmp_path, 3) == 3
    assert unfinished(tmp_path) == []


def slow_rank(root, who):
    """Save while a rank's disk takes longer than the time-out in a single call."""
    if group()[0] == who:
        original, slow = os.fsync, [1.5 * TIMEOUT_S, 2.5 * TIMEOUT_S]

        def fsync(descriptor):
            time.sleep(slow.pop() if slow else 0)
            return original(descriptor)

        os.fsync = fsync
    keeper = AsyncCheckpointer()

    def both():
        save_step(keeper, root / "b", 2)
        keeper.wait()

    return outcome_of(both)[0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_disk_is_slow_in_one_call_is_waited_for(tmp_path, who):
    assert on_ranks(2, slow_rank, tmp_path, who) == ["fine"] * 2
    assert holds(tmp_path, 2) == 2
