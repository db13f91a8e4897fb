"""Lesson 10: what a resume forgot, what it has to put back, and the loop that listens."""

import random
import sys
from pathlib import Path

import numpy as np
import torch

import npydata
from course.grading.exercise import Exercise
from course.grading.observers import files
from course.lesson import ROOT, solution
from npydata import CheckpointError, TrainingState, capture_rng, restore_rng

sys.path.append(str(ROOT / "examples"))
import resume

NOTES = ("weights", "batch", "loss", "after")


def notes(first, gap=1):
    """Return the notes of a step in two runs, which differ from `first` on."""
    whole = {"weights": 40_213, "batch": 7_119, "loss": 2.75, "after": 91_300}
    at = NOTES.index(first) if first else len(NOTES)
    return whole, {name: whole[name] + gap * (k >= at) for k, name in enumerate(NOTES)}


def last_difference(whole, resumed):
    parts = ("weights", "loader", "generators", "optimizer")
    found = [part for note, part in zip(NOTES, parts, strict=True) if whole[note] != resumed[note]]
    return found[-1] if found else "nothing"


MISSING_PART = Exercise(
    solution("10", "missing_part"),
    [notes(first) for first in (*NOTES, None)] + [notes("loss", 2.0**-20)],
    misconceptions="""
    return part >> return note | You name the note that differs; asked for is the part that was not put back.
    != resumed[note] >> - resumed[note] < -1e-3 | You let a small difference pass: another bit is another run.
    return "nothing" >> return part | You name a part even where the two runs agree.
    "weights": "weights", "batch": "loader", >> "batch": "loader", "weights": "weights", | With other weights the batch differs here as well: what came to be first counts.
    """,
    others={"What comes later differs because of what came earlier.": last_difference},
)


def draws():
    """Return the next numbers of each generator; normal ones come in pairs."""
    return {
        "Python's": [random.random(), random.gauss(0, 1)],
        "numpy's": [*np.random.rand(2), *np.random.randn(1)],
        "torch's": torch.rand(3).tolist(),
    }


def captured(answer, seed):
    """Observe the kinds of what is captured, and whether each generator goes on from it."""
    for one in (random.seed, np.random.seed, torch.manual_seed):
        one(seed)
    draws()
    before = capture_rng()
    state = answer()
    seen = {"it draws nothing itself": capture_rng() == before}
    wanted = draws()
    seen["kinds"] = {name: type(one).__name__ for name, one in state.items()}
    seen["kinds in numpy's tuple"] = [type(one).__name__ for one in state.get("numpy", ())]
    try:
        restore_rng(state)
    except CheckpointError:
        return seen | {"restore_rng takes it": False}
    found = draws()
    return seen | {f"{name} numbers go on": found[name] == wanted[name] for name in wanted}


CAPTURE_RNG = Exercise(
    capture_rng,
    [(0,), (1,)],
    captured,
    """
    np.asarray(keys).tobytes() >> keys | An array can't be stored as JSON: `keys` must be bytes.
    .numpy().tobytes() >> .numpy() | torch's state is still an array; it must be bytes.
    **capture_on_accelerators(), >> | The generators of the GPUs are missing: with one, dropout draws there.
    *rest), >> rest), | The three values at the end go into the tuple one by one, not as a list.
    (name, np.asarray(keys).tobytes(), *rest) >> np.asarray(keys).tobytes() | numpy's state is more than its keys: it also counts how many of them were used.
    "python": random.getstate(), >> | Python has a generator, too: a shuffle may draw from it.
    """,
    show=lambda seed: f"capture_rng()  # after a few draws, seed {seed}",
)


class Loads:
    """Anything with `load_state_dict`; as some do, it draws a number while it loads."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def load_state_dict(self, state):
        self.log[f"the {self.name} got"] = state
        random.random()


def three_parts():
    """Return model, optimizer and loader, and a log of what they were given."""
    names = ("model", "optimizer", "loader")
    log = dict.fromkeys([f"the {name} got" for name in names], "nothing")
    return log, [Loads(log, name) for name in names]


def put_back(answer, moments, loader, with_rng):
    """Observe what each part was given, and which random number is the next one."""
    random.seed(1)
    state = TrainingState(step=3, loader=loader, rng=capture_rng() if with_rng else None)
    to_come = [random.random() for _ in range(5)]
    log, parts = three_parts()
    random.seed(2)
    answer(*parts, "the weights", moments, state)
    if with_rng:
        drawn = random.random()
        log["the next random number"] = (
            f"number {to_come.index(drawn) + 1} of those to come" if drawn in to_come else "another"
        )
    return log


def all_of_it(model, optimizer, loader, weights, moments, state):
    for part, kept in ((model, weights), (optimizer, moments), (loader, state.loader)):
        part.load_state_dict(kept)
    restore_rng(state.rng)


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
    if moments is not None: >> if True: | Moments that are None were never saved: there is nothing to put back.
    if state.loader is not None: >> if True: | A loader's place that is None was never saved.
    model.load_state_dict(weights) >> state.rng, first = None, state.rng; first and npydata.restore_rng(first); model.load_state_dict(weights) | What loads after the generators may draw from them, and they move on.
    if state.rng is not None: >> if moments is not None and state.rng is not None: | Each part is there or not, whatever the others are.
    """,
    others={"Weights alone may be there: leave the other parts as they are.": all_of_it},
    show=lambda moments, loader, with_rng: (
        f"restore(model, optimizer, loader, weights, moments={moments!r}, state)"
        f"  # state.loader: {loader}, state.rng: {'there' if with_rng else None}"
    ),
)


