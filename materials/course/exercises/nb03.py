"""Lesson 03: the reorder buffer, judged by scripts of calls, and the loader around it."""

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from course.grading.child import in_one_line
from course.grading.exercise import Exercise
from course.grading.observers import threads
from course.grading.scripted import ForEverError, Script
from course.lesson import defined, solution

BUFFER = defined("03")["Buffer"]


def played(name, answer, count, capacity, *calls):
    """Observe a method of the buffer, beside the solution's other methods."""
    buffer = type("Buffer", (BUFFER,), {name: answer})(count, capacity)
    seen = Script(buffer).play(calls)
    return seen | {"ready at the end": sorted(buffer.results or ())}


def method(name, scripts, misconceptions):
    one = solution("03", name)
    alone = replace(one, source=one.source.partition("\nBuffer.")[0])
    return Exercise(
        alone,
        scripts,
        partial(played, name),
        misconceptions,
        show=lambda count, capacity, *calls: (
            f"Buffer({count}, capacity={capacity}): {', '.join(calls)}"
        ),
    )


CLAIM = method(
    "claim",
    [
        (3, 5, "claim", "claim", "claim", "claim"),
        (9, 1, "claim", "claim", "put 0", "take_next"),
        (9, 1, "claim", "claim", "close"),
        (9, 1, "claim", "claim", "wake", "close"),
        (2, 1, "claim", "claim", "claim", "put 0", "take_next", "wake"),
        (9, 4, "claim", "close", "claim"),
        (9, 1, "claim", "claim", "claim", "put 0", "take_next", "wake", "close"),
    ],
    """
    self.has_room() >> True | You hand out a number although there is no room.
    while >> if | You look once. Whoever wakes up may still find no room.
    self.claimed == self.count or >> | You wait for room or a close; after the last number no room will come.
    self.closed or self.claimed == self.count or >> | Only room ends your wait, not a close and not the last number.
    self.claimed - 1 >> self.claimed | The first number is 0: return it before you count it.
    with self.lock: >> if True: | You look and count without the lock: two workers could get the same number.
    """,
)
TAKE_NEXT = method(
    "take_next",
    [
        (9, 4, "claim", "put 0", "take_next"),
        (9, 4, "claim", "claim", "put 1", "take_next", "put 0", "take_next"),
        (9, 4, "claim", "take_next", "put 0"),
        (9, 4, "claim", "take_next", "wake", "put 0"),
        (9, 1, "claim", "claim", "put 0", "take_next"),
        (9, 4, "claim", "take_next", "close"),
        (9, 4, "close", "take_next"),
    ],
    """
    while >> if | You look once. Whoever wakes up may still find nothing.
    self.closed >> False | Only a result ends your wait; a close must end it, too.
    self.room.notify() >> pass | There is room now, and no worker hears of it.
    self.taken not in self.results >> not self.results | You wait for any result, and not for the next one.
    self.taken not in self.results >> not self.results.get(self.taken) | A result may itself be 0 or empty; you take it for one that isn't there.
    self.results.pop(self.taken - 1) >> self.results[self.taken - 1] | The result stays in `self.results`, and so in memory.
    """,
)
CLOSE = method(
    "close",
    [
        (9, 4, "claim", "put 0", "close", "claim"),
        (9, 1, "claim", "claim", "close"),
        (9, 1, "claim", "claim", "claim", "claim", "close"),
        (9, 4, "claim", "take_next", "close"),
        (9, 1, "claim", "claim", "take_next", "close"),
    ],
    """
    self.results.clear() >> pass | What is ready stays in memory, and nobody will take it.
    self.room.notify_all() >> self.room.notify() | You wake one worker; several may be asleep.
    self.ready.notify_all() >> pass | The consumer sleeps on: it may be waiting in another thread.
    with self.lock: >> if True: | You close the buffer without holding its lock.
    """,
)


def worked(answer, numbers, bad):
    """Observe what a worker does with a buffer that hands out these numbers."""
    left, seen = list(numbers), []

    def make(number):
        if seen.append(f"make {number}") or len(seen) > 20:
            raise ForEverError
        if number in bad:
            raise bad[number](f"batch {number}")
        return f"batch {number}"

    def put(number, result):
        error = getattr(result, "error", None)
        what = f"Failed with {type(error).__name__}" if error else result
        seen.append(f"put {number}, {what if isinstance(what, str) else type(what).__name__}")

    try:
        answer(SimpleNamespace(claim=lambda: left.pop(0) if left else None, put=put), make)
    except (AttributeError, NameError, TypeError):
        raise  # no error of `make`
    except BaseException as error:
        seen.append(f"ends with {type(error).__name__}")
    return {"what happens": "; ".join(seen[:9])}


