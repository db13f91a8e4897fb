"""What happens to a saver in each column: it saves, a fault comes, and its loader is asked.

A trial saves step 1 in peace and step 2 under the fault; then another process loads what the
documentation of the saver calls the newest checkpoint.
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from npydata.bench.survival import power
from npydata.bench.survival.process import PATIENCE, Inside, Process, ask
from npydata.bench.survival.strace import (
    CHANGES,
    SYNCS,
    SystemCall,
    calls_of,
    cannot_trace,
    evenly,
    traced,
)
from npydata.bench.survival.training import Survivor, Training, verdict_on
from npydata.errors import NpyDataError

OUTCOMES = {
    "whole": "a complete checkpoint loads",
    "older": "a complete one loads, but an older one than was reported saved",
    "by hand": "an error; a complete one loads after deleting the newest by hand",
    "error": "an error, and nothing complete is left",
    "mixed": "silence: parts of several steps, or not all of one",
    "garbage": "silence: numbers that nobody saved, or what the run began with",
    "unnoticed": "silence: reported as saved after a flush that failed",
    "hung": "the saving process never ends",
}
COMPLETE = ("whole", "older")


@dataclass(slots=True)
class Cell:
    """How often each outcome was seen, with an example's message."""

    outcomes: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """Why there are no trials, or what else one must know."""

    def add(self, outcome: str, message: str = "") -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if message:
            self.examples.setdefault(outcome, message)

    @property
    def trials(self) -> int:
        return sum(self.outcomes.values())

    @property
    def complete(self) -> int:
        """Trials after which a complete checkpoint loads."""
        return sum(self.outcomes.get(each, 0) for each in COMPLETE)


class Trials:
    """Fresh roots for one saver's trials, one at a time."""

    def __init__(self, survivor: Survivor, folder: Path, most: int) -> None:
        self.survivor, self.folder, self.most = survivor, folder, most
        self._numbers = count()

    @contextmanager
    def root(self) -> Iterator[Path]:
        root = self.folder / f"root{next(self._numbers)}"
        root.mkdir()
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def victim(
        self, root: Path, *, last: int = 2, handled: bool = False,
        forks_into: Sequence[Path] = (),
    ) -> Process:  # fmt: skip
        """Return a process that saved step 1 and stands before step 2."""

        def work(inside: Inside) -> None:
            def before(training: Training, step: int) -> None:
                if step == 2:
                    inside.wait()
                    for number, other in enumerate(forks_into):
                        if not os.fork():
                            training.root, training.shift = other, FORK_SHIFT * (number + 1)
                            training.report = lambda line: None
                            break

            training = Training(root, last, before, inside.report)
            if handled and self.survivor.again:
                signal.signal(signal.SIGTERM, lambda *_: save_and_leave(self.survivor, training))
            self.survivor.train(training)
            for _ in forks_into if not training.shift else ():
                os.wait()

        process = Process(work)
        if (lines := process.ready()) != ["saved 1"]:
            process.end()
            raise NpyDataError(f"saves nothing here: {'; '.join(lines)}")
        return process

    def calls(self) -> list[SystemCall]:
        """Return the calls of one undisturbed save that change files."""
        with self.root() as root:
            trace, lines = traced(self.victim(root), "-e", f"trace={CHANGES}")
            if lines != ["saved 2"]:
                raise NpyDataError(f"strace disturbs it: {'; '.join(lines)}")
            return calls_of(trace, root)

    def judge(self, cell: Cell, root: Path, lines: list[str], shift: float = 0.0) -> None:
        """Ask the loader in a process of its own, and count what it says."""
        saved = max([1, *(int(line.split()[1]) for line in lines if line.startswith("saved"))])
        cell.add(*look(self.survivor, root, 1 if shift else saved, shift))


FORKS, FORK_SHIFT = 3, 10.0
CUTS_PER_KILL = 5
NO_END = 1 << 20
"""Steps of a run that is killed when all has been seen."""


def save_and_leave(survivor: Survivor, training: Training) -> None:
    """Do what the handler of a signal commonly does: save once more, and end."""
    assert survivor.again is not None
    survivor.again(training, 2)
    sys.exit(0)


def look(survivor: Survivor, root: Path, saved: int, shift: float = 0.0) -> tuple[str, str]:
    """Return the outcome, and the message of an error."""
    lines = ask(lambda inside: inside.report(" ".join(loaded(survivor, root, saved, shift))))
    outcome, _, message = (lines or ["error the loading process died"])[-1].partition(" ")
    if outcome == "raised":
        return "error", message
    return outcome.replace("-", " "), message


def loaded(survivor: Survivor, root: Path, saved: int, shift: float) -> tuple[str, str]:
    try:
        verdict, step = verdict_on(survivor.load(root), 3, shift)
    except BaseException as error:
        by_hand = loads_by_hand(survivor, root, shift)
        return "by-hand" if by_hand else "error", f"{type(error).__name__}: {error}"
    return ("older" if verdict == "whole" and step < saved else verdict), ""


def loads_by_hand(survivor: Survivor, root: Path, shift: float) -> bool:
    """Whether a complete checkpoint loads when the newest ones are deleted one by one."""
    found = sorted(root.glob(survivor.checkpoints)) if survivor.checkpoints else []
    for newest in reversed(found[1:]):
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        try:
            return verdict_on(survivor.load(root), 3, shift)[0] == "whole"
        except BaseException:
            continue
    return False


# The columns


