"""Measuring side by side: everything in turn, several times, and the spread beside the median."""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, TypeVar

from npydata.system.page_cache import bytes_read
from npydata.system.progress import progress_bar

Key = TypeVar("Key")
Result = TypeVar("Result")
Plan = TypeVar("Plan")
Steps = Iterator[Any]
"""Does a piece of work at each step; closing it frees everything."""

MIB = 1 << 20
LESS_IS_BETTER = ("ms", "MiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All measurements of one baseline, as they go into the table, the JSON and the plot."""

    name: str
    setting: str
    group: str
    """Only rows of one group are compared: ``warm``, ``cold``, ``stall``, ..."""
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
        return median(self.rates)

    @property
    def score(self) -> float:
        """The median with a sign: of two rows the one with more is better."""
        return -self.median if self.unit in LESS_IS_BETTER else self.median

    @property
    def limit_bytes_per_s(self) -> float | None:
        """A limit in its own unit."""
        return self.bytes_per_token and self.median * 1e6 * self.bytes_per_token


def asked_for(args: argparse.Namespace, full: Plan, quick: Plan) -> Plan:
    """Return what to measure: one of two plans, with the arguments given of the same names."""
    plan: Any = quick if args.quick else full
    names = [field.name for field in fields(plan) if getattr(args, field.name, None) is not None]
    changed: Plan = replace(plan, **{name: getattr(args, name) for name in names})
    return changed


def interleave(
    title: str,
    methods: Mapping[Key, Callable[[], Result]],
    repeats: int,
    *,
    show: bool = True,
    on_sample: Callable[[], object] = lambda: None,
) -> dict[Key, list[Result]]:
    """Call A B C, A B C, ... and drop the first round, in which caches and pages get ready.

    In turn, so that a machine that gets slower or busier does so for all of them. Returns each
    method's results.
    """
    bar = progress_bar(title, len(methods) * (repeats + 1), " measurements", show=show)

    def noted(method: Callable[[], Result]) -> Result:
        result = method()
        bar.update(1)
        on_sample()
        return result

    with closing(bar), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # on purpose
        return in_turn({key: partial(noted, method) for key, method in methods.items()}, repeats)


def in_turn(methods: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """Call A B C, A B C, ... and return each method's results, the first round left out."""
    rounds = [{key: method() for key, method in methods.items()} for _ in range(repeats + 1)]
    return {key: [results[key] for results in rounds[1:]] for key in methods}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of a method that works in steps."""

    amount: float
    """Tokens, or a limit's bytes."""
    seconds: float
    read_bytes: int
    """Fetched from storage meanwhile by this process."""


def timed(
    start: Callable[[], Steps],
    amount: Callable[[Any], float],
    seconds: float,
    *,
    drop: int = 0,
    read_bytes: float | None = None,
) -> Sample:
    """Set up, drop the first steps, and time steps for some seconds, but one step at least.

    ``amount`` says how much a step delivered. It also ends when ``read_bytes`` came from storage,
    so that a cold file stays mostly cold.
    """
    read_before = bytes_read()
    with closing(start()) as steps:  # type: ignore[type-var]
        for _ in islice(steps, drop):
            pass
        done, took = 0.0, 0.0
        begin = time.perf_counter()
        for result in steps:
            done += amount(result)
            took = time.perf_counter() - begin
            if took > seconds or (read_bytes and bytes_read() - read_before > read_bytes):
                break
    return Sample(amount=done, seconds=took, read_bytes=bytes_read() - read_before)


def kept_running(start: Callable[[], Steps]) -> Callable[[], Steps]:
    """Return a start that sets up once and later goes on where it stopped.

    A training run maps its file once: the page tables that the first reads fill stay filled.
    """
    running: list[Steps] = []

    def resume() -> Steps:
        if not running:
            running.append(start())
        # A plain loop: ending it leaves the work itself running, which ``yield from`` would not.
        for result in running[0]:  # noqa: UP028
            yield result

    return resume


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def mean_milliseconds(work: Callable[[], object], seconds: float) -> float:
    """Return the mean milliseconds of a piece of work that is done again for some seconds."""
    done, total = 0, 0.0
    while total <= 1e3 * seconds or not done:
        total += milliseconds(work)
        done += 1
    return total / done
