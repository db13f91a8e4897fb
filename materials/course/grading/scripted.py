"""Play calls on an object that has a lock and conditions, in one thread and without a clock.

    Script(buffer).play(["claim", "put 0", "wake"])

While one call waits on a condition, the next calls of the script happen, as other threads would
make them. "wake" wakes every sleeper without a reason, as may happen to any thread. When the script
is over, nobody is left to end a wait.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

FIELDS = ("claimed", "taken", "closed", "results")
"""What the lock guards."""


class ForEverError(BaseException):
    """Nobody is left who could end this wait; no `except Exception` should catch it."""


class OneThreadLock:
    """A lock of one thread. It knows whether what it guards was changed while it was free."""

    def __init__(self, guarded: Callable[[], Any]) -> None:
        self.guarded, self.held = guarded, False
        self.left, self.changed_while_free = guarded(), False

    def look(self) -> None:
        self.changed_while_free |= not self.held and self.guarded() != self.left

    def acquire(self, blocking: bool = True) -> bool:
        if self.held and blocking:
            raise ForEverError
        self.look()
        free, self.held = not self.held, True
        return free

    def release(self, *_: Any) -> None:
        self.held, self.left = False, self.guarded()

    __enter__, __exit__ = acquire, release


class Room(threading.Condition):
    """A condition in one thread: a wait lets the script go on until somebody calls."""

    def __init__(self, script: "Script", name: str) -> None:
        super().__init__(script.lock)
        self.script, self.name, self.calls, self.waiting = script, name, 0, 0

    def wait(self, timeout: float | None = None) -> bool:
        super().notify(0)  # raises where the lock isn't held
        seen = self.script.running[-1]
        if (text := f"waits for `{self.name}`") not in seen:
            seen.append(text)
        self.waiting += 1
        self.release()
        try:
            while not self.calls:
                self.script.next_call()
            self.calls -= 1
        finally:
            self.waiting -= 1
            self.acquire()
        return True

    def notify(self, n: int = 1) -> None:
        super().notify(0)
        self.calls = min(self.calls + n, self.waiting)

    def notify_all(self) -> None:
        self.notify(self.waiting)


class Script:
    """Calls such as "claim" or "put 2" (which is given 2 and "batch 2"), and what came of each.

    The result of "put 0" is 0.
    """

    def __init__(self, made: Any) -> None:
        self.made, self.calls, self.running = made, [], []
        self.seen: dict[str, list[str]] = {}
        self.lock = made.lock = OneThreadLock(
            lambda: [copy.copy(getattr(made, field)) for field in FIELDS]
        )
        self.rooms = [Room(self, name) for name in ("room", "ready")]
        for room in self.rooms:
            setattr(made, room.name, room)

    def next_call(self) -> None:
        if not self.calls:
            raise ForEverError
        call = self.calls.pop(0)
        if call == "wake":
            for room in self.rooms:
                room.calls = room.waiting
            return
        name, *number = call.split()
        came = self.seen[f"{len(self.seen) + 1}. {call}"] = []
        self.running.append(came)
        try:
            results = (int(k) and f"batch {k}" for k in number)
            value = getattr(self.made, name)(*map(int, number), *results)
            end = f"gives {value!r}"
        except ForEverError:
            end = "is never woken"
        except RuntimeError:
            end = "raises RuntimeError"
        self.running.pop()
        came.append(end)

    def play(self, calls: Sequence[str]) -> dict[str, Any]:
        self.calls = list(calls)
        while self.calls:
            self.next_call()
        self.lock.look()
        return {
            **{call: ", ".join(texts) for call, texts in self.seen.items()},
            "changed without the lock": self.lock.changed_while_free,
            "lock still held at the end": self.lock.held,
        }
