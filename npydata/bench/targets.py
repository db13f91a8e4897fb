"""What we set out to reach, and how far the measurements bear it out: arithmetic on rows."""

from collections.abc import Callable, Sequence
from statistics import median

from npydata.bench.baselines import OURS
from npydata.bench.baselines.limits import COPY, DIRECT_WRITE
from npydata.bench.baselines.loaders import BATCH_ITEMS, DEFAULT_MARK, NAIVE, UNHINTED
from npydata.bench.baselines.loads import DIRECT_READ, OURS_MAPPED, OURS_VERIFIED
from npydata.bench.baselines.random_reads import RANDOM_READS
from npydata.bench.baselines.readers import CONVERT, COPY_FILE, SAFE_OPEN, TORCH_LOAD, TORCH_MMAP
from npydata.bench.baselines.savers import (
    DCP,
    DCP_ASYNC,
    DCP_CACHED,
    HUGGING_FACE,
    NO_SAVES,
    OVERLAP,
    SAVE_FILE,
)
from npydata.bench.baselines.windows import (
    CEILING,
    HINTED,
    IN_MEMORY,
    NANOGPT,
    NO_HINTS,
    NO_READAHEAD,
    PLAIN,
    RANDOM,
)
from npydata.bench.measure import MIB, Row
from npydata.bench.report import Verdict

TIMES, CLOSE_TIMES, SHARE, CLOSE_SHARE = "{:.1f}x", "{:.2f}x", "{:.0%}", "{:.1%}"

BEST_PEERS = {
    "legacy": (TORCH_LOAD, 50, TIMES),
    "zip": (TORCH_MMAP, 1, CLOSE_TIMES),
    "safetensors": (SAFE_OPEN, 1, CLOSE_TIMES),
}
"""Whom one tensor of each format is read against, and how many times as fast."""

READ_MIB, CONVERT_MIB, LOAD_MIB = 16, 64, 64
"""Memory beside tensors that reading one may take, converting a file, and loading all."""

PEERS = DCP, DCP_ASYNC, DCP_CACHED, HUGGING_FACE
"""Torch's writers of a state, by one process and by many."""


def find(
    rows: Sequence[Row], group: str, names: str | Sequence[str],
    setting: str | Callable[[str], bool] = lambda setting: True,
) -> Row | None:  # fmt: skip
    """Return the best row of a name, or of several, at a setting; ``None`` if none ran."""
    named = [
        row for row in rows
        if row.group == group and row.name in ([names] if isinstance(names, str) else names)
        and (setting(row.setting) if callable(setting) else setting == row.setting)
    ]  # fmt: skip
    return max(named, key=lambda row: row.score, default=None)


def compare(claim: str, ours: Row | None, other: Row | None, target: float, style: str,
            *, at_most: bool = False) -> list[Verdict]:  # fmt: skip
    """Compare two medians; what did not run has no verdict.

    The value is how many times as good ours is, or, where it may be at most the target, ours as a
    multiple of the other.
    """
    if ours is None or other is None:
        return []
    value = ours.median / other.median
    if not at_most and ours.score < 0:
        value = 1 / value
    return [Verdict(claim=claim, value=value, target=target, style=style, at_most=at_most)]


def cost(claim: str, slowed: Row | None, free: Row | None, *, most: float = 0.05) -> list[Verdict]:
    """Compare two rows turn by turn: the share of time that one takes longer, 5 % unless given."""
    if slowed is None or free is None:
        return []
    value = median(a / b for a, b in zip(free.rates, slowed.rates, strict=True)) - 1
    return [Verdict(claim=claim, value=value, target=most, style=CLOSE_SHARE, at_most=True)]


