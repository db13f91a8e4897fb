"""What the benches promise, and how far the measurements bear it out.

Pure arithmetic on rows; the names here are the rows' names.
"""

from collections.abc import Sequence
from statistics import median

from npydata.bench.measure import Row
from npydata.bench.report import Verdict, find

OURS = "ours"
RANDOM_IN_PROCESS = "random windows, in process"
NANOGPT = "nanoGPT style"
NAIVE = "naive DataLoader"
BATCH_ITEMS = "DataLoader, item = batch"
PLAIN = "plain mmap"
RANDOM_READS = "random reads"
NO_HINTS = "no hints"

IN_PROCESS = "in process, no loader"
IN_MEMORY = "data in memory"
STOCK_BY_BATCH = "ours in DataLoader, by batch"
STOCK_AS_IS = "ours in DataLoader, as is"
NODES = "ours in torchdata.nodes"
UNHINTED = "ours, no hints"
DEFAULT_MARK = " (default)"

TIMES, SHARE = "{:.1f}x", "{:.0%}"
CLOSE_TIMES, MEBIBYTES = "{:.2f}x", "{:.1f} MiB"

TORCH_LOAD, TORCH_MMAP, SAFE_OPEN = "torch.load", "torch.load(mmap=True)", "safe_open"
CONVERT, COPY = "to_safetensors", "copy + fsync"
BEST_PEERS = {
    "legacy": (TORCH_LOAD, 50, TIMES),
    "zip": (TORCH_MMAP, 1, CLOSE_TIMES),
    "safetensors": (SAFE_OPEN, 1, CLOSE_TIMES),
}
"""Whom one tensor of each format is read against, and how many times as fast."""

READ_MIB, CONVERT_MIB = 16, 64
"""Memory beside a tensor that reading it may take, and that converting a file may take."""

AHEAD = 4
"""Batches between a hint and its fetch."""

HINT_COST = 0.05
"""Share of the time of a fetch that hints may add when the file is in memory."""


def ahead_text(batches: int) -> str:
    """Name a distance of hints."""
    return f"hints {batches} ahead"


def verdicts_of(rows: Sequence[Row]) -> list[Verdict]:
    """Compare what was measured with the targets; what did not run has no verdict."""
    warm = find(rows, "warm", OURS, RANDOM_IN_PROCESS)
    cold = find(rows, "cold", OURS, ahead_text(AHEAD))
    naive, batches = find(rows, "warm", NAIVE), find(rows, "warm", BATCH_ITEMS)
    pairs = [
        (warm, find(rows, "warm", NANOGPT), 15, TIMES, "warm: ours is {} nanoGPT style"),
        (warm, naive, 8, TIMES, "warm: ours is {} the naive DataLoader's best"),
        (warm, batches, 1.8, TIMES, "warm: ours is {} a DataLoader whose item is a batch"),
        (cold, find(rows, "cold", RANDOM_READS), 0.9, SHARE,
         "cold: ours reaches {} of the disk's random-read limit"),
        (cold, find(rows, "cold", PLAIN, "MADV_RANDOM"), 7, TIMES,
         "cold: ours is {} plain mmap given MADV_RANDOM"),
    ]  # fmt: skip
    verdicts = [
        Verdict(claim=claim, value=ours.median / other.median, target=target, style=style)
        for ours, other, target, style, claim in pairs if ours and other
    ]  # fmt: skip
    if (cost := hint_cost(rows)) is not None:
        claim = "warm: hints add {} to the time of a fetch"
        verdicts.append(
            Verdict(claim=claim, value=cost, target=HINT_COST, style="{:.1%}", at_most=True)
        )
    return verdicts


def hint_cost(rows: Sequence[Row]) -> float | None:
    """Return the share of time that hints add on a warm file: the median over pairs of turns."""
    without = find(rows, "hints", OURS, NO_HINTS)
    hinted = find(rows, "hints", OURS, ahead_text(AHEAD))
    if not without or not hinted:
        return None
    return median(a / b for a, b in zip(without.rates, hinted.rates, strict=True)) - 1


