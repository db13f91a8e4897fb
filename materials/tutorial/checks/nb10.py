"""Exercises of notebook 10: find the missing part of a state, choose the save interval."""

import copy
import random

from tutorial.grading import Exercise

PARTS = ("weights", "loader", "generators", "optimizer", "nothing")

# missing_part


class ToyRun:
    """A training run in miniature: one weight, momentum, noise, and a place in the data."""

    def __init__(self, seed, noise):
        self.seed, self.size = seed, noise
        self.weights, self.optimizer, self.loader = seed % 7 + 1.0, 0.0, 0
        self.generators = random.Random(seed)

    def step(self):
        """Note weights and batch by a number that tells them from others, as a checksum does."""
        batch = 10_000 + (self.loader * 7919 + self.seed) % 90_000
        noise = self.size * self.generators.random()
        row = {"weights": round(self.weights * 1e9) % 99_991, "batch": batch,
               "loss": abs(self.weights - batch / 1e5) + noise}  # fmt: skip
        self.optimizer = 0.9 * self.optimizer + self.weights - batch / 1e5 + noise
        self.weights -= 0.05 * self.optimizer
        self.loader += 1
        return row

    def forget(self, part):
        """Let a part be as it is at the start of a run."""
        if part != "nothing":
            setattr(self, part, getattr(ToyRun(self.seed + (part == "weights"), self.size), part))


def runs(part, seed, steps, noise):
    """The rows of a run after its fifth step, and of one that resumed there without a part."""
    whole = ToyRun(seed, noise)
    for _ in range(5):
        whole.step()
    resumed = copy.deepcopy(whole)
    resumed.forget(part)
    return tuple([one.step() for _ in range(steps)] for one in (whole, resumed))


def run_cases(rng):
    fixed = [(part, 3, 2, 0.25) for part in PARTS]
    faint = [("generators", 4, 4, 1e-7), ("generators", 5, 3, 1e-7), ("optimizer", 6, 3, 1e-7)]
    drawn = [(part, int(rng.integers(10, 99)), 4, 0.1) for part in PARTS for _ in range(2)]
    return [runs(*case) for case in fixed + faint + drawn]


def missing(whole, resumed):
    for part, seen in (("weights", "weights"), ("loader", "batch"), ("generators", "loss")):
        if whole[0][seen] != resumed[0][seen]:
            return part
    return "optimizer" if whole[1]["weights"] != resumed[1]["weights"] else "nothing"


def differs(whole, resumed, seen):
    return any(a[seen] != b[seen] for a, b in zip(whole, resumed, strict=True))


def at_any_step(whole, resumed):
    seen = {"weights": "weights", "loader": "batch", "generators": "loss"}
    found = [part for part, one in seen.items() if differs(whole, resumed, one)]
    return found[0] if found else "nothing"


def loss_alone(whole, resumed):
    if whole[0]["loss"] != resumed[0]["loss"]:
        return "generators"
    return missing(whole, resumed)


def with_tolerance(whole, resumed):
    if abs(whole[0]["loss"] - resumed[0]["loss"]) > 1e-4:
        return missing(whole, resumed)
    return "optimizer" if whole[1]["weights"] != resumed[1]["weights"] else "nothing"


def first_step_only(whole, resumed):
    return missing(whole, [*resumed[:1], *whole[1:]])


def always_one(whole, resumed):
    found = missing(whole, resumed)
    return "optimizer" if found == "nothing" else found


def shown_runs(args):
    first = [" ".join(f"{key} {value}" for key, value in rows[0].items()) for rows in args]
    return f"first rows: {first[0]} | {first[1]}"


# best_interval

INTERVALS = [
    (1.0, 2.0, 100.0),
    (0.5, 2.0, 3600.0),
    (0.25, 8.0, 10_000.0),
    (2.0, 18.0, 28_900.0),
    (0.1, 0.5, 36.0),
    (5.0, 0.02, 25.0),
]
"""Seconds of a step, of a save's stall, and between crashes; the best interval is a whole number
of steps, or far below one."""


def best(step, stall, between_crashes):
    return max(1, round((2 * stall * between_crashes) ** 0.5 / step))


EXERCISES = [
    Exercise(
        "missing_part",
        missing,
        run_cases,
        {
            "You look at every step, but after the first difference all that follows differs.": (
                at_any_step
            ),
            "You stop at the first step, and one part shows only in what the step did.": (
                first_step_only
            ),
            "You blame the generators, but a loss also depends on weights and batch.": loss_alone,
            "You let a small difference pass: bit-identical is equal, not close.": with_tolerance,
            "You name a part even where the two runs are the same.": always_one,
        },
        show=shown_runs,
    ),
    Exercise(
        "best_interval",
        best,
        INTERVALS,
        {
            "You count a whole interval as lost; a crash comes half-way through, on average.": (
                lambda step, stall, between: max(1, round((stall * between) ** 0.5 / step))
            ),
            "You return seconds, and the question was how many steps.": (
                lambda step, stall, between: max(1, round((2 * stall * between) ** 0.5))
            ),
            "You save at every step, as if a save cost nothing.": (lambda step, stall, between: 1),
            "You wait for the crash, as if only saves cost something.": (
                lambda step, stall, between: max(1, round(between / step))
            ),
            "You return 0 steps where a save is cheap; it can't be more often than every step.": (
                lambda step, stall, between: round((2 * stall * between) ** 0.5 / step)
            ),
            "Your interval grows too fast: twice the stall does not make it twice as long.": (
                lambda step, stall, between: max(1, round(2 * stall * between / step))
            ),
        },
    ),
]
