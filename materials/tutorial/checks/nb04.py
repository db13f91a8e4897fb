"""What lesson 04 lets the learner build, and the wrong answers that people give."""

import time
from dataclasses import fields, replace
from functools import partial
from itertools import count, islice
from statistics import median
from types import SimpleNamespace

import numpy as np

from npydata.dataset.windows import merged
from npydata.loader.tuning import AS_GOOD, HEADROOM, cheapest, seconds_each
from npydata.system.page_cache import AdviceBackoff
from tutorial.building import Build
from tutorial.frames.tuning import MyBackoff, MyPrefetcher
from tutorial.kept.bench.measure import in_turn
from tutorial.lesson_loader import AdaptivePrefetcher
from tutorial.pipeline import Pipeline, Trip, diagnose, follow, idle_share, made_at, resume
from tutorial.promised.tuning import CARDS, PROMISES, by_clock  # noqa: F401

PART = "tuning"


# Measuring


def rounds_seen(answer, names, repeats):
    """In which order methods were called, and what came back; the k-th call gives k."""
    order, numbers = [], count(1)

    def method(name):
        order.append(name)
        return next(numbers)

    found = answer({name: lambda name=name: method(name) for name in names}, repeats)
    if found is None:
        return None
    if isinstance(found, dict):
        found = {name: [no_clock(one) for one in row] for name, row in found.items()}
    return {"called": " ".join(order), "returned": found}


def no_clock(result):
    """The results are counted; what has a fraction comes from a stopwatch."""
    return "seconds" if isinstance(result, float) and not result.is_integer() else result


def one_after_the_other(methods, repeats):
    return {name: [one() for _ in range(repeats + 1)][1:] for name, one in methods.items()}


def in_rounds(methods, repeats):
    rounds = [{name: one() for name, one in methods.items()} for _ in range(repeats)]
    return {name: [results[name] for results in rounds] for name in methods}


def with_a_stopwatch(methods, repeats):
    def seconds(one):
        begin = time.perf_counter()
        one()
        return time.perf_counter() - begin

    return in_turn({name: partial(seconds, one) for name, one in methods.items()}, repeats)


def in_one_list(methods, repeats):
    return [one() for _ in range(repeats + 1) for one in methods.values()][len(methods) :]


def one_list_for_all(methods, repeats):
    return dict.fromkeys(methods, in_one_list(methods, repeats))


IN_TURN = Build(
    name="in_turn",
    reference=in_turn,
    cases=[("A", 1), ("AB", 1), ("AB", 3), ("ABC", 2)],
    observe=rounds_seen,
    show=lambda case: f"in_turn({{{', '.join(f'{n!r}: ...' for n in case[0])}}}, {case[1]})",
    wrong={
        "You measure one to the end and then the next; a machine that slows down favours the "
        "first.": one_after_the_other,
        "You keep the warm-up round with the others.": lambda methods, repeats: in_rounds(
            methods, repeats + 1
        ),
        "You measure no round to throw away.": in_rounds,
        "You throw a round away that the repeats count; they are one too few.": (
            lambda methods, repeats: {
                name: row[1:] for name, row in in_rounds(methods, repeats).items()
            }
        ),
        "You throw away all but the median; then nobody sees how far the repeats lie apart.": (
            lambda methods, repeats: {
                name: [median(row)] for name, row in in_turn(methods, repeats).items()
            }
        ),
        "You time the calls; here the results count, whatever they are.": with_a_stopwatch,
        "You return the results of all in one list; who would know whose they are?": in_one_list,
        "All names share one list, so each has the results of the others as well.": (
            one_list_for_all
        ),
    },
)


def time_seen(answer, batches_s, seconds):
    """What a measurement says of batches that take known times."""
    found, taken = by_clock(answer, list(batches_s), seconds)
    return None if found is None else {"returned": found, "batches taken": taken}


def until(batches, seconds, least=2):
    begin, taken = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or taken < least:
        next(batches)
        taken += 1
    return time.perf_counter() - begin, taken


def a_fixed_number(batches, seconds):
    begin = time.perf_counter()
    for _ in islice(batches, 10):
        pass
    return (time.perf_counter() - begin) / 10


def only_the_last(batches, seconds):
    begin = now = time.perf_counter()
    taken = 0
    while now - begin < seconds or taken < 2:
        before = now
        next(batches)
        now, taken = time.perf_counter(), taken + 1
    return now - before