WORK = Exercise(
    solution("03", "work"),
    [
        ([], {}),
        ([0], {}),
        ([0, 1, 4], {}),
        ([2, 3, 5], {3: ValueError}),
        ([0, 1], {0: KeyboardInterrupt}),
        ([1, 2], {1: StopIteration, 2: SystemExit}),
    ],
    worked,
    """
    (number := buffer.claim()) is not None >> number := buffer.claim() | The first number is 0, and you take it for none.
    BaseException >> Exception | A `sys.exit()` is no Exception: it ends your worker, and the loop waits forever.
    result = Failed(error) >> buffer.put(number, Failed(error)); break | Your worker ends at the first error: the batches after it are never made.
    result = Failed(error) >> raise | The error ends your worker, and the consumer never hears of it.
    Failed(error) >> error | The consumer can't tell a bare error from a batch.
    """,
    show=lambda numbers, bad: (
        f"work(buffer, make)  # claim() gives {[*numbers, None]}"
        + "".join(f", make({k}) raises {error.__name__}" for k, error in bad.items())
    ),
)


BEYOND_S = 0.1
"""Seconds that the last batch takes: time enough to begin one beyond the end."""


class Numbers:
    """Samples that are their own numbers; one of them can't be fetched."""

    def __init__(self, length, fails_at=None):
        self.length, self.fails_at, self.beyond = length, fails_at, threading.Event()

    def __len__(self):
        return self.length

    def fetch(self, indices):
        if self.fails_at in indices:
            raise ValueError(f"sample {self.fails_at}")
        if indices[-1] >= self.length:
            self.beyond.set()
        elif indices[-1] + len(indices) >= self.length:
            self.beyond.wait(BEYOND_S)
        return list(indices)


def looped(answer, length, batch_size, workers, how):
    """Observe a loop over a loader, which is perhaps left early."""
    data = Numbers(length, how.get("fails_at"))
    loader = answer(data, batch_size, prefetch=2, workers=workers)
    given = how.get("given", 0)
    loader.given, got, seen = given, [], {}
    with threads() as counted:
        try:
            for batch in loader:
                got.append(batch if isinstance(batch, list) else type(batch).__name__)
                if len(got) == how.get("leave_after"):
                    break
        except ValueError as error:
            seen["raised"] = in_one_line(error)
        ahead = loader.given > given + len(got)
        seen |= {"batches": got, "given": "more than the loop got" if ahead else loader.given}
        seen["batches beyond the end are made"] = data.beyond.is_set()
        return seen | counted()


ONE = solution("03", "Loader")
LOADER = Exercise(
    ONE,
    [
        (12, 4, 1, {}),
        (25, 4, 3, {}),
        (24, 4, 2, {"given": 4}),
        (40, 4, 2, {"leave_after": 2}),
        (40, 4, 2, {"fails_at": 9}),
        (40, 4, 2, {"given": 3, "leave_after": 2}),
    ],
    looped,
    """
    raise batch.error >> yield batch | You hand the loop a Failed in place of a batch.
    yield batch >> self.given -= 1; yield batch; self.given += 1 | You count after the yield: on break the generator stops at the yield, and that line never runs.
    batch.error >> batch | A Failed is no exception: it holds one.
    buffer.close() >> buffer.close(); self.given = 0 | You set `given` to 0 however the loop is left: a resume would begin the epoch again.
    buffer.close() >> pass | Nobody tells the workers that it is over. They wait for room, forever.
    self.batches - first >> self.batches | In a resumed run fewer batches are left; you make too many.
    """,
    others={
        "The buffer has as many numbers as batches are *left*: workers would make batches beyond "
        "the end of the epoch.": ONE.define(
            ONE.source.replace("self.batches - first", "self.batches").replace(
                "range(buffer.count)", "range(self.batches - first)"
            )
        )
    },
    show=lambda length, batch_size, workers, how: (
        f"list(Loader({length} samples, {batch_size}, prefetch=2, workers={workers}))"
        + f"  # {how}" * bool(how)
    ),
)
