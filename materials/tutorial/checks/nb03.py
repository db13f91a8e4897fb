"""What lesson 03 lets the learner build, and the wrong answers that people give.

A buffer is judged without threads and without a clock. Its conditions are `Room`s: while one call
waits there, the next events of the script happen, as other threads would make them happen. A wait
ends when one of them called it; when nothing is left to happen, nobody ever will.
"""

import threading
from collections import deque
from types import SimpleNamespace

import torch

from tutorial.building import Build
from tutorial.frames.loader import MyBuffer, MyIterator, MyLoader
from tutorial.lesson_loader import (
    LOOK_AGAIN_SECONDS,
    ExceptionWrapper,
    PrefetchIterator,
    ReorderBuffer,
    fetch_chunk,
    worker_loop,
)
from tutorial.promised.loader import CARDS, PROMISES  # noqa: F401

PART = "loader"
COUNTERS = ("claimed", "taken", "released", "closed")
MOST_WAITS, MOST_LOOKS = 50, 50
FOR_EVER = "is never called", "is woken by close, and sleeps again"


class ForEverError(BaseException):
    """Nobody is left who could end this wait; no `except Exception` should catch it."""


class LooksForEverError(ForEverError):
    """It looks without end, and holds the lock meanwhile."""


class NotHeldError(RuntimeError):
    """What Python says where a condition is used without its lock."""


class Room(threading.Condition):
    """A condition in one thread: a wait lets the script go on until somebody calls."""

    def __init__(self, stage, name):
        super().__init__(stage.buffer.lock)
        self.stage, self.name, self.calls, self.waiting = stage, name, 0, 0

    def wait(self, timeout=None):
        if not self._is_owned():
            raise NotHeldError
        self.stage.waited(self.name)
        self.waiting += 1
        try:
            while not self.calls:
                self.stage.next_event()
            self.calls -= 1
        finally:
            self.waiting -= 1
        self.stage.woke()
        return True

    def notify(self, n=1):
        if not self._is_owned():
            raise NotHeldError
        self.calls = min(self.calls + n, self.waiting)

    def notify_all(self):
        self.notify(self.waiting)


class Results(dict):
    """The results of a buffer; who changes them should hold the lock."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def __contains__(self, number):
        self.stage.looked()
        return super().__contains__(number)

    def __setitem__(self, number, result):
        self.stage.changed("results")
        super().__setitem__(number, result)

    def pop(self, *args):
        self.stage.changed("results")
        return super().pop(*args)

    def clear(self):
        self.stage.changed("results")
        super().clear()


class Stage:
    """A buffer on which a script is played: claim, put 2, take_next, release, close, wake."""

    def __init__(self, methods, count, capacity, script):
        stage = self
        self.unlocked, self.told, self.running, self.waits = [], {}, [], 0
        self.playing, self.newest, self.looks, self.kept = False, "", 0, []
        self.woken_by_close = set()

        class Buffer(MyBuffer):
            def __setattr__(self, name, value):
                if name in COUNTERS:
                    stage.changed(name)
                super().__setattr__(name, value)

            def has_room(self):
                stage.looked()
                return super().has_room()

        for name, method in methods.items():
            setattr(Buffer, name, method)
        self.buffer = Buffer(count, capacity)
        self.buffer.room, self.buffer.ready = Room(self, "room"), Room(self, "ready")
        self.buffer.results = Results(self)
        self.script, self.playing = list(script), True

    def changed(self, what):
        if self.playing and not self.buffer.lock._is_owned() and what not in self.unlocked:
            self.unlocked.append(what)

    def looked(self):
        """Whoever looks again and again, and never waits, would keep the others out for ever."""
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise LooksForEverError

    def waited(self, room):
        self.waits += 1
        if self.waits > MOST_WAITS:
            raise ForEverError
        waits = self.told[self.running[-1]]
        if f"waits for `{room}`" not in waits:
            waits.append(f"waits for `{room}`")

    def woke(self):
        """Whoever sleeps again after a `close` did not look at `closed`."""
        if self.newest == "close":
            self.woken_by_close.add(self.running[-1])

    def next_event(self):
        """Let the next thing happen; of a wake, nothing happens but that all look again."""
        if not self.script:
            raise ForEverError
        self.newest, self.looks = self.script.pop(0), 0
        event, *number = self.newest.split()
        if event == "wake":
            for room in (self.buffer.room, self.buffer.ready):
                room.calls = room.waiting
            self.newest = "a look"
            return
        args = (int(number[0]), f"batch {number[0]}") if event == "put" else ()
        key = f"{len(self.told) + 1}: {self.newest}"
        self.told[key] = []
        self.running.append(key)
        try:
            result = getattr(self.buffer, event)(*args)
            outcome = f"gives {result!r}" if event in ("claim", "take_next") else "returns"
        except LooksForEverError:
            outcome = "looks again and again, without end"
        except ForEverError:
            outcome = FOR_EVER[key in self.woken_by_close]
        except NotHeldError:
            outcome = "raises RuntimeError: the lock is not held"
        except Exception as error:
            outcome = f"raises {type(error).__name__}"
        self.running.pop()
        if not self.running and self.buffer.lock._is_owned():
            self.kept.append(key)
        if self.told[key] and outcome not in FOR_EVER:
            self.told[key].append(f"after {self.newest}")
        self.told[key].append(outcome)

    def play(self):
        while self.script:
            self.next_event()
        return {
            **{event: ", ".join(happened) for event, happened in self.told.items()},
            "lies ready at the end": in_order(self.buffer.results),
            "changed without the lock": self.unlocked,
            "holds the lock for ever after": self.kept[:1],
        }


def in_order(results):
    """The numbers that lie ready; what is no dictionary any more, as it is."""
    return sorted(results) if isinstance(results, dict) else repr(results)


def played(name):
    """How to observe a method of the buffer: on a stage, beside the library's other methods."""
    return lambda answer, count, capacity, *script: Stage(
        {name: answer}, count, capacity, script
    ).play()