def killed(trials: Trials) -> Cell:
    """SIGKILL at each call that changes a file."""
    return at_each_call(trials, "KILL", trials.most)


def signalled(trials: Trials) -> Cell:
    """SIGTERM at such calls; the handler saves once more and ends, or is the saver's own."""
    cell = at_each_call(trials, "TERM", max(2, trials.most // 5))
    if not trials.survivor.again:
        cell.note = "its own handling"
    return cell


def at_each_call(trials: Trials, which: str, most: int) -> Cell:
    cell = Cell()
    points = list(dict.fromkeys((call.name, call.number) for call in trials.calls()))
    for name, number in evenly(points, most):
        with trials.root() as root:
            process = trials.victim(root, handled=which == "TERM")
            inject = f"inject={name}:signal={which}:when={number}"
            _, lines = traced(process, "-e", f"trace={name}", "-e", inject)
            if process.hung:
                cell.add("hung")
            else:
                trials.judge(cell, root, lines)
    return cell


def unplugged(trials: Trials) -> Cell:
    """Power cuts, replayed from a recorded save: see :mod:`npydata.bench.survival.power`."""
    cell = Cell()
    with trials.root() as root:
        process = trials.victim(root)
        start = power.snapshot(root)
        trace, _ = traced(process, "-e", f"trace={CHANGES}")
        recording = power.recorded(calls_of(trace, root), root, start)
        known: dict[int, tuple[str, str]] = {}
        for done, state in power.cuts(recording, CUTS_PER_KILL * trials.most):
            key = hash((done, tuple(sorted(state.items()))))
            if key not in known:
                with trials.root() as after:
                    power.make(state, root, after)
                    known[key] = look(trials.survivor, after, 2 if done else 1)
            cell.add(*known[key])
        cell.note = f"{len(known)} different states"
    return cell


def unsynced(trials: Trials) -> Cell:
    """Each fsync in turn fails with EIO; whoever says "saved" then has not looked."""
    cell = Cell()
    calls = [call for call in trials.calls() if call.name in SYNCS.split(",")]
    points = list(dict.fromkeys((call.name, call.number) for call in calls))
    if not points:
        return Cell(note="never calls fsync")
    for name, number in evenly(points, trials.most):
        with trials.root() as root:
            process = trials.victim(root)
            inject = f"inject={name}:error=EIO:when={number}"
            _, lines = traced(process, "-e", f"trace={name}", "-e", inject)
            if process.hung:
                cell.add("hung")
            elif "saved 2" in lines:
                cell.add("unnoticed")
            else:
                trials.judge(cell, root, lines)
    return cell


def full(trials: Trials) -> Cell:
    """No file may grow beyond a limit, at limits up to the size of the largest file."""
    cell = Cell()
    with trials.root() as root:
        process = trials.victim(root)
        process.go()
        process.end()
        largest = max(path.stat().st_size for path in root.rglob("*") if path.is_file())
    times = max(2, trials.most // 10)
    for number in range(times):
        with trials.root() as root:
            process = trials.victim(root)
            limit = largest * number // times
            for pid in process.pids():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
            process.go()
            lines = process.end()
            if process.hung:
                cell.add("hung")
            else:
                trials.judge(cell, root, lines)
    return cell


def read(trials: Trials) -> Cell:
    """Another process loads again and again while one step after the other is saved."""
    cell = Cell()
    with trials.root() as root:
        process = trials.victim(root, last=NO_END)
        process.go()

        def keep_loading(inside: Inside) -> None:
            for _ in range(trials.most):
                inside.report(" ".join(seen(trials.survivor, root)))

        reader = Process(keep_loading)
        for line in reader.end(10 * PATIENCE):
            outcome, _, message = line.partition(" ")
            cell.add(outcome, message)
        process.kill()
        if not any(line.startswith("saved") for line in process.end()):
            raise NpyDataError("it saved nothing beside a reader")
    return cell


def seen(survivor: Survivor, root: Path) -> tuple[str, str]:
    try:
        return verdict_on(survivor.load(root), NO_END)[0], ""
    except BaseException as error:
        return "error", f"{type(error).__name__}: {error}"


def forked(trials: Trials) -> Cell:
    """The process forks three times before a save; each saves its own weights into its own root."""
    cell = Cell()
    for _ in range(max(2, trials.most // 10)):
        with ExitStack() as stack:
            root, *others = (stack.enter_context(trials.root()) for _ in range(1 + FORKS))
            process = trials.victim(root, forks_into=others)
            process.go()
            lines = process.end()
            if process.hung:
                cell.add("hung")
                continue
            trials.judge(cell, root, lines)
            for number, other in enumerate(others):
                trials.judge(cell, other, lines, FORK_SHIFT * (number + 1))
    return cell


NEED_TRACING: set[Callable[[Trials], Cell]] = {killed, unplugged, signalled, unsynced}
COLUMNS: dict[str, Callable[[Trials], Cell]] = {
    "kill": killed,
    "power cut": unplugged,
    "disk full": full,
    "fsync fails": unsynced,
    "reader": read,
    "fork": forked,
    "signal": signalled,
}


def attack(survivor: Survivor, fault: str, folder: Path, most: int) -> Cell:
    """Return the cell of one saver and one fault, or why there is none."""
    column = COLUMNS[fault]
    if column in NEED_TRACING and (why := cannot_trace()):
        return Cell(note=why)
    try:
        return column(Trials(survivor, folder, max(2, most // survivor.cost)))
    except NpyDataError as error:
        return Cell(note=str(error))
