"""What the learner's loader must keep, and one-line changes that break it.

Whoever would wait for ever is found out: each job runs in a thread of its own, for a few seconds.
"""

import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from npydata import AsyncDataLoader, NpyTokensDataset
from tutorial.mutation import Card
from tutorial.promised import expect

PATIENCE = 4.0
"""Seconds; thousands of times what a right answer takes."""


@contextmanager
def file_of(ids):
    """A token file that is there while it is needed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        np.save(path, np.asarray(ids, np.uint16))
        yield path


def within(job, what):
    """What a job returns; an error where it is still waiting when our patience ends."""
    ended = []

    def run():
        try:
            ended.append((job(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not ended:
        raise AssertionError(f"{what}: still waiting, expected to end at once")
    value, error = ended[0]
    if error is not None:
        raise error
    return value


def all_end(threads):
    """Whether all these threads end within our patience."""
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def uneven(number):
    """A batch that takes now more, now less: later ones are ready before earlier ones."""
    threading.Event().wait((0.002, 0.0, 0.001, 0.0, 0.0)[number % 5])
    return number


SETTINGS = [(1, 1, 1), (2, 4, 1), (4, 5, 1), (8, 16, 1), (3, 12, 3)]
"""Workers, capacity, and how many batches change hands at a time."""


def in_order(mine):
    """Batches come in order, whatever the number of workers"""
    for workers, capacity, size in SETTINGS:
        prefetcher = mine.MyPrefetcher(uneven, 30, workers, capacity, size)
        what = f"30 batches of {workers} workers, capacity {capacity}"
        found = within(lambda p=prefetcher: [p.next() for _ in range(30)], what)
        prefetcher.close()
        expect(found, list(range(30)), what)


def each_made_once(mine):
    """Every batch is made once, by one worker"""
    made = []
    prefetcher = mine.MyPrefetcher(lambda k: made.append(k) or k, 2000, 8, 40)
    within(lambda: [prefetcher.next() for _ in range(2000)], "2,000 batches")
    prefetcher.close()
    expect(sorted(made), list(range(2000)), "batches made")


def same_with_any_workers(mine):
    """The same seed gives the same batches, with any number of workers"""
    data, options = list(torch.arange(50)), {"batch_size": 4, "seed": 7}
    alone = AsyncDataLoader(data, prefetch_factor=0, **options)
    expected = [batch.tolist() for _ in range(2) for batch in alone]
    for workers, factor in [(1, 1), (3, 2), (8, 4)]:
        loader = mine.MyLoader(data, num_workers=workers, prefetch_factor=factor, **options)
        what = f"2 epochs with {workers} workers"
        found = within(lambda one=loader: [b.tolist() for _ in range(2) for b in one], what)
        expect(len(found), len(expected), f"batches in {what}")
        expect(found == expected, True, f"{what}: as without workers")


def never_too_many(mine):
    """No more batches exist than the capacity, and those you hold"""
    for workers, capacity, size in [(1, 1, 1), (2, 4, 1), (4, 6, 1), (8, 3, 1)]:
        begun = []
        prefetcher = mine.MyPrefetcher(
            lambda k, begun=begun: begun.append(k) or k, 40, workers, capacity, size
        )
        what = f"{workers} workers, capacity {capacity}"
        most = 0
        for taken in range(40):
            threading.Event().wait(0.001)
            most = max(most, len(begun) - taken)
            within(prefetcher.next, what)
        within(prefetcher.close, "close")
        if most > capacity:
            raise AssertionError(f"{what}: {most} batches that you don't hold, expected {capacity}")


def errors_at_their_place(mine):
    """An error comes where its batch would come, and knows the line that raised it"""

    def unreadable(number):
        if number == 5:
            raise KeyError("sample 1234567")
        return uneven(number)

    for workers, capacity, size in SETTINGS:
        prefetcher = mine.MyPrefetcher(unreadable, 10, workers, capacity, size)
        what = f"a bad batch 5, {workers} workers"
        found = within(lambda p=prefetcher: [p.next() for _ in range(6)], what)
        prefetcher.close()
        expect(found[:5], list(range(5)), f"{what}: before it")
        try:
            found[5].reraise()
        except KeyError as error:
            lines = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            expect("unreadable" in lines, True, f"{what}: its traceback shows who raised it")
        else:
            raise AssertionError(f"{what}: no error, expected a KeyError")


class Bad(list):
    """Samples of which one can't be read."""

    def __init__(self, samples, bad, error):
        super().__init__(samples)
        self.bad, self.error = bad, error

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error
        return super().__getitem__(index)


def no_silent_end(mine):
    """No error looks like the end of the epoch, not even a StopIteration"""
    for error in (ValueError("bad"), StopIteration(), SystemExit(3)):
        data = Bad(torch.arange(12), 7, error)
        loader = mine.MyLoader(data, batch_size=2, shuffle=False, seed=0)
        seen, kind = [], type(error).__name__

        def run(loader=loader, seen=seen):
            for batch in loader:
                seen.extend(batch.tolist())

        try:
            within(run, f"a {kind} in batch 3")
        except BaseException as raised:
            if isinstance(raised, AssertionError):
                raise
            expect(seen, list(range(6)), f"delivered before the {kind}")
        else:
            raise AssertionError(f"a {kind} in batch 3: the epoch ended normally after {seen}")


