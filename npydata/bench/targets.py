"""What ``npydata bench dataset`` promises, and how far the measurements bear it out.

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

TIMES, SHARE = "{:.1f}x", "{:.0%}"

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
