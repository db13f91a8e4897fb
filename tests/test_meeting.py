"""Ranks that wait for each other: for one that is slow, and not for one that is dead."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from npydata.distributed.meeting import Group, Meeting
from npydata.errors import CheckpointError

TIMEOUT_S = 0.5


@pytest.fixture
def ranks():
    store = dist.HashStore()
    return [Meeting(Group(store, rank, 2, TIMEOUT_S, store), "save") for rank in range(2)]


def answer_late(meeting, *, at_work):
    with meeting.at_work() if at_work else nullcontext():
        time.sleep(5 * TIMEOUT_S)
    meeting.tell("answer", {"files": 3}, to=1)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_rank_that_computes_is_waited_for_if_it_shows_signs_of_life(ranks, at_work):
    late = threading.Thread(target=answer_late, args=(ranks[0],), kwargs={"at_work": at_work})
    late.start()
    try:
        if at_work:
            assert ranks[1].hear("answer", 1) == {"files": 3}
        else:
            with pytest.raises(
                CheckpointError, match=r"rank 0: no word \('answer'\) and no sign of life for 0.5 s"
            ):
                ranks[1].hear("answer", 1)
    finally:
        late.join()


def test_a_rank_that_died_is_not_waited_for_because_another_lives(ranks):
    over = threading.Event()

    def live():
        while not over.wait(TIMEOUT_S / 10):
            ranks[0].show_life()

    beside = threading.Thread(target=live)
    beside.start()
    try:
        with pytest.raises(CheckpointError, match="rank 1: no word"):
            ranks[0].gather_from("done", range(1, 2))
    finally:
        over.set()
        beside.join()


def test_signs_stop_with_the_work(ranks):
    with ranks[0].at_work():
        time.sleep(2 * TIMEOUT_S)
    assert ranks[1].live({0})
    time.sleep(TIMEOUT_S)
    assert not ranks[1].live({0})


class ComesLate(dist.HashStore):
    """A store to which each message comes just after it was looked for the first time."""

    looked = 0

    def check(self, names):
        self.looked += 1
        return self.looked > 1


def test_a_message_that_comes_in_the_last_moment_is_not_missed():
    store = ComesLate()
    meeting = Meeting(Group(store, 1, 2, 1e-9, store), "save", next_sign=float("inf"))
    meeting.tell("answer", {"files": 3}, to=1)
    assert meeting.hear("answer", 1) == {"files": 3}
    assert store.looked == 3
