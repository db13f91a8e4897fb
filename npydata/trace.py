"""``npydata trace SCRIPT``: where the time of a training script goes.

The script runs in this process, and its calls are timed through public interfaces alone: the
iteration of ``DataLoader`` and ``AsyncDataLoader``, PyTorch's hook after an optimizer's step, and
the functions that save and load (torch, safetensors, ``torch.distributed.checkpoint``, npydata).
Each moment of the thread that runs the script belongs to one part:

=========  =====================================================================================
start-up   until the first batch is asked for, or the first step is done
data       waiting for a batch
step       from a batch to the end of the optimizer's step
save       in a call that saves; training stands still
load       in a call that loads
other      the rest: logging, evaluation after its batches, what comes after the last step
=========  =====================================================================================

A trace is rows of ``(call site, start, end, part)``. No reference to the script's objects is kept.
"""

import functools
import importlib.abc
import inspect
import json
import os
import runpy
import sys
import sysconfig
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from time import perf_counter
from types import FrameType, ModuleType
from typing import Any

import npydata
from npydata.errors import NpyDataError
from npydata.system.atomic import replacing

PARTS = ("start-up", "data", "step", "save", "load", "other")
Interval = tuple[str, float, float, str]
MOST_EVENTS = 100_000
"""At most this many rows are kept for the trace file; the sums count all of them."""
WORTH_ADVICE = 0.05
"""A part gets advice if it takes at least this share of the time after start-up."""
LIBRARIES = (
    "<", f"{Path(__file__).parent}{os.sep}",
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
)  # fmt: skip
"""Prefixes of the names of files that are not part of the script."""

CALLS = {
    "torch.serialization": {"save": "save", "load": "load"},
    "torch.distributed.checkpoint.state_dict_saver": {"save": "save", "async_save": "save"},
    "torch.distributed.checkpoint.state_dict_loader": {"load": "load"},
    "safetensors.torch": {"save_file": "save", "load_file": "load"},
    "npydata.checkpointer.checkpointer": {"save_checkpoint": "our save"},
    "npydata.checkpointer.load": {"load_checkpoint": "our load"},
    "npydata.distributed.load": {"load_distributed": "our load"},
    "npydata.distributed.save": {
        "AsyncCheckpointer.prepare": "our save",
        "AsyncCheckpointer.save": "our save",
        "AsyncCheckpointer.save_distributed": "our save",
        "AsyncCheckpointer.wait": "our save",
    },
    "npydata.reader.checkpoint": {"LazyCheckpoint.load": "our load"},
    "npydata.reader.open": {"open_checkpoint": "our load"},
}
"""Which part each function and method belongs to, by the module that defines it: others import it
from there, and pickle looks it up there."""
LOADERS = {"torch.utils.data": "DataLoader", "npydata.loader.loader": "AsyncDataLoader"}

ADVICE = {
    "items": "items are fetched one by one; a dataset that takes a list of indices needs a batch "
    "sampler:\nDataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), {batch}, False), "
    "batch_size=None)",
    "waits": "batches are made while training waits, or cross from one process to another; let "
    "threads make them ahead (shuffled, unless you pass shuffle=False):\n"
    "loader = AsyncDataLoader(dataset, batch_size={batch})",
    "slow": "the loader can't keep up; ask which setting can:\n"
    "print(recommend(dataset, batch_size={batch}))",
    "save": "training stands still until the data is on the disk; write in the background:\n"
    "checkpointer.save(folder, model.state_dict(), optimizer.state_dict())"
    "  # checkpointer = AsyncCheckpointer(keep_last=2)",
    "our save": "training stands still while the state is copied; copy while it computes:\n"
    'checkpointer = AsyncCheckpointer(snapshot="overlap"); checkpointer.protect(optimizer)',
    "load": "the file is read whole, and then copied; read it straight into the model:\n"
    "open_checkpoint(path).load(into=model.state_dict())",
}
NOT_ITERATED = (
    "data: no DataLoader was iterated: batches that the script makes itself count as step;\n"
    "    iterate an AsyncDataLoader to see them"
)