def moments(batches, seconds):
    """When it began, and when each batch came."""
    found = [time.perf_counter()]
    while found[-1] - found[0] < seconds or len(found) < 3:
        next(batches)
        found.append(time.perf_counter())
    return found


def first_to_last(batches, seconds):
    first, *_, last = came = moments(batches, seconds)[1:]
    return (last - first) / (len(came) - 1)


def begins_with_the_second(batches, seconds):
    next(batches)
    return per_batch(batches, seconds, least=1)


def per_batch(batches, seconds, least=2):
    passed, taken = until(batches, seconds, least)
    return passed / taken


SECONDS_EACH = Build(
    name="seconds_each",
    reference=seconds_each,
    cases=[
        ((0.5,), 2.0),
        ((0.25, 0.5), 2.0),
        ((3.0, 1.0), 0.5),
        ((0.25,), 1.125),
        ((1.0, 0.125, 0.125), 1.0),
        ((1.0, 0.125, 0.125), 1.25),
        ((0.5,), 0.0),
    ],
    observe=time_seen,
    show=lambda case: (
        f"seconds_each(batches, {case[1]})  # they take {', '.join(map(str, case[0]))} s, in turn"
    ),
    wrong={
        "That is batches a second; asked for is the time of one.": lambda batches, seconds: (
            1 / per_batch(batches, seconds)
        ),
        "You stop after one slow batch; how would you know that it is like the others?": (
            lambda batches, seconds: per_batch(batches, seconds, least=1)
        ),
        "You take as many batches as you like, not for as long as you were told.": a_fixed_number,
        "You return the time of all batches together.": (
            lambda batches, seconds: until(batches, seconds)[0]
        ),
        "You divide the time that was asked for; the last batch ends later than that.": (
            lambda batches, seconds: seconds / until(batches, seconds)[1]
        ),
        "You measure the last batch only; the others count too.": only_the_last,
        "You leave out the wait for the first batch; it counts like the others.": first_to_last,
        "You look at the clock only when the first batch is there; its time counts, too.": (
            begins_with_the_second
        ),
        "You take the median of the single times; rare long waits then count for nothing.": (
            lambda batches, seconds: float(median(np.diff(moments(batches, seconds))))
        ),
        "You may come to divide before there is a batch.": (
            lambda batches, seconds: per_batch(batches, seconds, least=0)
        ),
    },
)


# The model


def pipeline_text(p):
    """A pipeline as one writes it: what is left at its default is left out."""
    given = [f for f in fields(p) if f.default != getattr(p, f.name)]
    return f"Pipeline({', '.join(f'{f.name}={getattr(p, f.name):g}' for f in given)})"


def share_cases(rng):
    def case(begun, before=None, **costs):
        made = [] if before is None else [before - 1.5, before]
        trips = [Trip(0, at - 1, at, at, at + 1) for at in made]
        return Pipeline(step_s=1.0, **costs), trips, begun

    plain = [case(3.0, fetch_s=4.0), case(3.0, 5.0, fetch_s=4.0)]
    shared = [case(b, m, fetch_s=4.0, serial_s=s) for s in (1.0, 3.0, 4.0) for b in (2.0, 6.0)
              for m in (None, 5.0, 8.0)]  # fmt: skip
    return plain + shared + [case(2.0, before, fetch_s=2.0, serial_s=3.0) for before in (5.0, None)]


def own_part(p):
    return max(p.fetch_s - p.serial_s, 0.0)


def made_as(p, trips, begun, free=lambda p, before: before.made - own_part(p), lasts=None):
    start = max(begun, free(p, trips[-1])) if trips else begun
    return start + (p.serial_s + own_part(p) if lasts is None else lasts)


