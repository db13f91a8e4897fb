"""The hooks: what of torch, ``os`` and npydata is wrapped, each as soon as its module is imported.

A wrapped function does what it did, and its time, bytes and caller are noted. Nothing is imported
that the script does not import.
"""

import atexit
import functools
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npydata.doctor.inside.recording import Recorder

Wrap = Callable[["Recorder", Any], None]
"""Changes a module that was just imported."""


def install(recorder: "Recorder") -> None:
    """Wrap what is there already, and the rest when it comes."""
    wrap_os(recorder)
    sys.meta_path.insert(0, Finder(recorder))
    atexit.register(recorder.finish)
    os.register_at_fork(after_in_child=functools.partial(recorder.begin, "idle"))


class Finder:
    """Finds the modules of ``WRAPS`` as the other finders do, and has them wrapped once run."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that is to be wrapped, and None of any other."""
        if name not in WRAPS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            try:
                WRAPS[name](self.recorder, module)
            except Exception:  # another version of it: the page lacks a counter
                self.recorder.add(unwrapped=1)

        loader.exec_module = exec_module
        return spec


def wrap_os(recorder: "Recorder") -> None:
    """Note which saved files are flushed, and which get another name."""

    def flushed(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(fd: Any) -> None:
            with recorder.span("save") as spent:
                function(fd)
            if recorder.role == "main":
                recorder.add(save_s=spent.counted_s)
                mark_saves(recorder, identity(fd), "synced")

        return wrapper

    os.fsync, os.fdatasync = flushed(os.fsync), flushed(os.fdatasync)
    os.rename, os.replace = renaming(recorder, os.rename), renaming(recorder, os.replace)


def renaming(recorder: "Recorder", function: Any) -> Any:
    """Return a function that renames, and notes which save was renamed."""

    @functools.wraps(function)
    def wrapper(src: Any, dst: Any, **options: Any) -> None:
        known = identity(src) if recorder.saves else None
        function(src, dst, **options)
        mark_saves(recorder, known, "renamed")

    if function in os.supports_dir_fd:
        os.supports_dir_fd.add(wrapper)
    return wrapper


def identity(file: Any) -> list[int] | None:
    """Return device and inode of a path or descriptor; None of what is not there."""
    try:
        named = isinstance(file, int | str | bytes | os.PathLike)
        status = os.stat(file if named else file.fileno())  # noqa: PTH116
    except (OSError, AttributeError, TypeError, ValueError):
        return None
    return [status.st_dev, status.st_ino]


def mark_saves(recorder: "Recorder", which: list[int] | None, what: str) -> None:
    """Note of the newest save into a file that something was done to it."""
    for save in reversed(recorder.saves):
        if which is not None and save["file"] == which:
            save[what] = True
            if what == "synced" and save["renamed"]:
                save["synced_late"] = True
            return


def wrap_dataloader(recorder: "Recorder", module: Any) -> None:
    """Time the iterators of stock loaders, and look at their datasets."""
    iterator, loader = module._BaseDataLoaderIter, module.DataLoader
    iterator.__next__ = timed_next(recorder, iterator.__next__, "_num_yielded")
    loader.__iter__ = timed_iter(recorder, loader.__iter__)


def wrap_our_iterator(recorder: "Recorder", module: Any) -> None:
    """Time the iterators of npydata's loader."""
    iterator = module.PrefetchIterator
    iterator.__next__ = timed_next(recorder, iterator.__next__, "_delivered")


def wrap_our_loader(recorder: "Recorder", module: Any) -> None:
    """Time how npydata's loader begins an epoch."""
    module.AsyncDataLoader.__iter__ = timed_iter(recorder, module.AsyncDataLoader.__iter__)


def timed_next(recorder: "Recorder", function: Any, given: str) -> Any:
    """Return a ``__next__`` whose wait is noted; the batches so far are an attribute, ``given``."""

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        is_first, now = not getattr(self, given), time.monotonic()
        if recorder.loop == threading.get_ident() and now < recorder.look_next and not is_first:
            is_step = recorder.phase == "step"
            return recorder.wait_quickly(function, self, now) if is_step else function(self)
        if recorder.is_inside():
            return function(self)
        wait = recorder.wait()
        try:
            with wait:
                batch = function(self)
        except BaseException:
            recorder.pass_over(wait)
            raise
        recorder.batch(wait, is_first=is_first)
        return batch

    return wrapper


def timed_iter(recorder: "Recorder", function: Any) -> Any:
    """Return an ``__iter__`` of a loader, which may start workers."""

    @functools.wraps(function)
    def wrapper(self: Any) -> Any:
        dataset, workers = getattr(self, "dataset", None), getattr(self, "num_workers", 0)
        with recorder.span("wait", starts_loop=True) as spent:
            iterator = function(self)
        recorder.watch(type(dataset).__name__, dataset)
        recorder.add(start_s=spent.counted_s)
        crew = "threads" if is_ours(self) else "processes"
        recorder.add(own_passes=is_ours(self))
        with recorder.lock:  # of several loaders, say of training and of validation, the most
            recorder.counts[crew] = max(recorder.counts[crew], workers or 0)
        return iterator

    return wrapper


def is_ours(loader: Any) -> bool:
    """Whether a loader is one of npydata's."""
    return any(kind.__module__.partition(".")[0] == "npydata" for kind in type(loader).__mro__)


def wrap_fetch(recorder: "Recorder", module: Any) -> None:
    """Time how batches of stock loaders are made: the items, and putting them together."""
    for kind in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        kind.fetch = timed_fetch(recorder, kind.fetch)
    base = module._BaseDatasetFetcher
    make = base.__init__

    @functools.wraps(make)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        collate = self.collate_fn

        def timed(data: Any) -> Any:
            thread = recorder.thread
            if recorder.is_quick or not thread.is_close:
                return collate(data)
            cpu = time.thread_time()
            batch = collate(data)
            thread.collate_cpu_s = time.thread_time() - cpu
            return batch

        self.collate_fn = timed

    base.__init__ = wrapper


def wrap_our_fetcher(recorder: "Recorder", module: Any) -> None:
    """Time how the threads of npydata's loader make batches."""
    module.EpochFetcher.__call__ = timed_fetch(recorder, module.EpochFetcher.__call__)


def timed_fetch(recorder: "Recorder", function: Any) -> Any:
    """Return a function that makes a batch, whose costs are noted."""

    @functools.wraps(function)
    def wrapper(self: Any, index: Any) -> Any:
        return recorder.fetch(function, self, index)

    return wrapper


def wrap_worker(recorder: "Recorder", module: Any) -> None:
    """Let worker processes keep an account of their own."""
    loop = module._worker_loop

    @functools.wraps(loop)
    def wrapper(dataset_kind: Any, dataset: Any, *args: Any, **options: Any) -> None:
        recorder.become("worker")
        recorder.watch(type(dataset).__name__, dataset)
        try:
            loop(dataset_kind, dataset, *args, **options)
        finally:
            recorder.write()

    module._worker_loop = wrapper


def wrap_optimizer(recorder: "Recorder", module: Any) -> None:
    """Count steps."""
    module.register_optimizer_step_post_hook(recorder.stepped)


def wrap_serialization(recorder: "Recorder", module: Any) -> None:
    """Note what ``torch.save`` and ``torch.load`` are asked, and by which line."""
    module.save = timed_save(recorder, module.save, "torch.save", 1)
    load = module.load

    @functools.wraps(load)
    def wrapper(f: Any, *args: Any, **options: Any) -> Any:
        if recorder.is_inside():
            return load(f, *args, **options)
        recorder.attend()
        if is_unsafe(options):
            line = recorder.user_line(sys._getframe(1))
            recorder.loads[line] = recorder.loads.get(line, 0) + 1
        with recorder.span("load") as spent:
            loaded = load(f, *args, **options)
        recorder.add(load_s=spent.counted_s)
        return loaded

    module.load = wrapper


def is_unsafe(options: dict[str, Any]) -> bool:
    """Whether ``torch.load`` with these options runs what a file asks for."""
    asked = options.get("weights_only")
    forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in YES
    if asked is None:  # the default since torch 2.6 is the safe one
        version = sys.modules["torch"].__version__.split(".")
        return forced or tuple(int(part) for part in version[:2]) < (2, 6)
    return not asked


def wrap_dcp(recorder: "Recorder", module: Any) -> None:
    """Time the saves of ``torch.distributed.checkpoint``."""
    for name in ("save", "async_save"):
        setattr(module, name, timed_save(recorder, getattr(module, name), f"dcp.{name}", None))


def wrap_safetensors(recorder: "Recorder", module: Any) -> None:
    """Time ``safetensors.torch.save_file``."""
    module.save_file = timed_save(recorder, module.save_file, "safetensors.save_file", 1)


def wrap_our_checkpointer(recorder: "Recorder", module: Any) -> None:
    """Time ``AsyncCheckpointer.save``."""
    ours = module.AsyncCheckpointer
    ours.save = timed_save(recorder, ours.save, "AsyncCheckpointer.save", None)
    wait = ours._wait

    @functools.wraps(wait)
    def wrapper(self: Any) -> None:
        if recorder.is_inside():  # of a save that waits for the one before
            wait(self)
            return
        with recorder.span("save") as spent:
            wait(self)
        recorder.stalled(spent)

    ours._wait = wrapper


def wrap_our_distributed_checkpointer(recorder: "Recorder", module: Any) -> None:
    """Time ``AsyncCheckpointer.save_distributed``."""
    ours = module.AsyncCheckpointer
    name = "AsyncCheckpointer.save_distributed"
    ours.save_distributed = timed_save(recorder, ours.save_distributed, name, None)


def timed_save(recorder: "Recorder", function: Any, kind: str, place: int | None) -> Any:
    """Return a function that saves, whose time and way of writing are noted.

    ``place`` says which argument is the file, for those that write one.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if recorder.is_inside():
            return function(*args, **options)
        recorder.attend()
        path = path_in(args, options, place)
        existed = bool(path) and os.path.exists(path) and was_there(recorder, path, args, place)  # noqa: PTH110
        with recorder.span("save") as spent:
            result = function(*args, **options)
        about = {
            "kind": kind, "path": path, "where": recorder.user_line(sys._getframe(1)),
            "over": existed, "file": identity(path) if path else None,
            "bytes": os.path.getsize(path) if path and os.path.isfile(path) else 0,  # noqa: PTH113, PTH202
            "synced": False, "synced_late": False, "renamed": False,
        }  # fmt: skip
        recorder.save(about, spent)
        return result

    return wrapper


def path_in(args: Any, options: Any, place: int | None) -> str:
    """Return the path of the file that a call writes; "" where it writes none, or none is known."""
    if place is None:
        return ""
    file = args[place] if len(args) > place else options.get("f", options.get("filename", ""))
    if not isinstance(file, str | os.PathLike):
        file = getattr(file, "name", "")
    return os.path.realpath(file) if isinstance(file, str | os.PathLike) else ""


def was_there(recorder: "Recorder", path: str, args: Any, place: int | None) -> bool:
    """Whether a save goes over a file with something in it.

    A file that the caller has opened is empty by now; then only our own record knows.
    """
    given = args[place] if place is not None and len(args) > place else None
    if isinstance(given, str | os.PathLike):
        return os.path.getsize(path) > 0  # noqa: PTH202
    return any(save["path"] == path and not save["renamed"] for save in recorder.saves)


YES = ("1", "y", "yes", "true")
WRAPS: dict[str, Wrap] = {
    "torch.utils.data.dataloader": wrap_dataloader,
    "torch.utils.data._utils.fetch": wrap_fetch,
    "torch.utils.data._utils.worker": wrap_worker,
    "torch.optim.optimizer": wrap_optimizer,
    "torch.serialization": wrap_serialization,
    "torch.distributed.checkpoint.state_dict_saver": wrap_dcp,
    "safetensors.torch": wrap_safetensors,
    "npydata.loader.iterator": wrap_our_iterator,
    "npydata.loader.loader": wrap_our_loader,
    "npydata.loader.fetcher": wrap_our_fetcher,
    "npydata.checkpointer.checkpointer": wrap_our_checkpointer,
    "npydata.distributed.checkpointer": wrap_our_distributed_checkpointer,
}
