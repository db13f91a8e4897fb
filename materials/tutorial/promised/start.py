"""What the learner's measurements must keep, and one-line changes that break it."""

from itertools import product

from tutorial.mutation import Card
from tutorial.promised import expect
from tutorial.scoreboard import overlapped

IN_TURNS = [
    ("cpu", 2.0, 5.0, "data wait"),
    ("gpu", 5.0, 9.0, "compute"),
    ("cpu", 9.0, 10.0, "data wait"),
    ("gpu", 10.0, 14.0, "compute"),
    ("disk", 14.0, 20.0, "save stall"),
]
TWO_QUEUES = [
    ("cpu", 0.0, 2.0, "data wait"),
    ("gpu", 2.0, 9.0, "compute"),
    ("gpu", 3.0, 5.0, "compute"),
    ("gpu", 8.0, 12.0, "compute"),
    ("disk", 12.0, 16.0, "save stall"),
]


def parts_add_up(mine):
    """The parts of a run that does one thing at a time add up to its length"""
    seconds = mine.seconds_by_part(IN_TURNS)
    expect(seconds, {"data wait": 4.0, "compute": 8.0, "save stall": 6.0}, "seconds")
    expect(sum(seconds.values()), 18.0, "all parts")


def a_trace_is_left_as_it_was(mine):
    """Nothing is lost or changed by looking"""
    before = list(IN_TURNS)
    mine.seconds_by_part(before)
    mine.idle_share(before, "gpu")
    expect(before, IN_TURNS, "the trace")


def work_at_once_counts_once(mine):
    """A moment in which a lane does two things is busy once"""
    expect(round(mine.idle_share(TWO_QUEUES, "gpu"), 6), 0.375, "idle share of the GPU")


def idle_has_the_clock_of_all(mine):
    """A lane is idle while others work, at the beginning and at the end as well"""
    for lane, share in (("cpu", 14 / 18), ("gpu", 10 / 18), ("disk", 12 / 18)):
        expect(round(mine.idle_share(IN_TURNS, lane), 6), round(share, 6), f"{lane} idle")


def the_rest_bounds_the_gain(mine):
    """No part, however fast, gains more than its share allows"""
    parts = {"data wait": 1.0, "compute": 2.0}
    for factor in (1, 2, 10, 10**6):
        gain = mine.speedup(parts, "data wait", factor)
        expect(
            gain <= 1.5,
            True,
            f"a third of the run {factor} x as fast: gained {gain:.2f}, below 1.5",
        )
        expect(round(gain * (2 + 1 / factor), 6), 3.0, f"gain times the new time, factor {factor}")


def the_slower_sets_the_pace(mine):
    """Side by side, each step waits for its batch and for the step before, and for nothing else"""
    for data, compute, steps in product((1.0, 4.0), (2.0, 5.0), (1, 2, 7)):
        rows = overlapped(data, compute, copy=0, write=0, saves=[False] * steps)
        found = sorted(mine.side_by_side(data, compute, steps))
        expect(found, sorted(rows), f"{steps} steps of {compute}, batches of {data}")


def the_work_comes_back(mine):
    """A row is noted for each piece of work, and its result comes back"""
    trace, ticks = [], iter(range(100))
    results = [
        mine.record_span(trace, ticks.__next__, "cpu", "load", lambda k=k: k) for k in range(3)
    ]
    expect(results, [0, 1, 2], "results")
    expect(trace, [("cpu", 2 * k, 2 * k + 1, "load") for k in range(3)], "rows")


def a_counter_has_its_whole_name(mine):
    """A counter is found by its whole name, whatever the order of the lines"""
    text = "cancelled_write_bytes: 1\nwrite_bytes: 22\nread_bytes: 333\nrchar: 4444\n"
    for name, value in (("write_bytes", 22), ("read_bytes", 333), ("rchar", 4444)):
        expect(mine.counter_in(text, name), value, name)


def only_the_work_counts(mine):
    """What a counter had before the work does not count"""
    total = [1000]
    moved = mine.moved_by(lambda: total[0], lambda: total.__setitem__(0, total[0] + 64))
    expect(moved, 64, "moved by")


PROMISES = [
    the_work_comes_back,
    parts_add_up,
    a_trace_is_left_as_it_was,
    idle_has_the_clock_of_all,
    work_at_once_counts_once,
    the_rest_bounds_the_gain,
    the_slower_sets_the_pace,
    a_counter_has_its_whole_name,
    only_the_work_counts,
]

CARDS = [
    Card(
        name="two queues",
        symbol="npydata.bench.trace.idle_share",
        line="busy += stop - max(start, covered)",
        mutant="busy += stop - start",
        promise=work_at_once_counts_once,
        symptoms=(
            "A GPU that does two things at once seems busier than it is.",
            "A GPU that does two things at once seems idle.",
            "A GPU that is never idle stops the program.",
        ),
        right=1,
        reasons={
            2: "Time that counts twice makes it busier, not idle.",
            3: "The share falls, even below 0; but nothing stops at that.",
        },
    ),
    Card(
        name="as if it were gone",
        symbol="npydata.bench.trace.speedup",
        line="after = before - parts[name] + parts[name] / factor",
        mutant="after = before - parts[name]",
        promise=the_rest_bounds_the_gain,
        symptoms=(
            "A faster part makes the whole look slower.",
            "A part that got a little faster looks as good as one that takes no time.",
            "The whole seems to gain as much as the part.",
        ),
        right=2,
        reasons={
            1: "The new loop gets shorter than it is, so it looks faster.",
            3: "The other parts keep their time, so the whole gains less than the part.",
        },
    ),
]
