"""Ranks that wait for each other: for one that is slow, and not for one that is dead."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from npydata.distributed.coordinator import Coordinator, coordinate
from npydata.distributed.group import Group
from npydata.errors import CheckpointError

TIMEOUT_S = 0.5


@pytest.fixture
def ranks():
    store = dist.HashStore()
    return [Coordinator(Group(store, rank, 2, TIMEOUT_S, store), "save") for rank in range(2)]


def answer_late(coordinator, *, at_work):
    with coordinator.heartbeats_beside() if at_work else nullcontext():
        time.sleep(5 * TIMEOUT_S)
    coordinator.send("outcome", {"files": 3})


@pytest.mark.parametrize("at_work", [True, False])
def test_a_rank_that_computes_is_waited_for_if_it_sends_heartbeats(ranks, at_work):
    late = threading.Thread(target=answer_late, args=(ranks[0],), kwargs={"at_work": at_work})
    late.start()
    try:
        if at_work:
            assert ranks[1].recv("outcome") == {"files": 3}
        else:
            with pytest.raises(
                CheckpointError,
                match=r"rank 0: no message \('outcome'\) and no heartbeat for 0.5 s",
            ):
                ranks[1].recv("outcome")
    finally:
        late.join()


def test_a_rank_that_died_is_not_waited_for_because_another_lives(ranks):
    over = threading.Event()

    def live():
        while not over.wait(TIMEOUT_S / 10):
            ranks[0].heartbeat()

    beside = threading.Thread(target=live)
    beside.start()
    try:
        with pytest.raises(CheckpointError, match="rank 1: no message"):
            ranks[0].gather_from("done", range(1, 2))
    finally:
        over.set()
        beside.join()


def test_heartbeats_stop_with_the_work(ranks):
    with ranks[0].heartbeats_beside():
        time.sleep(2 * TIMEOUT_S)
    assert ranks[1].alive({0})
    time.sleep(TIMEOUT_S)
    assert not ranks[1].alive({0})


class ComesLate(dist.HashStore):
    """A store to which each message comes just after it was looked for the first time."""

    looked = 0

    def check(self, names):
        self.looked += 1
        return self.looked > 1


def test_a_message_that_comes_in_the_last_moment_is_not_missed():
    store = ComesLate()
    coordinator = Coordinator(Group(store, 0, 2, 1e-9, store), "save", next_heartbeat=float("inf"))
    coordinator.send("outcome", {"files": 3})
    assert coordinator.recv("outcome") == {"files": 3}
    assert store.looked == 3


class Rank:
    """A rank in a thread of this process: the same object as long as its process group lives."""

    def __init__(self, store, number, timeout_s=60.0, world_size=2):
        self.group = Group(store, number, world_size, timeout_s, self)

    def save(self, folder, error=None):
        """Coordinate as a save does in the foreground; return what went wrong."""
        coordinator = coordinate(self.group, f"saves {folder}")
        try:
            with coordinator.abort_on_error("plan"):
                if error is not None:
                    raise CheckpointError(error)
            coordinator.require_same("step", 1)
        except CheckpointError as raised:
            return str(raised)
        return "fine"


def new_group(store, world_size=2, timeout_s=60.0):
    return [Rank(store, number, timeout_s, world_size) for number in range(world_size)]


@pytest.fixture
def two():
    return new_group(dist.HashStore())


def both(two, *folders):
    with ThreadPoolExecutor(len(two)) as threads:
        return list(threads.map(Rank.save, two, folders))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_save_different_folders_all_learn_which_long_before_the_time_out(world_size):
    ranks = new_group(dist.HashStore(), world_size)
    for folders in (["/a", "/b", "/b"], ["/c", "/c", "/b"], ["/b", "/a", "/a"]):
        messages = both(ranks, *folders[:world_size])
        if world_size == 3 or folders[0] != folders[1]:
            other = 1 if folders[0] != folders[1] else 2
            wanted = f"rank {other} saves {folders[other]}, rank 0 saves {folders[0]}"
            assert messages == [wanted] * world_size


def test_after_different_folders_ranks_are_in_step_again(two):
    both(two, "/a", "/b")
    for folder in ("/a", "/b", "/c", "/c"):
        assert both(two, folder, folder) == ["fine", "fine"], folder


def fail(ranks, how):
    """Let a group fail to save, and leave in the store what it does."""
    if how == "refused":
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Rank.save, ranks, ["/a", "/a"], [None, "no dict"]))
    elif how == "alone":
        ranks[0].save("/a")
    elif how == "without rank 0":
        ranks[1].save("/a")
    elif how == "rank 0 died":
        coordinate(ranks[0].group, "saves /a")
    elif how == "both died":
        coordinator = coordinate(ranks[0].group, "saves /a")
        coordinate(ranks[1].group, "saves /a").follow_rank_0(
            {"error": "rank 1: old", "purpose": "saves /a", "reply_to": "answer/old"}
        )
        coordinator.send("outcome", {"error": "rank 0: old"})


HOW = ["refused", "alone", "without rank 0", "rank 0 died", "both died"]


@pytest.mark.parametrize("how", HOW)
def test_what_a_failed_save_left_in_the_store_means_nothing_to_the_next_process_group(how):
    store = dist.HashStore()
    fail(new_group(store, timeout_s=0.1), how)
    assert both(new_group(store), "/a", "/a") == ["fine", "fine"]


@pytest.mark.parametrize("how", HOW[:3])
def test_a_save_that_failed_leaves_nothing_in_the_store(how):
    ranks = new_group(store := dist.HashStore(), timeout_s=0.2)
    assert both(ranks, "/a", "/a") == ["fine", "fine"]
    before = store.num_keys()
    fail(ranks, how)
    if how != "refused":  # for whom comes late, until the next one
        assert both(ranks, "/a", "/a") == ["fine", "fine"]
    assert store.num_keys() == before


def test_what_the_background_of_a_failed_save_left_goes_with_the_next():
    ranks = new_group(store := dist.HashStore())
    assert both(ranks, "/a", "/a") == ["fine", "fine"]
    before = store.num_keys()
    zero = coordinate(ranks[0].group, "saves /a")
    zero.send("outcome", {"error": "rank 0: no space"})
    zero.close(failed=True)
    assert both(ranks, "/a", "/a") == ["fine", "fine"]
    assert store.num_keys() == before


def test_a_rank_that_finds_another_rank_0_leaves_nothing_at_the_one_before():
    ranks = new_group(store := dist.HashStore())
    one = coordinate(ranks[1].group, "saves /a")
    for _ in range(2):  # the first of them died, or failed in the background
        zero = coordinate(ranks[0].group, "saves /a")
        one.next_look = one.next_heartbeat = 0
        one.follow_rank_0({})
        one.heartbeat()
    assert zero.is_there("plan", 1)
    assert zero.is_there("heartbeat", 1)
    assert store.num_keys() == 3  # and where rank 0 is


def test_no_two_plans_wait_for_the_answer_at_the_same_place(two):
    places = set()
    for _ in range(2):
        zero, one = (coordinate(rank.group, "saves /a") for rank in two)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(one.ask, {})
            zero.gather_plans({})
            places.add(zero.reply_to[1])
            zero.answer([{}, {}])
            asked.result()
    assert len(places) == 2


def test_a_rank_that_fails_before_the_others_come_lets_them_know_when_they_do(two):
    with ThreadPoolExecutor(1) as threads:
        failed = threads.submit(two[1].save, "/a", "no dict")
        assert two[0].save("/a") == "rank 1: no dict"
        assert failed.result() == "no dict"


def test_a_save_that_a_rank_forbade_is_not_committed(ranks):
    ranks[1].send("done", {"error": "rank 1: waited too long"})
    assert ranks[1].withdraw()
    with pytest.raises(CheckpointError, match="rank 1: waited too long"):
        ranks[0].begin_commit()


def test_a_save_that_is_being_committed_can_not_be_forbidden(ranks):
    ranks[0].begin_commit()
    assert not ranks[1].withdraw()


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_late_at_the_same_folder_is_waited_for(two, who):
    assert both(two, "/a", "/a") == ["fine", "fine"]
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(two[1 - who].save, "/b")
        time.sleep(0.5)  # long enough to look for the other one a few times
        assert two[who].save("/b") == early.result() == "fine"


def test_an_error_whose_text_begins_with_a_rank_is_named_as_any_other(ranks):
    with pytest.raises(ValueError, match="ranking"), ranks[1].abort_on_error("done"):
        raise ValueError("ranking is not possible")
    ranks[0].send("done", {})
    with pytest.raises(CheckpointError, match=r"^rank 1: ranking is not possible"):
        ranks[0].gather("done")