MADE_AT = Build(
    name="made_at",
    reference=made_at,
    cases=share_cases,
    show=lambda case: (
        f"made_at({pipeline_text(case[0])}, "
        f"{f'[..., made={case[1][-1].made:g}]' if case[1] else '[]'}, begun={case[2]:g})"
    ),
    wrong={
        "You let all workers do everything at once; a part of it they share.": (
            lambda p, trips, begun: begun + p.fetch_s
        ),
        "You make the whole fetch wait; only its shared part has to.": lambda p, trips, begun: (
            made_as(p, trips, begun, free=lambda p, before: before.made, lasts=p.fetch_s)
        ),
        "You let the shared part begin when the batch before is made; its worker gave it free "
        "earlier.": partial(made_as, free=lambda p, before: before.made),
        "You add the shared part to the fetch; it is a part of it.": lambda p, trips, begun: (
            made_as(p, trips, begun, lasts=p.serial_s + p.fetch_s)
        ),
        "A worker's own part can't take less than no time.": lambda p, trips, begun: made_as(
            p,
            trips,
            begun,
            free=lambda p, before: before.made - (p.fetch_s - p.serial_s),
            lasts=p.fetch_s,
        ),
        "Where the shared part is longer than `fetch_s`, the batch takes as long as that part.": (
            lambda p, trips, begun: made_as(p, trips, begun, lasts=p.fetch_s)
        ),
        "The worker before may have waited for the shared part itself, after it had begun.": (
            partial(made_as, free=lambda p, before: before.begun + p.serial_s)
        ),
        "The shared part comes first in a fetch, and the worker's own part last.": partial(
            made_as, free=lambda p, before: before.made - p.serial_s
        ),
        "Of the first batch there is none before: `trips` is empty then.": (
            lambda p, trips, begun: made_as(p, [trips[-1]], begun)
        ),
    },
)


def trips_seen(answer, pipeline, batches):
    """The four times of every batch; which of two equal workers makes it is free."""
    found = answer(pipeline, batches)
    if found is None:
        return None
    trips = list(found)
    kinds = {type(trip).__name__ for trip in trips}
    times = {
        name: [round(trip[place], 6) for trip in trips]
        for place, name in enumerate(Trip._fields)
        if name != "worker"
    }
    return {
        "returned": f"a {type(found).__name__} of {' and '.join(sorted(kinds))}",
        "trips": len(trips),
        "workers": len({trip[0] for trip in trips}),
        **times,
    }


def follow_cases():
    settings = [
        {"step_s": 1, "fetch_s": 2},
        {"step_s": 3, "fetch_s": 2},
        {"step_s": 3, "fetch_s": 2, "window": 1},
        {"step_s": 1, "fetch_s": 2, "workers": 2},
        {"step_s": 1, "fetch_s": 4, "workers": 3, "window": 6},
        {"step_s": 5, "fetch_s": 1, "workers": 2, "window": 3},
        {"step_s": 1.5, "fetch_s": 2, "window": 1, "wake_s": 0.5},
        {"step_s": 2, "fetch_s": 2, "workers": 2, "window": 1, "wake_s": 0.25},
        {"step_s": 0, "fetch_s": 4, "workers": 3, "window": 6, "serial_s": 2},
    ]
    return [(Pipeline(**one), batches) for one in settings for batches in (1, 5, 12)]


def followed(
    p, batches, room="taken", wake=resume, alone=False, waits_for="done", made=made_at,
    freed="made", begin=None, counted_from=0, looks_back_at_once=False,
):  # fmt: skip
    """The trips of a model that may be wrong."""
    trips = []
    for k in range(batches):
        workers = 1 if alone else p.workers
        if looks_back_at_once:
            free, place = trips[k - workers].made, trips[k - p.window].taken
        else:
            free = getattr(trips[k - workers], freed) if k >= workers else 0.0
            full = room and k >= p.window + counted_from
            place = getattr(trips[k - p.window], room) if full else 0.0
        begun = (begin or wake)(free, place, p.wake_s)
        ready = made(p, trips, begun)
        before = getattr(trips[-1], waits_for) if trips else 0.0
        taken = wake(before, ready, p.wake_s)
        trips.append(Trip(k % p.workers, begun, ready, taken, taken + p.step_s))
    return trips


def unshared(p, trips, begun):
    return begun + p.fetch_s


def room_for_each(p, batches):
    return followed(replace(p, window=p.window * p.workers), batches)


def waits_too_long(p, batches):
    shorter = Pipeline(p.step_s, p.fetch_s, p.workers, p.window + 1, 1, p.serial_s, p.wake_s)
    return followed(shorter, batches)


