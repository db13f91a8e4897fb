"""From counters to findings, by pure functions: each rule returns a finding or None."""

from npydata.doctor.counters import Counters
from npydata.doctor.dangers import leak, shared_memory, unsafe_load
from npydata.doctor.data_waits import data_wait, epoch_starts, step_reads
from npydata.doctor.finding import Finding
from npydata.doctor.interpreter_lock import held_by_others, held_by_workers, held_step
from npydata.doctor.saves import evicted, save_stall, torn_save

RULES = (
    data_wait,
    epoch_starts,
    step_reads,
    held_step,
    held_by_workers,
    held_by_others,
    save_stall,
    evicted,
    torn_save,
    unsafe_load,
    leak,
    shared_memory,
)


def findings(c: Counters) -> list[Finding]:
    """Return what is wrong with a run, the most expensive first; nothing of a healthy one."""
    found = [rule(c) for rule in RULES]
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)