def loader_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Compare what was measured through loaders with the targets."""
    ceiling = find(rows, "warm", OURS, IN_PROCESS)
    through = [row for row in rows if (row.group, row.name) == ("warm", OURS) and row != ceiling]
    best = max(through, key=lambda row: row.median, default=None)
    usual = next((row for row in through if row.setting.endswith(DEFAULT_MARK)), None)
    with_workers = [row for row in rows if (row.group, row.name) == ("warm", NAIVE)
                    and not row.setting.startswith("0")]  # fmt: skip
    naive = max(with_workers, key=lambda row: row.median, default=None)
    cold, reads = find(rows, "cold", OURS), find(rows, "cold", RANDOM_READS)
    unhinted = find(rows, "cold", UNHINTED)
    pairs = [
        (best, ceiling, 0.65, SHARE, "warm: through the loader, {} of the in-process gather"),
        (usual, ceiling, 0.65, SHARE, "warm: the default setting, {} of the in-process gather"),
        (best, naive, 20, TIMES, "warm: ours is {} the naive DataLoader's best with workers"),
        (usual, naive, 20, TIMES, "warm: the default setting is {} the naive DataLoader's best"),
        (cold, reads, 0.9, SHARE, "cold: through the loader, {} of the random-read limit"),
        (cold, unhinted, 1, TIMES, "cold: hints are {} the best number of workers without them"),
    ]
    verdicts = [
        Verdict(claim=claim, value=ours.median / other.median, target=target, style=style)
        for ours, other, target, style, claim in pairs if ours and other
    ]  # fmt: skip
    return verdicts + slow_downs(rows)


def slow_downs(rows: Sequence[Row]) -> list[Verdict]:
    """Compare steps beside the loader with steps on data in memory: the median over the turns."""
    claims = {"python": "a step in pure Python takes {} longer beside the loader",
              "train": "a tiny model's step takes {} longer than with data in memory"}  # fmt: skip
    verdicts = []
    for group, claim in claims.items():
        alone = find(rows, group, IN_MEMORY)
        for row in rows:
            if alone and (row.group, row.name) == (group, OURS):
                ratio = median(a / b for a, b in zip(alone.rates, row.rates, strict=True))
                verdicts.append(
                    Verdict(claim=f"{claim} ({row.setting})", value=ratio - 1, target=0.05,
                            style="{:.1%}", at_most=True)
                )  # fmt: skip
    return verdicts


def reader_verdicts(rows: Sequence[Row], tensor_mib: float) -> list[Verdict]:
    """Compare what was measured on checkpoints with the targets."""
    return [*speed_ups(rows), *extra_memory(rows, tensor_mib), *convert_shares(rows)]


def speed_ups(rows: Sequence[Row]) -> list[Verdict]:
    """Compare the time that one tensor takes with the best peer's, on the disk and in memory."""
    verdicts = []
    for format, (peer, target, style) in BEST_PEERS.items():
        for cache in ("cold", "warm"):
            group = f"{format} {cache}"
            ours, other = find(rows, group, OURS), find(rows, group, peer)
            if ours and other:
                claim = f"{format}, {cache}: ours is {{}} as fast as {peer}"
                verdicts.append(Verdict(claim=claim, value=other.median / ours.median,
                                        target=target, style=style))  # fmt: skip
    return verdicts


def extra_memory(rows: Sequence[Row], tensor_mib: float) -> list[Verdict]:
    """Compare the memory that ours takes with a tensor and what it may take beside that."""
    claims = {
        OURS: ("{}: ours takes {{}} of memory", READ_MIB),
        CONVERT: ("{}: converting takes {{}} of memory", CONVERT_MIB),
    }
    return [
        Verdict(claim=claims[row.name][0].format(row.setting), value=row.median,
                target=tensor_mib + claims[row.name][1], style=MEBIBYTES, at_most=True)
        for row in rows if row.group == "memory" and row.name in claims
    ]  # fmt: skip


def convert_shares(rows: Sequence[Row]) -> list[Verdict]:
    """Compare the rate of converting with that of copying the same bytes."""
    return [
        Verdict(claim=f"{row.setting}: converting reaches {{}} of a copy with fsync",
                value=row.median / copy.median, target=0.7, style=SHARE)
        for row in rows
        if row.name == CONVERT and (copy := find(rows, "convert", COPY, row.setting))
        and row.group == "convert"
    ]  # fmt: skip
