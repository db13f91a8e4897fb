"""What lesson 09 starts, counts and draws. Its ranks are forked, and outlive no time-out."""

import json
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from course import lab
from course.exercises.nb09 import spread
from course.play import cells
from course.play.nb02 import RANKS

PATIENCE_S = 60
SAMPLES, COLUMNS = 240, 8


@dataclass(frozen=True, slots=True)
class End:
    """What became of a rank: its exit code, negative for a signal, and what its work returned."""

    code: int
    told: Any


def start(ranks: int, work: Callable[[int, int], Any]) -> list[End]:
    """Run `work(rank, ranks)` in so many processes that find each other, as torchrun does."""
    meeting_place = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the kernel has threads; no rank does
        sys.stdout.flush()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                _be(rank, ranks, work, meeting_place.port, Path(folder))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        told = [Path(folder) / str(rank) for rank in range(ranks)]
        return [
            End(code, json.loads(path.read_text()) if path.exists() else None)
            for code, path in zip(codes, told, strict=True)
        ]


def _be(rank: int, ranks: int, work: Any, port: int, folder: Path) -> None:
    """The life of a rank; it ends here, so that nothing of the notebook runs twice."""
    code = 1
    try:
        signal.alarm(PATIENCE_S)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        (folder / f"{rank}.new").write_text(json.dumps(work(rank, ranks)))
        (folder / f"{rank}.new").rename(folder / str(rank))
        code = 0
    except BaseException as error:
        (folder / str(rank)).write_text(json.dumps(f"{type(error).__name__}: {error}"))
    finally:
        os._exit(code)


def the_store() -> Any:
    """Return the store that the ranks of the group share."""
    return dist.distributed_c10d._get_default_store()


def patience() -> str:
    """Return how long a collective waits if nobody says otherwise."""
    return f"{dist.distributed_c10d.default_pg_timeout.seconds // 60} minutes"


# Samples


def coverage(*orders: Iterable[Any], then: Iterable[Any] = (), steps: int = 20) -> str:
    """Say which samples the orders of several ranks give in so many steps, and then others'."""
    times = Counter(int(k) for order in orders for own in islice(order, steps) for k in own)
    times.update(int(k) for order in then for own in islice(order, steps) for k in own)
    twice = sum(n > 1 for n in times.values())
    return f"{len(times)} of {SAMPLES} samples seen, {twice} of them twice"


def draw_moved(rank_slice: Callable[..., range]) -> None:
    """Draw four steps on two ranks, and beside them the same where a third rank comes."""

    def steps(ranks: int, size: int, given: int, count: int) -> list[list[range]]:
        return [
            [rank_slice(step, given, SAMPLES, size, rank, ranks) for rank in range(ranks)]
            for step in range(count)
        ]

    stay, move = steps(2, 6, 0, 4), steps(2, 6, 0, 2) + steps(3, 4, 24, 2)
    figure, axes = cells.panels(2, 11, 2.2)
    titles = ("2 ranks, batches of 6", "after 2 steps 3 ranks, batches of 4")
    for ax, rows, title in zip(axes, (stay, move), titles, strict=True):
        for y, row in enumerate(rows):
            cells.name(ax, -0.2, y, f"step {y + 1}", ha="right")
            for rank, own in enumerate(row):
                for k in own:
                    cells.cell(ax, k - row[0].start, y, k, RANKS[rank])
        cells.frame(ax, 12, 4, title)
        ax.set_xlim(-2.4, 12.1)
    cells.legend(axes[0], {f"rank {rank}": RANKS[rank] for rank in range(3)})
    same = [
        [k for own in row for k in own] == [k for own in other for k in own]
        for row, other in zip(stay, move, strict=True)
    ]
    lab.picture(figure, f"each step has the same positions in both: {all(same)}")


# Shards


def shards(rows: int, ranks: int) -> list[list[Any]]:
    """Return what each rank has: some rows of `up`, and copies of three others."""
    return spread(rows, ranks)


def files_read(overlap: Any, wanted: range) -> str:
    """Say how many of two files have something of these rows, of 10."""
    held = [range(0, 5), range(5, 10)]
    return ("none", "one", "two")[sum(overlap(wanted, one) is not None for one in held)]


