"""Windows per second from one token file, warm and cold.

Warm, the file is in memory and the question is how much work a batch is. Cold, it is evicted
before every measurement and the question is how well the disk is asked. Each part has its limit,
measured in the same turns: a memory copy (which batches can beat that are reused while they are in
the processor's cache), and the disk's random reads.

    python materials/bench/dataset.py --quick
"""

import sys

from harness import SHARE, Bench, Target, limit, main, naive, ours, peer
from tokens import (
    OPTIONS,
    as_is,
    batch_items,
    by_batch,
    cold_rates,
    in_order,
    memory_copies,
    naive_items,
    nanogpt_style,
    plain_mmap,
    prepare,
    random_pages,
    random_windows,
    warm_rate,
)

from npydata import MmapDataset

HINTED = "hints 4 ahead"


def side_by_side(task):
    return MmapDataset(task.path, task.seq_len, dtype=task.dtype)


def text(workers):
    return f"{workers} worker{'s' * (workers != 1)}"


ROWS = [
    ours("warm", "ours", "random windows, in process", random_windows),
    ours("warm", "ours", "in order, in process", in_order, dataset=side_by_side),
    *(peer("warm", "ours in DataLoader, by batch", text(n), by_batch, workers=n) for n in (0, 2)),
    peer("warm", "ours in DataLoader, as is", text(0), as_is, workers=0),
    *(naive("warm", "DataLoader, item = batch", text(n), batch_items, workers=n) for n in (0, 2)),
    *(naive("warm", "naive DataLoader", text(n), naive_items, workers=n) for n in (0, 1, 2, 4)),
    naive("warm", "nanoGPT style", "in process", nanogpt_style),
    limit("warm", "memory copy", "limit", memory_copies),
    ours("hints", "ours", "no hints", random_windows),
    ours("hints", "ours", HINTED, random_windows, ahead=4),
    *(ours("cold", "ours", f"hints {n} ahead", random_windows, ahead=n, quick=n == 4)
      for n in (4, 1, 2, 8, 16)),
    ours("cold", "ours, pread", HINTED, random_windows, ahead=4, access="pread"),
    peer("cold", "ours, pread", "no hints", random_windows, access="pread"),
    naive("cold", "plain mmap", "MADV_RANDOM", plain_mmap, random=True),
    naive("cold", "plain mmap", "readahead as it is", plain_mmap, random=False),
    naive("cold", "nanoGPT style", "readahead as it is", nanogpt_style),
    limit("cold", "random reads", "limit, 64 at once", random_pages),
]  # fmt: skip

RANDOM = "warm | ours | random*"
TARGETS = [
    Target("warm: ours is {} nanoGPT style", RANDOM, "warm | nanoGPT*", 15),
    Target("warm: ours is {} the naive DataLoader's best", RANDOM, "warm | naive*", 8),
    Target("warm: ours is {} a DataLoader whose item is a batch",
           RANDOM, "warm | DataLoader, item*", 1.8),
    Target("cold: ours reaches {} of the disk's random-read limit",
           f"cold | ours | {HINTED}", "cold | random reads", 0.9, style=SHARE),
    Target("cold: ours is {} plain mmap given MADV_RANDOM",
           f"cold | ours | {HINTED}", "cold | plain mmap | MADV_RANDOM", 7),
    Target("warm: hints add {} to the time of a fetch", f"hints | ours | {HINTED}",
           "hints | ours | no hints", at_most=0.05, style=SHARE, extra=True),
]  # fmt: skip


def turn(row, task):
    if row.section == "cold":
        return cold_rates(row, task)
    return {row.section: warm_rate(row, task)}


BENCH = Bench(
    name="dataset",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    prepare=prepare,
    turn=turn,
    options=OPTIONS,
    rounds={"hints": 10},
    groups={
        "warm": ("File in memory", "Mtok/s"),
        "hints": ("Hints on a warm file", "Mtok/s"),
        "cold": ("File on the disk, evicted before each run", "Mtok/s"),
        "amplification": ("Bytes read from the disk per byte of a window", "x"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