def leaving_stops_all(mine):
    """Leaving early stops every thread"""
    for workers, capacity in [(1, 1), (4, 8)]:
        prefetcher = mine.MyPrefetcher(uneven, 10_000, workers, capacity)
        within(prefetcher.next, "the first batch")
        within(prefetcher.close, "close")
        expect(all_end(prefetcher.threads), True, f"all of {workers} workers end")
    before = set(threading.enumerate())
    for _ in mine.MyLoader(list(torch.arange(1000)), batch_size=2, seed=0):
        break
    expect(all_end(set(threading.enumerate()) - before), True, "all workers end after a break")


def closing_wakes_all(mine):
    """Closing wakes the consumer, too, if another thread closes"""
    go, buffer, heard = threading.Event(), mine.MyBuffer(9, 9), []

    def take():
        go.set()
        try:
            buffer.take_next()
        except RuntimeError:
            heard.append(True)

    consumer = threading.Thread(target=take, daemon=True)
    consumer.start()
    go.wait(PATIENCE)
    within(buffer.close, "close")
    expect(all_end([consumer]), True, "the consumer ends")
    expect(heard, [True], "it heard of it by a RuntimeError")


class Noted:
    """A batch that can be asked whether it is still in memory."""


def nothing_is_left(mine):
    """A closed buffer holds no batch, also none that a worker puts afterwards"""
    buffer = mine.MyBuffer(9, 9)
    batches = [Noted(), Noted()]
    refs = [weakref.ref(batch) for batch in batches]
    within(lambda: [buffer.claim(), buffer.claim()], "two claims")
    within(lambda: buffer.put(0, batches.pop(0)), "put")
    within(buffer.close, "close")
    within(lambda: buffer.put(1, batches.pop(0)), "put")
    expect([ref() is None for ref in refs], [True, True], "gone: put before, and after")
    expect(within(buffer.claim, "a claim after close"), None, "a claim after close")


def resumes_exactly(mine):
    """A run that resumes gets the very next batch, with any other number of workers"""
    data = list(torch.arange(23))
    whole = mine.MyLoader(data, batch_size=4, seed=7)
    expected = within(lambda: [b.tolist() for _ in range(2) for b in whole], "2 epochs")
    for stop in range(1, 7):
        stopped = mine.MyLoader(data, batch_size=4, seed=7)
        resumed = mine.MyLoader(data, batch_size=4, num_workers=stop)
        iterator = iter(stopped)
        within(lambda it=iterator, k=stop: [next(it) for _ in range(k)], f"{stop} batches")
        resumed.load_state_dict(stopped.state_dict())
        found = within(lambda one=resumed: [b.tolist() for b in one], "the rest of the epoch")
        rest = expected[stop:6] or expected[6:]
        expect(found, rest, f"after {stop} of 6 batches")
        iterator.close()


def kept_batches_stay(mine):
    """A batch that you keep is never overwritten"""
    with file_of(range(5000)) as path:
        data = NpyTokensDataset(path, 16)
        loader = mine.MyLoader(data, batch_size=8, seed=0)

        def pairs():
            return [(batch, [part.clone() for part in batch]) for batch in loader]

        kept = within(pairs, "an epoch")
        changed = sum(not all(map(torch.equal, batch, copy)) for batch, copy in kept)
        expect(changed, 0, f"changed, of {len(kept)} batches")


PROMISES = [
    in_order,
    each_made_once,
    same_with_any_workers,
    never_too_many,
    errors_at_their_place,
    no_silent_end,
    leaving_stops_all,
    closing_wakes_all,
    nothing_is_left,
    resumes_exactly,
    kept_batches_stay,
]

CARDS = [
    Card(
        name="one room too many",
        symbol="materials.tutorial.lesson_loader.ReorderBuffer.has_room",
        line="return self.claimed - self.released < self.capacity",
        mutant="return self.claimed - self.taken <= self.capacity",
        promise=never_too_many,
        symptoms=(
            "Batches come out of order now and then.",
            "More memory than the settings say; nothing else.",
            "Workers stop one batch too early, and training waits for ever.",
        ),
        right=2,
        reasons={
            1: "The order is made in `take_next`, and that is as it was.",
            3: "There is room earlier than before, never later.",
        },
    ),
    Card(
        name="a very special error",
        symbol="materials.tutorial.lesson_loader.ExceptionWrapper.reraise",
        line="if isinstance(self.error, StopIteration):",
        mutant="if False:",
        promise=no_silent_end,
        symptoms=(
            "A forgotten `next()` in a dataset ends the epoch, without a word.",
            "Every error of a worker arrives as a RuntimeError.",
            "The traceback no longer shows the line in the dataset.",
        ),
        right=1,
        reasons={
            2: "Only a StopIteration was turned into a RuntimeError; now nothing is.",
            3: "The error is raised as it came, with its traceback.",
        },
    ),
    Card(
        name="put after close",
        symbol="materials.tutorial.lesson_loader.ReorderBuffer.put",
        line="if not self.closed:",
        mutant="if True:",
        promise=nothing_is_left,
        symptoms=(
            "The next epoch begins with a batch of the last one.",
            "A worker never ends, because its buffer is full.",
            "After an early exit, a batch or two stay in memory.",
        ),
        right=3,
        reasons={
            1: "The next epoch has a buffer of its own; nobody looks into this one again.",
            2: "`put` never waits for room: its place was claimed before.",
        },
    ),
]
