"""Measuring side by side: everything in turn, several times, and the spread beside the median."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TypeVar

from npydata.pages import bytes_read

Way = TypeVar("Way")
Result = TypeVar("Result")

Steps = Iterator[float]
"""An iterator that does a piece of work per step and says how many tokens that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of doing the work."""

    name: str
    setting: str
    """What else one needs to know to do it again: workers, hints, depth."""
    group: str
    """Only contenders of one group are compared: ``warm``, ``cold`` or ``hints``."""
    role: str
    """``ours``, ``stock``, ``naive`` or ``limit``: decides the colour."""
    start: Callable[[], Steps]
    """Sets up from nothing and returns the work; closing it must free everything."""
    drop: int = 0
    """Steps at the start that are not timed: workers starting, queues filling."""
    bytes_per_token: float | None = None
    """For a limit measured in bytes: how many of them one token costs."""
    useful_bytes_per_token: float | None = None
    """For a cold file: bytes of a window divided by the tokens it delivers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop one measurement: whichever comes first, but not before one step."""

    seconds: float
    read_bytes: float = float("inf")
    """Bytes fetched from storage, so that a cold file stays mostly cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one contender."""

    tokens: float
    seconds: float
    read_bytes: int
    """Fetched from storage meanwhile by this process."""


LESS_IS_BETTER = ("ms", "MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All measurements of one contender, as they go into the table, the JSON and the plot."""

    name: str
    setting: str
    group: str
    role: str
    rates: tuple[float, ...]
    """What each repeat gave, in ``unit``, in the order taken."""
    unit: str = "Mtok/s"
    """``Mtok/s`` or ``MB/s``, of which more is better; ``ms`` or ``MiB``, of which less is."""
    read_amplification: float | None = None
    """Bytes fetched from storage per byte of a delivered window; ``None`` where files are warm."""
    read_bytes: float | None = None
    """Bytes fetched from storage in one repeat, the median."""
    bytes_per_token: float | None = None
    """For a limit: how many of the bytes it is measured in one token costs."""
    anonymous: float | None = None
    """For extra memory: how much of it was no page of a file when all was read, in ``unit``."""

    @property
    def median(self) -> float:
        """The middle of the repeats, in ``unit``."""
        return median(self.rates)

    @property
    def score(self) -> float:
        """The median with a sign: of two rows the one with more is better."""
        return -self.median if self.unit in LESS_IS_BETTER else self.median

    @property
    def limit_bytes_per_s(self) -> float | None:
        """A limit in its own unit."""
        return self.bytes_per_token and self.median * 1e6 * self.bytes_per_token


def interleave(
    contenders: Iterable[Contender],
    repeats: int,
    measure: Callable[[Contender], Sample],
    on_sample: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Measure contenders in turn and sum up each one's measurements."""
    contenders = list(contenders)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on purpose
        taken = take_turns(contenders, repeats, measure, on_sample)
    return [row_of(*pair) for pair in zip(contenders, taken, strict=True)]


def take_turns(
    ways: Sequence[Way],
    repeats: int,
    measure: Callable[[Way], Result],
    on_sample: Callable[[], object] = lambda: None,
) -> list[list[Result]]:
    """Measure A B C, A B C, ... and drop the first round, in which caches and pages get ready.

    In turn, so that a machine that gets slower or busier does so for all of them. Returns each
    way's results.
    """
    taken: list[list[Result]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for way, results in zip(ways, taken, strict=True):
            result = measure(way)
            if turn > 0:
                results.append(result)
            on_sample()
    return taken


def going_on(start: Callable[[], Steps]) -> Callable[[], Steps]:
    """Return a start that sets up once and later goes on where it stopped.

    A training run maps its file once: the page tables that the first reads fill stay filled.
    """
    running: list[Steps] = []

    def resume() -> Steps:
        if not running:
            running.append(start())
        # A plain loop: ending it leaves the work itself running, which ``yield from`` would not.
        for count in running[0]:  # noqa: UP028
            yield count

    return resume


def timed(contender: Contender, budget: Budget) -> Sample:
    """Set up, drop the first steps, and time steps until the budget is spent."""
    read_before = bytes_read()
    with closing(contender.start()) as steps:  # type: ignore[type-var]
        for _ in islice(steps, contender.drop):
            pass
        tokens, seconds = 0.0, 0.0
        begin = time.perf_counter()
        for count in steps:
            tokens += count
            seconds = time.perf_counter() - begin
            if seconds > budget.seconds or bytes_read_since(read_before, budget):
                break
    return Sample(tokens=tokens, seconds=seconds, read_bytes=bytes_read() - read_before)


def bytes_read_since(before: int, budget: Budget) -> bool:
    """Whether the budget's bytes are used up; asks the kernel only if there is such a budget."""
    return budget.read_bytes != float("inf") and bytes_read() - before > budget.read_bytes


def row_of(contender: Contender, samples: list[Sample]) -> Row:
    """Sum up one contender's measurements."""
    useful = contender.useful_bytes_per_token
    wanted = useful and useful * sum(sample.tokens for sample in samples)
    return Row(
        name=contender.name,
        setting=contender.setting,
        group=contender.group,
        role=contender.role,
        rates=tuple(sample.tokens / sample.seconds / 1e6 for sample in samples),
        read_amplification=wanted and sum(sample.read_bytes for sample in samples) / wanted,
        read_bytes=useful and median(sample.read_bytes for sample in samples),
        bytes_per_token=contender.bytes_per_token,
    )
