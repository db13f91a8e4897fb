"""The token file that the benches read, what every baseline has to deliver from it, and its rows.

Every baseline over tokens yields batches ``(x, y)``, each ``(batch_size, seq_len)`` int64.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npydata import NpyTokensDataset, open_tokens, write_tokens
from npydata.system.page_cache import PAGE_SIZE
from npydata.system.progress import progress_bar
from tutorial.kept.bench.baselines import Baseline
from tutorial.kept.bench.caches import when_cold
from tutorial.kept.bench.machine import require_space
from tutorial.kept.bench.measure import Row, Sample, Steps, interleave, kept_running, timed

SEED = 0
MEGABYTE = 1_000_000
SMALLEST_COLD = 200 * MEGABYTE
"""Below this, what one measurement reads would be too large a share of the file."""

COLD_SHARE = 1 / 16
"""A cold measurement ends when it has read this share of the file."""

CHUNK = 1 << 22
"""Tokens made at a time."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every baseline has to deliver."""

    path: Path
    dtype: str | None
    """As for :func:`npydata.open_tokens`."""
    seq_len: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Tokens per batch; x and y hold as many each."""
        return self.seq_len * self.batch_size

    def random_dataset(self, access: str = "mmap") -> NpyTokensDataset:
        return NpyTokensDataset(self.path, self.seq_len, seed=SEED, dtype=self.dtype, access=access)

    def layout(self) -> tuple[np.dtype[Any], int, int]:
        """Return the file's dtype, the byte at which its tokens begin, and their number."""
        file = open_tokens(self.path, dtype=self.dtype)
        return file.dtype, file.layout.offset, file.num_tokens

    def open_plain(self) -> npt.NDArray[Any]:
        """Map the file as people commonly do."""
        dtype, offset, count = self.layout()
        return np.memmap(self.path, dtype, "r", offset, (count,))

    @property
    def useful_bytes_per_token(self) -> float:
        """Bytes of a window in the file, divided by the tokens it delivers."""
        return (self.seq_len + 1) * self.layout()[0].itemsize / self.seq_len

    def page_bytes_per_window(self, windows: int = 4096) -> float:
        """Return how many bytes of whole pages a window costs: no disk delivers less than pages."""
        dtype, offset, count = self.layout()
        starts = np.random.default_rng(SEED).integers(count - self.seq_len, size=windows)
        begins = offset + starts * dtype.itemsize
        ends = begins + (self.seq_len + 1) * dtype.itemsize
        return float(PAGE_SIZE * ((ends - 1) // PAGE_SIZE - begins // PAGE_SIZE + 1).mean())


def check_pair(pair: Pair, task: Task) -> None:
    """Raise unless a batch is what the comparison promises: int64, shifted by one, contiguous."""
    x, y = pair
    for half in pair:
        assert half.shape == (task.batch_size, task.seq_len), half.shape
        assert half.dtype == torch.int64, half.dtype
        assert half.is_contiguous(), half.stride()
    assert torch.equal(x[:, 1:], y[:, :-1]), "y is not x shifted by one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to measure."""

    size_mb: int
    """MB of the file that is made."""
    repeats: int
    warm_s: float
    cold_s: float

    @property
    def nbytes(self) -> int:
        return self.size_mb * MEGABYTE


FULL = Plan(size_mb=1024, repeats=5, warm_s=0.5, cold_s=0.5)
QUICK = Plan(size_mb=256, repeats=3, warm_s=0.1, cold_s=0.2)


def task_of(args: argparse.Namespace, plan: Plan, folder: Path) -> Task:
    """Return the task: on the file that was given, checked, or on one made for it."""
    path = args.tokens or make_file(folder / "made.npy", plan.nbytes)
    dtype = args.dtype if args.tokens else None
    task = Task(path=path, dtype=dtype, seq_len=args.seq_len, batch_size=args.batch_size)
    dataset = task.random_dataset()
    check_pair(dataset.fetch(np.arange(task.batch_size) % len(dataset)), task)
    return task


def task_for_cold(task: Task, plan: Plan, folder: Path) -> Task:
    """Return the same task, on a file of its own if the given one is too small to stay cold."""
    if task.path.parent == folder or task.path.stat().st_size >= SMALLEST_COLD:
        return task
    size = max(plan.nbytes, SMALLEST_COLD)
    return replace(task, path=make_file(folder / "cold.npy", size), dtype=None)


def make_file(path: Path, size: int) -> Path:
    """Write random uint16 tokens, which no disk can compress and no file system leave out."""
    require_space(path.parent, size, "--dir or --size-mb")
    write_tokens(path, random_tokens(size // 2, "making tokens"))
    return path


def random_tokens(count: int, title: str) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield ``count`` random uint16 tokens in chunks, with a progress bar."""
    rng = np.random.default_rng(SEED)
    bar = progress_bar(title, 2 * count, "B")
    for start in range(0, count, CHUNK):
        chunk = rng.integers(1 << 16, size=min(CHUNK, count - start), dtype=np.uint16)
        yield chunk
        bar.update(chunk.nbytes)
    bar.close()


def settings_of(task: Task, cold_task: Task, repeats: int) -> dict[str, object]:
    """Return what was asked for, and how large the files are; no path."""
    return {
        "seq_len": task.seq_len,
        "batch_size": task.batch_size,
        "repeats": repeats,
        "warm_file_bytes": task.path.stat().st_size,
        "cold_file_bytes": cold_task.path.stat().st_size,
        "cold_page_bytes_per_window": cold_task.page_bytes_per_window(),
        "random_read_depth": 64,
    }


def conditions(settings: Mapping[str, Any]) -> str:
    """Return what the figures must be read with, in one line."""
    sizes = [
        f"{settings[f'{cache}_file_bytes'] / 1e6:,.0f} MB {cache}" for cache in ("warm", "cold")
    ]
    return (f"{settings['batch_size']} windows of {settings['seq_len']} tokens · "
            f"file of {', '.join(sizes)}")  # fmt: skip


def loader_settings(*pairs: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Return settings of a loader by name, from workers and prefetch factors."""
    return {loader_text(*pair): {"workers": pair[0], "prefetch": pair[1]} for pair in pairs}


def loader_text(workers: int, prefetch: int = 0) -> str:
    """Name workers and a prefetch factor; 0 where there is none."""
    text = f"{workers} worker{'s' * (workers != 1)}"
    return text + (f", prefetch {prefetch}" if prefetch else "")


def warm_rows(
    title: str, baselines: Sequence[Baseline], task: Task, repeats: int, seconds: float,
    *, group: str = "warm", keep: bool = True, show: bool = True,
) -> list[Row]:  # fmt: skip
    """Measure baselines on a file that is in memory, in turn, each time for some seconds.

    What works in this process alone is kept running from turn to turn. A loader is started anew,
    for it would fill its window in somebody else's turn; its first steps are not timed.
    """
    methods: dict[Baseline, Callable[[], Sample]] = {}
    for one in baselines:
        workers, prefetch = (one.options.get(key) or 0 for key in ("workers", "prefetch"))
        start: Callable[[], Steps] = partial(one.start, task)
        if keep and not workers and not prefetch:
            start = kept_running(start)
        methods[one] = partial(timed, start, amount_of(one, task), seconds,
                               drop=4 + workers * max(prefetch, 4))  # fmt: skip
    taken = interleave(title, methods, repeats, show=show)
    return [row_of(one, task, group, samples, cold=False) for one, samples in taken.items()]


def cold_rows(
    baselines: Sequence[Baseline], task: Task, repeats: int, seconds: float,
    *, share: float = COLD_SHARE, show: bool = True,
) -> list[Row]:  # fmt: skip
    """Measure baselines on a file that is evicted before every measurement, in turn.

    Raises:
        CacheError: The file stays in memory.
    """
    gc.collect()
    methods = {
        one: when_cold(task.path, partial(timed, partial(one.start, task), amount_of(one, task),
                                          seconds, drop=int(one.role == "limit"),
                                          read_bytes=share * task.path.stat().st_size))
        for one in baselines
    }  # fmt: skip
    taken = interleave("cold", methods, repeats, show=show)
    return [row_of(one, task, "cold", samples, cold=True) for one, samples in taken.items()]


def amount_of(one: Baseline, task: Task) -> Callable[[Any], float]:
    """Return what tells how many tokens a step delivered, or would for a limit's bytes."""
    if one.bytes_per_token is None:
        return lambda batch: float(batch[0].numel())
    each = one.bytes_per_token(task)
    return lambda nbytes: nbytes / each


def row_of(one: Baseline, task: Task, group: str, samples: list[Sample], *, cold: bool) -> Row:
    """Sum up one baseline's measurements."""
    elsewhere = one.role == "naive" and one.options.get("workers")  # read by other processes
    known = cold and one.role != "limit" and not elsewhere
    useful = task.useful_bytes_per_token if known else None
    wanted = useful and useful * sum(sample.amount for sample in samples)
    return one.row(
        group,
        [sample.amount / sample.seconds / 1e6 for sample in samples],
        read_amplification=wanted and sum(sample.read_bytes for sample in samples) / wanted,
        read_bytes=useful and median(sample.read_bytes for sample in samples),
        bytes_per_token=one.bytes_per_token and one.bytes_per_token(task),
    )


def with_step(one: Baseline, step: Callable[[Any], object]) -> Baseline:
    """Return a baseline whose consumer does a step on every batch, as training does."""

    def stepping(task: Task, **options: Any) -> Steps:
        for batch in one.method(task, **options):
            step(batch)
            yield batch

    return replace(one, method=stepping)