FOLLOW = Build(
    name="follow",
    reference=follow,
    cases=follow_cases(),
    observe=trips_seen,
    show=lambda case: f"follow({pipeline_text(case[0])}, {case[1]})",
    wrong={
        "Your workers go on without end; who says that there is room?": (
            lambda p, n: followed(p, n, room=None)
        ),
        "A place is free as soon as the batch is taken; you wait until its step is done.": (
            lambda p, n: followed(p, n, room="done")
        ),
        "A batch takes up room until it is taken; you give its place away when it is made.": (
            lambda p, n: followed(p, n, room="made")
        ),
        "A worker is free when its batch is made; yours waits until it was used.": (
            lambda p, n: followed(p, n, freed="done")
        ),
        "Your worker waits until its batch was taken; it is free when the batch is made.": (
            lambda p, n: followed(p, n, freed="taken")
        ),
        "Your consumer takes a batch before it is done with the one before.": (
            lambda p, n: followed(p, n, waits_for="taken")
        ),
        "You let one worker make everything.": lambda p, n: followed(p, n, alone=True),
        "A thread that waited goes on late: you wake nobody, or exchange what `resume` gets.": (
            lambda p, n: followed(p, n, wake=lambda ready, event, wake_s: max(ready, event))
        ),
        "You wake everybody, even those that didn't wait.": lambda p, n: followed(
            p, n, wake=lambda ready, event, wake_s: max(ready, event) + wake_s
        ),
        "You let all workers do everything at once; `made_at` knows what they share.": (
            lambda p, n: followed(p, n, made=unshared)
        ),
        "Your window holds one batch more than it should.": waits_too_long,
        "Batch `p.window` itself needs a place already: they are counted from 0.": (
            lambda p, n: followed(p, n, counted_from=1)
        ),
        "Early batches have none before them: at the start all are free, and there is room.": (
            lambda p, n: followed(p, n, looks_back_at_once=True)
        ),
        "A worker that waited for room is woken, too: by `resume`.": (
            lambda p, n: followed(p, n, begin=lambda ready, event, wake_s: max(ready, event))
        ),
        "There are `p.workers` workers, and they take turns; yours makes one batch each.": (
            lambda p, n: [trip._replace(worker=k) for k, trip in enumerate(follow(p, n))]
        ),
        "`p.window` holds for all workers together; you give that much room to each.": (
            room_for_each
        ),
        "A row of plain numbers has no names; other code asks for `trip.made`.": lambda p, n: [
            tuple(trip) for trip in follow(p, n)
        ],
        "You yield the trips one by one; other code asks for their number.": (
            lambda p, n: (trip for trip in follow(p, n))
        ),
    },
)


def trace_cases():
    """Traces in which worker and consumer stand idle for known shares of the time."""
    shares = (0.0, 0.06, 0.09, 0.11, 0.2, 0.5)
    exact = [(0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.25)]
    drawn = [(worker, consumer, 0.1) for worker in shares for consumer in shares]
    return [
        ([trip_at(k, worker, consumer) for k in range(9)], least)
        for worker, consumer, least in drawn + exact
    ]


def trip_at(k, worker, consumer):
    times = (k + worker, k + 1.0, k + 1.5 + consumer, k + 2.5)
    return Trip(0, *(round(10 * at, 3) for at in times))


def consumer_idle(trips):
    return idle_share([(trip.taken, trip.done) for trip in trips])


def worker_idle(trips):
    return idle_share([(trip.begun, trip.made) for trip in trips])


def named(consumer, worker, least):
    """The verdict on two idle shares."""
    if consumer <= least:
        return "fed"
    return "lock-step" if worker > least else "starved"


