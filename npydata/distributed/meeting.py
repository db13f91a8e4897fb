"""How ranks meet: short messages through the process group's store, every wait with an end.

A collective has no such end: where one rank raises or dies before it, the others wait for the
group's own time-out, which is made for training. And a background thread that calls one would
disturb the order of training's. Used in ``notebooks/06_scale_out``.
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
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npydata.errors import CheckpointError

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.0005, 0.01, 1.25
"""Between looks for a message: it is seen a quarter of the wait after it came, at most 10 ms."""
LIFE_S = 1.0
"""How often a rank at work shows a sign of life."""
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
    """Seconds without a sign of life after which a rank gives up another one it waits for."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise CheckpointError(f"timeout_s={self.timeout_s!r}, expected seconds above 0")


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that save together, and the store through which they talk."""

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

    def meet(self, folder: Path) -> "Meeting":
        """Begin the next meeting about a folder."""
        digest = hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:16]
        counter = saves_begun.setdefault(self.key, Counter())
        counter[digest] += 1
        return Meeting(self, f"{digest}/{counter[digest]}")


@dataclass(slots=True)
class Meeting:
    """One exchange of messages between the ranks of a group.

    A message is a JSON object; ``{"error": text}`` says that its rank gives up. Rank 0 presides: it
    answers what the others tell it.
    """

    group: Group
    key: str
    next_sign: float = 0
    signs: dict[int, Any] = field(default_factory=dict)
    """The last sign of life of ranks that were missed."""

    @contextmanager
    def giving_up(self, topic: str) -> Iterator[None]:
        """Let the others know what goes wrong here, so that they need not wait for the time-out.

        ``topic`` is what rank 0 expects of this rank; if this is rank 0, what all expect of it.
        """
        try:
            yield
        except BaseException as error:
            text = str(error) or type(error).__name__
            if not text.startswith("rank"):  # else rank 0 passes on what another one said
                text = f"rank {self.group.rank}: {text}"
            with suppress(CheckpointError):
                self.tell_error(topic, text)
            raise

    def tell_error(self, topic: str, text: str) -> None:
        """Leave word that this rank gives up."""
        if self.group.rank:
            self.tell(topic, {"error": text})
        elif topic == "plan":
            for rank in range(1, self.group.world_size):
                self.tell("answer", {"error": text}, to=rank)
        else:
            self.tell("outcome", {"error": text})

    def tell(self, topic: str, message: dict[str, Any], to: int | None = None) -> None:
        """Leave a message; ``to`` makes it one for a single rank."""
        name = self.name(topic, self.group.rank if to is None else to)
        self.asked("set", name, zlib.compress(json.dumps(message).encode(), 1))

    def hear(self, topic: str, of: int = 0) -> dict[str, Any]:
        """Return what rank 0 says, once it does; it may have to wait for others before.

        Raises:
            CheckpointError: A rank gave up, or rank 0 showed no sign of life for the time-out.
        """
        self.wait(topic, {self.name(topic, of): 0})
        return self.read(topic, of)

    def gave_up(self, topic: str, of: int = 0) -> bool:
        """Whether a rank has said that it gives up; waits for nothing."""
        return bool(self.asked("check", [self.name(topic, of)])) and "error" in self.message(
            topic, of
        )

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """Return what every rank said, in their order, and take it out of the store."""
        return self.gather_from(topic, range(self.group.world_size))

    def gather_from(self, topic: str, ranks: range) -> list[dict[str, Any]]:
        """Return what some ranks said."""
        self.wait(topic, {self.name(topic, rank): rank for rank in ranks})
        said = [self.read(topic, rank) for rank in ranks]
        for rank in ranks:
            self.forget(topic, rank)
        return said

    def agree(self, what: str, value: Any) -> None:
        """Meet once and compare: all ranks have the same value, or all of them raise.

        Raises:
            CheckpointError: They have not, or one of them gave up or left no word.
        """
        self.tell("plan", {"value": value})
        if self.group.rank == 0:
            with self.giving_up("plan"):
                for rank, said in enumerate(self.gather("plan")):
                    if said["value"] != value:
                        raise CheckpointError(
                            f"rank {rank} has {what} {said['value']}, rank 0 {value}"
                        )
            for rank in range(self.group.world_size):
                self.tell("answer", {}, to=rank)
        self.hear("answer", self.group.rank)
        self.forget("answer", self.group.rank)

    def read(self, topic: str, of: int) -> dict[str, Any]:
        """Return a message that is there."""
        message = self.message(topic, of)
        if "error" in message:
            raise CheckpointError(message["error"])
        return message

    def message(self, topic: str, of: int) -> dict[str, Any]:
        """Return a message that is there, whatever it says."""
        name = self.name(topic, of)
        message: dict[str, Any] = json.loads(zlib.decompress(self.asked("get", name)))
        return message

    def wait(self, topic: str, awaited: Mapping[str, int]) -> None:
        """Wait until all of these messages are there; each is to come from a rank.

        Raises:
            CheckpointError: Those that left none showed no sign of life for the time-out.
        """
        group, pause = self.group, FIRST_PAUSE_S
        longest = LONGEST_PAUSE_S * max(1, group.world_size / RANKS_PER_PAUSE)
        end = time.monotonic() + group.timeout_s
        while not self.asked("check", list(awaited)):
            self.show_life()
            if time.monotonic() > end:
                missing = {
                    rank for name, rank in awaited.items() if not self.asked("check", [name])
                }
                if missing and not self.live(missing):  # else it came just now
                    raise CheckpointError(
                        f"{ranks_text(missing)}: no word ({topic!r}) and no sign of life "
                        f"for {group.timeout_s:g} s"
                    )
                end = time.monotonic() + group.timeout_s
            time.sleep(pause)
            pause = min(PAUSE_GROWTH * pause, longest)

    def show_life(self) -> None:
        """Let others who wait for this rank know that it is at work; now and then is enough."""
        if time.monotonic() >= self.next_sign:
            every = min(LIFE_S, self.group.timeout_s / 4)
            self.next_sign = time.monotonic() + every * max(1, self.group.world_size / 1024)
            self.asked("add", self.name("life", self.group.rank), 1)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Show signs of life beside a long computation; not beside what may hang, as a disk."""
        over, pause = threading.Event(), min(LIFE_S, self.group.timeout_s / 4)

        def show() -> None:
            with suppress(CheckpointError):  # a store that is gone is noticed by who uses it next
                while not over.wait(pause):
                    self.show_life()

        beside = threading.Thread(target=show, name="npydata-life", daemon=True)
        beside.start()
        try:
            yield
        finally:
            over.set()
            beside.join()

    def live(self, ranks: Iterable[int]) -> bool:
        """Whether one of these ranks has shown a sign of life since this was asked last."""
        seen = {}
        for rank in ranks:
            name = self.name("life", rank)
            seen[rank] = self.asked("get", name) if self.asked("check", [name]) else None
        new = any(sign not in (None, self.signs.get(rank)) for rank, sign in seen.items())
        self.signs |= seen
        return new

    def name(self, topic: str, of: int) -> str:
        """Return the key of a message in the store."""
        return f"{self.key}/{topic}/{of}"

    def forget(self, topic: str, of: int) -> None:
        """Take a message out of the store."""
        self.asked("delete_key", self.name(topic, of))

    def asked(self, method: str, *args: Any) -> Any:
        """Ask the store, and say so where it doesn't answer."""
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
