"""Ranks that wait for each other: for one that is slow, and not for one that is dead."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from npydata.distributed.coordinator import Coordinator, Group
from npydata.errors import CheckpointError

TIMEOUT_S = 0.5


@pytest.fixture
def ranks():
    store = dist.HashStore()
    return [Coordinator(Group(store, rank, 2, TIMEOUT_S, store), "save") for rank in range(2)]


def answer_late(coordinator, *, at_work):
    with coordinator.heartbeats_beside() if at_work else nullcontext():
        time.sleep(5 * TIMEOUT_S)
    coordinator.send("answer", {"files": 3}, to=1)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_rank_that_computes_is_waited_for_if_it_sends_heartbeats(ranks, at_work):
    late = threading.Thread(target=answer_late, args=(ranks[0],), kwargs={"at_work": at_work})
    late.start()
    try:
        if at_work:
            assert ranks[1].recv("answer", 1) == {"files": 3}
        else:
            with pytest.raises(
                CheckpointError, match=r"rank 0: no message \('answer'\) and no heartbeat for 0.5 s"
            ):
                ranks[1].recv("answer", 1)
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
    coordinator = Coordinator(
        Group(store, 1, 2, 1e-9, store), "save", next_heartbeat=float("inf"), next_look=float("inf")
    )
    coordinator.send("answer", {"files": 3}, to=1)
    assert coordinator.recv("answer", 1) == {"files": 3}
    assert store.looked == 3


class Rank:
    """A rank in a thread of this process, with its own count of calls."""

    def __init__(self, store, number, timeout_s=60.0):
        self.group = Group(store, number, 2, timeout_s, self)

    def save(self, folder):
        """Come to a rendezvous as a save does; return what went wrong."""
        coordinator = self.group.rendezvous(Path(folder), f"saves {folder}")
        try:
            with coordinator.abort_on_error("plan"):
                coordinator.agree("step", 1)
        except CheckpointError as error:
            return str(error)
        return "fine"


@pytest.fixture
def two():
    store = dist.HashStore()
    return [Rank(store, number) for number in range(2)]


def both(two, *folders):
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(Rank.save, two, folders))


def test_ranks_that_save_different_folders_learn_so_long_before_the_time_out(two):
    began = time.monotonic()
    for message in both(two, "/a", "/b"):
        assert "rank 0 saves /a" in message
        assert "rank 1 saves /b" in message
    assert time.monotonic() - began < 30


def test_after_different_folders_ranks_are_in_step_again(two):
    both(two, "/a", "/b")
    for folder in ("/a", "/b", "/c", "/c"):
        assert both(two, folder, folder) == ["fine", "fine"], folder


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_late_at_the_same_folder_is_waited_for(two, who):
    assert both(two, "/a", "/a") == ["fine", "fine"]
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(two[1 - who].save, "/b")
        time.sleep(0.5)  # long enough to look for it elsewhere a few times
        assert two[who].save("/b") == early.result() == "fine"


def test_an_error_whose_text_begins_with_a_rank_is_named_as_any_other(ranks):
    with pytest.raises(ValueError, match="ranking"), ranks[1].abort_on_error("done"):
        raise ValueError("ranking is not possible")
    ranks[0].send("done", {})
    with pytest.raises(CheckpointError, match=r"^rank 1: ranking is not possible"):
        ranks[0].gather("done")
