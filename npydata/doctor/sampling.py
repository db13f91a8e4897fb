"""A process and its children from outside: what ``/proc`` counts of them, taken now and then.

``smaps_rollup`` is left alone: reading it walks a process's page tables while it must wait;
``RssAnon`` of ``status`` answers the same question for nothing.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm"
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLES_KEPT = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    pid: int
    parent: int
    name: str
    when_s: float
    cpu_s: float
    """User and system time so far."""
    faults: int
    """Major page faults so far: each waited for the disk."""
    read_bytes: int
    """Fetched from storage so far."""
    anonymous: int
    """Bytes of memory that no file stands behind."""
    waits_for_disk: bool
    """The kernel lists it as waiting and not to be woken (state D)."""


@dataclass(slots=True)
class Samples:
    """What was seen of a process and its descendants."""

    by_process: dict[int, list[Sample]] = field(default_factory=dict)
    shared_memory_share: float = 0.0
    """The fullest that ``/dev/shm`` was, 0 to 1."""
    machine: list[float] = field(default_factory=list)
    """CPU seconds of all processes of the machine since it started: at first, and now."""

    def take(self, process: int) -> bool:
        """Add a sample of each process of a tree; False when the root has gone."""
        found = [sample for pid in tree(process) if (sample := sample_of(pid)) is not None]
        for sample in found:
            kept = self.by_process.setdefault(sample.pid, [])
            kept.append(sample)
            if len(kept) > SAMPLES_KEPT:  # half as many, as far apart as they are long ago
                del kept[1::2]
        self.machine = [*self.machine[:1], cpu_of_machine()]
        self.shared_memory_share = max(self.shared_memory_share, share_used(SHARED_MEMORY))
        return any(sample.pid == process for sample in found)

    def others_share(self) -> float:
        """Return which share of the waits for a core is other processes' doing, 0 to 1.

        The rest is due to processes and threads of the watched tree that wait for each other; if
        they use less than the others, it is none.
        """
        spent = [seen[-1].cpu_s - seen[0].cpu_s for seen in self.by_process.values()]
        if not spent or len(self.machine) < 2:
            return 1.0
        others = max(self.machine[1] - self.machine[0] - sum(spent), 0.0)
        alone = min(max(spent), max(last_s(seen) for seen in self.by_process.values()))
        mine = sum(spent) - alone  # what waits does not compute meanwhile
        return min(2 * others / (others + mine), 1.0) if others + mine > 0 else 1.0


def last_s(seen: list[Sample]) -> float:
    """Return for how many seconds a process was seen."""
    return seen[-1].when_s - seen[0].when_s


def cpu_of_machine() -> float:
    """Return the CPU seconds that all processes have used; 0 where nobody counts them."""
    try:
        line = (PROC / "stat").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return 0.0
    user, nice, system, _idle, _iowait, *interrupts = map(int, line[1:8])
    return (user + nice + system + sum(interrupts)) / TICKS


def tree(process: int) -> list[int]:
    """Return a process and its descendants, of all its threads."""
    found = [process]
    for parent in found:
        for children in PROC.glob(f"{parent}/task/*/children"):
            try:
                found += [int(pid) for pid in children.read_text().split()]
            except (OSError, ValueError):
                continue
    return found


def sample_of(process: int) -> Sample | None:
    """Return what ``/proc`` says of a process now; None when it has gone or is a stranger's."""
    folder = PROC / str(process)
    try:
        name, _, rest = (folder / "stat").read_text().rpartition(")")
        status = fields((folder / "status").read_text())
        read = fields((folder / "io").read_text()).get("read_bytes", "0")
    except OSError:
        return None
    stat = rest.split()
    if stat[0] == "Z" or "RssAnon" not in status:  # it is over
        return None
    return Sample(
        pid=process,
        parent=int(stat[1]),
        name=name.partition("(")[2],
        when_s=time.monotonic(),
        cpu_s=(int(stat[11]) + int(stat[12])) / TICKS,
        faults=int(stat[9]),
        read_bytes=int(read),
        anonymous=1024 * int(status["RssAnon"].split()[0]),
        waits_for_disk=stat[0] == "D",
    )


def fields(text: str) -> dict[str, str]:
    """Return the lines ``name: value`` of a text."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines if value.strip()}


def share_used(folder: str) -> float:
    """Return how full a file system is, 0 to 1; 0 where there is none."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0.0
    return 1 - status.f_bfree / status.f_blocks if status.f_blocks else 0.0
