"""Exercises of notebook 04: tokens per second, and the diagnosis of a trace."""

from itertools import pairwise

from npydata.loader.pipeline import Pipeline, timeline
from tutorial.grading import Exercise

# tokens_per_s


def rate_cases(rng):
    small = [(1, 1, 1, 1), (4, 2, 1, 8), (2, 4, 1, 8), (2, 8, 2, 16), (1, 8, 4, 100), (3, 1, 2, 6)]
    drawn = [
        (*(rng.integers(1, 1000, 2) / 1000).tolist(), int(rng.integers(1, 9)), 32_768)
        for _ in range(12)
    ]
    return small + drawn


# diagnose


def trips(**pipeline):
    return [tuple(trip)[1:] for trip in timeline(Pipeline(**pipeline), 24).trips]


def trace_cases():
    fed = [{"step_s": step, "fetch_s": 2.0, "window": 4} for step in (2.5, 3.0, 9.0)]
    starved = [{"step_s": step, "fetch_s": 2.0, "window": 4} for step in (0.5, 1.0, 1.5)]
    stepping = [
        {"step_s": step, "fetch_s": 2.0, "window": 1, "wake_s": wake}
        for step, wake in ((1.0, 0.4), (1.5, 0.6), (2.0, 0.5))
    ]
    return [(trips(**pipeline),) for pipeline in fed + starved + stepping]


def idle(trace, begin, end):
    gaps = (after[begin] - before[end] for before, after in pairwise(trace))
    return sum(gaps) / (trace[-1][end] - trace[0][begin])


def consumer_waits(trace):
    return idle(trace, 2, 3) > 0.1


def worker_waits(trace):
    return idle(trace, 0, 1) > 0.1


def diagnose(trace):
    if not consumer_waits(trace):
        return "fed"
    return "lock-step" if worker_waits(trace) else "starved"


def lies_ready(trace):
    return sum(trip[2] - trip[1] for trip in trace) > 0.1 * (trace[-1][3] - trace[0][2])


def shown(args):
    begin = ", ".join(str(tuple(round(at, 1) for at in trip)) for trip in args[0][:4])
    return f"[{begin}, ... {len(args[0])} batches]"


EXERCISES = [
    Exercise(
        "tokens_per_s",
        lambda step, fetch, workers, tokens: tokens / max(step, fetch / workers),
        rate_cases,
        {
            "You add step and fetch: that is a loop that fetches only when it wants a batch.": (
                lambda step, fetch, workers, tokens: tokens / (step + fetch / workers)
            ),
            "You do step and fetch one after the other, and all workers are of no use to you.": (
                lambda step, fetch, workers, tokens: tokens / (step + fetch)
            ),
            "With you, more workers take longer for a batch.": (
                lambda step, fetch, workers, tokens: tokens / max(step, fetch * workers)
            ),
            "You leave out that workers share the fetching.": (
                lambda step, fetch, workers, tokens: tokens / max(step, fetch)
            ),
            "You let the workers share the step as well; the consumer is alone.": (
                lambda step, fetch, workers, tokens: tokens * workers / max(step, fetch)
            ),
            "That is how fast batches can be made; the step may be slower.": (
                lambda step, fetch, workers, tokens: tokens * workers / fetch
            ),
            "You let the quicker side set the pace; whom does it wait for?": (
                lambda step, fetch, workers, tokens: tokens / min(step, fetch / workers)
            ),
            "You count batches, not tokens.": (
                lambda step, fetch, workers, tokens: 1 / max(step, fetch / workers)
            ),
        },
    ),
    Exercise(
        "diagnose",
        diagnose,
        trace_cases(),
        {
            "You look at the consumer only. It waits in lock-step, too; is its worker busy?": (
                lambda trace: "starved" if consumer_waits(trace) else "fed"
            ),
            "You look at the worker only. It may wait because it is quicker than needed.": (
                lambda trace: "lock-step" if worker_waits(trace) else "starved"
            ),
            "You take starved for lock-step: where both wait, neither is too slow.": (
                lambda trace: {"starved": "lock-step", "lock-step": "starved"}.get(
                    diagnose(trace), "fed"
                )
            ),
            "You blame the consumer when batches lie ready; that is what prefetching is for.": (
                lambda trace: "starved" if lies_ready(trace) else "fed"
            ),
        },
        show=shown,
    ),
]
