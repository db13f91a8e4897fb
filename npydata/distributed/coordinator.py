"""How ranks coordinate a save: messages through the process group's store, every wait with an end.

A collective has no such end: where one rank raises or dies before it, the others wait for the
group's own time-out, which is made for training. And a background thread that calls one would
disturb the order of training's. Used in ``notebooks/09_scale_out``.
"""

import hashlib
import json
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npydata.errors import CheckpointError

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.0005, 0.01, 1.25
"""Between looks for a message: it is seen a quarter of the wait after it came, at most 10 ms."""
HEARTBEAT_S = 1.0
"""How often a rank at work sends a heartbeat."""
LOOK_S = 0.1
"""How often a rank that waits looks whether those it waits for are at another rendezvous."""
MOST_LOOKED_AT = 8
RANKS_PER_PAUSE = 64
"""With more ranks the pauses grow, so that the store is asked no more often."""

# Which save of a folder this is. All ranks count alike, as long as they call alike; a rank that
# missed one call is back in step with the next folder. A new process group begins anew.
saves_begun: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Who saves together, and how long they wait for each other.

    When a rank dies or hangs, each of the others raises at most ``2 * timeout_s`` after the last of
    them has written its part. A rank that is only slow, and still writes, is waited for.
    """

    process_group: Any = None
    """A ``torch.distributed`` process group; ``None`` is the default one."""
    timeout_s: float = 60
    """Seconds without a heartbeat after which a rank no longer waits for another one."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise CheckpointError(f"timeout_s={self.timeout_s!r}, expected seconds above 0")


class RankError(CheckpointError):
    """What went wrong on a rank, or between ranks; the message names them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that save together, and the store through which they send messages."""

    store: Any
    rank: int
    world_size: int
    timeout_s: float
    key: Any
    """What is the same object as long as the group lives."""

    @staticmethod
    def of(
        sharding: ShardingConfig, rank: int | None = None, world_size: int | None = None
    ) -> "Group":
        """Return the group of this process; one process without a group is a group of its own.

        Raises:
            CheckpointError: This process isn't in it, or is not the rank that was given.
        """
        group = sharding.process_group
        if not (dist.is_available() and dist.is_initialized()):
            store: Any = dist.HashStore()  # type: ignore[attr-defined]
            alone = Group(store, 0, 1, sharding.timeout_s, Group)
            return alone.checked(rank, world_size, "there is no process group")
        mine = dist.get_rank(group)
        if mine < 0:
            raise CheckpointError("this process is not in the given process group")
        key = dist.group.WORLD if group is None else group
        name = getattr(key, "group_name", "")
        common = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"npydata/{name}", common)  # type: ignore[attr-defined]
        size = dist.get_world_size(group)
        found = Group(store, mine, size, sharding.timeout_s, key)
        return found.checked(rank, world_size, "as the process group says")

    def checked(self, rank: int | None, world_size: int | None, why: str) -> "Group":
        """Return this group, if it is what was asked for."""
        for name, given, found in (
            ("rank", rank, self.rank),
            ("world_size", world_size, self.world_size),
        ):
            if given is not None and given != found:
                raise CheckpointError(f"{name}={given}, expected {found}: {why}")
        return self

    def rendezvous(self, folder: Path, purpose: str) -> "Coordinator":
        """Come to the next rendezvous about a folder, and let the other ranks know."""
        digest = hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:16]
        counter = saves_begun.setdefault(self.key, Counter())
        counter[digest] += 1
        coordinator = Coordinator(self, f"{digest}/{counter[digest]}", purpose, counter)
        coordinator.arrive()
        return coordinator