class Tracer:
    """Attributes each moment of the thread that creates it to one part."""

    def __init__(self, steps: int | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.sites: dict[str, dict[str, float]] = {part: defaultdict(float) for part in PARTS}
        self.events: list[Interval] = []
        self.advice: dict[str, str] = {}
        """Advice for a call site, shown if it turns out to be the slowest of its part."""
        self.steps = 0
        self.begun = self._mark = perf_counter()
        self._steps_wanted = steps
        self._thread = threading.get_ident()
        self._inside = self._started = False
        self._batches_of: int | None = None
        """``id`` of the iterator that gave the last batch, until a step follows it."""
        self._unclear: list[tuple[int, float, float]] = []
        """Times after a batch: counted as step if one follows, else (an evaluation) as other."""

    def timed(self, part: str, function: Callable[..., Any], rule: str) -> Callable[..., Any]:
        """Return the function, timed as a part; timed calls inside it are not counted again."""

        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            if not self._enter():
                return function(*args, **options)
            try:
                return function(*args, **options)
            finally:
                self._leave(part, rule)

        return wrapper

    def batches(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a loader's ``__iter__``, timed; the iterators it returns are timed as well."""

        @functools.wraps(make)
        def wrapper(loader: Any) -> Any:
            if not self._enter():
                return make(loader)
            self._started = True
            try:
                iterator = make(loader)
            finally:
                self._leave("data", rule_for(loader), getattr(loader, "batch_size", None))
            kind = type(iterator)
            if not hasattr(kind.__next__, "timed"):
                with suppress(TypeError):  # a built-in class, such as a generator
                    kind.__next__ = self._next(kind.__next__)
            return iterator

        return wrapper

    def _next(self, give: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(give)
        def wrapper(iterator: Any) -> Any:
            if not self._enter():
                return give(iterator)
            delivered = False
            try:
                batch = give(iterator)
                delivered = True
                return batch
            finally:
                self._leave("data")
                self._batches_of = id(iterator) if delivered else None
                if not delivered:
                    self._settle("other", "evaluation", id(iterator))

        wrapper.timed = True  # type: ignore[attr-defined]
        return wrapper

    def step_done(self, *_: Any) -> None:
        """Record that an optimizer has done a step."""
        if not self._watching():
            return
        part, site = "step", call_site()
        if not self._started:
            part, site = "start-up", "up to the end of the first step"
        if self._batches_of is not None:
            self._settle(part, site, self._batches_of)
        self._add(part, site, self._mark, now := perf_counter())
        self._mark, self._batches_of, self._started = now, None, True
        self.steps += 1
        if self.steps == self._steps_wanted:
            raise SystemExit(0)

    def finish(self) -> None:
        """Attribute the time that is left, and stop tracing."""
        if self._watching():
            self._settle("other", "after the last step")
            self._close_gap("after the last step")
        self._thread = 0

    def _watching(self) -> bool:
        return threading.get_ident() == self._thread and not self._inside

    def _enter(self) -> bool:
        """Begin a timed call, unless it is inside another one or in another thread."""
        if not self._watching():
            return False
        self._close_gap(f"up to {call_site()}")
        self._inside = True
        return True

    def _leave(self, part: str, rule: str = "", batch: object = None) -> None:
        site = call_site()
        self._inside = False
        self._add(part, site, self._mark, now := perf_counter())
        self._mark = now
        if rule in ADVICE:
            self.advice[site] = ADVICE[rule].format(batch=batch or 32)

    def _close_gap(self, site: str) -> None:
        """Attribute the time since the last timed call."""
        now = perf_counter()
        if self._batches_of is not None:
            self._unclear.append((self._batches_of, self._mark, now))
        else:
            self._add("other" if self._started else "start-up", site, self._mark, now)
        self._mark = now

    def _settle(self, part: str, site: str, batches_of: int | None = None) -> None:
        """Attribute the unclear times after an iterator's batches, or after all batches."""
        for number, start, end in self._unclear:
            if batches_of in (None, number):
                self._add(part, site, start, end)
        self._unclear = [one for one in self._unclear if batches_of not in (None, one[0])]

    def _add(self, part: str, site: str, start: float, end: float) -> None:
        self.seconds[part] += end - start
        self.sites[part][site] += end - start
        if len(self.events) < MOST_EVENTS:
            self.events.append((site, start, end, part))

    # Output

    def text(self, script: str) -> str:
        """Return the bar chart, a row per part with its slowest call site, then the advice."""
        total = sum(self.seconds.values()) or 1.0
        lines = [f"npydata trace: {script}, {total:.2f} s, {self.steps:,} optimizer steps"]
        for part, seconds in self.seconds.items():
            share = seconds / total
            slowest = max(self.sites[part], key=self.sites[part].__getitem__, default="")
            lines.append(
                f"{part:<9} {seconds:>9.2f} s {share:>6.1%}  {'█' * round(30 * share):<30}"
                f"  {slowest}".rstrip()
            )
        for part in sorted(PARTS, key=lambda part: -self.seconds[part]):
            known = [site for site in self.sites[part] if site in self.advice]
            if self.steps and part in ("data", "save", "load") and known:
                if self.seconds[part] < WORTH_ADVICE * (total - self.seconds["start-up"]):
                    continue
                slowest = max(known, key=self.sites[part].__getitem__)
                why, line = self.advice[slowest].split("\n")
                lines += [f"{part}, {slowest}: {why}", f"    {line}"]
        if self.steps and not self.sites["data"]:
            lines.append(NOT_ITERATED)
        return "\n".join(lines)

    def write(self, out: Path) -> None:
        """Write the trace for Perfetto or ``chrome://tracing``."""
        events: list[dict[str, Any]] = [
            {
                "name": part,
                "ph": "X",
                "pid": 1,
                "tid": 1,
                "ts": 1e6 * (start - self.begun),
                "dur": 1e6 * (end - start),
                "args": {"at": site},
            }
            for site, start, end, part in self.events
        ]
        with replacing(out) as file:
            file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


@functools.cache
def own_name(filename: str) -> str:
    """Return the name of a file that belongs to the script; empty for a library's."""
    return "" if filename.startswith(LIBRARIES) else Path(filename).name


def call_site() -> str:
    """Return the calling line in the script, or in a module that it imports from beside it."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if name := own_name(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def rule_for(loader: Any) -> str:
    """Return which advice suits a loader that training waits for."""
    if isinstance(loader, npydata.AsyncDataLoader):
        return "slow"
    by_item = getattr(loader, "batch_sampler", None) is not None
    takes_lists = hasattr(getattr(loader, "dataset", None), "__getitems__")
    return "items" if by_item and takes_lists else "waits"


# Installing the tracer


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as the script has imported it."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], object]]) -> None:
        self.calls = calls
        for name in list(calls):
            if name in sys.modules:
                calls.pop(name)(sys.modules[name])

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Find a module the usual way, and make the call once it has been executed."""
        if name not in self.calls:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if call := self.calls.pop(name, None):
                    call(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def install(tracer: Tracer) -> None:
    """Time what the script will import and call."""

    def functions(module: Any) -> None:
        for name, rule in CALLS[module.__name__].items():
            *classes, last = name.split(".")
            home = functools.reduce(getattr, classes, module)
            timed = tracer.timed(rule.removeprefix("our "), getattr(home, last), rule)
            setattr(home, last, timed)

    def loaders(module: ModuleType) -> None:
        loader = getattr(module, LOADERS[module.__name__])
        loader.__iter__ = tracer.batches(loader.__iter__)

    def optimizers(module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(tracer.step_done)

    calls: dict[str, Callable[[ModuleType], object]] = {
        **dict.fromkeys(CALLS, functions),
        **dict.fromkeys(LOADERS, loaders),
        "torch.optim.optimizer": optimizers,
    }
    sys.meta_path.insert(0, AfterImport(calls))


def run(
    script: Path, arguments: Sequence[str], *, out: Path | None = None, steps: int | None = None
) -> int:
    """Run a script under the tracer; return its exit code.

    The bar chart goes to stderr however the script ends, other than by ``os._exit`` or a signal
    that kills it (``timeout`` sends one: use ``timeout -s INT``). ``steps`` ends it after that many
    optimizer steps, as ``sys.exit(0)`` would.

    Raises:
        NpyDataError: There is no such script, ``out`` can't be a file, or ``steps`` is less than 1.
    """
    if not script.is_file():
        raise NpyDataError(f"{script}: no such script, expected a Python file")
    if out and (out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK)):
        raise NpyDataError(f"{out}: expected the name of a file in a folder that you can write to")
    if steps is not None and steps < 1:
        raise NpyDataError(f"steps={steps}, expected at least 1")
    tracer, process = Tracer(steps), os.getpid()
    # The script may change folder, and replace or close the streams.
    out, stdout, stderr = out and out.absolute(), sys.stdout, sys.stderr
    sys.argv[:] = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    install(tracer)
    try:
        return run_script(script)
    finally:
        tracer.finish()
        if os.getpid() == process:  # and not a child that the script forked
            with suppress(AttributeError, ValueError):
                stdout.flush()
            with suppress(AttributeError, ValueError):
                stderr.write(f"{tracer.text(script.name)}\n")
            if out is not None:
                tracer.write(out)


def run_script(script: Path) -> int:
    """Run a script; return the exit code that Python would, and print an exception as it does."""
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")  # noqa: PTH100
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        at = error.__traceback__
        while at is not None and not own_name(at.tb_frame.f_code.co_filename):
            at = at.tb_next  # up to the script's own frame
        traceback.print_exception(error.with_traceback(at or error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0