def as_script(case):
    count, capacity, *script = case
    return f"buffer = MyBuffer(count={count}, capacity={capacity}): {', '.join(script)}"


# worker_loop

HANDS_OUT = [(), (0,), (0, 1), (1, 4, 5), (2, 3, 5, 7, 11)]


def worked(answer, *numbers):
    """What a worker does, in order, with a buffer that hands out these numbers."""
    left, told = list(numbers), []

    def claim():
        told.append("claim")
        if told.count("claim") > len(numbers) + 1:
            raise RuntimeError("claimed again after None")
        return left.pop(0) if left else None

    def make(number):
        told.append(f"make {number}")
        if len(told) > 5 * len(HANDS_OUT[-1]):
            raise RuntimeError("there is no end")
        return f"batch {number}"

    def put(number, result):
        told.append(f"put {number!r}, {result!r}")

    try:
        answer(SimpleNamespace(claim=claim, put=put), make)
    except RuntimeError as error:
        told[9:] = [f"{error}"]
    return {"it happens": "; ".join(told)}


def ends_at_zero(buffer, make):
    while number := buffer.claim():
        buffer.put(number, make(number))


def works_once(buffer, make):
    number = buffer.claim()
    if number is not None:
        buffer.put(number, make(number))


def claims_once(buffer, make):
    number = buffer.claim()
    while number is not None:
        buffer.put(number, make(number))


def puts_without_number(buffer, make):
    while (number := buffer.claim()) is not None:
        buffer.put(make(number), number)


def takes_none_for_a_number(buffer, make):
    while True:
        number = buffer.claim()
        buffer.put(number, make(number))


def makes_all_first(buffer, make):
    made = {}
    while (number := buffer.claim()) is not None:
        made[number] = make(number)
    for number, result in made.items():
        buffer.put(number, result)


WORKER_LOOP = Build(
    name="worker_loop",
    reference=worker_loop,
    cases=HANDS_OUT,
    observe=worked,
    show=lambda case: f"worker_loop(buffer, make)  # claim() gives {[*case, None]}",
    wrong={
        "The first number is 0, and you take it for none.": ends_at_zero,
        "You make one batch; a worker goes on until there is no number left.": works_once,
        "You claim once, and make that batch again and again.": claims_once,
        "`put` takes the number first, then the result.": puts_without_number,
        "`None` is no number: there is nothing left to make.": takes_none_for_a_number,
        "You keep all results until the end; the consumer waits for the first one.": (
            makes_all_first
        ),
    },
)


# claim

