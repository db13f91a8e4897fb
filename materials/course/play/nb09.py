"""What lesson 09 starts, counts and draws. Its ranks are forked, and outlive no time-out."""

import os
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import npydata
from course import lab
from course.exercises.nb09 import spread
from course.grading.child import in_child
from course.play.charts import strips
from course.play.nb02 import RANKS

SAMPLES, COLUMNS = 240, 8
COLOURS = {f"rank {k}": colour for k, colour in enumerate(RANKS)}


def start(ranks, work):
    """Run `work(rank, ranks)` in so many processes that find each other, as torchrun does."""
    meeting_place = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def be(rank):
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("127.0.0.1", meeting_place.port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        return work(rank, ranks)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: in_child(lambda _: be(rank)), range(ranks)))


def the_store():
    """Return the store that the ranks of the group share."""
    return dist.distributed_c10d._get_default_store()


def patience():
    """Return how long a collective waits if nobody says otherwise."""
    return f"{dist.distributed_c10d.default_pg_timeout.seconds // 60} minutes"


# Samples


def coverage(*orders, then=(), steps=20):
    """Say which samples the orders of several ranks give in so many steps, and then others'."""
    batches = [own for order in (*orders, *then) for own in islice(order, steps)]
    times = Counter(int(sample) for own in batches for sample in own)
    twice = sum(n > 1 for n in times.values())
    return f"{len(times)} of {SAMPLES} samples seen, {twice} of them twice"


def draw_moved(rank_slice):
    """Draw four steps on two ranks, and below them the same where a third rank comes."""

    def steps(ranks, size, given, count):
        slices = [(rank_slice(step, given, SAMPLES, size, rank, ranks), f"rank {rank}")
                  for step in range(count) for rank in range(ranks)]  # fmt: skip
        return [(own.start, own.stop, name) for own, name in slices]

    rows = {"2 ranks": steps(2, 6, 0, 4), "2, then 3": steps(2, 6, 0, 2) + steps(3, 4, 24, 2)}
    title = "Who gets which position of the order: 4 steps of 12"
    lines = [f"{name}: {row[0][0]} to {row[-1][1]}" for name, row in rows.items()]
    lab.picture(strips(rows, COLOURS, title, "position"), "\n".join(lines))


# Shards


def pieces(rows, ranks):
    """Return which rows of a tensor each rank has; some may have none."""
    return [range(at, at + n) for (_, at, n), *_ in filter(None, spread(rows, ranks, ()))]


def readers_of(overlap):
    """Return what the sliders draw: the rows in each file above, those of each rank below."""

    def draw(ranks_that_wrote, ranks_that_read, rows):
        held, wanted = pieces(rows, ranks_that_wrote), pieces(rows, ranks_that_read)
        lanes = {
            name: [(own.start, own.stop, f"rank {k}") for k, own in enumerate(owners)]
            for name, owners in {"in the files of": held, "wanted by": wanted}.items()
        }
        lines = [
            f"rank {k} reads {sum(overlap(own, one) is not None for one in held)} of the files"
            for k, own in enumerate(wanted)
        ]
        return strips(lanes, COLOURS, "Rows of a tensor", "row"), "\n".join(lines)

    return draw


def whole(name, rows):
    """Return a tensor whose every element says which row of which tensor it is in."""
    return sum(map(ord, name)) + torch.arange(rows * COLUMNS, dtype=torch.float32).reshape(rows, -1)


def _state(rank, ranks, rows):
    return {
        (name, first, count): whole(name, first + count)[first:]
        for name, first, count in spread(rows, ranks)[rank]
    }


_scratch = TemporaryDirectory(prefix="npydata-ranks-")


def save_on(ranks, write_share, rows):
    """Have each rank write its share; print what is in the files, and return their folder."""
    folder = Path(_scratch.name) / "saved"
    ends = start(ranks, lambda rank, _: write_share(folder, rank, ranks, _state(rank, ranks, rows)))
    for end in ends:
        if end.why:
            print(end.why)
    for path in sorted(folder.iterdir()):
        with npydata.open_checkpoint(path) as file:
            print(
                f"{path.name}:", ", ".join(f"{k} {list(file.info(k).shape)}" for k in sorted(file))
            )
    return folder


def load_on(ranks, load, folder, rows=10):
    """Have each of so many ranks load its rows; say what it has, and whether that is right."""

    def work(rank, ranks):
        state = _state(rank, ranks, rows)
        found = load(folder, {name: range(at, at + n) for name, at, n in state})
        right = all(torch.equal(found[name], rows) for (name, _, _), rows in state.items())
        up = next(key for key in state if key[0] == "up")
        return f"has rows {up[1]} to {sum(up[1:])} of up; every bit is right: {right}"

    for rank, end in enumerate(start(ranks, work)):
        print(f"rank {rank} of {ranks}", end.why or end.value)


def killed_in_a_save(save, patience):
    """Save step 1 on two ranks; rank 1 dies in the save of step 2. Return what rank 0 gets."""
    root = Path(_scratch.name) / "risky"

    def work(rank, ranks):
        state = _state(rank, ranks, 10)
        save(root, 1, rank, ranks, state, the_store(), patience)
        if rank == 1:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        save(root, 2, rank, ranks, state, the_store(), patience)

    survivor, _ = start(2, work)
    print("rank 0:", survivor.why)
    print("in the folder:", *sorted(path.name for path in root.iterdir()))
    return "an error that names rank 1" if "1" in (survivor.why or "") else "nothing"
