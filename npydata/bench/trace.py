"""Where the time of a run went, read off its trace, and what a faster part of it would bring.

A trace is rows of ``(lane, start, end, part)``: who was busy, from when to when, and with what. The
scoreboard of the notebooks is drawn from one. Built in ``notebooks/00_start_here``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Interval = tuple[str, float, float, str]
"""Lane, start, end, part; times in seconds."""


def record_span(
    trace: list[Interval],
    clock: Callable[[], float],
    lane: str,
    part: str,
    work: Callable[[], Any],
) -> Any:
    """Do a piece of work, add its row to a trace, and return what it returns."""
    start = clock()
    result = work()
    trace.append((lane, start, clock(), part))
    return result


def seconds_by_part(trace: Sequence[Interval]) -> dict[str, float]:
    """Return how long each part took in all."""
    seconds: dict[str, float] = {}
    for _, start, end, part in trace:
        seconds[part] = seconds.get(part, 0) + end - start
    return seconds


def idle_share(trace: Sequence[Interval], lane: str) -> float:
    """Return the share of the trace's time, 0 to 1, in which a lane does nothing.

    Intervals come in the order of their starts; those of one lane may overlap.
    """
    begin = min(start for _, start, _, _ in trace)
    end = max(stop for _, _, stop, _ in trace)
    busy, covered = 0.0, begin
    for name, start, stop, _ in trace:
        if name == lane and stop > covered:
            busy += stop - max(start, covered)
            covered = stop
    return 1 - busy / (end - begin)


def speedup(parts: Mapping[str, float], name: str, factor: float) -> float:
    """Return how many times as fast the whole gets when one part does (Amdahl's law)."""
    before = sum(parts.values())
    after = before - parts[name] + parts[name] / factor
    return before / after


def side_by_side(data: float, compute: float, steps: int) -> list[Interval]:
    """Return the trace of a loop whose next batch is made while it computes: a model."""
    trace: list[Interval] = []
    cpu = gpu = 0.0
    for _ in range(steps):
        trace.append(("cpu", cpu, cpu + data, "data wait"))
        cpu = max(cpu + data, gpu)
        gpu = cpu + compute
        trace.append(("gpu", cpu, gpu, "compute"))
    return trace
