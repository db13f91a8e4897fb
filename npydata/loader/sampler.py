"""Which samples make batch k of an epoch, for this rank, from wherever the epoch was left.

An epoch is one order of all samples. Where the loader decides it, that is pure arithmetic: a
*global* batch is the next ``batch_size * world_size`` samples, and each rank takes its slice. So
the position in an epoch is one number, the samples that all ranks together have received, and any
number of ranks can resume from it. Built in ``notebooks/02_order_without_a_list``.

The order of a sampler or a stream has to be *pulled*, one item after the other. Only the source
itself can return to a position: through its ``state_dict``, or by being pulled again that many
times.
"""

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed

from npydata.dataset.batches import copied
from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import IntArray, stream_key
from npydata.errors import LoaderError
from npydata.loader.state import Position

BLOCK_SAMPLES = 8192
"""Shuffling has a fixed cost per call, so indices are computed for many batches at a time."""

LEAST_ADVISED = 4
"""A sample's pages are advised at least this many batches before it is fetched."""


class Plan(NamedTuple):
    """What batch k is made of; ``items`` is ``None`` after the last one."""

    items: Any
    """Indices, an int64 array or a list; for a stream, the samples themselves."""
    keys: range | IntArray
    """An integer for each sample: its index or, in a stream, its position in the epoch."""
    after: Position
    """Where the epoch stands once this batch is delivered."""


