"""Lesson 10: what a resume forgot, what it has to put back, and the loop that listens."""

import random
import sys

from course.grading.exercise import Exercise
from course.grading.observers import Batches
from course.lesson import ROOT, solution
from npydata import TrainingState, capture_rng

sys.path.append(str(ROOT / "examples"))
import resume

NOTES = ("weights", "batch", "loss", "after")


def notes(first, gap=1):
    """Return the notes of a step in two runs, which differ from `first` on."""
    whole = {"weights": 40_213, "batch": 7_119, "loss": 2.75, "after": 91_300}
    at = NOTES.index(first) if first else len(NOTES)
    return whole, {name: whole[name] + gap * (k >= at) for k, name in enumerate(NOTES)}


MISSING_PART = Exercise(
    solution("10", "missing_part"),
    [notes(first) for first in (*NOTES, None)] + [notes("loss", 2.0**-20)],
    misconceptions="""
    return part >> return note | You name the note that differs; asked for is the part that was not put back.
    != resumed[note] >> - resumed[note] < -1e-3 | You let a small difference pass: another bit is another run.
    "nothing" >> part | You name a part even where the two runs agree.
    "weights": "weights", "batch": "loader", >> "batch": "loader", "weights": "weights", | With other weights the batch differs here as well.
    """,
)


class Loads:
    """Anything with `load_state_dict`; as some do, it draws a number while it loads."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def load_state_dict(self, state):
        self.log[f"the {self.name} got"] = state
        random.random()


def put_back(answer, moments, loader, with_rng):
    """Observe what each part was given, and which random number is the next one."""
    random.seed(1)
    state = TrainingState(step=3, loader=loader, rng=capture_rng() if with_rng else None)
    to_come = [random.random() for _ in range(5)]
    names = ("model", "optimizer", "loader")
    log = dict.fromkeys([f"the {name} got" for name in names], "nothing")
    random.seed(2)
    answer(*[Loads(log, name) for name in names], "the weights", moments, state)
    if with_rng:
        drawn = random.random()
        log["the next random number"] = (
            f"number {to_come.index(drawn) + 1} of those to come" if drawn in to_come else "another"
        )
    return log


RESTORE = Exercise(
    resume.restore,
    [
        ("the moments", {"samples": 24}, True),
        (None, {"samples": 24}, True),
        ("the moments", None, True),
        ("the moments", {"samples": 24}, False),
        (None, None, False),
    ],
    put_back,
    """
    optimizer.load_state_dict(moments) >> pass | The optimizer keeps the moments of a fresh start.
    loader.load_state_dict(state.loader) >> pass | The loader stays at the beginning.
    loader.load_state_dict(state.loader) >> loader.load_state_dict(state) | The loader gets its own part of the state, not all of it.
    moments is not None >> True | Moments that are None were never saved.
    model.load_state_dict(weights) >> model.load_state_dict(weights); optimizer.load_state_dict(moments); loader.load_state_dict(state.loader); npydata.restore_rng(state.rng); return | You put back what was never saved: it is None.
    model.load_state_dict(weights) >> state.rng, first = None, state.rng; first and npydata.restore_rng(first); model.load_state_dict(weights) | What loads after the generators may draw from them, and they move on.
    """,
    show=lambda moments, loader, with_rng: (
        f"restore(model, optimizer, loader, weights, moments={moments!r}, state)"
        f"  # state.loader: {loader}, state.rng: {'there' if with_rng else None}"
    ),
)


def kept(answer, first, last, every, signals):
    """Observe what the loop does; a signal comes during a step or a save, or just before a look."""
    batches, events, looks = Batches(9), [], []

    class Asked:
        save = ended = False
        end = property(
            lambda self: note(f"look {len(looks) + 1} at asked.end", looks) or self.ended
        )

    asked = Asked()

    def note(what, among=events):
        among.append(what)
        if got := signals.get(what):
            asked.save, asked.ended = True, asked.ended or got == "SIGTERM"

    def do_step(step, batch):
        note(f"step {step}" if batch == f"batch {step - first}" else f"step {step} on {batch}")

    answer(first, last, batches, do_step, lambda step: note(f"save {step}"), asked, every)
    return {"in order": ", ".join(events), "batches taken": batches.taken}


KEEP_TRAINING = Exercise(
    solution("10", "keep_training"),
    [
        (0, 2, 2, {}),
        (0, 3, 2, {}),
        (2, 2, 2, {}),
        (3, 5, 4, {}),
        (0, 5, 3, {"step 1": "SIGUSR1", "step 3": "SIGUSR1"}),
        (0, 5, 9, {"step 2": "SIGTERM"}),
        (0, 4, 2, {"step 2": "SIGTERM"}),
        (0, 4, 2, {"save 2": "SIGUSR1"}),
        (0, 5, 9, {"look 2 at asked.end": "SIGTERM"}),
    ],
    kept,
    """
    range(first + 1, last + 1) >> range(first, last) | `first` steps are done already: the next one is first + 1.
    step == last or asked.end >> asked.end | The very last step is saved, too, whatever its number.
    if is_last: >> if is_last or asked.end: | You look twice: a signal that comes in between ends the loop without a save.
    is_last or asked.save or >> step == last or | Somebody asked for a save, and it didn't come.
    asked.save = False >> asked.save &= step % every == 0 | A save that was due anyway answers a request, too.
    asked.save = False >> | One request, and you save after every step from there on.
    return >> pass | After SIGTERM you train on; the machine is taken away in the middle of it.
    save(step) >> save(step); asked.save = False | A request that comes while you save gets lost.
    zip(range(first + 1, last + 1), batches) >> ((n, batch) for batch, n in zip(batches, range(first + 1, last + 1))) | You take a batch from the loader that no step is done on.
    """,
    show=lambda first, last, every, signals: (
        f"keep_training({first}, {last}, ..., every={every})"
        + "".join(f"  # {got} comes during {what}" for what, got in signals.items())
    ),
)