CLAIMS = [
    (3, 5, "claim", "claim", "claim", "claim", "claim"),
    (9, 1, "claim", "claim"),
    (9, 2, "claim", "claim", "put 0", "put 1", "claim", "take_next", "release"),
    (9, 2, "claim", "claim", "put 0", "take_next", "claim", "release"),
    (9, 1, "claim", "claim", "wake", "wake"),
    (9, 1, "claim", "claim", "close"),
    (2, 1, "claim", "claim", "claim", "release", "wake"),
    (9, 4, "claim", "close", "claim"),
    (9, 1, "claim", "claim", "claim", "release", "wake", "release"),
    (2, 1, "claim", "claim", "claim", "release", "put 0", "take_next", "release", "wake"),
]


def claim_as(self, wait="while", closed=True, end=True, room=None, give=lambda n: n - 1):
    """The library's `claim` with one thing changed."""

    def over():
        return (closed and self.closed) or (end and self.claimed == self.count)

    def may():
        return over() or (room(self) if room else self.has_room())

    with self.lock:
        while not may():
            if wait == "no":
                break
            self.room.wait(LOOK_AGAIN_SECONDS)
            if wait == "if":
                break
        if over():
            return None
        self.claimed += 1
        return give(self.claimed)


def claims_unlocked(self):
    if self.closed or self.claimed == self.count:
        return None
    while not self.has_room():
        with self.lock:
            self.room.wait(LOOK_AGAIN_SECONDS)
            if self.closed:
                return None
    self.claimed += 1
    return self.claimed - 1


def claims_without_lock(self):
    while not (self.closed or self.claimed == self.count or self.has_room()):
        self.room.wait(LOOK_AGAIN_SECONDS)
    if self.closed or self.claimed == self.count:
        return None
    self.claimed += 1
    return self.claimed - 1


def deaf_to_close(self):
    with self.lock:
        while not (self.claimed == self.count or self.has_room()):
            self.room.wait(LOOK_AGAIN_SECONDS)
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed - 1


def waits_for_room_alone(self):
    with self.lock:
        while not self.has_room():
            self.room.wait(LOOK_AGAIN_SECONDS)
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed - 1


def asks_for_the_end_in_the_wait(self):
    with self.lock:
        while not self.has_room():
            self.room.wait(LOOK_AGAIN_SECONDS)
            if self.closed or self.claimed == self.count:
                return None
        self.claimed += 1
        return self.claimed


def looks_at_the_end_once(self):
    with self.lock:
        if self.closed or self.claimed == self.count:
            return None
        while not self.has_room():
            self.room.wait(LOOK_AGAIN_SECONDS)
        self.claimed += 1
        return self.claimed - 1


def looks_and_begins_at_one(self):
    while not self.has_room():
        pass
    with self.lock:
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed


def one_number_too_many(self):
    with self.lock:
        while not (self.closed or self.claimed > self.count or self.has_room()):
            self.room.wait(LOOK_AGAIN_SECONDS)
        if self.closed or self.claimed > self.count:
            return None
        self.claimed += 1
        return self.claimed - 1


def looks_without_end(self):
    with self.lock:
        while not (self.closed or self.claimed == self.count or self.has_room()):
            pass
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed - 1


def waits_in_the_wrong_room(self):
    with self.lock:
        while not (self.closed or self.claimed == self.count or self.has_room()):
            self.ready.wait(LOOK_AGAIN_SECONDS)
        if self.closed or self.claimed == self.count:
            return None
        self.claimed += 1
        return self.claimed - 1


def gives_none_when_full(self):
    with self.lock:
        if self.closed or self.claimed == self.count or not self.has_room():
            return None
        self.claimed += 1
        return self.claimed - 1


