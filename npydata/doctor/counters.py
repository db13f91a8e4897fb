"""A watched run as plain numbers, put together from the accounts of all its processes."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from npydata.doctor.sampling import Sample, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """How one checkpoint was written."""

    kind: str
    """The function, such as ``torch.save``."""
    path: str = ""
    where: str = ""
    """The line that called it: ``file:line function``."""
    s: float = 0.0
    stall_s: float = 0.0
    """Of these, seconds that the loop stood still."""
    bytes: int = 0
    over: bool = False
    """The file was there before, with something in it."""
    synced: bool = False
    synced_late: bool = False
    """The flush came after the new name."""
    renamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory of one process that grows and grows."""

    who: str
    first: int
    """Bytes, after it had settled."""
    last: int
    seconds: float
    rising: float
    """Share of its changes, from sample to sample, that were upwards, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A run in numbers; seconds are of the loop unless it says otherwise."""

    watched_s: float = 0.0
    """From the start of the command to the page, or its end."""
    startup_s: float = 0.0
    """Of these, until the loop began: imports, building the model, loading it."""
    steps: int = 0
    batches: int = 0
    wait_s: float = 0.0
    """For batches, without the first of each pass."""
    wait_cpu_s: float = 0.0
    """Of these, the loop worked itself: receiving, or fetching."""
    wait_core_s: float = 0.0
    """Of these, it was ready to go on, and other processes had the cores."""
    starts: int = 0
    start_s: float = 0.0
    """For passes over the data to begin and end: workers, the first batch."""
    save_s: float = 0.0
    load_s: float = 0.0
    step_s: float = 0.0
    """All the rest."""
    step_cpu_s: float = 0.0
    step_core_s: float = 0.0
    """The step was ready to run, and other processes had the cores."""
    step_faults: int = 0
    """Page faults of the process that waited for the disk, during steps."""
    step_read_bytes: int = 0
    step_faulted: float = 0.0
    """Share of the steps with such a fault, 0 to 1."""
    step_held: float = 0.0
    """Share of the moments in a step at which the interpreter lock was taken, 0 to 1."""
    wait_held: float = 0.0
    """The same of the waits for data."""
    processes: int = 0
    """Worker processes of the loader."""
    threads: int = 0
    """Worker threads of the loader."""
    own_passes: int = 0
    """Passes over npydata's own loader."""
    fetches: int = 0
    """Batches made, and their cost, over all workers."""
    items: int = 0
    per_item: bool = False
    """A batch is made of items, one by one."""
    fetch_s: float = 0.0
    longest_fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    fetch_core_s: float = 0.0
    collate_cpu_s: float = 0.0
    fetch_faults: int = 0
    fetch_read_bytes: int = 0
    batch_bytes: int = 0
    tensors: int = 0
    hand_over_core_s: float = 0.0
    """Worker processes were ready for anything else than making batches, and had no core."""
    hand_over_cpu_s: float = 0.0
    """Worker processes computed, and not in making batches."""
    after_n: int = 0
    """Batches taken soon after a save."""
    after_wait_s: float = 0.0
    """Without what was waited for a core."""
    after_read_bytes: int = 0
    after_faults: int = 0
    else_n: int = 0
    """All other batches."""
    else_wait_s: float = 0.0
    else_read_bytes: int = 0
    else_faults: int = 0
    saves: Sequence[Save] = ()
    unsafe_loads: Mapping[str, int] = field(default_factory=dict)
    """How often each line loaded so that a file may run code."""
    growth: Sequence[Growth] = ()
    grown: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Containers with many more entries than at first: first, last."""
    lines: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By phase: lines of the script, and how often they were seen."""
    shared_memory_share: float = 0.0

    @property
    def core_s(self) -> float:
        """Seconds in which the loop was ready to go on, and other processes had the cores."""
        return self.wait_core_s + self.crew_core_s + self.step_core_s

    @property
    def crew_core_s(self) -> float:
        """Seconds in which it waited for workers that were ready, and had no core either."""
        if not (self.fetch_s and (self.processes or self.threads)):
            return 0.0
        lacked = self.fetch_core_s + self.hand_over_core_s
        worked = self.fetch_s + self.hand_over_cpu_s + self.hand_over_core_s
        return min((self.wait_s - self.wait_core_s) * min(lacked / worked, 1.0), lacked)

    @property
    def data_wait_s(self) -> float:
        """Seconds that it waited for batches, first ones apart, and not for want of a core."""
        return self.wait_s - self.wait_core_s - self.crew_core_s

    @property
    def run_s(self) -> float:
        """Seconds from the loop's beginning to its end, without those that lacked a core."""
        return sum(self.phases.values())

    @property
    def phases(self) -> dict[str, float]:
        """The loop's seconds by what it did, without those that lacked a core."""
        return {
            "data": self.data_wait_s + self.start_s,
            "saves": self.save_s,
            "loads": self.load_s,
            "step": self.step_s - self.step_core_s,
        }

    @property
    def all_time(self) -> dict[str, float]:
        """All of the watched seconds, by what they went into."""
        return {"start-up": self.startup_s, **self.phases, "no core": self.core_s,
                "other": self.other_s}  # fmt: skip

    @property
    def other_s(self) -> float:
        """Seconds after the last step: evaluating, ending, and what nobody watched."""
        return max(self.watched_s - self.startup_s - self.run_s - self.core_s, 0.0)


