"""How ranks coordinate a save: messages through the process group's store, every wait with an end.

A collective has no such end: where one rank raises or dies before it, the others wait for the
group's own time-out, which is made for training. And a background thread that calls one would
disturb the order of training's.

Every save has messages of its own: rank 0 draws a number, their prefix, and lets the others read
it. Another rank can't know whether what it reads is of this save or of one that died long ago in
the same store; so it draws a number, too, and believes only an answer to that one. Used in
``notebooks/09_scale_out``.
"""

import json
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.distributed.group import Group

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.0005, 0.01, 1.25
"""Between looks for a message: it is seen a quarter of the wait after it came, at most 10 ms."""
HEARTBEAT_S = 1.0
"""How often a rank at work sends a heartbeat."""
LOOK_S = 0.1
"""How often a rank that waits for rank 0's answer looks whether rank 0 came only now."""
RANKS_PER_PAUSE = 64
"""With more ranks the pauses grow, so that the store is asked no more often."""
COMMITTING = 1 << 32
"""What rank 0 adds to the count of ranks that withdrew, when it begins to commit."""

left_behind: "weakref.WeakKeyDictionary[Any, set[str]]" = weakref.WeakKeyDictionary()
"""By group, what rank 0 has left for others to read when a save failed; once they come to the next
one, nobody waits for it any more."""


class RankError(CheckpointError):
    """What went wrong on a rank, or between ranks; the message names them."""


def coordinate(group: Group, purpose: str) -> "Coordinator":
    """Begin to exchange messages about what all ranks do together."""
    coordinator = Coordinator(group, purpose=purpose)
    if group.rank == 0:
        coordinator.key = secrets.token_hex(8)
        coordinator.invite([coordinator.key])
    return coordinator


