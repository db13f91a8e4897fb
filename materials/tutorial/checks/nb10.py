"""What lesson 10 lets the learner build, and the wrong answers that people give."""

import itertools
import random
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import npydata
from npydata import CheckpointError, TrainingState, restore_rng, save_checkpoint
from tutorial.building import Build
from tutorial.kept.checkpointer.training_state import capture_rng
from tutorial.promised.training import CARDS, PROMISES  # noqa: F401
from tutorial.symbols import ROOT

sys.path.append(str(ROOT / "examples"))
import train

PART = "training"


# The detective

SEEN = ("weights", "batch", "loss", "after")
"""What is noted of a step, in the order in which it comes to be."""


def missing_part(whole, resumed):
    shows = {"weights": "weights", "batch": "loader", "loss": "generators", "after": "optimizer"}
    for seen, part in shows.items():
        if whole[seen] != resumed[seen]:
            return part
    return "nothing"


def first_steps(differing, gap=1):
    """The notes of a step in two runs: from `differing` on, what follows differs as well."""
    whole = {"weights": 40_213, "batch": 7_119, "loss": 2.75, "after": 91_300}
    follows = {"weights": SEEN, "batch": SEEN[1:], "loss": SEEN[2:], "after": SEEN[3:], None: ()}
    return whole, {seen: whole[seen] + gap * (seen in follows[differing]) for seen in SEEN}


def with_tolerance(whole, resumed):
    if abs(whole["loss"] - resumed["loss"]) < 1e-3 and whole["batch"] == resumed["batch"]:
        resumed = resumed | {"loss": whole["loss"]}
    return missing_part(whole, resumed)


def last_difference(whole, resumed):
    names = {"weights": "weights", "batch": "loader", "loss": "generators", "after": "optimizer"}
    found = [names[seen] for seen in SEEN if whole[seen] != resumed[seen]]
    return found[-1] if found else "nothing"


def loss_first(whole, resumed):
    if whole["loss"] != resumed["loss"]:
        return "generators"
    return missing_part(whole, resumed)


def name_of_the_note(whole, resumed):
    return next((seen for seen in SEEN if whole[seen] != resumed[seen]), "nothing")


MISSING_PART = Build(
    name="missing_part",
    reference=missing_part,
    kept=False,
    cases=[first_steps(seen) for seen in (*SEEN, None)] + [first_steps("loss", 2.0**-20)],
    wrong={
        "What comes later differs because of what came earlier: the first difference counts.": (
            last_difference
        ),
        "A loss also differs where weights or batch do.": loss_first,
        "You let a small difference of the loss pass: another bit is another run.": with_tolerance,
        "You name the note that differs; asked for is the part that was not put back.": (
            name_of_the_note
        ),
        "You name a part even where the two runs are the same.": lambda whole, resumed: (
            "optimizer" if whole == resumed else missing_part(whole, resumed)
        ),
    },
)


# The generators


def draws():
    """The next numbers of each generator; the normal ones of numpy and Python come in pairs."""
    return {
        "Python": [random.random(), random.gauss(0, 1)],
        "numpy": np.random.rand(2).tolist(),
        "numpy, normal": np.random.randn(1).tolist(),
        "torch": torch.rand(3).tolist(),
    }


def captured(answer, seed):
    """Whether each generator goes on from a state, and what there is to say of the state."""
    for one in (random.seed, np.random.seed, torch.manual_seed):
        one(seed)
    for _ in range(seed):
        draws()
    before = capture_rng()
    state = answer()
    seen = {"taking it draws no number": capture_rng() == before}
    wanted = draws()
    kinds = {name: type(one).__name__ for name, one in before.items()}
    seen["its parts"] = {name: type(one).__name__ for name, one in state.items()}
    seen["numpy's, by kind"] = [type(one).__name__ for one in state.get("numpy", ())]
    if seen["its parts"] == kinds:
        try:
            restore_rng(state)
        except CheckpointError:
            return seen | {"it can be put back": False}
        seen["it can be put back"] = True
        found = draws()
        seen |= {f"{name} goes on": found[name] == wanted[name] for name in wanted}
    return seen