CLAIM = Build(
    name="claim",
    reference=ReorderBuffer.claim,
    owner="MyBuffer",
    cases=CLAIMS,
    observe=played("claim"),
    show=as_script,
    wrong={
        "You hand out a number although there is no room.": lambda self: claim_as(self, "no"),
        "You look only once; who is woken may still find no room.": (
            lambda self: claim_as(self, "if")
        ),
        "The epoch has an end: after the last number comes None.": (
            lambda self: claim_as(self, end=False)
        ),
        "A worker of a closed buffer should hear that it is over.": (
            lambda self: claim_as(self, closed=False)
        ),
        "Only room ends your wait, or the last number; `close` does not.": deaf_to_close,
        "Only room ends your wait; `close` and the end of the epoch do not.": waits_for_room_alone,
        "The first number is 0; yours is 1.": (
            lambda self: claim_as(self, give=lambda number: number)
        ),
        "The first number is 0; and the end may come without a wait.": (
            asks_for_the_end_in_the_wait
        ),
        "`count` numbers begin at 0: the last one is not `count`.": one_number_too_many,
        "You wait outside `with self.lock`: the lock that `wait` lets go of has to be held.": (
            claims_without_lock
        ),
        "A batch that was taken keeps its slot until `release`.": (
            lambda self: claim_as(self, room=lambda b: b.claimed - b.taken < b.capacity)
        ),
        "Two workers may claim at the same moment: hold `self.lock`.": claims_unlocked,
        "Workers wait for `room`; who is called in `ready` is the consumer.": (
            waits_in_the_wrong_room
        ),
        "No room is not the end: wait for it.": gives_none_when_full,
        "You look without sleeping; to wait in `self.room` lets go of the lock.": looks_without_end,
        "The first number is 0; and you look without sleeping.": looks_and_begins_at_one,
        "You look at `self.closed` before the wait; `close` may come during it.": (
            looks_at_the_end_once
        ),
    },
)


# put

PUTS = [
    (4, 4, "claim", "claim", "put 0", "put 1"),
    (4, 4, "claim", "claim", "put 1", "take_next", "put 0"),
    (4, 4, "claim", "take_next", "put 0"),
    (4, 4, "claim", "claim", "take_next", "put 0", "put 1"),
    (4, 4, "claim", "claim", "claim", "put 0", "take_next", "take_next", "put 2", "put 1"),
    (4, 4, "claim", "close", "put 0"),
    (4, 4, "claim", "claim", "put 1", "close", "put 0"),
]


def put_as(self, number, result, guard=True, calls="ready", key=None):
    with self.lock:
        if not (guard and self.closed):
            self.results[number if key is None else key(self)] = result
        getattr(self, calls).notify()


def puts_unlocked(self, number, result):
    if not self.closed:
        self.results[number] = result
    with self.lock:
        self.ready.notify()


def puts_without_lock(self, number, result):
    if not self.closed:
        self.results[number] = result
    if number == self.taken:
        self.ready.notify()


def puts_and_always_calls(self, number, result):
    if not self.closed:
        self.results[number] = result
        self.ready.notify()


def calls_when(number_of):
    def put(self, number, result):
        with self.lock:
            if not self.closed:
                self.results[number] = result
            if number == number_of(self):
                self.ready.notify()

    return put


def puts_in_its_turn(self, number, result):
    with self.lock:
        while number != self.taken and not self.closed:
            self.room.wait(LOOK_AGAIN_SECONDS)
        put_as(self, number, result)


PUT = Build(
    name="put",
    reference=ReorderBuffer.put,
    owner="MyBuffer",
    cases=PUTS,
    observe=played("put"),
    show=as_script,
    wrong={
        "After `close` nobody takes it: it lies in memory for nobody.": (
            lambda self, number, result: put_as(self, number, result, guard=False)
        ),
        "The consumer sleeps in `ready`, and you don't call it there.": (
            lambda self, number, result: put_as(self, number, result, calls="room")
        ),
        "You call workers, not the consumer; and a closed buffer keeps what nobody takes.": (
            lambda self, number, result: put_as(self, number, result, guard=False, calls="room")
        ),
        "A worker need not wait for its number's turn: it leaves the result and goes on.": (
            puts_in_its_turn
        ),
        "You leave it under another number: the order of arrival, not of the epoch.": (
            lambda self, number, result: put_as(
                self, number, result, key=lambda b: b.taken + len(b.results)
            )
        ),
        "`released` counts what was given back; the consumer may wait for a later one.": (
            calls_when(lambda self: self.released)
        ),
        "Numbers begin at 0: when `taken` results were taken, `taken` itself is next.": (
            calls_when(lambda self: self.taken + 1)
        ),
        "You change `self.results` without holding `self.lock`.": puts_unlocked,
        "You wake outside `with self.lock`: who calls a condition has to hold its lock.": (
            puts_without_lock
        ),
        "You write and wake without `with self.lock`: who calls a condition has to hold its "
        "lock.": puts_and_always_calls,
    },
)


