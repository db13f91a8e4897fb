"""What happens to a saver under each fault: it saves, the fault comes, and its loader is asked.

A trial saves step 1 in peace and step 2 under the fault; then another process loads what the
saver's documentation calls the newest checkpoint. Faults come from the engine that the tests use:
a save is filmed, and every disk that a power cut may leave of it is looked at.
"""

import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from faults.children import Child
from faults.film import Camera
from faults.power_cuts import power_cuts, written_out
from savers import Saver
from training import Training, verdict_on

OUTCOMES = {
    "whole": "a complete checkpoint loads",
    "older": "a complete one loads, but an older one than was reported saved",
    "by hand": "an error; a complete one loads after deleting the newest by hand",
    "error": "an error, and nothing complete is left",
    "mixed": "silence: parts of several steps, or not all of one",
    "garbage": "silence: numbers that nobody saved",
    "unnoticed": "silence: reported as saved after a flush that failed",
    "hung": "the saving process never ends",
}


@dataclass
class Trials:
    """Fresh roots for one saver's trials."""

    saver: Saver
    folder: Path
    most: int
    outcomes: Counter = field(default_factory=Counter)

    def save(self, fault, ended=lambda: None):
        """Save in a forked process: ``fault(root, report)`` comes before step 2, ``ended()`` last.

        Returns the root, the last step that was called saved, and what the fault reported.
        """
        root = self.folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()

        def work(report):
            def before(step):
                if step == 2:
                    fault(root, report)

            self.saver.train(Training(root, 2, before, report))
            ended()

        child = start(work)
        lines = child.lines()
        if child.code == -signal.SIGALRM:
            self.outcomes["hung"] += 1
        child.close()
        saved = [int(line) for line in lines if line.isdigit()]
        if not saved:
            raise RuntimeError("it saves nothing here")
        return root, max(saved), [line for line in lines if not line.isdigit()]

    def judge(self, root, saved):
        """Ask the loader in a process of its own, and count what it says."""
        child = start(lambda report: report(looked_at(self.saver, root, saved)))
        self.outcomes[([*child.lines()] or ["error"])[0]] += 1
        child.close()


def start(work):
    """Fork a process that works in silence."""

    def silently(report):
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        warnings.simplefilter("ignore")
        logging.disable()
        torch.set_num_threads(1)  # its other threads were not forked
        work(report)

    return Child(silently)


def looked_at(saver, root, saved, last=2):
    try:
        verdict, step = verdict_on(saver.load(root), last)
        return "older" if verdict == "whole" and step < saved else verdict
    except BaseException:
        found = sorted(root.glob(saver.checkpoints)) if saver.checkpoints else []
    for newest in reversed(found[1:]):
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        try:
            if verdict_on(saver.load(root), last)[0] == "whole":
                return "by hand"
        except BaseException:
            continue
    return "error"


def watched(root, changed):
    """Call ``changed`` after every call of a function that changed a root; return what ends it."""
    last = [signature(root)]

    def hook(frame, event, function):
        if event not in ("c_return", "c_exception"):
            return
        if (now := signature(root)) != last[0]:
            last[0] = now
            changed()

    threading.setprofile(hook)
    sys.setprofile(hook)
    return lambda: sys.setprofile(None)


def signature(root):
    """Return what tells one content of a folder from another, without reading it."""
    found = []
    with os.scandir(root) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                found.append((entry.path, status.st_ino, status.st_size, status.st_mtime_ns))
                if entry.is_dir(follow_symlinks=False):
                    found += signature(entry.path)
            except FileNotFoundError:
                continue
    return found


# The faults


def kill(trials):
    """SIGKILL after a change of a file that step 2 makes, one after the other."""

    def counting(root, report):
        watched(root, lambda: report("change"))

    *_, changes = trials.save(counting)
    for number in evenly(len(changes), trials.most):

        def killing(root, report, number=number):
            left = iter(range(number, -1, -1))
            watched(root, lambda: next(left) or os.kill(os.getpid(), signal.SIGKILL))

        trials.judge(*trials.save(killing)[:2])


def power_cut(trials):
    """The disks that POSIX allows after a power cut during or after step 2, or a sample."""
    film, stack = trials.folder / "film", ExitStack()

    def filming(root, report):
        camera = stack.enter_context(Camera(root, film).running())
        stack.callback(watched(root, lambda: camera.note("seen", None)))
        stack.callback(camera.confirm, 2)

    trials.save(filming, stack.close)
    cuts = list(power_cuts(film, 40))
    random.Random(0).shuffle(cuts)
    for files, confirmed in cuts[: 5 * trials.most]:
        left = trials.folder / "left"
        left.mkdir()
        written_out(files, left)
        trials.judge(left, max(1, confirmed))
        shutil.rmtree(left)


def fsync_fails(trials):
    """Each fsync of step 2 in turn fails with EIO; whoever says "saved" then has not looked."""

    def failing(number):
        def fault(root, report):
            real, calls = os.fsync, iter(range(1 << 30))

            def fsync(file):
                report("fsync")
                if next(calls) == number:
                    raise OSError(5, os.strerror(5))
                real(file)

            os.fsync = fsync

        return fault

    *_, calls = trials.save(failing(None))
    for number in range(len(calls)):
        root, saved, _ = trials.save(failing(number))
        if saved == 2:
            trials.outcomes["unnoticed"] += 1
        else:
            trials.judge(root, saved)


def disk_full(trials):
    """No file may grow beyond a limit, at limits up to the size of the largest file."""
    root, *_ = trials.save(lambda *_: None)
    largest = max(path.stat().st_size for path in root.rglob("*") if path.is_file())
    for limit in evenly(largest, max(2, trials.most // 10)):

        def filling(root, report, limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        trials.judge(*trials.save(filling)[:2])


def reader(trials):
    """Another process loads all the time while one step after the other is saved."""
    folder = trials.folder / "read"
    folder.mkdir()
    saving = start(lambda report: trials.saver.train(Training(folder, 1 << 20, after=report)))
    if saving.line() is None:
        raise RuntimeError("it saves nothing beside a reader")

    def load(report):
        for _ in range(trials.most):
            report(looked_at(Saver(trials.saver.train, trials.saver.load), folder, 0, 1 << 20))

    reading = start(load)
    trials.outcomes.update(reading.lines())
    saving.kill()
    saving.end()
    for child in (reading, saving):
        child.close()


def evenly(count, most):
    """Return at most so many of the numbers below ``count``, the first and the last included."""
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


FAULTS = {"kill": kill, "power cut": power_cut, "disk full": disk_full,
          "fsync fails": fsync_fails, "reader": reader}  # fmt: skip
