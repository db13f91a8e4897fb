"""The exercises of notebook 00: how long a lane is idle, and what a faster part is worth."""

import numpy as np

from tutorial.grading import Exercise

Trace = list[tuple[str, float, float]]


def idle_share(trace: Trace, lane: str) -> float:
    begin = min(start for _, start, _ in trace)
    end = max(end for _, _, end in trace)
    return 1 - _busy(_of(trace, lane)) / (end - begin)


def _of(trace: Trace, lane: str) -> list[tuple[float, float]]:
    return [(start, end) for name, start, end in trace if name == lane]


def _busy(intervals: list[tuple[float, float]]) -> float:
    """Time covered by at least one interval; the starts ascend."""
    busy, free_from = 0.0, -np.inf
    for start, end in intervals:
        busy += max(0.0, end - max(start, free_from))
        free_from = max(free_from, end)
    return busy


def _span(trace: Trace) -> float:
    return max(end for _, _, end in trace) - min(start for _, start, _ in trace)


def _twice(trace: Trace, lane: str) -> float:
    return 1 - sum(end - start for start, end in _of(trace, lane)) / _span(trace)


def _own_clock(trace: Trace, lane: str) -> float:
    own = [row for row in trace if row[0] == lane]
    return 1 - _busy(_of(own, lane)) / _span(own)


def _from_zero(trace: Trace, lane: str) -> float:
    return 1 - _busy(_of(trace, lane)) / max(end for _, _, end in trace)


def _busy_share(trace: Trace, lane: str) -> float:
    return 1 - idle_share(trace, lane)


def _percent(trace: Trace, lane: str) -> float:
    return 100 * idle_share(trace, lane)


def _seconds(trace: Trace, lane: str) -> float:
    return idle_share(trace, lane) * _span(trace)


def _all_lanes(trace: Trace, lane: str) -> float:
    return 1 - _busy(sorted((start, end) for _, start, end in trace)) / _span(trace)


def _inner_end(trace: Trace, lane: str) -> float:
    """Forgets that an earlier interval may end later than the one inside it."""
    busy, free_from = 0.0, -np.inf
    for start, end in _of(trace, lane):
        busy += max(0.0, end - max(start, free_from))
        free_from = end
    return 1 - busy / _span(trace)


def _traces(rng: np.random.Generator) -> list[tuple[Trace, str]]:
    """Small ones by hand, each with one difficulty; then busy ones with all of them."""
    cases: list[tuple[Trace, str]] = [
        ([("gpu", 0, 4), ("cpu", 4, 8)], "gpu"),
        ([("cpu", 0, 2), ("gpu", 2, 5), ("cpu", 5, 6), ("gpu", 6, 10)], "gpu"),
        ([("cpu", 5, 7), ("gpu", 7, 10), ("disk", 10, 15)], "gpu"),
        ([("gpu", 0, 4), ("gpu", 2, 6), ("cpu", 6, 8)], "gpu"),
        ([("gpu", 0, 6), ("gpu", 1, 2), ("gpu", 3, 7), ("cpu", 7, 8)], "gpu"),
    ]
    return cases + [(_random_trace(rng), lane) for lane in ("cpu", "gpu", "disk") * 5]


def _random_trace(rng: np.random.Generator) -> Trace:
    rows = [
        (lane, int(start), int(start + length))
        for lane in ("cpu", "gpu", "disk")
        for start, length in rng.integers(1, 12, (4, 2)) * (4, 1) + (20, 0)
    ]
    return sorted(rows, key=lambda row: row[1])


def speedup(parts: dict[str, float], name: str, factor: float) -> float:
    total = sum(parts.values())
    return total / (total - parts[name] + parts[name] / factor)


def _share(parts: dict[str, float], name: str) -> float:
    return parts[name] / sum(parts.values())


def _factor_itself(parts: dict[str, float], name: str, factor: float) -> float:
    return factor


def _gone(parts: dict[str, float], name: str, factor: float) -> float:
    return 1 / (1 - _share(parts, name))


def _averaged(parts: dict[str, float], name: str, factor: float) -> float:
    return 1 + _share(parts, name) * (factor - 1)


def _upside_down(parts: dict[str, float], name: str, factor: float) -> float:
    return 1 / speedup(parts, name, factor)


def _saved(parts: dict[str, float], name: str, factor: float) -> float:
    return 1 - _upside_down(parts, name, factor)


def _alone(parts: dict[str, float], name: str, factor: float) -> float:
    return factor / _share(parts, name)


def _new_time(parts: dict[str, float], name: str, factor: float) -> float:
    return sum(parts.values()) / speedup(parts, name, factor)


def _loops(rng: np.random.Generator) -> list[tuple[dict[str, float], str, float]]:
    cases: list[tuple[dict[str, float], str, float]] = [
        ({"data": 4, "compute": 4}, "data", 2),
        ({"data": 6, "compute": 3, "save": 1}, "data", 3),
        ({"data": 1, "compute": 8, "save": 1}, "save", 10),
    ]
    for factor in (2, 5, 20, 100):
        data, compute, save = (int(ms) for ms in rng.integers(1, 50, 3))
        cases.append(({"data": data, "compute": compute, "save": save}, "data", factor))
    return cases


IDLE_BELIEFS = {
    "Two intervals of the lane overlap here, and the time they share counted twice.": _twice,
    "An interval may lie inside a longer one; its end does not make the lane idle.": _inner_end,
    "The trace is longer than this lane's part; you timed the lane by its own clock.": _own_clock,
    "This assumes that the trace begins at time 0.": _from_zero,
    "This is how much of the time the lane is busy.": _busy_share,
    "Another lane's work counted as work of this one.": _all_lanes,
    "A share lies between 0 and 1; this looks like a percentage.": _percent,
    "This is a duration; a share has no unit.": _seconds,
}
SPEEDUP_BELIEFS = {
    "This is how much faster the part gets; the others take as long as before.": _factor_itself,
    "This treats the part as gone; it got faster, and still takes some time.": _gone,
    "Factors were averaged here, weighted by share; what adds up in a loop is time.": _averaged,
    "This is new time over old time; a loop that got faster scores above 1.": _upside_down,
    "This is the share of time saved; the question is how many times as fast.": _saved,
    "The whole old loop is compared with the one faster part; the others are missing.": _alone,
    "This is a duration, the new loop's; a speed-up has no unit.": _new_time,
}
EXERCISES = [
    Exercise("idle_share", idle_share, _traces, IDLE_BELIEFS),
    Exercise("speedup", speedup, _loops, SPEEDUP_BELIEFS),
]