def capture_as(drop=(), **replaced):
    state = capture_rng()
    for name, change in replaced.items():
        state[name] = change(state[name])
    return {name: one for name, one in state.items() if name not in drop}


def capture_after_a_draw():
    torch.rand(1)
    return capture_rng()


CAPTURE_RNG = Build(
    name="capture_rng",
    reference=capture_rng,
    cases=[(0,), (1,), (2,)],
    observe=captured,
    show=lambda case: f"capture_rng()  # after {case[0]} rounds of draws",
    wrong={
        "The drop-out draws from torch, but a shuffle or an augmentation may draw from others.": (
            partial(capture_as, drop=("python", "numpy"))
        ),
        "The key `cuda` is missing: with a GPU the noise is drawn there.": partial(
            capture_as, drop=("cuda",)
        ),
        "A tensor is no JSON: the checkpoint keeps bytes.": partial(
            capture_as, torch=lambda one: torch.tensor(list(one))
        ),
        "numpy's words as an array can't be stored beside the rest: they must be bytes.": partial(
            capture_as, numpy=lambda one: (one[0], np.frombuffer(one[1], np.uint32), *one[2:])
        ),
        "Neither an array nor a tensor is JSON: both must be bytes.": partial(
            capture_as,
            numpy=lambda one: (one[0], np.frombuffer(one[1], np.uint32), *one[2:]),
            torch=lambda one: torch.tensor(list(one)),
        ),
        "numpy's state is one tuple of five values; yours has a list in it.": partial(
            capture_as, numpy=lambda one: (*one[:2], list(one[2:]))
        ),
        "Of numpy's state you keep the words only: it also counts how many were used.": partial(
            capture_as, numpy=lambda one: one[:2]
        ),
        "Looking at a generator must not draw from it.": capture_after_a_draw,
    },
)


# What is taken down


@dataclass
class Place:
    """A loader that stands somewhere."""

    samples: int

    def state_dict(self):
        """Where it stands, as plain values."""
        return {"epoch": 1, "samples": self.samples}


def taken_down(answer, step, settings, shown):
    state = answer(step, Place(8 * step), settings, **shown)
    fields = {name: getattr(state, name) for name in ("step", "loader", "extra", *shown)}
    return {"kind": type(state).__name__, **fields, "rng as it stands": state.rng == capture_rng()}


def state_as(step, loader, settings, drop=(), later=0, place=lambda loader: loader.state_dict(),
             **shown):  # fmt: skip
    fields = {"step": step + later, "rng": capture_rng(), "loader": place(loader),
              "extra": settings, **shown}  # fmt: skip
    return TrainingState(**{name: one for name, one in fields.items() if name not in drop})


def draws_first(step, loader, settings, **shown):
    state = train.training_state(step, loader, settings, **shown)
    torch.rand(1)
    return state


TRAINING_STATE = Build(
    name="training_state",
    reference=train.training_state,
    cases=[(3, {}, {}), (4, {"seed": 5}, {}), (5, {"seed": 5}, {"loss": 2.5, "tokens": 2_560})],
    observe=taken_down,
    show=lambda case: f"training_state({case[0]}, loader, {case[1]}, **{case[2]})",
    wrong={
        "The noise of the next step is drawn from generators that nobody took down.": partial(
            state_as, drop=("rng",)
        ),
        "Without the loader's place the run begins its data again.": partial(
            state_as, drop=("loader",)
        ),
        "You store the loader itself: what is needed is where it stands.": partial(
            state_as, place=lambda loader: loader
        ),
        "Without the settings nobody can refuse a run that has others.": partial(
            state_as, drop=("extra",)
        ),
        "What is shown to people is left out.": lambda step, loader, settings, **shown: state_as(
            step, loader, settings
        ),
        "`extra` is what a resume compares: what is shown to people differs at each step.": (
            lambda step, loader, settings, **shown: state_as(step, loader, settings | shown)
        ),
        "The step that is stored is the one that was done, not the next one.": partial(
            state_as, later=1
        ),
    },
)