WHOLE = {one.name for one in fields(Counters) if one.type is int}
SUMMED = WHOLE | {one.name for one in fields(Counters) if one.type is float}
MADE_BY_WORKERS = {"fetches", "items", "fetch_s", "fetch_cpu_s", "fetch_core_s", "collate_cpu_s",
                   "fetch_faults", "fetch_read_bytes", "batch_bytes", "tensors"}  # fmt: skip


PHASES = ("step", "after", "else", "fetch")
"""What an account counts, and looks at closely now and then; waits are after a save, or else."""
LACKED_CORES = ("wait_core_s", "step_core_s", "fetch_core_s", "hand_over_core_s")


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the accounts that the watched processes have written."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [{**report, "counts": summed_up(report["counts"])} for report in reports]


def summed_up(counts: Mapping[str, float]) -> dict[str, float]:
    """Return an account's counters with the waits after saves, and all others, in one.

    What was looked at closely stands for the few that came after the last look, too.
    """
    known = defaultdict(float, counts)
    known["fetches"] = known["fetch_n"]
    times = {phase: known[phase + "_n"] / max(known[phase + "_looked"], 1) for phase in PHASES}
    for phase in PHASES:
        for what in ("cpu_s", "core_s"):  # the kernel's clocks are others
            used = times[phase] * known[f"{phase}_{what}"]
            known[f"{phase}_{what}"] = min(used, known[phase + "_s"])
    for what in ("collate_cpu_s", "batch_bytes", "tensors"):
        known[what] *= times["fetch"]
    for when in ("after", "else"):
        known["batches"] += known[when + "_n"]
        for what in ("s", "cpu_s", "core_s"):
            known[f"wait_{what}"] += known[f"{when}_{what}"]
        known[when + "_wait_s"] = known[when + "_s"] - known[when + "_core_s"]
    return known