DIAGNOSE = Build(
    name="diagnose",
    reference=diagnose,
    cases=trace_cases(),
    show=lambda case: (
        f"diagnose(trips, {case[1]})  # the worker idle {worker_idle(case[0]):.0%}, "
        f"the consumer {consumer_idle(case[0]):.0%}"
    ),
    wrong={
        "You look at the consumer only. It waits in lock-step, too; is its worker busy?": (
            lambda trips, least=0.1: "starved" if consumer_idle(trips) > least else "fed"
        ),
        "You look at the worker only. It may wait because it is quicker than needed.": (
            lambda trips, least=0.1: "lock-step" if worker_idle(trips) > least else "starved"
        ),
        "You take starved for lock-step: where both wait, neither is too slow.": (
            lambda trips, least=0.1: {"starved": "lock-step", "lock-step": "starved"}.get(
                diagnose(trips, least), "fed"
            )
        ),
        "You count every gap; a share of `least` is no wait.": (
            lambda trips, least=0.1: diagnose(trips, 0.0)
        ),
        "A share of exactly `least` is no wait: more than that is.": (
            lambda trips, least=0.1: diagnose(trips, least - 1e-9)
        ),
        "You count every gap of the worker; a share of `least` is no wait.": (
            lambda trips, least=0.1: (
                "fed"
                if consumer_idle(trips) <= least
                else "lock-step"
                if worker_idle(trips) > 0
                else "starved"
            )
        ),
        "You look at the wrong lane: whether the *consumer* waits tells fed from the others.": (
            lambda trips, least=0.1: named(worker_idle(trips), consumer_idle(trips), least)
        ),
        "A worker that never waits is no sign that its consumer does.": (
            lambda trips, least=0.1: "fed" if worker_idle(trips) > least else "starved"
        ),
        "Where nobody waits, nothing is in lock-step.": lambda trips, least=0.1: (
            diagnose(trips, least)
            if max(consumer_idle(trips), worker_idle(trips)) > least
            else "lock-step"
        ),
        "From `begun` to `taken` a batch may lie ready; its worker is at work until `made`.": (
            lambda trips, least=0.1: named(
                idle_share([(trip.made, trip.done) for trip in trips]),
                idle_share([(trip.begun, trip.taken) for trip in trips]),
                least,
            )
        ),
        "You blame the consumer when batches lie ready; that is what prefetching is for.": (
            lambda trips, least=0.1: (
                "starved" if sum(t.taken - t.made for t in trips) > least else "fed"
            )
        ),
    },
)


# Choosing


def help_seen(answer, started, most, ready, machine=99):
    """How many workers are started by a consumer that finds a batch ready, or doesn't."""
    answers, asked = iter(ready), []
    own = type("Own", (MyPrefetcher,), {"get_help": answer}).__new__(MyPrefetcher)
    own.threads, own.most_workers = ("thread",) * started, most
    own.pace = SimpleNamespace(patience=lambda: 0.02, workers=started)

    def is_ready(patience):
        asked.append(patience)
        return next(answers, True)

    def add_worker_if_any():
        if len(own.threads) < machine:
            own.threads = (*own.threads, "thread")
        else:
            own.most_workers = len(own.threads)

    own.buffer = SimpleNamespace(is_ready=is_ready)
    own.add_worker_if_any = own._add_worker = add_worker_if_any
    answer(own)
    return {"workers": len(own.threads), "times asked": len(asked), "patience": set(asked)}


def helped(self, when=lambda self: self.buffer.is_ready(self.pace.patience()), most=None):
    while len(self.threads) < (most or self.most_workers):
        if when(self):
            break
        self.add_worker_if_any()


def helps_once(self):
    if len(self.threads) < self.most_workers and not self.buffer.is_ready(self.pace.patience()):
        self.add_worker_if_any()


def asks_when_all_are_there(self):
    while not self.buffer.is_ready(self.pace.patience()):
        if len(self.threads) >= self.most_workers:
            break
        self.add_worker_if_any()


def helps_at_once(self):
    if not self.buffer.is_ready(self.pace.patience()):
        while len(self.threads) < self.most_workers:
            self.add_worker_if_any()


def helps_when_ready(self):
    while len(self.threads) < self.most_workers and self.buffer.is_ready(self.pace.patience()):
        self.add_worker_if_any()


def without_a_limit(self):
    while not self.buffer.is_ready(self.pace.patience()):
        self.add_worker_if_any()


def counts_beforehand(self):
    for _ in range(self.most_workers - len(self.threads)):
        if self.buffer.is_ready(self.pace.patience()):
            break
        self.add_worker_if_any()


GET_HELP = Build(
    name="get_help",
    reference=AdaptivePrefetcher.get_help,
    owner="MyPrefetcher",
    cases=[
        (1, 4, (True,)),
        (1, 1, (False,)),
        (1, 4, (False, True)),
        (1, 4, (False, False, True)),
        (1, 4, (False,) * 9),
        (4, 4, (False,) * 3),
        (1, 4, (False,) * 9, 2),
    ],
    observe=help_seen,
    show=lambda case: (
        f"get_help()  # {case[0]} of {case[1]} workers; ready? "
        + ", ".join("yes" if one else "no" for one in case[2])
        + (f"; the system has {case[3]} threads" if len(case) > 3 else "")
    ),
    wrong={
        "You stop after one worker; the batch may still be slow to come.": helps_once,
        "You start all workers at the first wait; the second may be enough.": helps_at_once,
        "You wait for help when everybody is there already.": asks_when_all_are_there,
        "You call for help while batches lie ready.": helps_when_ready,
        "You start all workers at once, whether anybody waits or not.": (
            lambda self: helped(self, when=lambda self: False)
        ),
        "You start workers without asking how many are allowed.": without_a_limit,
        "You count beforehand how many may come; a system may have fewer threads.": (
            counts_beforehand
        ),
        "You don't wait at all; `self.pace.patience()` says how long.": (
            lambda self: helped(self, when=lambda self: self.buffer.is_ready(0.0))
        ),
    },
)


