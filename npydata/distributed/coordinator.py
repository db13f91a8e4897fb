"""How ranks agree: messages through the process group's store, with a time-out on every wait.

A collective has no such time-out: if one rank raises or dies before it, the others wait for the
group's own, which is meant for training. And a collective in a background thread would disturb the
order of training's collectives.

Each exchange has keys of its own, ``KEY/TOPIC/RANK``: rank 0 draws KEY at random and publishes it
until every plan is there. So what a dead process group left in the store is never used: a rank that
sent its plan to an old KEY sends it again as soon as there is a new one.
"""

import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from npydata.errors import CheckpointError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01
"""Between checks for a message. ``store.wait`` would hold the store's lock against training."""
RANKS_PER_PAUSE = 64
"""With more ranks the pauses grow, so that the store is polled no more often."""
LEAVE_S = 10
"""How long rank 0, whose process may hold the store, waits for the others to read the outcome."""


class RankError(CheckpointError):
    """What went wrong on a rank, or between ranks; the message names them."""


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Which ranks save together, and how long they wait for each other.

    Args:
        process_group: A ``torch.distributed`` process group; None is the default one.
        timeout_s: Seconds that rank 0 waits for the others; they wait twice as long for it. A rank
            that is dead, stopped or slower than that fails the save on all others, which name it.
    """

    process_group: Any = None
    timeout_s: float = 600

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise CheckpointError(f"timeout_s={self.timeout_s!r}, expected seconds above 0")


class Coordinator:
    """One exchange of messages between the ranks of a group; rank 0 decides.

    A message is a JSON object; ``{"error": text}`` says that its rank gives up. ``agree`` is the
    first part of every exchange, and all of it for a load; the rest uses ``send``, ``gather``,
    ``missing`` and ``take``.

    Args:
        sharding: The group; one process without a group is a group of its own.
        rank: Compared with the group's, if it is given; so is ``world_size``.
    """

    def __init__(
        self,
        sharding: ShardingConfig | None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        sharding = sharding or ShardingConfig()
        group = sharding.process_group
        self.timeout_s = sharding.timeout_s
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise CheckpointError("this process is not in the given process group")
            name = getattr(dist.group.WORLD if group is None else group, "group_name", "")
            common = dist.distributed_c10d._get_default_store()
            self.store: Any = dist.PrefixStore(f"npydata/{name}", common)  # type: ignore[attr-defined]
        else:
            self.rank, self.world_size = 0, 1
            self.store = dist.HashStore()  # type: ignore[attr-defined]
        for what, given, found in (
            ("rank", rank, self.rank),
            ("world_size", world_size, self.world_size),
        ):
            if given is not None and given != found:
                raise CheckpointError(f"{what}={given}, expected {found} as in the process group")
        self.others = range(1, self.world_size)  # all ranks but 0
        self.key, self.in_background = "", False
        """Rank 0's random text for this exchange; whether a worker now answers for this rank."""

    # The first part of an exchange

    def agree(
        self,
        plan: Callable[[], dict[str, Any]],
        decide: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Return rank 0's answer to this rank's plan.

        What a plan ``does`` must be the same on all ranks. ``decide`` runs on rank 0: it gets the
        plans of all ranks, and returns an answer for each.

        Raises:
            CheckpointError: A rank raised, never came, or does something else; the error is the
                same on every rank that came.
        """
        mine: Exception | None = None
        try:
            message = plan()
        except Exception as error:  # sent to the others, so that they don't wait in vain
            mine, message = error, self.error_message(error)
        try:
            return self._answer(message, decide) if self.rank == 0 else self._ask(message)
        except RankError as error:
            mine = mine or error
        raise mine

    def _answer(self, message: dict[str, Any], decide: Any) -> dict[str, Any]:
        """On rank 0: gather the plans, and answer them."""
        self.key = secrets.token_hex(8)
        answers: list[dict[str, Any]] = []
        try:
            self._call("set", "rank_0", self.key)
            try:
                plans = [message, *self.gather("plan")]
            finally:
                self._call("set", "rank_0", "")  # a get of a deleted key would wait for it
            if "error" in message:
                raise RankError(message["error"])
            for rank, one in enumerate(plans):
                if one["does"] != message["does"]:
                    raise RankError(f"rank {rank} {one['does']}, rank 0 {message['does']}")
            answers = decide(plans)
        except BaseException as error:
            answers = [self.error_message(error)] * self.world_size
            raise
        finally:
            for rank, answer in zip(self.others, answers[1:], strict=True):
                with suppress(RankError):
                    self.send("answer", answer, rank)
        return answers[0]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """On another rank: send the plan under rank 0's newest key; wait for the answer."""
        end, pause, published = time.monotonic() + 2 * self.timeout_s, FIRST_PAUSE_S, ""
        try:
            while True:
                if self._call("check", ["rank_0"]):
                    published = self._call("get", "rank_0").decode()
                # Checked after that: rank 0 answers before it publishes another key.
                if self.key and self._call("check", [self._name("answer", self.rank)]):
                    break
                if published not in ("", self.key):
                    self.delete("plan", self.rank)
                    self.key = published
                    self.send("plan", message)
                if time.monotonic() > end:
                    raise RankError(f"rank 0 did not answer within {2 * self.timeout_s:g} s")
                pause = self._sleep(pause)
            return self.take("answer", self.rank)
        except BaseException:
            with suppress(RankError):
                self.delete("plan", self.rank)
                self.delete("answer", self.rank)
            raise

    # Single messages

    def send(self, topic: str, message: dict[str, Any], rank: int | None = None) -> None:
        """Store a message from this rank, or for another one."""
        name = self._name(topic, self.rank if rank is None else rank)
        content = zlib.compress(json.dumps(message).encode(), 1)  # torch's store takes 8 MiB
        self._call("set", name, content)

    def take(self, topic: str, rank: int) -> dict[str, Any]:
        """Return a message that is there, and delete it.

        Raises:
            RankError: The message says that its sender gave up.
        """
        name = self._name(topic, rank)
        message: dict[str, Any] = json.loads(zlib.decompress(self._call("get", name)))
        self._call("delete_key", name)
        if "error" in message:
            raise RankError(message["error"])
        return message

    def gather(self, topic: str, timeout_s: float = 0) -> list[dict[str, Any]]:
        """On rank 0: return a message from each other rank, in their order.

        Raises:
            RankError: A rank gave up, or did not answer in time.
        """
        missing = self.missing(topic, self.others, timeout_s or self.timeout_s)
        messages, errors = [], []
        for rank in self.others:
            if rank not in missing:
                try:
                    messages.append(self.take(topic, rank))
                except RankError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        if missing:
            some = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
            raise RankError(f"rank {some} did not answer within {timeout_s or self.timeout_s:g} s")
        return messages

    def missing(self, topic: str, ranks: Iterable[int], timeout_s: float) -> list[int]:
        """Wait for a message from or for each of ``ranks``; return the ranks that still lack one.

        With ``timeout_s`` 0 this checks once.
        """
        names = {self._name(topic, rank): rank for rank in ranks}
        end, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while names and not self._call("check", list(names)):
            if time.monotonic() > end:
                return [rank for name, rank in names.items() if not self._call("check", [name])]
            pause = self._sleep(pause)
        return []

    def delete(self, topic: str, *ranks: int) -> None:
        """Delete messages, if they are there."""
        for rank in ranks:
            self._call("delete_key", self._name(topic, rank))

    def error_message(self, error: BaseException) -> dict[str, Any]:
        """Return what this rank says when it gives up."""
        text = str(error) or type(error).__name__
        if not isinstance(error, RankError):  # those name the rank already
            text = f"rank {self.rank}: {text}"
        return {"error": text}

    def _name(self, topic: str, rank: int) -> str:
        return f"{self.key}/{topic}/{rank}"

    def _sleep(self, pause: float) -> float:
        time.sleep(pause)
        return min(1.25 * pause, LONGEST_PAUSE_S * max(1, self.world_size / RANKS_PER_PAUSE))

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.store, method)(*args)
        except RuntimeError as error:
            raise RankError(f"the store of the process group is gone: {error!s:.200}") from None
