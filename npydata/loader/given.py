"""Orders that the loader does not decide: a sampler's, a batch sampler's, or a stream's.

Our own order is arithmetic: batch k is known without the ones before it. A given order has to be
*pulled*, one item after the other, and only the thing itself knows how to stand somewhere: by its
``state_dict``, or by being pulled again that often.
"""

import copy
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from npydata.dataset.windows import IntArray
from npydata.errors import LoaderError
from npydata.loader.config import is_integer
from npydata.loader.sampler import epoch_seed
from npydata.loader.state import Cursor

UNKNOWN = sys.maxsize
"""The number of batches of an order that does not say its length."""


@dataclass(slots=True)
class GivenCursor(Cursor):
    """Where an epoch of a given order stands."""

    order_state: dict[str, Any] | None = None
    """What brings the order back to where it stands: see :meth:`GivenOrder.state`."""
    is_elsewhere: bool = False
    """Whether the order has to be brought there: after a load, or when prefetched items were
    never delivered. At the end of an epoch it is there by itself."""

    def for_next_iterator(self) -> "GivenCursor":
        """Return where the next iterator begins: behind a batch that failed, else as always."""
        if isinstance(self.after_failure, GivenCursor):
            return self.after_failure
        if self.begun:
            return GivenCursor(self.epoch + 1)
        return GivenCursor(self.epoch, self.samples, order_state=self.order_state,
                           is_elsewhere=self.is_elsewhere)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """The items of one batch, and where the order stands behind them."""

    items: list[Any]
    is_whole: bool
    """The one item is the batch: a list of indices, or a sample that comes singly."""
    samples: int
    order_state: dict[str, Any]