def gone_on(answer, saved, batch_size):
    """Observe what a start finds where steps were saved in this order, with batches of 4."""
    log, parts = three_parts()
    with files():
        root = Path("run")
        for step in saved:
            state = TrainingState(step=step, loader={"samples": step}, extra={"batch_size": 4})
            weights = {"w": torch.tensor([float(step)])}
            npydata.save_checkpoint(root / f"step-{step}", weights, weights, state)
        try:
            log["returned"] = answer(root, *parts, {"batch_size": batch_size})
        except CheckpointError:
            log["raised"] = "a CheckpointError"
    return log


RESUME_FROM = Exercise(
    resume.resume_from,
    [([], 4), ([3], 4), ([3, 5], 4), ([5, 3], 4), ([3], 8)],
    gone_on,
    """
    return 0, "none" >> raise FileNotFoundError | At the first start there is no checkpoint, and that is no error.
    require_same(settings, state.extra, newest) >> | A run with other settings goes on as if nothing were different.
    require_same( >> restore(model, optimizer, loader, weights, moments, state); require_same( | A run that is refused must be left as it was: compare the settings first.
    restore(model, optimizer, loader, weights, moments, state) >> | You load it, and nothing of it is put back.
    return state.step, newest.name >> return state.step + 1, newest.name | Asked for is the step that is done, not the next one.
    newest.name >> newest | Asked for is the folder's name, not its path.
    npydata.latest_checkpoint(out) >> max(out.glob("step-*"), default=None) | The newest checkpoint is the one that was saved last, whatever its name.
    """,
    show=lambda saved, batch_size: (
        f"resume_from(out, ..., {{'batch_size': {batch_size}}})"
        f"  # saved with batches of 4, in this order: {saved or 'nothing'}"
    ),
)


class Asked:
    save = end = False


class Endless:
    """Batches 1, 2, 3, ..., more than are wanted: each loop over them begins anew."""

    taken = 0

    def __iter__(self):
        for self.taken in range(1, 10):
            yield self.taken


def kept(answer, first, last, every, signals):
    """Observe what the loop does; a signal comes during a step or a save of that name."""
    batches, events = Endless(), []

    def signal(when):
        if got := signals.get(when):
            asked.save = True
            asked.end |= got == "SIGTERM"

    def note(what):
        events.append(what)
        signal(what)

    class Looked(Asked):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name == "save" and events:
                signal(f"a look at asked.save after {events[-1]}")
            return value

    asked = Looked()

    def do_step(step, batch):
        note(f"step {step}" if batch == step - first else f"step {step} on batch {batch}")

    answer(first, last, batches, do_step, lambda step: note(f"save {step}"), asked, every)
    return {"in order": ", ".join(events), "batches taken": batches.taken}


def loop_text(first, last, every, signals):
    come = "".join(f"  # {got} comes during {what}" for what, got in signals.items())
    return f"keep_training({first}, {last}, ..., every={every}){come}"


KEEP_TRAINING = Exercise(
    solution("10", "keep_training"),
    [
        (0, 2, 2, {}),
        (0, 3, 2, {}),
        (2, 2, 2, {}),
        (3, 5, 4, {}),
        (0, 4, 9, {"step 2": "SIGUSR1"}),
        (0, 5, 9, {"step 2": "SIGTERM"}),
        (0, 4, 2, {"step 2": "SIGTERM"}),
        (0, 4, 2, {"save 2": "SIGUSR1"}),
        (0, 5, 9, {"a look at asked.save after step 2": "SIGTERM"}),
    ],
    kept,
    """
    range(first + 1, last + 1) >> range(first, last) | `first` steps are done already: the next one is first + 1.
    is_last = step == last or asked.end >> is_last = asked.end | The very last step is saved, too, whatever its number.
    is_last or asked.save or >> step == last or | Somebody asked for a save, and it didn't come.
    asked.save = False >> | One request, and you save after every step from there on.
    if is_last: >> if step == last or asked.end: | You look at `asked.end` twice: what comes in between ends the run without a save.
    return >> pass | After SIGTERM you train on; the machine is taken away in the middle of it.
    save(step) >> save(step); asked.save = False | A request that comes while you save gets lost.
    zip(range(first + 1, last + 1), batches) >> ((n, batch) for batch, n in zip(batches, range(first + 1, last + 1))) | You take a batch from the loader that no step is done on.
    """,
    show=loop_text,
)