def main_report(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the account of the process that trains; of several, the one with the most steps."""
    mains = [report for report in reports if report["role"] == "main"]
    return max(mains, key=lambda one: (busy(one), -one["pid"]), default=None)


def busy(report: Mapping[str, Any]) -> float:
    """Return how much of a loop a process has done."""
    counts = report["counts"]
    return float(counts.get("steps", 0) + counts.get("batches", 0))


def counters_of(
    reports: Sequence[Mapping[str, Any]],
    samples: Samples,
    *,
    began: float = 0.0,
    watched_s: float = 0.0,
    blind: bool = False,
) -> Counters:
    """Return the run's counters: the training process's own, and its workers' added up.

    ``began``: the moment of ``time.monotonic`` from which on was watched, for ``watched_s``.
    ``blind``: a process is watched that was running already, so all samples count.
    """
    main = main_report(reports)
    alone = sum(one["role"] == "main" for one in reports) == 1
    workers = [one for one in reports if one["role"] == "worker"
               and main is not None and (alone or one["parent"] == main["pid"])]  # fmt: skip
    of_main = {} if main is None else main["counts"]
    totals = {name: of_main.get(name, 0) for name in SUMMED}
    makes_its_own = has_own_fetches(of_main)
    if workers and not makes_its_own:
        crew = [one["counts"] for one in workers]
        totals |= {name: sum(one.get(name, 0) for one in crew) for name in MADE_BY_WORKERS}
        totals["longest_fetch_s"] = max(one.get("longest_fetch_s", 0.0) for one in crew)
    elif workers:
        totals["processes"] = 0
    totals |= {name: int(totals[name]) for name in WHOLE}
    for resource in ("cpu_s", "core_s"):
        totals[f"hand_over_{resource}"] = sum(
            max(0.0, one["counts"][resource] - one["counts"].get(f"fetch_{resource}", 0))
            for one in workers
        )
    others = samples.others_share()
    totals |= {name: others * totals[name] for name in LACKED_CORES}
    if main and (going_on := main["going_on"]):  # it had not come to an end
        totals[going_on["phase"] + "_s"] += going_on["s"]
    mine = [*workers, *([main] if main else [])]
    makers = [main] if main and makes_its_own else mine
    loops = {one["pid"]: one["began"] for one in mine if one["began"] is not None}
    known = {
        "watched_s": watched_s,
        "startup_s": max(loops[main["pid"]] - began, 0.0) if main and main["pid"] in loops else 0.0,
        "per_item": any(one["counts"].get("per_item") for one in makers),
        "step_faulted": of_main.get("step_faulted", 0) / max(of_main.get("step_looked", 0), 1),
        "step_held": share(of_main, "step"),
        "wait_held": share(of_main, "wait"),
        "saves": [saved(save) for save in (main["saves"] if main else [])],
        "unsafe_loads": {line: n for one in mine for line, n in one["loads"].items()},
        "growth": growths(samples, {one["pid"]: one["role"] for one in mine}, loops, blind),
        "grown": {name: sizes for one in mine for name, sizes in one["grown"].items()},
        "lines": lines_by_phase(makers),
        "shared_memory_share": samples.shared_memory_share,
    }
    return Counters(**{**totals, **known})


def has_own_fetches(of_main: Mapping[str, float]) -> bool:
    """Whether a loop waits for batches that it makes itself, beside a loader with workers."""
    waited = of_main.get("wait_s", 0.0) + of_main.get("start_s", 0.0)
    return of_main.get("fetch_s", 0.0) > waited / 2 and not of_main.get("threads")


def saved(save: Mapping[str, Any]) -> Save:
    """Return a save of an account, without what only the account needs."""
    return Save(**{one.name: save[one.name] for one in fields(Save)})


def share(counts: Mapping[str, float], phase: str) -> float:
    """Return the share of a phase's wake-ups that waited for the interpreter lock."""
    return counts.get(f"{phase}_held", 0) / max(counts.get(f"{phase}_wakes", 0), 1)


def lines_by_phase(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how often each line was seen in each phase."""
    lines: dict[str, dict[str, int]] = {}
    for report in reports:
        for key, count in report["lines"]:
            phase, _, line = key.partition(" ")
            seen = lines.setdefault(phase, {})
            seen[line] = seen.get(line, 0) + count
    return lines


def growths(
    samples: Samples, roles: Mapping[int, str], began: Mapping[int, float], blind: bool
) -> list[Growth]:
    """Return how the memory of each process went since its own beginning; starting up is none.

    Of a process with no account only what is watched ``blind`` counts.
    """
    found = []
    for pid, seen in samples.by_process.items():
        begin = began.get(pid, 0.0 if blind else inf)
        since = [sample for sample in seen if sample.when_s >= begin]
        if since and (growth := growth_of(since, roles.get(pid, since[-1].name))):
            found.append(growth)
    return found


def growth_of(seen: Sequence[Sample], who: str) -> Growth | None:
    """Return how a process's memory went after the first third; None with too few samples."""
    settled = seen[len(seen) // 3 :]
    if len(settled) < 4:
        return None
    changes = [later.anonymous - one.anonymous for one, later in pairwise(settled)]
    moved = [change for change in changes if change]
    return Growth(
        who=who,
        first=settled[0].anonymous,
        last=settled[-1].anonymous,
        seconds=settled[-1].when_s - settled[0].when_s,
        rising=sum(change > 0 for change in moved) / max(len(moved), 1),
    )