# take_next

TAKES = [
    (4, 4, "claim", "put 0", "take_next"),
    (4, 4, "claim", "claim", "put 1", "put 0", "take_next", "take_next"),
    (4, 4, "claim", "claim", "take_next", "put 1", "wake", "put 0", "take_next"),
    (4, 4, "take_next", "wake", "wake"),
    (4, 4, "take_next", "close"),
    (4, 4, "claim", "put 0", "close", "take_next"),
    (4, 4, "claim", "put 0", "take_next", "take_next", "claim", "put 1"),
    (2, 1, "claim", "put 0", "take_next", "claim", "release", "put 1", "take_next"),
]


def take_as(self, wait="while", closed=True, forget=True, room="ready", release=False):
    with self.lock:
        while self.taken not in self.results:
            if closed and self.closed:
                raise RuntimeError("the buffer was closed")
            getattr(self, room).wait(LOOK_AGAIN_SECONDS)
            if wait == "if":
                break
        self.taken += 1
        if release:
            self.released += 1
            self.room.notify()
        if forget:
            return self.results.pop(self.taken - 1)
        return self.results[self.taken - 1]


def takes_without_lock(self):
    while self.taken not in self.results:
        if self.closed:
            raise RuntimeError("the buffer was closed")
        self.ready.wait(LOOK_AGAIN_SECONDS)
    self.taken += 1
    return self.results.pop(self.taken - 1)


def looks_at_closed_once(self):
    with self.lock:
        if self.closed:
            raise RuntimeError("the buffer was closed")
        while self.taken not in self.results:
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(self.taken - 1)


def takes_behind_its_count(self):
    with self.lock:
        while self.taken not in self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(self.taken)


def takes_deaf_and_behind(self):
    with self.lock:
        while self.taken not in self.results:
            self.ready.wait(LOOK_AGAIN_SECONDS)
        if self.closed:
            raise RuntimeError("the buffer was closed")
        self.taken += 1
        return self.results.pop(self.taken)


def takes_without_sleep(self):
    with self.lock:
        while self.taken not in self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
        self.taken += 1
        return self.results.pop(self.taken - 1)


def spins_without_lock(self):
    while self.taken not in self.results:
        pass
    with self.lock:
        self.taken += 1
        return self.results.pop(self.taken - 1)


def asks_after_the_wait(self):
    with self.lock:
        while self.taken not in self.results:
            self.ready.wait(LOOK_AGAIN_SECONDS)
            if self.closed:
                raise RuntimeError("the buffer was closed")
        self.taken += 1
        return self.results.pop(self.taken - 1)


def takes_any(self):
    with self.lock:
        while not self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(next(iter(self.results)))


def takes_the_smallest(self):
    with self.lock:
        while not self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(min(self.results))


def takes_the_smallest_for_ever(self):
    with self.lock:
        while not self.results:
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(min(self.results))


def takes_none(self):
    with self.lock:
        while self.taken not in self.results:
            if self.closed:
                return None
            self.ready.wait(LOOK_AGAIN_SECONDS)
        self.taken += 1
        return self.results.pop(self.taken - 1)


def stays_at_the_first(self):
    with self.lock:
        while self.taken not in self.results:
            if self.closed:
                raise RuntimeError("the buffer was closed")
            self.ready.wait(LOOK_AGAIN_SECONDS)
        return self.results.pop(self.taken)