def rate_cases(rng):
    slow = {(1, 2): 100.0, (1, 8): 196.0, (2, 8): 200.0}
    edge = {(1, 2): 100.0, (1, 8): 200.0, (2, 8): 400.0, (4, 8): 390.0}
    down = {(1, 2): 200.0, (2, 8): 100.0}
    steps = (0.0, 0.004, 0.008, 0.01, 0.02, 0.1)
    drawn = [
        {(1, 2): a, (1, 8): b, (2, 2): c, (4, 8): d} for a, b, c, d in rng.uniform(50, 500, (8, 4))
    ]
    return [(rates, step) for rates in (slow, edge, down, *drawn) for step in steps]


def chosen(rates, step_s, headroom=HEADROOM, as_good=AS_GOOD, last=False):
    needed = headroom / step_s if step_s else float("inf")
    best = max(rates.values())
    target = needed if best >= needed else as_good * best
    found = [setting for setting, rate in rates.items() if rate >= target]
    return found[-1] if last else found[0]


def as_good_is_enough(rates, step_s):
    needed = HEADROOM / step_s if step_s else float("inf")
    enough = min(needed, AS_GOOD * max(rates.values()))
    return next(setting for setting, rate in rates.items() if rate >= enough)


def divides_by_any_step(rates, step_s):
    _ = HEADROOM / step_s
    return chosen(rates, step_s)


def shown_rates(case):
    rates = ", ".join(f"{setting}: {rate:.0f}" for setting, rate in case[0].items())
    return f"cheapest({{{rates}}}, {case[1]})"


CHEAPEST = Build(
    name="cheapest",
    reference=cheapest,
    cases=rate_cases,
    show=shown_rates,
    wrong={
        "You take the fastest; a cheaper one may be enough.": (
            lambda rates, step_s: max(rates, key=rates.get)
        ),
        "You leave no headroom: on a busy day this one starves its consumer.": (
            lambda rates, step_s: chosen(rates, step_s, headroom=1.0)
        ),
        "Where none is enough you take the fastest; a cheaper one is as good.": (
            lambda rates, step_s: chosen(rates, step_s, as_good=1.0)
        ),
        "Where a setting has the headroom, one that is as good as the best is not enough.": (
            as_good_is_enough
        ),
        "You take the most expensive of those that are enough.": (
            lambda rates, step_s: chosen(rates, step_s, last=True)
        ),
        "You find none where none is enough; something must be chosen.": lambda rates, step_s: next(
            (setting for setting, rate in rates.items() if rate * step_s >= HEADROOM), None
        ),
        "A step of 0 asks for as fast as can be: don't divide by it.": divides_by_any_step,
        "A step of `step_s` seconds uses 1 / `step_s` batches a second: compare rates.": (
            lambda rates, step_s: chosen(rates, step_s and 1 / step_s)
        ),
        "The cheapest comes first; you take it whatever it delivers.": (
            lambda rates, step_s: next(iter(rates))
        ),
    },
)


# Hints


def range_cases(rng):
    small = [((0,), 1), ((0, 4), 2), ((0, 2), 2), ((0, 1), 2), ((3, 3), 1), ((0, 3, 4, 9), 2)]
    drawn = [(tuple(np.sort(rng.integers(0, 40, n)).tolist()), w) for n in (3, 8) for w in (1, 2)]
    return small + drawn


def ranges_seen(answer, first, width):
    """The ranges, as arrays."""
    begins = np.array(first)
    found = answer(begins, begins + width)
    if found is None:
        return None
    run_first, run_stop = found
    return {"first": np.asarray(run_first), "stop": np.asarray(run_stop)}


