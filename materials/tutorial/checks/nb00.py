"""What lesson 00 lets the learner build, and the wrong answers that people give."""

import time
from functools import partial
from itertools import pairwise

from npydata.bench.trace import idle_share, record_span, seconds_by_part, side_by_side, speedup
from npydata.system.page_cache import counter_in, moved_by
from tutorial.building import Build
from tutorial.promised.start import CARDS, PROMISES  # noqa: F401

PART = "start"

BUSY_WITH = {"cpu": "data wait", "gpu": "compute", "disk": "save stall"}


def rows_of(*intervals):
    """A trace from (lane, start, end)."""
    return [(lane, start, end, BUSY_WITH[lane]) for lane, start, end in intervals]


def random_rows(rng):
    """A trace of whole seconds from 20 on, in which intervals of a lane may overlap."""
    rows = [
        (lane, int(start), int(start + length))
        for lane in BUSY_WITH
        for start, length in rng.integers(1, 12, (4, 2)) * (4, 1) + (20, 0)
    ]
    return rows_of(*sorted(rows, key=lambda row: row[1]))


# A row of a trace


class Clock:
    """A clock that says how often it was looked at, and when the work was done."""

    def __init__(self, start):
        self.now, self.log = start, []

    def read(self):
        self.log.append("look")
        self.now += 1
        return self.now

    def work(self):
        self.log.append("work")
        self.now += 10
        return "a batch"


def record_seen(answer, start, rows):
    """What is returned and noted, and in which order it was done."""
    clock, trace = Clock(start), list(rows)
    result = answer(trace, clock.read, "cpu", "data wait", clock.work)
    if result == clock.work:
        result = "work itself, not done"
    if "look" not in clock.log:  # the times are those of the machine
        trace = [(*row[:1], "another clock", *row[3:]) for row in trace]
    return {"returns": result, "the trace after it": trace, "order": ", ".join(clock.log)}


def record_as(trace, clock, lane, part, work, row=lambda *one: one, back=True):
    start = clock()
    result = work()
    trace.append(row(lane, start, clock(), part))
    return result if back else None


def looks_first(trace, clock, lane, part, work):
    trace.append((lane, clock(), clock(), part))
    return work()


def works_twice(trace, clock, lane, part, work):
    record_span(trace, clock, lane, part, work)
    return work()


def works_first(trace, clock, lane, part, work):
    result = work()
    trace.append((lane, clock(), clock(), part))
    return result


def hides_the_row(trace, clock, lane, part, work):
    return record_span([*trace], clock, lane, part, work)


def returns_the_trace(trace, clock, lane, part, work):
    trace = [*trace]
    record_span(trace, clock, lane, part, work)
    return trace


def does_nothing(trace, clock, lane, part, work):
    trace.append((lane, clock(), clock(), part))
    return work


def own_stopwatch(trace, clock, lane, part, work):
    return record_span(trace, time.perf_counter, lane, part, work)


RECORD = Build(
    name="record_span",
    reference=record_span,
    cases=[(0, ()), (100, ()), (100, (("gpu", 3, 9, "compute"),))],
    observe=record_seen,
    show=lambda case: (
        f'record_span(trace, clock, "cpu", "data wait", work)  # the clock shows {case[0]}; '
        f"{len(case[1])} rows so far"
    ),
    wrong={
        "The loop needs what the work returns: its batch, or its loss.": partial(
            record_as, back=False
        ),
        "You look at the clock twice before the work is done.": looks_first,
        "You look at the clock only when the work is over.": works_first,
        "The work is done twice.": works_twice,
        "You note how long it took; a row says from when to when.": partial(
            record_as, row=lambda lane, start, end, part: (lane, start, end - start, part)
        ),
        "A row is lane, start, end, part, in this order.": partial(
            record_as, row=lambda lane, start, end, part: (lane, part, start, end)
        ),
        "The row goes into a list of your own; the caller's trace has nothing of it.": (
            hides_the_row
        ),
        "You make a new trace and return it; the caller looks into its own, and wants its batch.": (
            returns_the_trace
        ),
        "You hand the work on and nobody does it.": does_nothing,
        "You look at a clock of your own; the caller gave you one.": own_stopwatch,
    },
)


# The parts of a run


