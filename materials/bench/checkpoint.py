"""How long training stands still for a save, and until it is safe.

Every way saves the same state twice into fresh folders, in turn with the others: the first save of
a run and a later one are different things. Then a training loop with saves, the memory they take,
the page cache that what was written pushes out, very many tiny tensors, and a root full of older
checkpoints. All of them end on the disk.

    python materials/bench/checkpoint.py --quick
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from disk import PAGE, aligned_memory, direct_write, make_cold, resident_share, sync_folder
from harness import (
    MIB,
    SHARE,
    Bench,
    Target,
    limit,
    main,
    milliseconds,
    naive,
    ours,
    peak_memory,
    peer,
)
from model_states import make_state, tiny_state
from safetensors.torch import save_file

from npydata import AsyncCheckpointer, TrainingState


@dataclass(frozen=True)
class Saver:
    """One way of saving a state, again and again."""

    save: Callable[[Path], object]
    """Saves into a new folder; training goes on when it returns."""
    finish: Callable[[Path], object] = lambda folder: None
    """Waits until the disk has everything that was saved there."""
    close: Callable[[], object] = lambda: None
    holds: Any = None
    """What must live as long as the saver does."""


def our_saver(
    state,
    *,
    snapshot="host",
    prepared=True,
    save=AsyncCheckpointer.save,
    **options,
):
    checkpointer = AsyncCheckpointer(snapshot=snapshot)
    optimizer = torch.optim.SGD(list(state.values()), lr=0.1)  # only one that lives is protected
    if prepared:
        checkpointer.prepare(state)
    if snapshot == "overlap":
        checkpointer.protect(optimizer)

    def saved(folder):
        save(checkpointer, folder, state, None, TrainingState(step=1), **options)

    return Saver(saved, lambda folder: checkpointer.wait(), checkpointer.wait, optimizer)


def dcp_saver(
    state,
    *,
    background=False,
    reused=False,
    writer=lambda folder: None,
):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # A stager that keeps its memory from save to save.
    plain = dict.fromkeys(
        ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"),
        False,
    )
    stager = {"async_stager": DefaultStager(StagingOptions(**plain))} if reused else {}
    uploads = []

    def save(folder):
        if background:
            uploads.append(dcp.async_save(state, checkpoint_id=folder, **stager))
        else:
            dcp.save(state, checkpoint_id=folder, storage_writer=writer(folder))

    def finish(folder):
        while uploads:
            upload = uploads.pop()
            getattr(upload, "upload_completion", upload).result()

    return Saver(save, finish, lambda: [one.close() for one in stager.values()])


def one_file(state, *, write):
    """Write a file and flush it while training waits."""

    def save(folder):
        folder.mkdir()
        write({name: one.detach() for name, one in state.items()}, folder / "model")
        with open(folder / "model", "rb") as file:
            os.fsync(file.fileno())
        sync_folder(folder)

    return Saver(save)


def no_saves(state):
    """What a training loop would be without checkpoints."""
    return Saver(lambda folder: None)


def memory_copy(nbytes, folder):
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return partial(target.copy_, source)


def write_directly(nbytes, folder):
    return partial(direct_write, folder / f"direct-{os.getpid()}", aligned_memory(nbytes))


REUSED = {"background": True, "reused": True}
SAVERS = [  # where they stand beside "saves"
    (ours, "ours", "loop memory cache tiny", our_saver, {}),
    (ours, "ours, overlap", "loop", our_saver, {"snapshot": "overlap"}),
    (ours, "ours, not prepared", "", our_saver, {"prepared": False}),
    (peer, "dcp.save", "memory cache", dcp_saver, {}),
    (peer, "dcp.async_save", "memory", dcp_saver, {"background": True}),
    (peer, "dcp.async_save, reused stager", "loop memory", dcp_saver, REUSED),
    (naive, "save_file + fsync", "loop memory cache", one_file, {"write": save_file}),
    (naive, "torch.save + fsync", "loop memory tiny", one_file, {"write": torch.save}),
]
LIMITS = [
    limit("saves", "memory copy", "", memory_copy, group="stall"),
    limit("saves", "direct sequential write", "", write_directly, group="durable"),
]
KEPT = {"few": 2, "many": 200}
ROWS = [
    *(role("saves", name, "", work, **options) for role, name, _, work, options in SAVERS),
    *LIMITS,
    limit("loop", "no saves", "", no_saves),
    limit("memory", "the state itself", "", no_saves),
    *(role(section, name, "", work, **options) for section in ("loop", "memory", "cache", "tiny")
      for role, name, where, work, options in SAVERS if section in where),
    *(ours("kept", "ours", f"{few} in the folder already", our_saver, kept=few) for few in KEPT),
]  # fmt: skip
TARGETS = [
    Target("a save stalls training for {} of a memory copy", "stall | ours",
           "stall | memory copy", at_most=1.15),
    Target("with overlap, for {} of a memory copy", "stall | ours, overlap",
           "stall | memory copy", at_most=0.05),
    Target("the disk has it at {} of the direct write limit", "durable | ours",
           "durable | direct*", 0.85, style=SHARE),
    Target("... {} as fast as save_file + fsync", "durable | ours",
           "durable | save_file*", 1.3),
    Target("... {} as fast as torch.distributed.checkpoint's best", "durable | ours",
           "durable | dcp*", 2),
    Target("the first save, prepared, takes {} of a later one", "first durable | ours",
           "durable | ours", at_most=1.5),
    Target("memory beside the state: {} of its size", "peak | ours",
           "peak | the state itself", at_most=1.05),
    Target("a training loop that saves every 20 steps loses {}", "loop | ours",
           "loop | no saves", at_most=0.03, style=SHARE, extra=True),
    Target("very many tiny tensors: training stands still for {} of torch.save's time",
           "tiny | ours", "tiny | torch.save*", at_most=0.5),
    Target("with many checkpoints in the folder, a small save takes {} of one with few",
           "kept | ours | many*", "kept | ours | few*", at_most=1.2),
]  # fmt: skip


# Measuring


def save_twice(saver, folder, before=lambda: None, remove=shutil.rmtree):
    """Save twice into fresh folders; return the milliseconds of each.

    ``before`` a save and ``remove`` after it are outside the timing.
    """
    rates = {}
    for prefix in ("first ", ""):
        target = folder / f"saved-{prefix.strip()}"
        before()
        begin = time.perf_counter()
        saver.save(target)
        rates[f"{prefix}stall"] = 1e3 * (time.perf_counter() - begin)
        saver.finish(target)
        rates[f"{prefix}durable"] = 1e3 * (time.perf_counter() - begin)
        remove(target)
    saver.close()
    return rates


def turn(row, args):
    if row.role == "limit" and row.section == "saves":
        work = row.work(args.size_mb * MIB, args.folder)
        return {row.options["group"]: milliseconds(work)}
    return MEASURES[row.section](row, args)


def saves(row, args):
    return save_twice(row.work(state_of(args.size_mb), **row.options), args.folder)


def loop(row, args):
    """Return the mean milliseconds of a step; every 20th of 40 is followed by a save."""
    saver, target = row.work(state_of(args.loop_mb), **row.options), args.folder
    left, right, product = (torch.randn(512, 512) for _ in range(3))
    begin = time.perf_counter()
    for step in range(1, 41):
        end = time.perf_counter() + args.step_s
        while time.perf_counter() < end:
            torch.matmul(left, right, out=product)
        if step % 20 == 0:
            target = args.folder / f"loop-{step}"
            saver.save(target)
    mean = 1e3 * (time.perf_counter() - begin) / 40
    saver.finish(target)
    saver.close()
    for path in args.folder.glob("loop-*"):
        shutil.rmtree(path)
    return {"loop": mean}


def memory(row, args):
    if row.role == "limit":
        return {"peak": float(args.size_mb)}
    return {"peak": peak_memory(two_saves, row.work, row.options, args.size_mb, args.folder)}


def two_saves(work, options, megabytes, folder):
    save_twice(work(make_state(4096, 4096), **options), folder)  # imports are no one's fault
    state = make_state(megabytes * MIB)
    return lambda: save_twice(work(state, **options), folder)


def page_cache(row, args):
    """Return how much of what was written stays in memory, in the place of other files."""
    saver, target = row.work(state_of(args.size_mb), **row.options), args.folder / "cached"
    saver.save(target)
    saver.finish(target)
    files = [path for path in target.iterdir() if path.stat().st_size >= PAGE]
    kept = sum(resident_share(path) * path.stat().st_size for path in files) / MIB
    for path in files:
        make_cold(path)
    saver.close()
    shutil.rmtree(target)
    return {"cache": kept}


@cache
def state_of(megabytes):
    return make_state(megabytes * MIB)


tiny_of = cache(tiny_state)


def tiny(row, args):
    return {"tiny": save_twice(row.work(tiny_of(args.tiny), **row.options), args.folder)["stall"]}


def small_save(row, args):
    """Return the milliseconds of a small save, durable, beside older checkpoints."""
    root = args.folder / f"root-{os.getpid()}-{row.options['kept']}"
    saver = our_saver(make_state(1 << 16, 1 << 16))
    for k in range(0 if root.exists() else KEPT[row.options["kept"]]):
        saver.save(root / f"old-{k}")
        saver.finish(root)
    times, target = [], root / "new"
    for _ in range(5):
        times.append(milliseconds(lambda: (saver.save(target), saver.finish(target))))
        shutil.rmtree(target)
    saver.close()
    return {"kept": min(times)}


MEASURES = {
    "saves": saves,
    "loop": loop,
    "memory": memory,
    "cache": page_cache,
    "tiny": tiny,
    "kept": small_save,
}


BENCH = Bench(
    name="checkpoint",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    turn=turn,
    options={
        "size_mb": (1024, 128),
        "loop_mb": (128, 32),
        "step_s": (0.1, 0.03),
        "tiny": (100_000, 5_000),
    },
    rounds={"memory": 0, "cache": 0},
    groups={
        "stall": ("Training stands still for a later save", "ms"),
        "durable": ("Until the disk has a later save", "ms"),
        "first stall": ("Training stands still for the first save", "ms"),
        "first durable": ("Until the disk has the first save", "ms"),
        "loop": ("A training step, on average, with a save every 20 steps", "ms"),
        "peak": ("Memory beside the state, at the peak", "MiB"),
        "cache": ("Page cache taken by what was written", "MiB"),
        "tiny": ("Training stands still for very many tiny tensors", "ms"),
        "kept": ("Until a small save is on the disk, beside older checkpoints", "ms"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