TAKE = Build(
    name="take_next",
    reference=ReorderBuffer.take_next,
    owner="MyBuffer",
    cases=TAKES,
    observe=played("take_next"),
    show=as_script,
    wrong={
        "You take what came first: that is the order of the workers.": takes_any,
        "You take the smallest number that lies there, though the next one may be in the making.": (
            takes_the_smallest
        ),
        "The smallest number there need not be next; and `close` doesn't end your wait.": (
            takes_the_smallest_for_ever
        ),
        "You look only once; who is woken may still find nothing.": (
            lambda self: take_as(self, wait="if")
        ),
        "Only a result ends your wait; `close` does not.": (
            lambda self: take_as(self, closed=False)
        ),
        "You look at `self.closed` before the wait; `close` may come during it.": (
            looks_at_closed_once
        ),
        "You wait outside `with self.lock`: the lock that `wait` lets go of has to be held.": (
            takes_without_lock
        ),
        "You look without sleeping; to wait in `self.ready` lets go of the lock.": (
            takes_without_sleep
        ),
        "You look without sleeping, and `close` never ends it.": spins_without_lock,
        "You look at `self.closed` only after a wait; it may be closed before.": (
            asks_after_the_wait
        ),
        "Only a result ends your wait; and you take the number behind your count.": (
            takes_deaf_and_behind
        ),
        "You count, and then take the number behind it.": takes_behind_its_count,
        "None could be a batch; who takes from a closed buffer deserves an error.": takes_none,
        "The result stays in `self.results`, and in memory.": (
            lambda self: take_as(self, forget=False)
        ),
        "The consumer waits for `ready`; `room` is where workers wait.": (
            lambda self: take_as(self, room="room")
        ),
        "You give the slot back; that is for `release`, which the consumer calls.": (
            lambda self: take_as(self, release=True)
        ),
        "You don't note that it was taken: the next turn never comes.": stays_at_the_first,
    },
)


# fetch_chunk


class Unreadable(Exception):  # noqa: N818
    """What a data set may raise."""


CHUNKS = [
    (range(0, 1), {}),
    (range(3, 6), {}),
    (range(0, 1), {0: Unreadable}),
    (range(3, 7), {5: Unreadable}),
    (range(2, 5), {2: StopIteration}),
    (range(0, 2), {1: KeyboardInterrupt}),
    (range(0, 2), {1: SystemExit}),
    (range(4, 4), {}),
]


def chunk_seen(answer, numbers, bad):
    """The chunk, and what was asked for on the way."""
    asked = []

    def fetch(number):
        asked.append(number)
        if number in bad:
            raise bad[number](f"batch {number}")
        return f"batch {number}"

    try:
        chunk = answer(fetch, numbers)
    except BaseException as error:
        return {"the chunk": f"none, it raises {type(error).__name__}"}
    kind = type(chunk).__name__
    if kind != "deque":  # whatever is in it
        return {"as a": kind}
    return {"the chunk": list(map(in_words, chunk)), "as a": kind, "asked for": asked}


def in_words(item):
    if isinstance(item, ExceptionWrapper):
        error = item.error
        known = isinstance(error, BaseException) and error.__traceback__ is not None
        return f"the error {type(error).__name__}{'' if known else ' (without its traceback)'}"
    return item if isinstance(item, str) else f"a {type(item).__name__}"


def chunk_as(fetch, numbers, caught=BaseException, wrap=ExceptionWrapper, keep=True, stop=True):
    chunk = deque()
    for number in numbers:
        try:
            chunk.append(fetch(number))
        except caught as error:
            if keep:
                chunk.append(wrap(error))
            if stop:
                break
    return chunk


def raises_it(fetch, numbers):
    return deque(fetch(number) for number in numbers)


def lists_unguarded(fetch, numbers):
    return [fetch(number) for number in numbers]


def returns_the_error_alone(fetch, numbers):
    chunk = deque()
    try:
        chunk.extend(map(fetch, numbers))
    except BaseException as error:
        return ExceptionWrapper(error)


def returns_no_chunk(fetch, numbers):
    chunk_as(fetch, numbers)


def returns_a_chunk_with_an_error(fetch, numbers):
    chunk = chunk_as(fetch, numbers)
    if chunk and isinstance(chunk[-1], ExceptionWrapper):
        return chunk


def loses_the_good_ones(fetch, numbers):
    chunk = deque()
    for number in numbers:
        try:
            chunk.append(fetch(number))
        except BaseException as error:
            return deque([ExceptionWrapper(error)])
    return chunk


def tries_a_generator(fetch, numbers):
    try:
        return deque(fetch(number) for number in numbers)
    except BaseException as error:
        return deque([ExceptionWrapper(error)])


def makes_a_new_error(fetch, numbers):
    return chunk_as(fetch, numbers, wrap=lambda error: ExceptionWrapper(RuntimeError(str(error))))