def part_cases(rng):
    fixed = [
        rows_of(("cpu", 0, 2), ("gpu", 2, 5)),
        rows_of(("cpu", 0, 2), ("gpu", 2, 5), ("cpu", 5, 6), ("gpu", 6, 10)),
        rows_of(("gpu", 1, 3), ("disk", 3, 9), ("gpu", 9, 11)),
        [("disk", 4, 9, "save stall"), ("disk", 9, 11, "load")],
        [],
    ]
    return [(rows,) for rows in [*fixed, *(random_rows(rng) for _ in range(5))]]


def parts_as(trace, key=3, lasts=lambda start, end: end - start, keep=lambda old, new: old + new):
    found = {}
    for row in trace:
        length = lasts(row[1], row[2])
        found[row[key]] = keep(found[row[key]], length) if row[key] in found else length
    return found


def shares_of(trace):
    found = seconds_by_part(trace)
    return {part: seconds / sum(found.values()) for part, seconds in found.items()}


def all_four(trace):
    return dict.fromkeys(("data wait", "compute", "save stall", "load"), 0) | seconds_by_part(trace)


def first_to_last(trace):
    return {
        part: max(r[2] for r in trace if r[3] == part) - min(r[1] for r in trace if r[3] == part)
        for _, _, _, part in trace
    }


SECONDS_BY_PART = Build(
    name="seconds_by_part",
    reference=seconds_by_part,
    cases=part_cases,
    wrong={
        "You keep the last interval of a part, and lose those before.": partial(
            parts_as, keep=lambda old, new: new
        ),
        "You keep the first interval of a part, and lose those after.": partial(
            parts_as, keep=lambda old, new: old
        ),
        "You file the seconds under the lane; asked is what it was busy with.": partial(
            parts_as, key=0
        ),
        "You count the intervals; asked is how long they were.": partial(
            parts_as, lasts=lambda start, end: 1
        ),
        "You add up the moments at which intervals end, not their lengths.": partial(
            parts_as, lasts=lambda start, end: end
        ),
        "These are shares; asked are seconds.": shares_of,
        "From a part's first start to its last end, other parts had their time as well.": (
            first_to_last
        ),
        "You name parts that this trace knows nothing of.": all_four,
    },
)


# A lane that does nothing


def idle_cases(rng):
    by_hand = [
        rows_of(("gpu", 0, 4), ("cpu", 4, 8)),
        rows_of(("cpu", 0, 2), ("gpu", 2, 5), ("cpu", 5, 6), ("gpu", 6, 10)),
        rows_of(("cpu", 5, 7), ("gpu", 7, 10), ("disk", 10, 15)),
        rows_of(("gpu", 0, 4), ("gpu", 2, 6), ("cpu", 6, 8)),
        rows_of(("gpu", 0, 6), ("gpu", 1, 2), ("gpu", 3, 7), ("cpu", 7, 8)),
        rows_of(("disk", 0, 8), ("gpu", 2, 4)),
    ]
    drawn = [(random_rows(rng), lane) for lane in ("cpu", "gpu", "disk") * 5]
    return [*((rows, "gpu") for rows in by_hand), *drawn]


def of_lane(trace, lane):
    return [(start, end) for name, start, end, _ in trace if name == lane]


def busy(intervals, inner_ends=True):
    """Time covered by at least one interval."""
    total, covered = 0, float("-inf")
    for start, end in intervals:
        total += max(0, end - max(start, covered))
        covered = max(covered, end) if inner_ends else end
    return total


def span(trace):
    return max(end for _, _, end, _ in trace) - min(start for _, start, _, _ in trace)


def own_clock(trace, lane, twice=False):
    own = [row for row in trace if row[0] == lane]
    worked = sum(b - a for a, b in of_lane(own, lane)) if twice else busy(of_lane(own, lane))
    return 1 - worked / span(own)


def takes_back(trace, lane):
    total, covered = 0, trace[0][1]
    for start, end in of_lane(trace, lane):
        total += end - max(start, covered)
        covered = end
    return 1 - total / span(trace)


def between_its_rows(trace, lane, at=None):
    """The time in which the lane waits for its next row, as a share."""
    idle, covered = 0, at
    for start, end in of_lane(trace, lane):
        idle += max(0, start - (start if covered is None else covered))
        covered = end if covered is None else max(covered, end)
    return idle / span(trace)