def readers_of(overlap: Any) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: the rows in each file above, those of each rank below."""

    def pieces(rows: int, ranks: int) -> list[range]:
        return [range(at, at + n) for (_, at, n), *_ in filter(None, spread(rows, ranks, ()))]

    def draw(ranks_that_wrote: int, ranks_that_read: int, rows: int) -> tuple[Figure, str]:
        held, wanted = pieces(rows, ranks_that_wrote), pieces(rows, ranks_that_read)
        figure, (ax,) = cells.panels(1, 8, 1.7)
        lines = []
        for y, owners in enumerate((held, wanted)):
            cells.name(ax, -0.2, y, ("in the files", "wanted by")[y], ha="right")
            for number, own in enumerate(owners):
                for row in own:
                    cells.cell(ax, row, y, row, RANKS[number])
        for number, own in enumerate(wanted):
            both = [(k, overlap(own, one)) for k, one in enumerate(held)]
            parts = [f"{len(range(own.stop)[b[0]])} from file {k}" for k, b in both if b]
            lines.append(f"rank {number}, rows: {', '.join(parts)}")
        cells.frame(ax, rows, 2, "Rows of a tensor, by file and by rank")
        ax.set_xlim(-2.6, rows + 0.1)
        cells.legend(ax, {f"{k}": RANKS[k] for k in range(max(len(held), len(wanted)))})
        return figure, "\n".join(lines)

    return draw


def _state(rank: int, ranks: int, rows: int) -> dict[Any, torch.Tensor]:
    """Return a rank's shards; every element says which row of which tensor it is."""
    return {
        (name, first, count): whole(name, rows if name == "up" else count)[first : first + count]
        for name, first, count in spread(rows, ranks)[rank]
    }


def whole(name: str, rows: int) -> torch.Tensor:
    return sum(map(ord, name)) + torch.arange(rows * COLUMNS, dtype=torch.float32).reshape(rows, -1)


_scratch = TemporaryDirectory(prefix="npydata-ranks-")


def save_on(ranks: int, write_share: Any, rows: int) -> Path:
    """Have each rank write its share; print what is in the files, and return their folder."""
    folder = Path(_scratch.name) / "saved"

    def work(rank: int, ranks: int) -> None:
        write_share(folder, rank, ranks, _state(rank, ranks, rows))

    _require(start(ranks, work))
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        print(f"{path.name}:", ", ".join(f"{k} {header[k]['shape']}" for k in sorted(header)))
    return folder


def load_on(ranks: int, load: Any, folder: Path, rows: int = 10) -> None:
    """Have each of so many ranks load its rows; say what it has, and whether that is right."""

    def work(rank: int, ranks: int) -> Any:
        wanted = {name: range(at, at + n) for name, at, n in spread(rows, ranks)[rank]}
        found = load(folder, wanted)
        right = [
            torch.equal(
                found[name], whole(name, rows if name == "up" else own.stop)[own.start : own.stop]
            )
            for name, own in wanted.items()
        ]
        return wanted["up"].start, wanted["up"].stop, all(right)

    for rank, end in enumerate(_require(start(ranks, work))):
        begin, stop, right = end.told
        print(
            f"rank {rank} of {ranks} has rows {begin} to {stop} of up; every bit is right: {right}"
        )


def _require(ends: list[End]) -> list[End]:
    for rank, end in enumerate(ends):
        if end.code:
            raise RuntimeError(f"rank {rank}: {end.told}")
    return ends


def killed_in_a_save(save: Any, patience: float) -> str:
    """Save step 1 on two ranks; rank 1 dies in the save of step 2. Return what rank 0 gets."""
    root = Path(_scratch.name) / "risky"

    def work(rank: int, ranks: int) -> Any:
        state = _state(rank, ranks, 10)
        save(root, 1, rank, ranks, state, the_store(), patience)
        if rank == 1:
            real = os.fsync

            def fsync(descriptor: int) -> None:
                real(descriptor)
                os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = fsync
        try:
            save(root, 2, rank, ranks, state, the_store(), patience)
        except RuntimeError as error:
            return str(error)
        return "nothing"

    survivor, killed = start(2, work)
    print(
        f"rank 1 ended by {signal.Signals(-killed.code).name if killed.code < 0 else killed.told}"
    )
    print("rank 0:", survivor.told)
    print("in the folder:", *sorted(path.name for path in root.iterdir()))
    return "an error that names rank 1" if "1" in survivor.told else "nothing"