FETCH_CHUNK = Build(
    name="fetch_chunk",
    reference=fetch_chunk,
    cases=CHUNKS,
    observe=chunk_seen,
    show=lambda case: (
        f"fetch_chunk(fetch, {case[0]})"
        + "".join(f"  # fetch({k}) raises {error.__name__}" for k, error in case[1].items())
    ),
    wrong={
        "The error ends the worker, and the consumer never hears of it.": raises_it,
        "You catch `Exception`; a `sys.exit()` in somebody's dataset is none: the worker ends.": (
            lambda fetch, numbers: chunk_as(fetch, numbers, Exception)
        ),
        "The error is gone: its batch is just missing.": (
            lambda fetch, numbers: chunk_as(fetch, numbers, keep=False)
        ),
        "You go on behind the error; the consumer stops there, and nobody takes the rest.": (
            lambda fetch, numbers: chunk_as(fetch, numbers, stop=False)
        ),
        "The batches before the error were good, and you throw them away.": loses_the_good_ones,
        "One `try` around all of them loses the batches that were good before the error.": (
            tries_a_generator
        ),
        "You make a new error; kind and traceback of the old one are lost.": makes_a_new_error,
        "The consumer takes batches from the left end; a list is slow there: return a `deque`.": (
            lambda fetch, numbers: list(chunk_as(fetch, numbers))
        ),
        "The consumer can't tell a bare error from a batch: wrap it.": (
            lambda fetch, numbers: chunk_as(fetch, numbers, wrap=lambda error: error)
        ),
        "It is a list, and the first error ends the worker.": lists_unguarded,
        "You make a chunk, and don't return it.": returns_no_chunk,
        "Only a chunk with an error in it is returned.": returns_a_chunk_with_an_error,
        "What you return is the error alone, or nothing; the consumer expects a chunk.": (
            returns_the_error_alone
        ),
    },
)


# close

CLOSES = [
    (9, 4, "claim", "put 0", "close"),
    (9, 1, "claim", "claim", "close"),
    (9, 1, "claim", "claim", "claim", "claim", "close"),
    (9, 1, "take_next", "close"),
    (9, 1, "claim", "claim", "take_next", "close"),
    (9, 4, "claim", "claim", "put 0", "put 1", "close", "claim", "take_next"),
    (9, 4, "close", "close", "claim"),
]


def close_as(self, mark=True, clear=True, rooms=("room", "ready"), everyone=True):
    with self.lock:
        self.closed = self.closed or mark
        if clear:
            self.results.clear()
        for room in rooms:
            condition = getattr(self, room)
            condition.notify_all() if everyone else condition.notify()


def closes_unlocked(self):
    self.closed = True
    self.results.clear()
    with self.lock:
        self.room.notify_all()
        self.ready.notify_all()


def takes_the_results_away(self):
    with self.lock:
        self.closed, self.results = True, None
        self.room.notify_all()
        self.ready.notify_all()


def closes_without_lock(self):
    self.closed = True
    self.results.clear()
    self.room.notify_all()
    self.ready.notify_all()


CLOSE = Build(
    name="close",
    reference=ReorderBuffer.close,
    owner="MyBuffer",
    cases=CLOSES,
    observe=played("close"),
    show=as_script,
    wrong={
        "Who is woken by `close` looks at `self.closed`, and sleeps again: you don't set it.": (
            lambda self: close_as(self, mark=False)
        ),
        "Who sleeps hears nothing: nobody looks at `self.closed` in a dream.": (
            lambda self: close_as(self, rooms=())
        ),
        "You wake one worker; several may sleep there.": (
            lambda self: close_as(self, everyone=False)
        ),
        "You wake the workers; the consumer may sleep, too, in another thread.": (
            lambda self: close_as(self, rooms=("room",))
        ),
        "You wake the consumer; the workers sleep on.": (
            lambda self: close_as(self, rooms=("ready",))
        ),
        "What lies ready stays in memory, and nobody will take it.": (
            lambda self: close_as(self, clear=False)
        ),
        "You take the dictionary itself away, and `take_next` still looks into it.": (
            takes_the_results_away
        ),
        "You change the buffer without holding `self.lock`.": closes_unlocked,
        "You wake outside `with self.lock`: who calls a condition has to hold its lock.": (
            closes_without_lock
        ),
    },
)


# _advance

EPOCHS = [
    (6, 2, 1, 0, 3),
    (6, 2, 1, 0, 1),
    (7, 3, 1, 0, 3),
    (7, 3, 1, 4, 1),
    (20, 2, 3, 0, 2),
    (20, 2, 3, 6, 9),
    (8, 2, 1, 0, 9),
]