@dataclass(slots=True)
class Coordinator:
    """One exchange of messages between the ranks of a group.

    A message is a JSON object; ``{"error": text}`` says that its rank aborts. Rank 0 coordinates:
    it answers what the others send it.
    """

    group: Group
    key: str = ""
    """What the names of all messages begin with; empty until rank 0's is known."""
    purpose: str = ""
    """What the ranks do together: ``saves FOLDER``."""
    reply_to: dict[int, str] = field(default_factory=dict)
    """On rank 0: where the ranks that sent a plan wait for the answer."""
    planned: bool = False
    """Whether this rank has had its say in the foreground, whatever came of it."""
    written: set[str] = field(default_factory=set)
    """The messages that this rank has left and not deleted."""
    next_heartbeat: float = 0
    next_look: float = 0
    heartbeats: dict[int, Any] = field(default_factory=dict)
    """The last heartbeat of ranks that were missed."""

    # In the foreground: each rank sends rank 0 a plan and gets an answer

    def gather_plans(self, plan: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the plans of all ranks, rank 0's own the first of them.

        Raises:
            RankError: One aborted, doesn't come, or is here for something else.
        """
        came: Sequence[int] = range(1, self.group.world_size)
        try:
            self.wait("plan", {self.name("plan", rank): rank for rank in came})
        except BaseException:
            came = [rank for rank in came if self.is_there("plan", rank)]
            raise
        finally:
            self.planned = True
            self.invite([])
            plans = [plan, *(self.take("plan", rank) for rank in came)]
            self.reply_to = {
                rank: one["reply_to"] for rank, one in zip(came, plans[1:], strict=True)
            }
        for name in left_behind.pop(self.group.key, ()):
            self.call_store("delete_key", name)
        for rank, one in enumerate(plans[1:], start=1):
            if one["purpose"] != self.purpose:
                raise RankError(f"rank {rank} {one['purpose']}, rank 0 {self.purpose}")
            raise_sent(one)
        return plans

    def answer(self, messages: Sequence[dict[str, Any]]) -> None:
        """Answer the other ranks' plans."""
        for rank, name in self.reply_to.items():
            self.set(name, messages[rank])

    def ask(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Send rank 0 a plan, once it is there, and return its answer."""
        reply_to = f"answer/{secrets.token_hex(8)}"
        message = {**plan, "purpose": self.purpose, "reply_to": reply_to}
        self.planned = True
        try:
            self.wait("answer", {reply_to: 0}, lambda: self.follow_rank_0(message))
        except BaseException:
            self.delete("plan", self.group.rank)
            raise
        answer: dict[str, Any] = self.get(reply_to)
        self.call_store("delete_key", reply_to)
        raise_sent(answer)
        return answer

    def follow_rank_0(self, plan: dict[str, Any]) -> None:
        """Bring rank 0 the plan, and bring it again if rank 0 turns out to be elsewhere.

        What a dead process group left in the store looks like a rank 0, but doesn't answer.
        """
        if self.key and time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_S * max(1, self.group.world_size / RANKS_PER_PAUSE)
        invited = self.get("rank_0") if self.call_store("check", ["rank_0"]) else []
        if invited and invited[0] != self.key:
            if self.key:  # nobody reads there any more
                self.delete("plan", self.group.rank)
                self.delete("heartbeat", self.group.rank)
            self.key = invited[0]
            self.send("plan", plan)

    def invite(self, keys: list[str]) -> None:
        """Let the others read where rank 0 waits for their plans, if it does."""
        self.call_store("set", "rank_0", encoded(keys))

    def require_same(self, what: str, value: Any) -> None:
        """Compare: all ranks have the same value, or all of them raise.

        Raises:
            RankError: They have not, or one of them aborted or sent nothing.
        """
        with self.abort_on_error("plan"):
            if self.group.rank:
                self.ask({"value": value})
            else:
                for rank, plan in enumerate(self.gather_plans({"value": value})):
                    if plan["value"] != value:
                        raise RankError(f"rank {rank} has {what} {plan['value']}, rank 0 {value}")
                self.answer([{}] * self.group.world_size)
        self.close(failed=False)

    @contextmanager
    def abort_on_error(self, topic: str) -> Iterator[None]:
        """Let the others know what goes wrong here, so that they need not wait for the time-out.

        ``topic`` is what rank 0 expects of this rank; if this is rank 0, what all expect of it.
        """
        try:
            yield
        except BaseException as error:
            with suppress(CheckpointError):
                if topic == "plan":
                    self.abort_plan(error)
                else:
                    self.send(topic if self.group.rank else "outcome", self.error_message(error))
            raise

    def abort_plan(self, error: BaseException) -> None:
        """Send an error in the place of a plan, or of the answers to plans.

        As with a plan, this waits for the others: who comes late would wait for this rank in vain.
        """
        message = self.error_message(error)
        if not self.planned and isinstance(error, Exception):
            with suppress(CheckpointError):
                self.ask(message) if self.group.rank else self.gather_plans({})
        try:
            self.answer([message] * self.group.world_size)
        finally:
            self.close(failed=True)

    def error_message(self, error: BaseException) -> dict[str, Any]:
        """Return the message of a rank that aborts."""
        text = str(error) or type(error).__name__
        named = isinstance(error, RankError)  # the rank is in it already
        return {"error": text if named else f"rank {self.group.rank}: {text}"}

    # In the background: each rank sends what it has done, and rank 0 what came of it

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """Return the messages of all ranks, in their order, and delete them from the store."""
        return self.gather_from(topic, range(self.group.world_size))

    def gather_from(self, topic: str, ranks: range) -> list[dict[str, Any]]:
        """Return the messages of some ranks."""
        self.wait(topic, {self.name(topic, rank): rank for rank in ranks})
        messages = [self.take(topic, rank) for rank in ranks]
        for message in messages:
            raise_sent(message)
        return messages

    def recv(self, topic: str, of: int = 0) -> dict[str, Any]:
        """Return what rank 0 sends, once it does; it may have to wait for others before.

        Raises:
            RankError: A rank aborted, or rank 0 sent no heartbeat for the time-out.
        """
        self.wait(topic, {self.name(topic, of): 0})
        message = self.message(topic, of)
        raise_sent(message)
        return message

    def aborted(self, topic: str, of: int = 0) -> bool:
        """Whether a rank has sent an error; waits for nothing."""
        return self.is_there(topic, of) and "error" in self.message(topic, of)

    def begin_commit(self) -> None:
        """Decide that what all ranks have done is committed, unless one has withdrawn.

        Raises:
            RankError: It has, because it waited too long for this rank 0.
        """
        if self.count_withdrawn(COMMITTING) != COMMITTING:
            for rank in range(self.group.world_size):
                if self.aborted("done", rank):
                    raise_sent(self.take("done", rank))
            raise RankError("a rank waited too long for rank 0")

    def withdraw(self) -> bool:
        """Forbid rank 0 to commit; say whether that is possible still."""
        return self.count_withdrawn(1) < COMMITTING

    def count_withdrawn(self, more: int) -> int:
        """Add to the count of ranks that withdrew, and return it; one comes first."""
        self.written.add(name := self.name("withdrawn", 0))
        count: int = self.call_store("add", name, more)
        return count

    def close(self, *, failed: bool) -> None:
        """Leave nothing in the store; what others may still read goes with the next exchange."""
        if failed and self.group.rank == 0:
            left_behind.setdefault(self.group.key, set()).update(self.written)
        with suppress(CheckpointError):
            self.delete("heartbeat", self.group.rank)

    # Waiting

    def wait(
        self, topic: str, awaited: Mapping[str, int], look: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until all of these messages are there; each is to come from a rank.

        Raises:
            RankError: One that sent none had no heartbeat for the time-out.
        """
        group, pause = self.group, FIRST_PAUSE_S
        longest = LONGEST_PAUSE_S * max(1, group.world_size / RANKS_PER_PAUSE)
        end = time.monotonic() + group.timeout_s
        while not self.call_store("check", list(awaited)):
            look()
            self.heartbeat()
            if time.monotonic() > end:
                missing = {
                    rank for name, rank in awaited.items() if not self.call_store("check", [name])
                }
                if dead := missing - self.alive(missing):  # else it came just now
                    raise RankError(
                        f"{ranks_text(dead)}: no message ({topic!r}) and no heartbeat "
                        f"for {group.timeout_s:g} s"
                    )
                end = time.monotonic() + group.timeout_s
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, longest)

    def heartbeat(self) -> None:
        """Let others who wait for this rank know that it is at work; now and then is enough."""
        if self.key and time.monotonic() >= self.next_heartbeat:
            every = min(HEARTBEAT_S, self.group.timeout_s / 4)
            self.next_heartbeat = time.monotonic() + every * max(1, self.group.world_size / 1024)
            self.call_store("add", self.name("heartbeat", self.group.rank), 1)

    @contextmanager
    def heartbeats_beside(self) -> Iterator[None]:
        """Send heartbeats beside work that may take long in one call, as a disk's ``fsync``."""
        over, pause = threading.Event(), min(HEARTBEAT_S, self.group.timeout_s / 4)

        def beat() -> None:
            with suppress(CheckpointError):  # a store that is gone is noticed by who uses it next
                while not over.wait(pause):
                    self.heartbeat()

        beside = threading.Thread(target=beat, name="npydata-heartbeat", daemon=True)
        beside.start()
        try:
            yield
        finally:
            over.set()
            beside.join()

    def alive(self, ranks: Iterable[int]) -> set[int]:
        """Return those of the ranks that have sent a heartbeat since this was asked last."""
        seen = {}
        for rank in ranks:
            name = self.name("heartbeat", rank)
            there = self.call_store("check", [name])
            seen[rank] = self.call_store("get", name) if there else None
        new = {rank for rank, beat in seen.items() if beat not in (None, self.heartbeats.get(rank))}
        self.heartbeats |= seen
        return new

    # The store

    def name(self, topic: str, of: int) -> str:
        """Return the key of a message in the store."""
        return f"{self.key}/{topic}/{of}"

    def send(self, topic: str, message: dict[str, Any]) -> None:
        """Leave a message of this rank."""
        self.set(self.name(topic, self.group.rank), message)

    def set(self, name: str, message: dict[str, Any]) -> None:
        """Leave a message."""
        self.written.add(name)
        self.call_store("set", name, encoded(message))

    def is_there(self, topic: str, of: int) -> bool:
        """Whether a rank has sent a message; waits for nothing."""
        return bool(self.call_store("check", [self.name(topic, of)]))

    def take(self, topic: str, of: int) -> dict[str, Any]:
        """Return a message that is there, and delete it."""
        message = self.message(topic, of)
        self.delete(topic, of)
        return message

    def message(self, topic: str, of: int = 0) -> dict[str, Any]:
        """Return a message that is there, whatever it says."""
        message: dict[str, Any] = self.get(self.name(topic, of))
        return message

    def get(self, name: str) -> Any:
        """Return what is there."""
        return json.loads(zlib.decompress(self.call_store("get", name)))

    def delete(self, topic: str, of: int) -> None:
        """Take a message out of the store."""
        self.written.discard(name := self.name(topic, of))
        self.call_store("delete_key", name)

    def call_store(self, method: str, *args: Any) -> Any:
        """Call the store, and say so where it doesn't answer."""
        try:
            return getattr(self.group.store, method)(*args)
        except RuntimeError as error:  # the process that held it has ended
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"the process group's store does not answer: {text}") from None


def encoded(message: Any) -> bytes:
    """Return a message as the store holds it."""
    return zlib.compress(json.dumps(message).encode(), 1)


def raise_sent(message: dict[str, Any]) -> None:
    """Raise the error that a rank sent."""
    if "error" in message:
        raise RankError(message["error"])


def ranks_text(ranks: Iterable[int]) -> str:
    """Return some ranks in words."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{more}"