def between_neighbours(trace, lane):
    gaps = (max(0, b[0] - a[1]) for a, b in pairwise(of_lane(trace, lane)))
    return sum(gaps) / span(trace)


def until_its_last_row(trace, lane):
    return between_its_rows(trace, lane, at=min(start for _, start, _, _ in trace))


def of_all_rows(trace, lane):
    worked = sum(end - start for start, end in of_lane(trace, lane))
    return 1 - worked / sum(end - start for _, start, end, _ in trace)


def from_first_to_last(trace, lane):
    return 1 - span([row for row in trace if row[0] == lane]) / span(trace)


def counts_both_ends(trace, lane):
    seconds = {k for start, end in of_lane(trace, lane) for k in range(int(start), int(end) + 1)}
    return 1 - len(seconds) / span(trace)


IDLE_SHARE = Build(
    name="idle_share",
    reference=idle_share,
    cases=idle_cases,
    wrong={
        "Two intervals of the lane overlap here, and the time they share counted twice.": (
            lambda trace, lane: 1 - sum(b - a for a, b in of_lane(trace, lane)) / span(trace)
        ),
        "An interval may lie inside a longer one; its end does not make the lane idle.": (
            lambda trace, lane: 1 - busy(of_lane(trace, lane), inner_ends=False) / span(trace)
        ),
        "The trace is longer than this lane's part; you timed the lane by its own clock.": (
            own_clock
        ),
        "You timed the lane by its own clock, and counted shared time twice.": partial(
            own_clock, twice=True
        ),
        "The row that starts last is not always the one that ends last.": lambda trace, lane: (
            1 - busy(of_lane(trace, lane)) / (trace[-1][2] - trace[0][1])
        ),
        "An interval inside a longer one adds no time; yours takes some away.": takes_back,
        "You take it that the trace begins at time 0.": (
            lambda trace, lane: 1 - busy(of_lane(trace, lane)) / max(row[2] for row in trace)
        ),
        "This is how much of the time the lane is busy.": (
            lambda trace, lane: 1 - idle_share(trace, lane)
        ),
        "Another lane's work counted as work of this one.": (
            lambda trace, lane: 1 - busy(sorted(row[1:3] for row in trace)) / span(trace)
        ),
        "A share lies between 0 and 1; this looks like a percentage.": (
            lambda trace, lane: 100 * idle_share(trace, lane)
        ),
        "This is a duration; a share has no unit.": (
            lambda trace, lane: idle_share(trace, lane) * span(trace)
        ),
        "Before its first row and after its last the lane is idle, too.": between_its_rows,
        "A gap between neighbours is idle time, unless a longer row covers it; and there is more "
        "before the first and after the last.": between_neighbours,
        "After its last row the lane is idle until the trace ends.": until_its_last_row,
        "That the share stays at 0 hides it, but shared time still counts twice.": (
            lambda trace, lane: max(
                0, 1 - sum(b - a for a, b in of_lane(trace, lane)) / span(trace)
            )
        ),
        "All rows together take longer or shorter than the trace: lanes work at the same time.": (
            of_all_rows
        ),
        "Between its first row and its last the lane may be idle.": from_first_to_last,
        "From 2 to 5 are three seconds: you count one too many.": counts_both_ends,
    },
)


# What a faster part is worth


def loops(rng):
    cases = [
        ({"data": 4, "compute": 4}, "data", 2),
        ({"data": 6, "compute": 3, "save": 1}, "data", 3),
        ({"data": 1, "compute": 8, "save": 1}, "save", 10),
        ({"data": 3, "compute": 5}, "data", 1),
    ]
    for factor in (2, 5, 20, 100):
        data, compute, save = (int(ms) for ms in rng.integers(1, 50, 3))
        cases.append(({"data": data, "compute": compute, "save": save}, "data", factor))
    return cases


def share(parts, name):
    return parts[name] / sum(parts.values())