def stands_at(answer, samples, batch_size, ranks, start, batches):
    """The loader's state after each batch of a loop, and in the next one."""
    data = list(torch.arange(samples))
    loader = type("Loader", (MyLoader,), {"_new_iterator": with_advance(answer)})(
        data, batch_size=batch_size, prefetch_factor=0, seed=0, rank=0, world_size=ranks
    )
    state = loader.state_dict()
    loader.load_state_dict(state | {"samples": start})
    iterator, places = iter(loader), []
    for _ in range(min(batches, len(iterator) + 1)):
        if next(iterator, None) is None:
            places.append("end")
            break
        state = loader.state_dict()
        places.append((state["epoch"], state["samples"]))
    to_come = len(iterator)
    iter(loader)
    state = loader.state_dict()
    return {
        "epoch and samples after each batch": places,
        "batches to come": to_come,
        "epoch and samples of a new loop": (state["epoch"], state["samples"]),
    }


def with_advance(answer):
    return type("MyIterator", (MyIterator,), {"_advance": answer})


def advance_as(self, by=1, samples=None, finish=True):
    self._delivered += by
    after = self._sampler.samples_after(self._delivered)
    self._cursor.advance(samples(self, after) if samples else after)
    if finish and self._delivered == self._total:
        self._finish()


def moves_before_it_counts(self):
    self._cursor.advance(self._sampler.samples_after(self._delivered))
    self._delivered += 1
    if self._delivered == self._total:
        self._finish()


def moves_after_the_end(self):
    self._delivered += 1
    if self._delivered == self._total:
        self._finish()
    self._cursor.advance(self._sampler.samples_after(self._delivered))


def sets_the_number(self):
    self._delivered += 1
    self._cursor.samples = self._sampler.samples_after(self._delivered)
    if self._delivered == self._total:
        self._finish()


ADVANCE = Build(
    name="_advance",
    reference=PrefetchIterator._advance,
    owner="MyIterator",
    cases=EPOCHS,
    observe=stands_at,
    show=lambda case: (
        "{4} batches of {0} samples, batch_size={1}, {2} ranks, "
        "from a state with samples={3}".format(*case)
    ),
    wrong={
        "A resume would give the last batch again: it was delivered, too.": moves_before_it_counts,
        "The cursor counts samples, not batches.": (
            lambda self: advance_as(self, samples=lambda it, after: it._delivered)
        ),
        "The epoch never ends: a resume behind its last batch finds nothing.": (
            lambda self: advance_as(self, finish=False)
        ),
        "You pass one batch's samples; the cursor wants the sum.": (
            lambda self: advance_as(self, samples=lambda it, after: it._sampler.batch_size)
        ),
        "You pass one batch's samples, of all ranks; the cursor wants the sum of all batches.": (
            lambda self: advance_as(
                self,
                samples=lambda it, after: it._sampler.batch_size * it._sampler.world_size,
            )
        ),
        "You pass 1, as if the cursor moved by batches; it wants the sum of all samples.": (
            lambda self: advance_as(self, samples=lambda it, after: 1)
        ),
        "You move the cursor after the epoch was finished.": moves_after_the_end,
        "You count what this run was given; a state counts from the epoch's beginning.": (
            lambda self: advance_as(self, samples=lambda it, after: after - it._sampler.start)
        ),
        "You count one rank's samples; the state counts those of all ranks.": (
            lambda self: advance_as(
                self,
                samples=lambda it, after: (
                    it._sampler.start + (after - it._sampler.start) // it._sampler.world_size
                ),
            )
        ),
        "The cursor stands still: every resume begins where this one did.": (
            lambda self: advance_as(self, samples=lambda it, after: it._sampler.start)
        ),
        "You multiply by the batch size: what of the other ranks, a short batch, and where the "
        "run began?": (
            lambda self: advance_as(
                self, samples=lambda it, after: it._delivered * it._sampler.batch_size
            )
        ),
        "You set the number; `advance` also notes that the epoch has begun.": sets_the_number,
    },
)

BUILDS = [WORKER_LOOP, CLAIM, PUT, TAKE, FETCH_CHUNK, CLOSE, ADVANCE]