def joined(first, stop, near=lambda begin, end: begin <= end):
    runs = [[int(first[0]), int(stop[0])]]
    for begin, end in list(zip(first.tolist(), stop.tolist(), strict=True))[1:]:
        if near(begin, runs[-1][1]):
            runs[-1][1] = end
        else:
            runs.append([begin, end])
    return tuple(np.array(runs).T)


MERGED = Build(
    name="merged",
    reference=merged,
    cases=range_cases,
    observe=ranges_seen,
    show=lambda case: f"merged({list(case[0])}, {[one + case[1] for one in case[0]]})",
    wrong={
        "Ranges that touch are one as well: one call is enough for both.": (
            lambda first, stop: joined(first, stop, lambda begin, end: begin < end)
        ),
        "You join ranges with a page between them that nobody wants.": (
            lambda first, stop: joined(first, stop, lambda begin, end: begin <= end + 1)
        ),
        "You join equal ranges only; others overlap too.": lambda first, stop: (
            np.unique(first),
            np.unique(stop),
        ),
        "You make one range of all: it names what lies between them, too.": lambda first, stop: (
            first[:1],
            stop[-1:],
        ),
        "Your runs end where their first range does.": lambda first, stop: (
            joined(first, stop)[0],
            stop[np.searchsorted(first, joined(first, stop)[0])],
        ),
        "You return the runs one by one; asked are all first pages, and all stops.": (
            lambda first, stop: list(zip(*joined(first, stop), strict=True))
        ),
        "You return the ranges as they came.": lambda first, stop: (first, stop),
    },
)


def checks_seen(answer, found):
    """After how many skipped calls each check comes, when the checks find the pages so."""
    backoff = type("Own", (MyBackoff,), {"record": answer})()
    skipped, later = [], []
    for warm in found:
        calls = 0
        while not backoff.is_due():
            calls += 1
            if calls > 2000:
                skipped.append("without end")
                return {"calls skipped before each check": skipped, "delay after each": later}
        skipped.append(calls)
        backoff.record(was_resident=warm)
        later.append(backoff.delay)
    return {"calls skipped before each check": skipped, "delay after each": later}


def recorded(self, was_resident, later, most=AdviceBackoff.LONGEST, forgets=True):
    self.delay = min(later(self.delay), most) if was_resident else 0 if forgets else self.delay
    self.left = self.delay if was_resident or forgets else 0


def without_left(self, *, was_resident):
    self.delay = min(2 * self.delay + 1, self.LONGEST) if was_resident else 0


def doubles_left(self, *, was_resident):
    self.left = min(2 * self.left + 1, self.LONGEST) if was_resident else 0


RECORD = Build(
    name="record",
    reference=AdviceBackoff.record,
    owner="MyBackoff",
    cases=[
        ([True] * 2,),
        ([True] * 5,),
        ([False] * 3,),
        ([True, True, True, False, False, True, True],),
        ([True] * 12,),
    ],
    observe=checks_seen,
    show=lambda case: (
        "checks that find: " + ", ".join("warm" if warm else "cold" for warm in case[0])
    ),
    wrong={
        "You skip one call more each time; on a warm file that is still a check too many.": (
            lambda self, *, was_resident: recorded(self, was_resident, lambda d: d + 1)
        ),
        "You skip ever more, without an end: who would notice that the file went cold?": (
            lambda self, *, was_resident: recorded(self, was_resident, lambda d: 2 * d + 1, 10**9)
        ),
        "Cold pages end the skipping for once; then you go on where you were.": (
            lambda self, *, was_resident: recorded(
                self, was_resident, lambda d: 2 * d + 1, forgets=False
            )
        ),
        "The delay grows, and no call is skipped: nothing was left to skip.": without_left,
        "`left` was counted down to 0 before the look; doubled, it stays small.": doubles_left,
        "You add 1 before you double.": lambda self, *, was_resident: recorded(
            self, was_resident, lambda d: 2 * (d + 1)
        ),
        "You double zero, and never skip a call.": lambda self, *, was_resident: recorded(
            self, was_resident, lambda d: 2 * d
        ),
        "You skip calls on cold pages, where each hint pays.": lambda self, *, was_resident: (
            recorded(self, not was_resident, lambda d: 2 * d + 1)
        ),
    },
)

BUILDS = [
    IN_TURN,
    SECONDS_EACH,
    MADE_AT,
    FOLLOW,
    DIAGNOSE,
    GET_HELP,
    CHEAPEST,
    MERGED,
    RECORD,
]