def dataset_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    warm, cold = find(rows, "warm", OURS, RANDOM), find(rows, "cold", OURS, HINTED)
    return [
        *compare("warm: ours is {} nanoGPT style", warm, find(rows, "warm", NANOGPT), 15, TIMES),
        *compare("warm: ours is {} the naive DataLoader's best",
                 warm, find(rows, "warm", NAIVE), 8, TIMES),
        *compare("warm: ours is {} a DataLoader whose item is a batch",
                 warm, find(rows, "warm", BATCH_ITEMS), 1.8, TIMES),
        *compare("cold: ours reaches {} of the disk's random-read limit",
                 cold, find(rows, "cold", RANDOM_READS), 0.9, SHARE),
        *compare("cold: ours is {} plain mmap given MADV_RANDOM",
                 cold, find(rows, "cold", PLAIN, NO_READAHEAD), 7, TIMES),
        *cost("warm: hints add {} to the time of a fetch",
              find(rows, "hints", OURS, HINTED), find(rows, "hints", OURS, NO_HINTS)),
    ]  # fmt: skip


def loader_verdicts(rows: Sequence[Row]) -> list[Verdict]:
    ceiling = find(rows, "warm", OURS, CEILING)
    best = find(rows, "warm", OURS, lambda setting: setting != CEILING)
    default = find(rows, "warm", OURS, lambda setting: setting.endswith(DEFAULT_MARK))
    naive = find(rows, "warm", NAIVE, lambda setting: not setting.startswith("0"))
    cold = find(rows, "cold", OURS)
    verdicts = [
        *compare("warm: through the loader, {} of the in-process gather",
                 best, ceiling, 0.65, SHARE),
        *compare("warm: the default setting, {} of the in-process gather",
                 default, ceiling, 0.65, SHARE),
        *compare("warm: ours is {} the naive DataLoader's best with workers",
                 best, naive, 20, TIMES),
        *compare("warm: the default setting is {} the naive DataLoader's best",
                 default, naive, 20, TIMES),
        *compare("cold: through the loader, {} of the random-read limit",
                 cold, find(rows, "cold", RANDOM_READS), 0.9, SHARE),
        *compare("cold: hints are {} the best number of workers without them",
                 cold, find(rows, "cold", UNHINTED), 1, TIMES),
    ]  # fmt: skip
    claims = {"python": "a step in pure Python takes {} longer beside the loader",
              "train": "a tiny model's step takes {} longer than with data in memory"}  # fmt: skip
    for row in rows:
        if row.group in claims and row.name == OURS:
            claim = f"{claims[row.group]} ({row.setting})"
            verdicts += cost(claim, row, find(rows, row.group, IN_MEMORY))
    return verdicts


def reader_verdicts(rows: Sequence[Row], tensor_mib: float) -> list[Verdict]:
    """Judge times, memory beside a tensor, and converting."""
    verdicts = []
    for format, (peer, target, style) in BEST_PEERS.items():
        for cache in ("cold", "warm"):
            group = f"{format} {cache}"
            verdicts += compare(f"{format}, {cache}: ours is {{}} as fast as {peer}",
                                find(rows, group, OURS), find(rows, group, peer), target,
                                style)  # fmt: skip
    memory = {OURS: ("ours takes", READ_MIB), CONVERT: ("converting takes", CONVERT_MIB)}
    for row in rows:
        if row.group == "memory" and row.name in memory:
            what, beside = memory[row.name]
            verdicts.append(Verdict(claim=f"{row.setting}: {what} {{}} of memory",
                                    value=row.median, target=tensor_mib + beside,
                                    style="{:.1f} MiB", at_most=True))  # fmt: skip
        elif row.name == CONVERT:
            verdicts += compare(f"{row.setting}: converting reaches {{}} of a copy with fsync",
                                row, find(rows, "convert", COPY_FILE, row.setting), 0.7,
                                SHARE)  # fmt: skip
    return verdicts


def load_verdicts(rows: Sequence[Row], size_mib: int) -> list[Verdict]:
    """Judge whole loads against the disk and against a copy, and their memory."""
    verdicts = []
    for row in rows:
        if row.group == "memory":
            verdicts.append(Verdict(claim=f"{row.setting}: loading takes {{}} of memory",
                                    value=row.median, target=size_mib + LOAD_MIB,
                                    style="{:.0f} MiB", at_most=True))  # fmt: skip
            continue
        if row.name != OURS:
            continue
        cold, what = row.group.endswith("cold"), f"{row.group}, {row.setting}"
        limit = DIRECT_READ if cold else COPY
        verdicts += compare(f"{what}: ours reaches {{}} of a {limit}",
                            row, find(rows, row.group, limit, row.setting),
                            0.8 if row.group == "legacy cold" else 0.9, SHARE)  # fmt: skip
        peers = sorted({one.name for one in rows if one.role in ("peer", "naive")})
        verdicts += compare(f"{what}: the best of ours is {{}} the best peer",
                            find(rows, row.group, (OURS, OURS_MAPPED), row.setting),
                            find(rows, row.group, peers, row.setting), 1, CLOSE_TIMES)  # fmt: skip
        if cold:
            verdicts += cost(f"{what}: verifying on the way adds {{}} to the time",
                             find(rows, row.group, OURS_VERIFIED, row.setting), row,
                             most=0.1)  # fmt: skip
    return verdicts