class Turns:
    """A lock that is a new one in each copy, so that what has it can be copied and pickled."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()


class GivenOrder:
    """One epoch of a given order, cut into batches, in whatever thread asks for the next.

    Args:
        source: What gives the items: a sampler, a batch sampler, or an iterable dataset.
        kind: Which of them: ``"sampler"``, ``"batch_sampler"`` or ``"stream"``.
        size: Items per batch; ``None`` where each item is one.
        drop_last: Leave out a short batch at the end.
        cursor: Where to begin; its order's state is filled in if it has none.
        seed: Decides what a sampler draws from torch's global generator when it begins.
        turns: Held while the source works, also by an iterator that was left a moment ago.
        check_cancelled: Raises once nobody wants the epoch.
    """

    def __init__(
        self,
        source: Any,
        kind: str,
        size: int | None,
        *,
        drop_last: bool,
        cursor: GivenCursor,
        seed: int,
        turns: Turns,
        check_cancelled: Callable[[], None],
    ) -> None:
        self.source, self.kind, self.size, self.drop_last = source, kind, size, drop_last
        self.epoch = cursor.epoch
        self.check_cancelled, self._lock = check_cancelled, turns.lock
        self._cuts: dict[int, Cut | BaseException | None] = {}
        self._pulled, self._over = 0, False
        self._head: list[Any] = []
        with self._lock:
            self._open(cursor, epoch_seed(seed, cursor.epoch))

    def __len__(self) -> int:
        return UNKNOWN

    def cut(self, number: int) -> Cut | None:
        """Return the items of a batch; ``None`` behind the last one."""
        with self._lock:
            while self._pulled <= number:
                self._cuts[self._pulled] = self._next_or_error()
                self._pulled += 1
            found = self._cuts[number]
        if isinstance(found, BaseException):
            raise found
        return found

    def behind(self, number: int, epoch: int) -> GivenCursor:
        """Return where to go on without a batch that failed; in the next epoch if it was not cut.

        A source that raised an error has ended: most generators never give anything again.
        """
        with self._lock:
            cut = self._cuts.get(number)
        if not isinstance(cut, Cut):
            return GivenCursor(epoch + 1)
        return GivenCursor(epoch, cut.samples, order_state=cut.order_state, is_elsewhere=True)

    def forget(self, number: int) -> None:
        """Let go of a batch that was made."""
        self._cuts.pop(number, None)

    def keys(self, number: int) -> IntArray:
        """Return an integer for each sample of a batch: its index, or its place in the epoch."""
        cut = self.cut(number)
        items = cut.items if cut else []
        if cut and cut.is_whole and self.kind == "batch_sampler":
            items = list(items[0])
        if self.kind != "stream" and all(map(is_integer, items)):
            return np.array(items, np.int64)
        return np.arange(cut.samples - len(items), cut.samples) if cut else np.arange(0)

    def end(self) -> dict[str, Any]:
        """Return the state in which the next epoch begins."""
        with self._lock:
            self.given = 0
            self._note_generator()
            return self.state(ended=True)

    def state(self, ended: bool = False) -> dict[str, Any]:
        """Return what a state needs: the source's own state, or how many items to pull again.

        Copies: what the source goes on with must not change them.
        """
        own = {} if self.iterator is self.source else {"source": state_of(self.source)}
        own["iterator"] = state_of(self.iterator)
        is_stateful = any(state is not None for state in own.values())
        return {
            "of": self.kind,
            "resumes_by": "state_dict" if is_stateful else "skipping",
            "given": self.given,
            "ended": ended,
            **({name: state for name, state in own.items() if state is not None}),
            **({} if is_stateful or self._generator is None else {"generator": self._generator}),
        }

    def _open(self, cursor: GivenCursor, seed: int) -> None:
        """Begin the source where the cursor stands, and let the cursor say where that is."""
        state = cursor.order_state if cursor.is_elsewhere else None
        self.given = state["given"] if state else 0
        self.samples, self._skip, self._reopen = cursor.samples, 0, False
        if state and "source" in state:
            self.source.load_state_dict(copy.deepcopy(state["source"]))
        if state and "generator" in state:
            set_generator(self.source, state["generator"])
        self._note_generator()
        self.iterator = iter(self.source)
        if state and "iterator" in state:
            self.iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        if state and state["resumes_by"] == "skipping":
            self._skip = self.given
        elif state and state["ended"]:  # the source stands at its end: of this epoch, or the last
            self._over, self._reopen = self.given > 0, self.given == 0
        if not state:
            cursor.order_state = self.state()
        cursor.is_elsewhere = True
        if self.kind != "stream" and not self._over:
            self._head = drawn_with(seed, self._pull)

    def _note_generator(self) -> None:
        generator = generator_of(self.source)
        self._generator = generator.get_state().numpy().tobytes().hex() if generator else None

    def _next_or_error(self) -> Cut | BaseException | None:
        """Return the next batch's items; after the end, or an error, there are no more."""
        if self._over:
            return None
        try:
            self.check_cancelled()
            found = self._next()
        except BaseException as error:
            self._over = True
            return error
        self._over = found is None
        return found

    def _next(self) -> Cut | None:
        self._catch_up()
        items = list(islice(self._items(), self.size or 1))
        if not items or (self.drop_last and len(items) < (self.size or 1)):
            return None
        self.given += len(items)
        self.samples += len(items[0]) if self.kind == "batch_sampler" else len(items)
        is_short = len(items) < (self.size or 1)  # the source has ended, and may have started over
        return Cut(items, self.size is None, self.samples, self.state(ended=is_short))

    def _pull(self) -> list[Any]:
        """Return the next item in a list, an empty one at the end.

        ``next`` is all that is asked of an iterator: a sampler's may have no ``__iter__``.
        """
        try:
            return [next(self.iterator)]
        except StopIteration:
            return []

    def _items(self) -> Iterable[Any]:
        """Yield what is next, looking before each item whether anybody still wants it."""
        while True:
            if not self._head:
                self._head = self._pull()
            if not self._head:
                return
            yield self._head.pop()
            self.check_cancelled()

    def _catch_up(self) -> None:
        """Pull again what was given before; begin anew if a loaded state was an epoch's end."""
        for _ in range(self._skip):
            if not list(islice(self._items(), 1)):
                break
        self._skip = 0
        if self._reopen and not self._head:
            self._head = self._pull()
            if not self._head:
                self.iterator = iter(self.source)
        self._reopen = False


def is_stateful(thing: Any) -> bool:
    """Whether something can say where it stands, and be brought there."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def state_of(thing: Any) -> Any:
    """Return a copy of something's state; ``None`` if it has none."""
    return copy.deepcopy(thing.state_dict()) if is_stateful(thing) else None


def generator_of(source: Any) -> torch.Generator | None:
    """Return the generator that a sampler, or the sampler inside a batch sampler, draws from."""
    while source is not None:
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        source = getattr(source, "sampler", None)
    return None


def set_generator(source: Any, state: str) -> None:
    """Bring a sampler's generator to where a state says it stood."""
    generator = generator_of(source)
    if generator is None:
        raise LoaderError("the state has a sampler's generator, and this sampler has none: give it "
                          "generator=torch.Generator(), as the one had that was saved")  # fmt: skip
    generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def drawn_with(seed: int, draw: Callable[[], Any]) -> Any:
    """Return what is drawn while torch's global generator stands at a seed; then it is put back.

    torch's samplers take a single number from it when they begin.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return draw()
    finally:
        torch.default_generator.set_state(before)