SPEEDUP = Build(
    name="speedup",
    reference=speedup,
    cases=loops,
    wrong={
        "This is how much faster the part gets; the others take as long as before.": (
            lambda parts, name, factor: factor
        ),
        "You take the part for gone; it got faster, and still takes some time.": (
            lambda parts, name, factor: 1 / (1 - share(parts, name))
        ),
        "You take away the time that the part still needs, not the time that it saved.": (
            lambda parts, name, factor: 1 / (1 - share(parts, name) / factor)
        ),
        "You averaged factors, weighted by share; what adds up in a loop is time.": (
            lambda parts, name, factor: 1 + share(parts, name) * (factor - 1)
        ),
        "This is new time over old time; a loop that got faster scores above 1.": (
            lambda parts, name, factor: 1 / speedup(parts, name, factor)
        ),
        "This is the share of time saved; the question is how many times as fast.": (
            lambda parts, name, factor: 1 - 1 / speedup(parts, name, factor)
        ),
        "You compare the whole old loop with the one faster part; the others are missing.": (
            lambda parts, name, factor: factor / share(parts, name)
        ),
        "This is how many seconds are saved; the question is how many times as fast.": (
            lambda parts, name, factor: parts[name] * (1 - 1 / factor)
        ),
        "You leave the other parts out: they take their time as well.": (
            lambda parts, name, factor: share(parts, name) * factor
        ),
        "This is a duration, the new loop's; a speed-up has no unit.": (
            lambda parts, name, factor: sum(parts.values()) / speedup(parts, name, factor)
        ),
    },
)


# The next batch beside the step


def rows_seen(answer, *case):
    """The rows by lane, whatever their order."""
    rows = answer(*case)
    seen = {
        f"of the {lane}": sorted(
            (start, end, part) for name, start, end, part in rows if name == lane
        )
        for lane in ("cpu", "gpu")
    }
    return seen | {"rows": len(rows)}


def modelled(data, compute, steps, begin=max, ahead=False, waits=True):
    """The model with one of its waits changed."""
    trace, cpu, gpu = [], 0, 0
    for _ in range(steps):
        made = cpu + data
        trace.append(("cpu", cpu, made, "data wait"))
        start = begin(made, gpu)
        gpu = start + compute
        trace.append(("gpu", start, gpu, "compute"))
        cpu = made if ahead else start if waits else gpu
    return trace


def in_one_rhythm(data, compute, steps, first=0):
    """Everything begins whenever the slower of both is done."""
    beats = [k * max(data, compute) for k in range(steps)]
    batches = [("cpu", at, at + data, "data wait") for at in beats]
    return batches + [("gpu", first + at, first + at + compute, "compute") for at in beats]


def rows_with(change):
    return lambda data, compute, steps: [change(*row) for row in side_by_side(data, compute, steps)]


def one_batch_more(data, compute, steps):
    rows = side_by_side(data, compute, steps)
    taken = rows[-1][1]
    return [*rows, ("cpu", taken, taken + data, "data wait")]


SIDE_BY_SIDE = Build(
    name="side_by_side",
    reference=side_by_side,
    cases=[(d, c, steps) for d in (1, 3, 4) for c in (2, 4, 7) for steps in (1, 2, 3, 5)],
    observe=rows_seen,
    wrong={
        "This is the loop in turns: each batch waits for the step before.": partial(
            modelled, waits=False
        ),
        "A step begins when its batch is there, but the GPU may be busy with the one before.": (
            partial(modelled, begin=lambda made, gpu: made)
        ),
        "A step begins when the GPU is free, but its batch may not be there.": partial(
            modelled, begin=lambda made, gpu: gpu
        ),
        "The CPU runs further and further ahead; it has room for one batch only.": partial(
            modelled, ahead=True
        ),
        "There is one row too few: so many steps have so many batches.": (
            lambda data, compute, steps: side_by_side(data, compute, steps)[:-1]
        ),
        "You return when the loop ends; asked is its whole trace.": (
            lambda data, compute, steps: side_by_side(data, compute, steps)[-1][2]
        ),
        "The first step begins at once; its batch isn't made yet.": in_one_rhythm,
        "You let each batch begin in the rhythm of the slower; the CPU may be free before.": (
            lambda data, compute, steps: in_one_rhythm(data, compute, steps, first=data)
        ),
        "The lanes have changed places: the CPU makes batches, and the GPU computes.": rows_with(
            lambda lane, start, end, part: ("gpu" if lane == "cpu" else "cpu", start, end, part)
        ),
        "What the CPU is busy with is called `data wait`.": rows_with(
            lambda lane, start, end, part: (lane, start, end, part.removesuffix(" wait"))
        ),
        "There is one batch too many: no step takes it.": one_batch_more,
        "A row says when it ends, not how long it is.": rows_with(
            lambda lane, start, end, part: (lane, start, end - start, part)
        ),
    },
)