def checkpoint_verdicts(rows: Sequence[Row], nbytes: int) -> list[Verdict]:
    copy, durable = find(rows, "stall", COPY), find(rows, "durable", OURS)
    verdicts = [
        *compare("a save stalls training for {} of a memory copy",
                 find(rows, "stall", OURS), copy, 1.15, CLOSE_TIMES, at_most=True),
        *compare("with overlap, for {} of a memory copy",
                 find(rows, "stall", OVERLAP), copy, 0.05, SHARE, at_most=True),
        *compare("the disk has it at {} of the direct write limit",
                 durable, find(rows, "durable", DIRECT_WRITE), 0.9, SHARE),
        *compare("... {} as fast as save_file + fsync",
                 durable, find(rows, "durable", SAVE_FILE), 1.3, CLOSE_TIMES),
        *compare("... {} as fast as torch.distributed.checkpoint's best",
                 durable, find(rows, "durable", PEERS), 2.0, CLOSE_TIMES),
        *compare("the first save, prepared, takes {} of a later one",
                 find(rows, "first durable", OURS), durable, 1.5, CLOSE_TIMES, at_most=True),
    ]  # fmt: skip
    if peak := find(rows, "peak", OURS):
        verdicts.append(Verdict(claim="memory beside the state: {} of its size",
                                value=peak.median * MIB / nbytes, target=1.05,
                                style=CLOSE_TIMES, at_most=True))  # fmt: skip
    loop, free = find(rows, "loop", OURS), find(rows, "loop", NO_SAVES)
    if loop and free:
        verdicts.append(Verdict(claim="a training loop that saves every 20 steps loses {}",
                                value=loop.median / free.median - 1, target=0.03, style=SHARE,
                                at_most=True))  # fmt: skip
    return verdicts


def distributed_verdicts(rows: Sequence[Row], cases: Sequence[str]) -> list[Verdict]:
    """Judge each case, such as ``2 processes, sharded``, against the best of torch's writers."""
    verdicts = []
    for case in cases:
        for what, name, claim in (
            ("stall", OURS, "a save stalls training {{}} less than {}"),
            ("stall", OVERLAP, "with overlap, {{}} less than {}"),
            ("durable", OURS, "the disk has it {{}} as fast as with {}"),
        ):
            group = f"{what}, {case}"
            if best := find(rows, group, PEERS):
                text = claim.format(", ".join(part for part in (best.name, best.setting) if part))
                verdicts += compare(f"{case}: {text}", find(rows, group, name), best, 2.0,
                                    CLOSE_TIMES)  # fmt: skip
    return verdicts


def distributed_notes(rows: Sequence[Row], cases: Sequence[str]) -> list[str]:
    """Say how far one could get at all: what the best peer leaves above the limits."""
    texts = {
        ("stall", COPY): "ours stalls {:.2f}x as long as all processes need to copy their bytes at "
        "once; a save that stalls just that long would stall {:.2f}x less than the best of torch's",
        ("durable", DIRECT_WRITE): "ours takes {:.2f}x as long as all processes need to write their"
        " bytes at once; a save that takes just that long would be {:.2f}x as fast as the best of "
        "torch's",
    }
    notes = []
    for case in cases:
        for (what, limit), text in texts.items():
            least, ours, best = (find(rows, f"{what}, {case}", names)
                                 for names in (limit, OURS, PEERS))  # fmt: skip
            if least and ours and best:
                figures = ours.median / least.median, best.median / least.median
                notes.append(f"{case}: {text.format(*figures)}")
    return notes
