"""What the loader delivers, and what it costs the training beside it.

Free-running, a consumer takes batches as fast as they come, and the in-process gather is the
ceiling. With a step, the question is who waits for whom: beside a step that needs no interpreter,
a step in pure Python, and a tiny model. Cold, the file is evicted before every measurement.

    python materials/bench/loader.py --quick
"""

import sys

import numpy as np
import torch
from harness import (
    SHARE,
    Bench,
    Row,
    Target,
    limit,
    main,
    milliseconds,
    naive,
    ours,
    peer,
)
from tokens import (
    OPTIONS,
    as_is,
    by_batch,
    cold_rates,
    naive_items,
    one_batch,
    prepare,
    random_pages,
    random_windows,
    through_loader,
    warm_rate,
    without_hints,
)

DEFAULT, CEILING = "default", "in process, no loader"
STEPS = ("fed", "python", "train")


def text(workers, prefetch):
    return f"{workers} worker{'s' * (workers != 1)}, prefetch {prefetch}"


ROWS = [
    ours("warm", "ours", CEILING, random_windows),
    ours("warm", "ours", DEFAULT, through_loader, workers=None),
    *(ours("warm", "ours", text(w, p), through_loader, workers=w, prefetch=p,
           quick=(w, p) == (1, 16))
      for w, p in ((1, 8), (1, 16), (2, 2), (2, 8))),
    peer("warm", "ours in DataLoader, by batch", "0 workers", by_batch, workers=0),
    peer("warm", "ours in DataLoader, by batch", text(2, 2), by_batch, workers=2, prefetch=2),
    peer("warm", "ours in DataLoader, as is", text(2, 2), as_is, workers=2, prefetch=2),
    naive("warm", "naive DataLoader", "0 workers", naive_items, workers=0),
    *(naive("warm", "naive DataLoader", text(w, p), naive_items, workers=w, prefetch=p,
            quick=p == 2)
      for p in (2, 4) for w in (1, 2, 4)),
    *(row for step in STEPS for row in (
        limit(step, "data in memory", "one batch, kept", one_batch),
        ours(step, "ours", DEFAULT, through_loader, workers=None),
        naive(step, "naive DataLoader", text(2, 2), naive_items, workers=2, prefetch=2))),
    ours("cold", "ours", DEFAULT, through_loader, workers=None),
    ours("cold", "ours", text(4, 4), through_loader, workers=4, prefetch=4),
    *(peer("cold", "ours, no hints", text(w, p), through_loader, workers=w, prefetch=p,
           dataset=without_hints, quick=(w, p) in ((1, 8), (8, 2)))
      for w, p in ((1, 8), (2, 8), (4, 4), (8, 2), (16, 2))),
    naive("cold", "naive DataLoader", "0 workers", naive_items, workers=0),
    naive("cold", "naive DataLoader", text(4, 2), naive_items, workers=4, prefetch=2),
    limit("cold", "random reads", "limit, 64 at once", random_pages),
]  # fmt: skip

THROUGH, GATHER = f"warm | ours | {DEFAULT}", f"warm | ours | {CEILING}"
TARGETS = [
    Target("warm: the default setting reaches {} of the in-process gather", THROUGH, GATHER, 0.65,
           style=SHARE),
    Target("warm: at the best setting, {} of the in-process gather",
           "warm | ours | [!i]*", GATHER, 0.65, style=SHARE),
    Target("warm: the default setting is {} the naive DataLoader's best with workers",
           THROUGH, "warm | naive DataLoader | [!0]*", 20),
    Target("cold: through the loader, {} of the random-read limit",
           "cold | ours", "cold | random reads", 0.9, style=SHARE),
    Target("cold: hints are {} the best number of workers without them",
           "cold | ours", "cold | ours, no hints", 1),
    Target("a step in pure Python takes {} longer beside the loader", "python | ours",
           "python | data in memory", at_most=0.05, style=SHARE, extra=True),
    Target("a tiny model's step takes {} longer than with data in memory", "train | ours",
           "train | data in memory", at_most=0.05, style=SHARE, extra=True),
]  # fmt: skip


# What stands for training


STEP = {}
"""What is done on a batch, by its name."""


def step_of(name, task):
    if name not in STEP:
        STEP[name] = (
            tiny_model(task)
            if name == "train"
            else calibrated(python_loop, 0.01)
            if name == "python"
            else calibrated(sines, 2 * fetch_seconds(task))
        )
    return STEP[name]


def calibrated(work, seconds):
    """Return work of about so many seconds on one core."""
    rounds = 1e3 * seconds / min(milliseconds(lambda: work(1)) for _ in range(20))
    return lambda batch: work(rounds)


VALUES = np.linspace(0, 1, 1 << 15)
OUT = np.empty_like(VALUES)


def sines(rounds):
    """Without the interpreter's lock: few calls, on values that stay in the processor's cache."""
    for _ in range(int(rounds)):
        np.sin(VALUES, out=OUT)
    part = int(rounds % 1 * len(VALUES))
    np.sin(VALUES[:part], out=OUT[:part])


def python_loop(rounds):
    """Keeps the interpreter busy."""
    total = 0
    for k in range(int(1000 * rounds)):
        total ^= k
    return total


def tiny_model(task):
    """A step of some milliseconds: the next token from the last one, of a small vocabulary."""
    used = max(1, 4096 // task.batch_size)
    model = torch.nn.Sequential(torch.nn.Embedding(4096, 16), torch.nn.Linear(16, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = (half[:, :used] for half in batch)
        logits = model(x % 4096).flatten(0, -2)
        loss = torch.nn.functional.cross_entropy(logits, (y % 256).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def fetch_seconds(task):
    batches = random_windows(task)
    return min(milliseconds(lambda: next(batches)) for _ in range(50)) / 1e3


def stepping(task, name, work, **options):
    """Do a step on every batch, as training does."""
    step = step_of(name, task)
    for batch in work(task, **options):
        step(batch)
        yield batch


def turn(row, task):
    if row.section == "cold":
        return cold_rates(row, task)
    if row.section == "warm":
        return {"warm": warm_rate(row, task)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other cores are the workers': torch would take them all
    try:
        options = {**row.options, "name": row.section, "work": row.work}
        stepped = Row(row.section, row.name, row.setting, row.role, stepping, options)
        return {row.section: warm_rate(stepped, task, BENCH.rounds[row.section])}
    finally:
        torch.set_num_threads(threads)


BENCH = Bench(
    name="loader",
    about=__doc__,
    rows=ROWS,
    targets=TARGETS,
    prepare=prepare,
    turn=turn,
    options=OPTIONS,
    rounds=dict.fromkeys(STEPS, 5),
    groups={
        "warm": ("File in memory, the consumer only takes", "Mtok/s"),
        "fed": ("A consumer whose step takes twice as long as a fetch", "Mtok/s"),
        "python": ("Beside a training step in pure Python", "Mtok/s"),
        "train": ("Training a tiny model", "Mtok/s"),
        "cold": ("File on the disk, evicted before each run", "Mtok/s"),
        "amplification": ("Bytes read from the disk per byte of a window", "x"),
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