# What is put back


class Loads:
    """Anything with `load_state_dict`; as some do, it draws a number while it loads."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def load_state_dict(self, state):
        """Note what came."""
        self.log[self.name] = state
        random.random()


def put_back(answer, moments, loader, with_rng):
    """What each part was given, and which random number is the next one."""
    random.seed(1)
    state = TrainingState(step=3, loader=loader, rng=capture_rng() if with_rng else None)
    to_come, log = [random.random() for _ in range(5)], {}
    random.seed(2)
    model, optimizer, place = (Loads(log, name) for name in ("model", "optimizer", "loader"))
    answer(model, optimizer, place, "the weights", moments, state)
    names = ("model", "optimizer", "loader")
    seen = {f"the {name} was given": log.get(name, "nothing") for name in names}
    if with_rng:
        drawn = random.random()
        where = to_come.index(drawn) + 1 if drawn in to_come else "none"
        seen["the next random number"] = f"{where} of those to come"
    return seen


PARTS = "model optimizer loader rng"


def restore_as(model, optimizer, loader, weights, moments, state, order=PARTS, careful=True):
    for part in order.split():
        if part == "model":
            model.load_state_dict(weights)
        elif part == "optimizer" and (moments is not None or not careful):
            optimizer.load_state_dict(moments)
        elif part == "loader" and (state.loader is not None or not careful):
            loader.load_state_dict(state.loader)
        elif part == "rng" and (state.rng is not None or not careful):
            restore_rng(state.rng)


def all_or_none(model, optimizer, loader, weights, moments, state):
    model.load_state_dict(weights)
    if moments is not None and state.loader is not None and state.rng is not None:
        restore_as(model, optimizer, loader, weights, moments, state)


def given_without_looking(model, optimizer, loader, weights, moments, state):
    restore_as(model, optimizer, loader, weights, moments, state, careful=False)


def looks_at_the_generators_only(model, optimizer, loader, weights, moments, state):
    parts = PARTS if state.rng is not None else "model optimizer loader"
    restore_as(model, optimizer, loader, weights, moments, state, parts, careful=False)


def one_of_them(model, optimizer, loader, weights, moments, state):
    given = {"optimizer": moments, "loader": state.loader, "rng": state.rng}
    part = next((name for name, one in given.items() if one is not None), "")
    restore_as(model, optimizer, loader, weights, moments, state, order=f"model {part}")


def gives_nothing_for_none(model, optimizer, loader, weights, moments, state):
    optimizer.load_state_dict(moments or {})
    restore_as(model, optimizer, loader, weights, moments, state, order="model loader rng")


def gives_the_whole_state(model, optimizer, loader, weights, moments, state):
    model.load_state_dict(weights)
    loader.load_state_dict(state)
    restore_as(model, optimizer, loader, weights, moments, state, order="optimizer rng")


RESTORE = Build(
    name="restore",
    reference=train.restore,
    cases=[
        ("the moments", {"samples": 24}, True),
        (None, {"samples": 24}, True),
        ("the moments", None, True),
        ("the moments", {"samples": 24}, False),
        (None, None, False),
    ],
    observe=put_back,
    show=lambda case: (
        "restore(model, optimizer, loader, weights, "
        f"{case[0]!r}, state)  # state.loader: {case[1]}, "
        f"state.rng: {'given' if case[2] else None}"
    ),
    wrong={
        "The generators come last: what is loaded after them may draw numbers.": partial(
            restore_as, order="rng model optimizer loader"
        ),
        "Only the loader is left to load, and yet it comes after the generators.": partial(
            restore_as, order="model optimizer rng loader"
        ),
        "What loads after the generators may draw from them, and they move on.": partial(
            restore_as, order="model rng optimizer loader"
        ),
        "With `elif` only one part is put back; each is there or not, whatever the others are.": (
            one_of_them
        ),
        "An empty state is not the same as none: you still load it.": gives_nothing_for_none,
        "Assigning gives a parameter another object; the model itself stays as it was.": partial(
            restore_as, order="rng"
        ),
        "The loader gets its own part of the state, not all of it.": gives_the_whole_state,
        "The model keeps the weights of a fresh start.": partial(
            restore_as, order="optimizer loader rng"
        ),
        "The optimizer keeps its moments of nothing.": partial(
            restore_as, order="model loader rng"
        ),
        "The loader stays at the beginning.": partial(restore_as, order="model optimizer rng"),
        "The generators stay where a fresh start left them.": partial(
            restore_as, order="model optimizer loader"
        ),
        "A part that is None was never saved: it can't be put back.": given_without_looking,
        "Not only the generators may lack: a part that gets None is not left as it is.": (
            looks_at_the_generators_only
        ),
        "One part that lacks is no reason to leave the others.": all_or_none,
    },
)


# How a run goes on


def gone_on(answer, saved, settings):
    """What a start finds in a folder with checkpoints of these steps, saved in this order."""
    log = {}
    model, optimizer, loader = (Loads(log, name) for name in ("model", "optimizer", "loader"))
    with TemporaryDirectory() as name:
        root = Path(name) / "run"
        for step in saved:
            state = TrainingState(step=step, loader={"samples": step}, extra={"batch_size": 4})
            weights, moments = ({"w": torch.tensor([float(step + k)])} for k in (0, 0.5))
            save_checkpoint(root / f"step-{step}", weights, moments, state)
        try:
            returned = answer(root, model, optimizer, loader, settings)
            seen = {"returned": without(root.parent, returned)}
        except CheckpointError as error:
            turned = f"was made with batch_size {settings['batch_size']}" in str(error)
            seen = {
                "raised": "CheckpointError",
                "it says that the checkpoint has the settings of this run": turned,
            }
    return seen | {
        f"the {name} was given": "nothing" if name not in log else plain(log[name])
        for name in ("model", "optimizer", "loader")
    }


def plain(given):
    """What was loaded, each tensor as a list."""
    return {
        key: one.tolist() if isinstance(one, torch.Tensor) else one for key, one in given.items()
    }


def without(parent, returned):
    """What came back, with each path in it told from the parent on."""
    if not isinstance(returned, tuple):
        return returned
    told = (str(one).replace(f"{parent}/", "") if isinstance(one, Path | str) else one
            for one in returned)  # fmt: skip
    return tuple(told)


def whole_path(out, model, optimizer, loader, settings):
    step, name = resume_as(out, model, optimizer, loader, settings)
    return step, name if name == "none" else str(out / name)


def resume_as(out, model, optimizer, loader, settings, choose=None, check="before", later=0):
    newest = (choose or npydata.latest_checkpoint)(out)
    if newest is None:
        return 0, "none"
    weights, moments, state = npydata.load_checkpoint(newest)
    if check == "before":
        train.require_same(settings, state.extra, newest)
    train.restore(model, optimizer, loader, weights, moments, state)
    if check == "after":
        train.require_same(settings, state.extra, newest)
    return state.step + later, newest.name


def highest_step(out):
    folders = sorted(out.glob("step-*"), key=lambda one: int(one.name.split("-")[1]))
    return folders[-1] if folders else None


def loads_always(out, model, optimizer, loader, settings):
    weights, moments, state = npydata.load_checkpoint(npydata.latest_checkpoint(out))
    train.require_same(settings, state.extra, out)
    train.restore(model, optimizer, loader, weights, moments, state)
    return state.step, npydata.latest_checkpoint(out).name


def counts_only(out, model, optimizer, loader, settings):
    newest = npydata.latest_checkpoint(out)
    if newest is None:
        return 0, "none"
    state = npydata.load_checkpoint(newest)[2]
    train.require_same(settings, state.extra, newest)
    return state.step, newest.name


def turns_the_settings(out, model, optimizer, loader, settings):
    newest = npydata.latest_checkpoint(out)
    if newest is not None:
        train.require_same(npydata.load_checkpoint(newest)[2].extra, settings, newest)
    return resume_as(out, model, optimizer, loader, settings)


def resume_with(model_alone=False, none=(0, "none"), turned=False):
    """Going on, with something less, or something else to tell."""

    def answer(out, model, optimizer, loader, settings):
        newest = npydata.latest_checkpoint(out)
        if newest is None:
            return none
        if not model_alone:
            told = resume_as(out, model, optimizer, loader, settings)
            return told[::-1] if turned else told
        weights, _, state = npydata.load_checkpoint(newest)
        train.require_same(settings, state.extra, newest)
        model.load_state_dict(weights)
        return state.step, newest.name

    return answer


RESUME = Build(
    name="resume_from",
    reference=train.resume_from,
    cases=[
        ((), {"batch_size": 4}),
        ((3,), {"batch_size": 4}),
        ((9, 4), {"batch_size": 4}),
        ((3,), {"batch_size": 8}),
    ],
    observe=gone_on,
    show=lambda case: (
        f"resume_from(out, model, optimizer, loader, {case[1]})  "
        f"# out holds {', '.join(f'step {step}' for step in case[0]) or 'nothing'}"
    ),
    wrong={
        "At the very first start there is nothing to load: that is no error.": loads_always,
        "The highest step is not the newest: somebody may have gone back.": partial(
            resume_as, choose=highest_step
        ),
        "Nobody compares the settings, and the run goes on as another one.": partial(
            resume_as, check="never"
        ),
        "You refuse after the model was changed: who catches the error has half a restore.": (
            partial(resume_as, check="after")
        ),
        "You return the next step; asked for is the last one that is done.": partial(
            resume_as, later=1
        ),
        "You say where the run stands, and put nothing back.": counts_only,
        "The weights alone are not the run: optimizer and loader begin anew.": resume_with(
            model_alone=True
        ),
        "Who asks for the step and the name gets None at the first start.": resume_with(none=None),
        "Without a checkpoint the name is the word `none`, not None.": resume_with(none=(0, None)),
        "The error has the settings turned round: this run's come first, then the saved ones.": (
            turns_the_settings
        ),
        "The step comes first, then the name.": resume_with(none=("none", 0), turned=True),
        "A name was asked for; this is the whole path, another one on each machine.": whole_path,
    },
)


# Epoch after epoch


class Epochs:
    """A loader of three pairs, in another order each epoch; it counts what it made."""

    def __init__(self):
        self.begun = self.made = 0

    def __iter__(self):
        self.begun += 1
        order = [0, 1, 2][self.begun % 3 :] + [0, 1, 2][: self.begun % 3]
        for sample in order:
            self.made += 1
            yield f"epoch {self.begun}", f"sample {sample}"


def taken_from(answer, count):
    loader = Epochs()
    taken = [
        ", ".join(one) if isinstance(one, tuple | list) else type(one).__name__
        for one in itertools.islice(answer(loader), count)
    ]
    return {"the batches": taken, "epochs begun": loader.begun, "batches made": loader.made}


def one_list_after_the_other(loader):
    while True:
        yield from list(loader)


def only_two(loader):
    yield from loader
    yield from loader


def one_by_one(loader):
    while True:
        for x, y in loader:
            yield x
            yield y


def whole_epochs(loader):
    while True:
        yield loader


def asks_one_iterator(loader):
    batches = iter(loader)
    while True:
        yield next(batches)


def keeps_the_first_epoch(loader):
    batches = list(loader)
    while True:
        yield from batches


def only_the_first(loader):
    while True:
        yield next(iter(loader))


EPOCHS = Build(
    name="epochs",
    reference=train.epochs,
    cases=[(2,), (4,), (8,)],
    observe=taken_from,
    show=lambda case: f"epochs(loader)  # 3 batches an epoch, {case[0]} are taken",
    wrong={
        "It ends with the first epoch.": lambda loader: iter(loader),
        "`cycle` gives the first epoch over and over, and keeps all of it.": itertools.cycle,
        "You make a whole epoch before the first batch is given.": one_list_after_the_other,
        "It ends at some time: give batches as long as somebody asks.": only_two,
        "A batch is a pair, x and y; you give them one by one.": one_by_one,
        "You give the loader; asked for are its batches.": whole_epochs,
        "Where an epoch ends `next` raises, and your generator with it.": asks_one_iterator,
        "You make a list of the first epoch, and give it over and over.": keeps_the_first_epoch,
        "Each batch is the first of an epoch: you begin one for each.": only_the_first,
        "`return` ends it at the first batch.": lambda loader: next(iter(loader)),
    },
)


# Signals

NAMES = {signal.SIGUSR1: "SIGUSR1", signal.SIGTERM: "SIGTERM"}


def asked_for(answer, numbers):
    """What stands in the flags after each signal."""
    MyAsked = type("MyAsked", (train.Asked,), {"note": answer})
    asked, seen = MyAsked(), {}
    for at, number in enumerate(numbers, start=1):
        name = f"after signal {at}, {NAMES[number]}"
        try:
            asked.note(number, None)
        except SystemExit:
            return seen | {name: "the process is gone"}
        seen[name] = f"save {asked.save}, end {asked.end}"
    return seen


def noting(ends):
    """A method that always asks for a save, and for the end when `ends` says so."""

    def note(self, number, frame):
        self.save, self.end = True, ends(self, number)

    return note


def saves_or_ends(self, number, frame):
    if number == signal.SIGTERM:
        self.end = True
    else:
        self.save = True


def leaves_at_once(self, number, frame):
    self.save = True
    if number == signal.SIGTERM:
        self.end = True
        sys.exit(143)


NOTE = Build(
    name="note",
    reference=train.Asked.note,
    owner="MyAsked",
    cases=[
        ((signal.SIGUSR1,),),
        ((signal.SIGTERM,),),
        ((signal.SIGUSR1, signal.SIGTERM),),
        ((signal.SIGTERM, signal.SIGUSR1),),
    ],
    observe=asked_for,
    show=lambda case: f"the signals {', '.join(NAMES[one] for one in case[0])}",
    wrong={
        "SIGTERM asks for a last checkpoint, too.": saves_or_ends,
        "A later SIGUSR1 calls the end off.": noting(lambda self, number: number == signal.SIGTERM),
        "SIGUSR1 asks for a checkpoint, not for the end.": noting(lambda self, number: True),
        "Nobody is told that the run should end.": noting(lambda self, number: False),
        "You leave in the middle of a step: nothing of it is saved.": leaves_at_once,
    },
)
# How often to save

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


def best_interval(step, stall, between_crashes):
    seconds = (2 * stall * between_crashes) ** 0.5
    return max(1, round(seconds / step))


BEST_INTERVAL = Build(
    name="best_interval",
    reference=best_interval,
    kept=False,
    cases=INTERVALS,
    wrong={
        "You count a whole interval as lost; a crash comes half-way through, on average.": (
            lambda step, stall, between: max(1, round((stall * between) ** 0.5 / step))
        ),
        "You return seconds, and the question was how many steps.": (
            lambda step, stall, between: max(1, round((2 * stall * between) ** 0.5))
        ),
        "Half an interval is lost at a crash: you halve where it should count twice.": (
            lambda step, stall, between: max(1, round((stall * between / 2) ** 0.5 / step))
        ),
        "You take the root of the step, too; it only turns seconds into steps.": (
            lambda step, stall, between: max(1, round((2 * stall * between / step) ** 0.5))
        ),
        "More seconds in a step make fewer steps of an interval; with yours they get more.": (
            lambda step, stall, between: max(1, round((2 * stall * between * step) ** 0.5))
        ),
        "This is how many saves would fit between two crashes.": (
            lambda step, stall, between: max(1, round(between / stall))
        ),
        "You add a step; at least one is asked for, which is already there.": (
            lambda step, stall, between: round((2 * stall * between) ** 0.5 / step) + 1
        ),
        "You save at every step, as if a save cost nothing.": lambda step, stall, between: 1,
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
)

BUILDS = [
    MISSING_PART,
    CAPTURE_RNG,
    TRAINING_STATE,
    RESTORE,
    EPOCHS,
    RESUME,
    NOTE,
    BEST_INTERVAL,
]
