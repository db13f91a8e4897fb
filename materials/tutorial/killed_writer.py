"""Kill the real checkpointer after each of its calls to the system, and see what loads.

`kill_everywhere(folder)` gives call -> step of the checkpoint that loads.  It runs this file in a
process of its own, which imports the library once and then forks a writer for every kill.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CALLS = ("mkdir", "pwrite", "ftruncate", "fsync", "rename", "replace")
MOST = 200  # calls; a writer that makes more does not come to an end


def kill_everywhere(folder: Path) -> dict[str, int]:
    """Save step 1, then step 2 over it, killed after call 1, 2, 3, ... until it gets through."""
    run = subprocess.run(
        [sys.executable, __file__, str(folder)], check=True, capture_output=True, text=True
    )
    return dict(json.loads(run.stdout))


def _main(folder: Path) -> None:
    import torch

    from tutorial import kept as npydata

    def save(run: Path, step: int) -> None:
        weights = {"weight": torch.full((1 << 14,), float(step))}
        npydata.save_checkpoint(run / "newest", weights, None, npydata.TrainingState(step=step))

    def save_and_die(run: Path, number: int) -> None:
        _die_at(number, notes)
        save(run, 2)

    notes = folder / "last call"
    torch.set_num_threads(1)
    in_fork(lambda: save(folder / "first", 1))  # no thread may run here when we fork
    ends: dict[str, int] = {}
    for number in range(1, MOST):
        run = folder / f"run {number}"
        shutil.copytree(folder / "first", run)
        status = in_fork(partial(save_and_die, run, number))
        newest = npydata.latest_checkpoint(run)
        assert newest is not None, f"nothing loads after call {number}"
        npydata.verify_checkpoint(newest)
        weights, _, training = npydata.load_checkpoint(newest)
        assert weights["weight"].unique().tolist() == [training.step]
        if not os.WIFSIGNALED(status):
            ends["(not killed)"] = training.step
            break
        ends[f"{number:2} {notes.read_text()}"] = training.step
    print(json.dumps(ends))


def in_fork(job: Callable[[], object]) -> int:
    """Run a job in a forked process; return how that ended, unless the job raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads; we only write
        child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the writer failed")
    return status


def _die_at(number: int, notes: Path) -> None:
    """From now on count calls, and end this process after one of them."""
    made = 0

    def die(call: str) -> None:
        nonlocal made
        made += 1
        if made == number:
            notes.write_text(call)
            os.kill(os.getpid(), signal.SIGKILL)

    after_each_call(die)


def after_each_call(then: Callable[[str], object]) -> None:
    """From now on tell `then` of each call to the system that a save makes, when it was made."""
    from tutorial.kept.checkpointer import commit

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            then(f"{name} {shown(args[0])}")
            return result

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    commit.exchange = counted("exchange", commit.exchange)


def shown(target: Any) -> str:
    """The name of a file, without what is random in it."""
    if isinstance(target, int):
        link = f"/proc/self/fd/{target}"
        target = os.readlink(link) if os.path.exists(link) else ""  # noqa: PTH110, PTH115
    name = Path(target).name
    name = re.sub(r"^\.latest\..*", "latest (new)", name)
    name = re.sub(r"^run \d+$", "the root", name)
    return re.sub(r"^\..*npydata-tmp$", "the temporary folder", name)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