# Counters

SHORT = "rchar: 20\nread_bytes: 7\n"
TEXTS = [
    SHORT,
    "cancelled_write_bytes: 5\nwrite_bytes: 30\nread_bytes: 8192\nrchar: 524418\n",
    "rchar: 1948779\nwchar: 0\nsyscr: 2209\nsyscw: 17\nread_bytes: 4096\nwrite_bytes: 8192\n",
]


def counter_cases(rng):
    cases = [(text, line.split(":")[0]) for text in TEXTS for line in text.splitlines()]
    return [*cases, (SHORT, "wchar")]


def line_that(text, holds):
    return int(next(line.split(": ")[1] for line in text.splitlines() if holds(line)))


def within_a_longer_name(text, name):
    if name not in text:
        raise KeyError(name)
    return line_that(text, lambda line: name in line)


def gives_up_at_once(text, name):
    for line in text.splitlines():
        found, value = line.split(": ")
        if found != name:
            raise KeyError(name)
        return int(value)


def with_its_colon(text, name):
    return int(dict(line.split() for line in text.splitlines())[name])


COUNTER_IN = Build(
    name="counter_in",
    reference=counter_in,
    cases=counter_cases,
    wrong={
        "This is text; a counter is a number.": (
            lambda text, name: dict(line.split(": ") for line in text.splitlines())[name]
        ),
        "A name that holds the one you look for is another counter.": (
            lambda text, name: line_that(text, lambda line: name in line)
        ),
        "`name in line` finds your name inside a longer one, too.": within_a_longer_name,
        "You take the same line whatever the name is.": (
            lambda text, name: line_that(text, lambda line: True)
        ),
        "A counter that isn't there is not 0: nobody has counted.": (
            lambda text, name: int(
                dict(line.split(": ") for line in text.splitlines()).get(name, 0)
            )
        ),
        "The text ends with the end of a line; what comes behind it is no line.": (
            lambda text, name: {
                line.split(": ")[0]: int(line.split(": ")[1]) for line in text.split("\n")
            }[name]
        ),
        "The first line is of another counter; yours may stand further down.": gives_up_at_once,
        "Split at blanks, a name still has its colon.": with_its_colon,
        "You return all counters; asked is one.": (
            lambda text, name: {
                line.split(": ")[0]: int(line.split(": ")[1]) for line in text.splitlines()
            }
        ),
    },
)


class Meter:
    """A counter that has been running, and work that moves it."""

    def __init__(self, before, moves):
        self.total, self.moves, self.done = before, moves, 0

    def read(self):
        return self.total

    def work(self):
        self.total += self.moves
        self.done += 1
        return 12_345


def moved_seen(answer, before, moves):
    meter = Meter(before, moves)
    return {"moved by": answer(meter.read, meter.work), "times the work was done": meter.done}


def without_before(counter, work):
    work()
    return counter()


def before_it_is_done(counter, work):
    return -(counter() - counter())


def twice(counter, work):
    work()
    return moved_by(counter, work)


def twice_as_far(counter, work):
    before = counter()
    work(), work()
    return counter() - before


def the_other_way(counter, work):
    return -moved_by(counter, work)


def hands_on(counter, work):
    return work()


MOVED_BY = Build(
    name="moved_by",
    reference=moved_by,
    cases=[(0, 10), (1000, 10), (1000, 0), (7, 4224)],
    observe=moved_seen,
    show=lambda case: f"moved_by(counter, work)  # it stands at {case[0]}; the work adds {case[1]}",
    wrong={
        "The counter has been running since the process began.": without_before,
        "You look twice, and the work is never done.": before_it_is_done,
        "The work is done twice: once for nothing.": twice,
        "The work is done twice, and you count both.": twice_as_far,
        "You take after from before: a counter goes up.": the_other_way,
        "This is what the work returns; asked is how far the counter moved.": hands_on,
    },
)

BUILDS = [RECORD, SECONDS_BY_PART, IDLE_SHARE, SPEEDUP, SIDE_BY_SIDE, COUNTER_IN, MOVED_BY]