@dataclass(frozen=True, kw_only=True)
class RankSlices:
    """How the rest of an epoch is cut into global batches, and which slice of each is our batch.

    Every rank gets the same number of batches.

    What is left after the full batches is split evenly among the ranks. A remainder of fewer
    samples than ranks goes to none of them, since a rank with one batch more would wait for the
    others.
    """

    num_samples: int
    """Samples in the dataset."""
    batch_size: int
    """Samples per batch of one rank."""
    rank: int = 0
    """Which slice of each global batch is ours."""
    world_size: int = 1
    """How many ranks share the epoch."""
    drop_last: bool = False
    """Leave out the last batch if it is short."""
    start: int = 0
    """Samples that all ranks together received before."""

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples - self.start, self.batch_size * self.world_size)
        return full + (rest >= self.world_size and not self.drop_last)

    def samples_after(self, batches: int) -> int:
        """Samples that all ranks together have received once each got that many batches."""
        shared = (self.num_samples - self.start) // self.world_size * self.world_size
        return self.start + min(batches * self.batch_size * self.world_size, shared)

    def positions(self, batch: int) -> range:
        """Return our positions in the epoch's order for a batch."""
        begin = self.samples_after(batch)
        size = min(self.batch_size, (self.num_samples - begin) // self.world_size)
        return range(begin + self.rank * size, begin + (self.rank + 1) * size)


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's shuffle, different for each seed and each epoch."""
    return int(stream_key(seed, epoch))


class EpochOrder:
    """The samples of each batch of an epoch: in order, or shuffled without a list.

    Constant memory; safe to share between threads that ask for batches within ``window``, and for
    indices up to three times as far ahead.
    """

    def __init__(
        self, slices: RankSlices, seed: int, epoch: int, *, shuffle: bool, window: int
    ) -> None:
        self.slices, self.epoch, self.shuffle, self.window = slices, epoch, shuffle, window
        self._count = len(slices)
        self._permutation = Permutation(max(1, slices.num_samples), epoch_seed(seed, epoch))
        self._per_block = max(1, BLOCK_SAMPLES // slices.batch_size)
        self._most_blocks = 2 + 3 * max(LEAST_ADVISED, window) // self._per_block
        self._blocks: dict[int, IntArray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __call__(self, batch: int) -> Plan:
        """Return what a batch is made of, ``(batch_size,)`` indices."""
        if batch >= self._count:
            return Plan(None, range(0), Position(self.epoch + 1))
        indices, after = self.indices(batch), Position(self.epoch + 1)
        if batch + 1 < self._count:
            after = Position(self.epoch, self.slices.samples_after(batch + 1))
        return Plan(indices, indices, after)

    def indices(self, batch: int) -> IntArray:
        """Return the indices of a batch, int64."""
        number, within = divmod(batch, self._per_block)
        block = self._blocks.get(number)
        if block is None:
            block = self._compute(number)
        size = self.slices.batch_size
        return block[within * size : (within + 1) * size]  # the last batch may be short

    def _compute(self, number: int) -> IntArray:
        """Compute a block, unless another thread just did, and drop those long past."""
        with self._lock:
            if number not in self._blocks:
                first = number * self._per_block
                last = min(first + self._per_block, self._count)
                ours = map(self.slices.positions, range(first, last))
                positions = np.concatenate([np.arange(one.start, one.stop) for one in ours])
                shuffled = self._permutation(positions) if self.shuffle else positions
                self._blocks[number] = np.asarray(shuffled)
            block = self._blocks[number]
            for old in sorted(self._blocks)[: -self._most_blocks]:
                del self._blocks[old]
        return block


class PulledOrder:
    """One epoch of another source's order, pulled by whichever thread asks for the next batch.

    Args:
        source: What gives the items: a sampler, a batch sampler or an iterable dataset.
        kind: ``"sampler"``, ``"batch_sampler"`` or ``"stream"``.
        size: Items per batch.
        drop_last: Leave out a short batch at the end.
        start: Where to begin. ``start.order``, if it is not ``None``, is what :meth:`_state`
            returned; the source is restored to it.
        seed: Decides what torch's samplers draw from the global generator when they begin.
        lock: Held while the source runs, also by an iterator that was abandoned a moment ago.
        require_open: Raises if the epoch was abandoned.

    The attribute ``start`` is where the epoch begins, with its ``order`` filled in. A sampler's
    first item is pulled at once, by the caller. If the source has a ``len``, its last batch ends
    the epoch; otherwise the end is noticed when one more batch is asked for.
    """

    def __init__(
        self,
        source: Any,
        kind: str,
        size: int,
        *,
        drop_last: bool,
        start: Position,
        seed: int,
        lock: threading.RLock,
        require_open: Callable[[], None],
    ) -> None:
        self.source, self.kind, self.size, self.drop_last = source, kind, size, drop_last
        self.epoch, self._samples = start.epoch, start.samples
        self._lock, self._require_open = lock, require_open
        # Batches are pulled in order, but a later one may be asked for first: the others wait here.
        self._plans: dict[int, Plan | BaseException] = {}
        self._pulled, self._over = 0, False
        self._length = length_hint(source, sys.maxsize)
        # Items pulled to see whether there are any; they belong to the next batch.
        self._peeked: list[Any] = []
        # Samplers draw from the global generator when they begin, or at their first item.
        with lock, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(epoch_seed(seed, start.epoch))
            self._open(start.order or {"given": 0})
            # Keep a loaded state: many sources know their position only once they were pulled.
            self.start = start if start.order else start._replace(order=self._state())
            if kind != "stream":
                self._peeked = self._pull(1)

    def _open(self, state: dict[str, Any]) -> None:
        """Begin the source at the position of a state."""
        # How many items of this epoch are in batches: what is saved for a source without a state.
        self._batched, self._generator = state["given"], generator_of(self.source)
        if "source" in state:
            self.source.load_state_dict(copy.deepcopy(state["source"]))
        if "generator" in state:
            if self._generator is None:
                raise LoaderError(
                    "the state has a sampler's generator, and this sampler has none: "
                    "give it one, as the sampler had that was saved"
                )
            bits = bytearray.fromhex(state["generator"])
            self._generator.set_state(torch.frombuffer(bits, dtype=torch.uint8))
        self._generator_at_start = self._generator_state()
        self.iterator = iter(self.source)
        if "iterator" in state:
            self.iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        stands_there = "source" in state or "iterator" in state
        self._skip = 0 if stands_there else self._batched
        # The source's own state may be from the end of its last epoch: then it has to begin again.
        self._may_be_at_end = stands_there and not self._batched

    def _state(self) -> dict[str, Any]:
        """Return a copy of what restores the source to this position.

        That is its own state if it has one, else how many items to pull again.
        """
        things = {"source": self.source, "iterator": self.iterator}
        if self.iterator is self.source:
            del things["source"]
        own = {}
        for name, thing in things.items():
            if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
                with suppress(TypeError):  # the streams of some libraries want arguments
                    own[name] = copy.deepcopy(thing.state_dict())
        if not own and self._generator_at_start:
            own["generator"] = self._generator_at_start
        return {"of": self.kind, "given": self._batched, **own}

    def _generator_state(self) -> str | None:
        return self._generator.get_state().numpy().tobytes().hex() if self._generator else None

    def __call__(self, batch: int) -> Plan:
        """Return what a batch is made of; raise what the source raised in its place."""
        with self._lock:
            while self._pulled <= batch:
                try:
                    self._plans[self._pulled] = self._next_plan()
                except BaseException as error:
                    self._over, self._plans[self._pulled] = True, error
                self._pulled += 1
            plan = self._plans.pop(batch)
        if isinstance(plan, BaseException):
            raise plan
        return plan

    def _next_plan(self) -> Plan:
        if self._over:
            return self._end()
        items = self._pull_on()
        self._over = len(items) < self.size
        if not items or (self._over and self.drop_last):
            return self._end()
        self._batched += len(items)
        if self.kind == "batch_sampler":
            items = list(items[0])
        places = range(self._samples, self._samples + len(items))
        self._samples = places.stop
        is_keyed = self.kind != "stream" and all(isinstance(item, Integral) for item in items)
        keys = np.array(items, np.int64) if is_keyed else places
        after = Position(self.epoch, self._samples, self._state())
        more = self.size if self.drop_last else 1
        if not self._over and self._batched + more > self._length:  # it should be at its end
            self._peeked = self._pull(more)
            self._over = len(self._peeked) < more
        return Plan(items, keys, self._end().after if self._over else after)

    def _end(self) -> Plan:
        """Return what comes after the last batch: the next epoch."""
        self._batched = 0
        self._generator_at_start = self._generator_state()
        return Plan(None, range(0), Position(self.epoch + 1, 0, self._state()))

    def _pull_on(self) -> list[Any]:
        """Return the items of the next batch, skipping those already given."""
        samples = 0
        while self._skip and (item := self._pull(1)):
            self._skip -= 1
            samples += len(item[0]) if self.kind == "batch_sampler" else 0
        if samples not in (0, self._samples):
            raise LoaderError(
                f"the batch sampler begins with other batches than it did: {samples} samples in "
                f"those already given, expected {self._samples}"
            )
        items = self._pull(self.size)
        if not items and self._may_be_at_end:
            self.iterator = iter(self.source)
            items = self._pull(self.size)
        self._may_be_at_end = False
        return items

    def _pull(self, count: int) -> list[Any]:
        """Return the next items, fewer of them at the end."""
        items, self._peeked = self._peeked[:count], self._peeked[count:]
        try:
            while len(items) < count:
                self._require_open()
                item = next(self.iterator)
                # A stream may reuse one buffer for every item.
                items.append(copied(item) if self.kind == "stream" else item)
        except StopIteration:
            pass
        return items


def generator_of(source: Any) -> torch.Generator | None:
    """Return the generator that a sampler, or the sampler inside a batch sampler, draws from."""
    while source is not None:
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
        source = getattr(source, "sampler", None)
    return None


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else as ``torch.distributed`` says."""
    if rank is not None and world_size is not None:
        return int(rank), int(world_size)
    if has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def has_process_group() -> bool:
    """Whether this process is one of several that torch.distributed connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def draw_seed(world_size: int) -> int:
    """Draw a seed that all ranks share; ``torch.manual_seed`` decides it.

    Raises:
        LoaderError: The ranks have no process group to agree through.
    """
    drawn = [int(torch.empty((), dtype=torch.int64).random_())]
    if world_size > 1:
        if not has_process_group():
            raise LoaderError(
                f"seed=None with world_size={world_size} and no process group: the ranks cannot "
                "agree on one; give a seed"
            )
        torch.distributed.broadcast_object_list(drawn)
    return drawn[0]