@dataclass(slots=True)
class Coordinator:
    """One exchange of messages between the ranks of a group.

    A message is a JSON object; ``{"error": text}`` says that its rank aborts. Rank 0 coordinates:
    it answers what the others send it.
    """

    group: Group
    key: str
    purpose: str = ""
    """What the ranks do together: ``saves FOLDER``."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often this rank came to a rendezvous, by the digest of its folder."""
    mismatched: bool = False
    """Whether another rank is at another rendezvous; this one's stays for the others to see."""
    next_heartbeat: float = 0
    next_look: float = 0
    heartbeats: dict[int, Any] = field(default_factory=dict)
    """The last heartbeat of ranks that were missed."""

    def arrive(self) -> None:
        """Let ranks that are at another rendezvous see that this one is here."""
        name = f"rendezvous/{self.group.rank}"
        self.call_store("set", name, json.dumps([self.key, self.purpose]).encode())

    def leave(self) -> None:
        """Say that this rank waits here no longer."""
        self.call_store("set", f"rendezvous/{self.group.rank}", b"[]")

    @contextmanager
    def abort_on_error(self, topic: str) -> Iterator[None]:
        """Let the others know what goes wrong here, so that they need not wait for the time-out.

        ``topic`` is what rank 0 expects of this rank; if this is rank 0, what all expect of it.
        """
        try:
            yield
        except BaseException as error:
            text = str(error) or type(error).__name__
            if not isinstance(error, RankError):  # else the rank is named already
                text = f"rank {self.group.rank}: {text}"
            with suppress(CheckpointError):
                self.abort(topic, text)
                if topic == "plan" and not self.mismatched:
                    self.leave()
            raise

    def abort(self, topic: str, text: str) -> None:
        """Leave the message that this rank has stopped."""
        if self.group.rank:
            self.send(topic, {"error": text})
        elif topic == "plan":
            for rank in range(1, self.group.world_size):
                self.send("answer", {"error": text}, to=rank)
        else:
            self.send("outcome", {"error": text})

    def send(self, topic: str, message: dict[str, Any], to: int | None = None) -> None:
        """Leave a message; ``to`` makes it one for a single rank."""
        name = self.name(topic, self.group.rank if to is None else to)
        self.call_store("set", name, zlib.compress(json.dumps(message).encode(), 1))

    def recv(self, topic: str, of: int = 0) -> dict[str, Any]:
        """Return what rank 0 sends, once it does; it may have to wait for others before.

        Raises:
            RankError: A rank aborted, or rank 0 sent no heartbeat for the time-out.
        """
        self.wait(topic, {self.name(topic, of): 0})
        return self.read(topic, of)

    def aborted(self, topic: str, of: int = 0) -> bool:
        """Whether a rank has sent an error; waits for nothing."""
        sent = bool(self.call_store("check", [self.name(topic, of)]))
        return sent and "error" in self.message(topic, of)

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """Return the messages of all ranks, in their order, and delete them from the store."""
        return self.gather_from(topic, range(self.group.world_size))

    def gather_from(self, topic: str, ranks: range) -> list[dict[str, Any]]:
        """Return the messages of some ranks."""
        self.wait(topic, {self.name(topic, rank): rank for rank in ranks})
        messages = [self.read(topic, rank) for rank in ranks]
        for rank in ranks:
            self.delete(topic, rank)
        return messages

    def agree(self, what: str, value: Any) -> None:
        """Compare: all ranks have the same value, or all of them raise.

        Raises:
            RankError: They have not, or one of them aborted or sent nothing.
        """
        self.send("plan", {"value": value})
        if self.group.rank == 0:
            with self.abort_on_error("plan"):
                for rank, message in enumerate(self.gather("plan")):
                    if message["value"] != value:
                        raise RankError(
                            f"rank {rank} has {what} {message['value']}, rank 0 {value}"
                        )
            for rank in range(self.group.world_size):
                self.send("answer", {}, to=rank)
        self.recv_answer()

    def recv_answer(self) -> dict[str, Any]:
        """Return rank 0's answer to this rank, with which the rendezvous is over."""
        answer = self.recv("answer", self.group.rank)
        self.delete("answer", self.group.rank)
        self.leave()
        return answer

    def read(self, topic: str, of: int) -> dict[str, Any]:
        """Return a message that is there."""
        message = self.message(topic, of)
        if "error" in message:
            if "key" in message:
                self.catch_up(message["key"])
            raise RankError(message["error"])
        return message

    def message(self, topic: str, of: int) -> dict[str, Any]:
        """Return a message that is there, whatever it says."""
        name = self.name(topic, of)
        message: dict[str, Any] = json.loads(zlib.decompress(self.call_store("get", name)))
        return message

    def wait(self, topic: str, awaited: Mapping[str, int]) -> None:
        """Wait until all of these messages are there; each is to come from a rank.

        Raises:
            RankError: Those that sent none had no heartbeat for the time-out, or save another
                folder.
        """
        group, pause = self.group, FIRST_PAUSE_S
        longest = LONGEST_PAUSE_S * max(1, group.world_size / RANKS_PER_PAUSE)
        end = time.monotonic() + group.timeout_s
        while not self.call_store("check", list(awaited)):
            self.heartbeat()
            if topic in ("plan", "answer"):
                self.look_for_another_rendezvous(awaited)
            if time.monotonic() > end:
                missing = {
                    rank for name, rank in awaited.items() if not self.call_store("check", [name])
                }
                if missing and not self.alive(missing):  # else it came just now
                    raise RankError(
                        f"{ranks_text(missing)}: no message ({topic!r}) and no heartbeat "
                        f"for {group.timeout_s:g} s"
                    )
                end = time.monotonic() + group.timeout_s
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, longest)

    def look_for_another_rendezvous(self, awaited: Mapping[str, int]) -> None:
        """Raise if a rank that is missed here waits elsewhere, where this one has not been.

        Where this one has been, the other is only late: it comes here when it is done there.
        """
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_S * max(1, self.group.world_size / RANKS_PER_PAUSE)
        found = ""
        for name, rank in islice(awaited.items(), MOST_LOOKED_AT):
            there = self.elsewhere(rank)
            if there is None or self.call_store("check", [name]):
                continue  # a rank sends its message before it goes on to another rendezvous
            key, purpose = there
            again = " again" * (purpose == self.purpose)
            found = f"rank {rank} {purpose}{again}, rank {self.group.rank} {self.purpose}"
            self.catch_up(key)
            self.notify(rank, key, found)
        if found:
            raise RankError(found)

    def elsewhere(self, rank: int) -> tuple[str, str] | None:
        """Return at which rendezvous a rank is, and why, if this one has never been there."""
        if not self.call_store("check", [name := f"rendezvous/{rank}"]):
            return None
        match json.loads(self.call_store("get", name)):
            case [key, purpose] if self.calls[key.split("/")[0]] < int(key.split("/")[1]):
                return key, purpose
        return None

    def catch_up(self, key: str) -> None:
        """Count the call of a rank at another rendezvous, to be in step with it next time."""
        digest, number = key.split("/")
        self.calls[digest] = max(self.calls[digest], int(number))
        self.mismatched = True

    def notify(self, rank: int, key: str, text: str) -> None:
        """Let a rank at another rendezvous know that this one isn't coming."""
        there = Coordinator(self.group, key)
        topic, to = ("plan", self.group.rank) if self.group.rank else ("answer", rank)
        there.send(topic, {"error": text, "key": self.key}, to=to)

    def heartbeat(self) -> None:
        """Let others who wait for this rank know that it is at work; now and then is enough."""
        if time.monotonic() >= self.next_heartbeat:
            every = min(HEARTBEAT_S, self.group.timeout_s / 4)
            self.next_heartbeat = time.monotonic() + every * max(1, self.group.world_size / 1024)
            self.call_store("add", self.name("heartbeat", self.group.rank), 1)

    @contextmanager
    def heartbeats_beside(self) -> Iterator[None]:
        """Send heartbeats beside a long computation; not beside what may hang, as a disk."""
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

    def alive(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has sent a heartbeat since this was asked last."""
        seen = {}
        for rank in ranks:
            name = self.name("heartbeat", rank)
            there = self.call_store("check", [name])
            seen[rank] = self.call_store("get", name) if there else None
        new = any(beat not in (None, self.heartbeats.get(rank)) for rank, beat in seen.items())
        self.heartbeats |= seen
        return new

    def name(self, topic: str, of: int) -> str:
        """Return the key of a message in the store."""
        return f"{self.key}/{topic}/{of}"

    def delete(self, topic: str, of: int) -> None:
        """Take a message out of the store."""
        self.call_store("delete_key", self.name(topic, of))

    def call_store(self, method: str, *args: Any) -> Any:
        """Call the store, and say so where it doesn't answer."""
        try:
            return getattr(self.group.store, method)(*args)
        except RuntimeError as error:  # the process that held it has ended
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"the process group's store does not answer: {text}") from None


def ranks_text(ranks: Iterable[int]) -> str:
    """Return some ranks in words."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{more}"
