"""Rules about what ends a run, or hands it over: memory that runs out, files that run code."""

from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding
from npydata.system.progress import human_bytes, human_rate

LEAK_BYTES, LEAK_SHARE, LEAK_RISING = 32 << 20, 0.1, 0.6
"""Memory leaks that grows by so many bytes and such a share, in such a share of the samples."""
SHARED_MEMORY_FULL = 0.9


def unsafe_load(c: Counters) -> Finding | None:
    """Loads that run what a file asks for."""
    if not c.unsafe_loads:
        return None
    said = [f"{n} x {line}" for line, n in c.unsafe_loads.items()]
    change = (
        "torch.load(path, weights_only=True), or npydata.open_checkpoint(path), which runs "
        "nothing of what is in the file"
    )
    return Finding(
        "unsafe_load",
        "torch.load may run code from the file",
        0.0,
        0.0,
        ["weights_only=False: a checkpoint is a program then", *said],
        change,
        next(iter(c.unsafe_loads)),
        risk=True,
    )


def leak(c: Counters) -> Finding | None:
    """Memory that grows for as long as the run goes on."""
    rising = [
        one
        for one in c.growth
        if one.last - one.first > LEAK_BYTES
        and one.last - one.first > LEAK_SHARE * one.first
        and one.rising > LEAK_RISING
    ]
    if not rising:
        return None
    most = max(rising, key=lambda one: one.last - one.first)
    rate = (most.last - most.first) / max(most.seconds, 1e-9)
    said = [
        f"memory of the {most.who} process grew from {human_bytes(most.first)} to "
        f"{human_bytes(most.last)} in {most.seconds:.3g} s, {human_rate(rate, 'B')}"
    ]
    said += [
        f"{name} grew from {first:,} to {last:,} entries" for name, (first, last) in c.grown.items()
    ]
    kept = next(iter(c.grown), "what is kept from step to step (a cache, losses with their graph)")
    return Finding(
        "leak",
        "Memory grows without end",
        c.run_s,
        1.0,
        said,
        f"bound {kept}, or keep numbers instead of tensors",
        risk=True,
    )


def shared_memory(c: Counters) -> Finding | None:
    """A ``/dev/shm`` that is about to be full, and ends workers with a bus error then."""
    if c.shared_memory_share < SHARED_MEMORY_FULL or not c.processes:
        return None
    said = [
        f"/dev/shm was {c.shared_memory_share:.0%} full; {c.processes} worker processes put "
        "their batches there"
    ]
    change = "a lower prefetch_factor, a larger /dev/shm (docker run --shm-size), or worker threads"
    return Finding(
        "shared_memory", "/dev/shm is nearly full", c.run_s, 1.0, said, change, risk=True
    )
