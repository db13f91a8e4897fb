"""From a run's counters to what is named first, and to advice that fits what the script uses."""

from dataclasses import replace

import pytest

from npydata.doctor import judging
from npydata.doctor.counters import Counters, Growth, Save

HEALTHY = Counters(
    steps=1000, batches=1000, starts=1, wait_s=0.1, wait_cpu_s=0.05, step_s=20.0, step_cpu_s=2.0,
    fetches=1000, items=32_000, per_item=True, fetch_s=0.1, fetch_cpu_s=0.1, collate_cpu_s=0.03,
    batch_bytes=500_000_000, tensors=2000, else_n=999, else_wait_s=0.1,
    lines={"wait": {"a.py:1 loop": 9, "data.py:3 get": 7, "data.py:4 get": 5}},
)  # fmt: skip
FAULTING = replace(HEALTHY, batches=0, step_faults=10**5, step_faulted=0.9)
STARVED = replace(HEALTHY, wait_s=10.0, fetch_s=10.0, fetch_cpu_s=5.0, collate_cpu_s=2.0)
BY_WORKERS = replace(STARVED, processes=2)
SAVED = Save(kind="torch.save", path="/run/a.pt", where="train.py:7 main", stall_s=1.0,
             bytes=10**8, synced=True, renamed=True)  # fmt: skip
AFTER_SAVES = replace(
    STARVED, saves=[SAVED], after_n=100, after_wait_s=9.0, after_read_bytes=10**8, else_n=899,
    else_wait_s=1.0,
)  # fmt: skip
IN_HELPERS = {"fetch": {"aug.py:9 blur": 5, "data.py:3 __getitem__": 4}}
ROWS = Growth(who="main", first=10**8, last=3 * 10**8, seconds=10.0, rising=0.9)


def with_saves(**changes):
    return replace(HEALTHY, saves=[replace(SAVED, **changes)] * 3)


CASES = {
    "healthy": (HEALTHY, []),
    "per item": (STARVED, ["per_item_fetch"]),
    "per batch": (replace(STARVED, per_item=False), ["slow_fetch"]),
    "slow items": (replace(STARVED, fetch_cpu_s=10.0, items=8000), ["slow_transform"]),
    "large items": (
        replace(STARVED, fetch_cpu_s=10.0, items=8000, batch_bytes=8 * 10**9),
        ["per_item_fetch"],
    ),
    "slow in threads": (
        replace(STARVED, fetch_cpu_s=9.0, items=1000, per_item=False, threads=4),
        ["slow_transform"],
    ),
    "items that call slow functions": (
        replace(STARVED, items=20_000, lines=IN_HELPERS),
        ["slow_transform"],
    ),
    "items that are as slow themselves": (
        replace(STARVED, items=20_000, lines={"fetch": {"data.py:3 __getitem__": 9}}),
        ["per_item_fetch"],
    ),
    "a slow function that puts items together": (
        replace(STARVED, collate_cpu_s=4.9, items=20_000, lines=IN_HELPERS),
        ["slow_transform"],
    ),
    "items that call quick functions": (
        replace(STARVED, items=80_000, lines=IN_HELPERS),
        ["per_item_fetch"],
    ),
    "items seen where the loop is": (
        replace(STARVED, items=20_000, lines={**IN_HELPERS, "step": {"aug.py:9 blur": 1}}),
        ["per_item_fetch"],
    ),
    "unknown iterator": (replace(STARVED, fetches=0), ["data_wait"]),
    "cold": (replace(STARVED, fetch_cpu_s=1.0, fetch_read_bytes=10**9), ["cold_reads"]),
    "cold, and little of it": (
        replace(STARVED, fetch_cpu_s=4.0, fetch_read_bytes=10**7),
        ["item_waits"],
    ),
    "slow for want of a core": (
        replace(STARVED, fetch_cpu_s=1.0, fetch_core_s=8.5, fetch_read_bytes=10**9),
        ["per_item_fetch"],
    ),
    "no core for the loop": (replace(STARVED, wait_core_s=9.0), []),
    "idle workers": (replace(BY_WORKERS, hand_over_cpu_s=8.0), ["worker_copies"]),
    "idle workers, and a late batch": (
        replace(BY_WORKERS, hand_over_cpu_s=1.0, longest_fetch_s=0.5),
        ["uneven_batches"],
    ),
    "busy workers": (
        replace(BY_WORKERS, fetch_s=55.0, fetch_cpu_s=40.0, collate_cpu_s=37.0),
        ["per_item_fetch"],
    ),
    "busy workers that copy": (
        replace(BY_WORKERS, fetch_s=55.0, fetch_cpu_s=40.0, collate_cpu_s=37.0, items=1000),
        ["worker_copies"],
    ),
    "busy workers, and a late batch": (
        replace(BY_WORKERS, fetch_s=55.0, fetch_cpu_s=40.0, longest_fetch_s=0.5),
        ["slow_transform"],
    ),
    "workers that wait": (replace(BY_WORKERS, fetch_s=55.0), ["item_waits"]),
    "the loop waits itself": (replace(STARVED, fetch_cpu_s=3.0), ["item_waits"]),
    "threads that wait": (replace(STARVED, threads=2, fetch_cpu_s=3.0), ["item_waits"]),
    "threads that wait for the lock": (
        replace(STARVED, threads=2, fetch_cpu_s=3.0, wait_held=0.9, per_item=False),
        ["slow_fetch"],
    ),
    "workers without a core": (replace(BY_WORKERS, fetch_s=55.0, fetch_core_s=54.0), []),
    "a worker that hangs": (
        replace(BY_WORKERS, fetch_s=0.2, fetch_core_s=0.15, longest_fetch_s=0.1),
        ["uneven_batches"],
    ),
    "workers without a core to hand over": (
        replace(BY_WORKERS, hand_over_cpu_s=8.0, hand_over_core_s=200.0),
        [],
    ),
    "threads that keep the lock": (
        replace(HEALTHY, threads=2, step_held=0.9, fetch_cpu_s=17.0),
        ["gil_workers"],
    ),
    "threads that keep the lock, and come late": (
        replace(STARVED, threads=2, step_held=0.9, fetch_s=16.0, fetch_cpu_s=15.0, items=1000),
        ["slow_transform"],
    ),
    "threads that take it at times": (
        replace(HEALTHY, threads=2, step_held=0.9, fetch_cpu_s=12.0),
        [],
    ),
    "threads that hand it back and forth": (
        replace(HEALTHY, threads=1, step_held=0.17, fetch_cpu_s=18.6, step_cpu_s=12.0),
        ["gil_workers"],
    ),
    "threads that mostly leave it": (
        replace(HEALTHY, threads=1, step_held=0.04, fetch_cpu_s=18.6, step_cpu_s=12.0),
        [],
    ),
    "few batches": (replace(STARVED, batches=3), []),
    "epochs": (replace(HEALTHY, starts=9, start_s=5.0), ["epoch_starts"]),
    "first batches like others": (replace(STARVED, starts=250, start_s=2.5), ["per_item_fetch"]),
    "a short run": (replace(HEALTHY, wait_s=0.09, step_s=0.1), []),
    "one slow start": (replace(HEALTHY, start_s=5.0), []),
    "step in Python": (replace(HEALTHY, step_held=0.9, step_cpu_s=15.0), ["gil_step"]),
    "step in C": (replace(HEALTHY, step_held=0.1, step_cpu_s=19.0), []),
    "lock of others, unseen": (replace(HEALTHY, step_held=0.9), []),
    "lock of others": (
        replace(HEALTHY, step_held=0.9, lines={"beside": {"log.py:3 count": 9}}),
        ["gil_threads"],
    ),
    "lock of others, at times": (
        replace(HEALTHY, step_held=0.1, lines={"beside": {"log.py:3 count": 9}}),
        [],
    ),
    "lock where a batch is taken": (
        replace(
            HEALTHY,
            processes=2,
            step_held=0.9,
            step_cpu_s=15.0,
            lines={"held": {"a.py:1 loop": 9}, "wait": {"a.py:1 loop": 2}},
        ),
        [],
    ),
    "cold reads by the loop": (FAULTING, ["cold_reads"]),
    "cold code in the first steps": (replace(FAULTING, step_faulted=0.2), []),
    "a wait for something else": (replace(FAULTING, step_faults=100), []),
    "cold reads by threads": (replace(FAULTING, threads=2), []),
    "no core for anybody": (
        replace(with_saves(), save_s=0.5, step_core_s=15.0),
        ["save_stall"],
    ),
    "step in Python without a core": (
        replace(HEALTHY, step_held=0.9, step_cpu_s=5.0, step_core_s=13.0),
        ["gil_step"],
    ),
    "threads that the step stops": (
        replace(STARVED, threads=2, step_held=0.9, step_cpu_s=15.0),
        ["gil_step"],
    ),
    "stall": (replace(with_saves(), save_s=3.0), ["save_stall"]),
    "short stall": (replace(with_saves(), save_s=0.2), []),
    "stall by dcp": (replace(with_saves(kind="dcp.save", path=""), save_s=3.0), ["dcp_stall"]),
    "pushed out": (AFTER_SAVES, ["page_cache"]),
    "slow after saves, from memory": (replace(AFTER_SAVES, after_read_bytes=0), ["per_item_fetch"]),
    "reads at all times": (replace(AFTER_SAVES, else_read_bytes=10**9), ["per_item_fetch"]),
    "over the last": (with_saves(over=True, renamed=False), ["torn_save"]),
    "over a temporary file": (with_saves(over=True), []),
    "not synced": (with_saves(synced=False, renamed=False), ["unsynced_save"]),
    "renamed first": (with_saves(synced=False), ["rename_unsynced"]),
    "synced too late": (with_saves(synced_late=True), ["rename_unsynced"]),
    "unsafe": (replace(HEALTHY, unsafe_loads={"train.py:3 main": 2}), ["unsafe_load"]),
    "leak": (replace(HEALTHY, growth=[ROWS]), ["leak"]),
    "small growth": (replace(HEALTHY, growth=[replace(ROWS, last=ROWS.first + 10**6)]), []),
    "up and down": (replace(HEALTHY, growth=[replace(ROWS, rising=0.5)]), []),
    "grown once": (replace(HEALTHY, growth=[replace(ROWS, first=10**10, last=10**10 + 10**8)]), []),
    "shm": (replace(HEALTHY, processes=2, shared_memory_share=0.95), ["shared_memory"]),
    "somebody else's shm": (replace(HEALTHY, shared_memory_share=0.95), []),
    "a great wait before a risk": (
        replace(STARVED, unsafe_loads={"x": 1}),
        ["per_item_fetch", "unsafe_load"],
    ),
    "a small wait after it": (
        replace(with_saves(over=True, renamed=False), save_s=1.4),
        ["torn_save", "save_stall"],
    ),
    "the dearer wait first": (
        replace(STARVED, saves=[SAVED], save_s=12.0),
        ["save_stall", "per_item_fetch"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_counters_are_judged(name):
    given, causes = CASES[name]
    assert [finding.cause for finding in judging.findings(given)] == causes


def test_the_line_of_a_step_in_python_is_where_it_held_the_lock():
    seen = {"step": {"a.py:1 let_go": 9, "a.py:2 count": 2}, "held": {"a.py:2 count": 2}}
    (finding,) = judging.findings(replace(HEALTHY, step_held=0.9, step_cpu_s=15.0, lines=seen))
    assert finding.where == "a.py:2 count"


def test_a_finding_has_evidence_cost_and_the_line_to_change():
    (finding,) = judging.findings(STARVED)
    assert finding.loss_s == 10.0
    assert finding.share == pytest.approx(1 / 3)
    assert finding.where == "data.py:3 get"
    assert "32 items a batch" in " ".join(finding.evidence)
    assert "AsyncDataLoader" in finding.change


@pytest.mark.parametrize(("kind", "said", "unsaid"), [
    ("torch.save", "AsyncCheckpointer().save(", "prepare"),
    ("dcp.save", "AsyncCheckpointer().save_distributed(", "prepare"),
    ("AsyncCheckpointer.save", 'prepare(model.state_dict(), optimizer.state_dict())', "().save("),
])  # fmt: skip
def test_nobody_is_told_to_save_as_they_already_do(kind, said, unsaid):
    (finding,) = judging.findings(replace(with_saves(kind=kind), save_s=3.0))
    assert said in finding.change
    assert unsaid not in finding.change


OWN = replace(SAVED, kind="AsyncCheckpointer.save", path="", where="train.py:9 main", bytes=0)
NEW = "npydata.Async"


@pytest.mark.parametrize(("given", "cause", "said", "unsaid"), [
    (with_saves(over=True, renamed=False), "torn_save", NEW, "too, which"),
    (with_saves(synced=False), "rename_unsynced", NEW, "too, which"),
    (AFTER_SAVES, "page_cache", NEW, "too, which"),
    (replace(with_saves(), save_s=3.0), "save_stall", NEW, "too, which"),
])  # fmt: skip
def test_a_script_with_our_checkpointer_is_told_to_give_it_the_rest(given, cause, said, unsaid):
    (finding,) = judging.findings(given)
    assert (finding.cause, said in finding.change, unsaid in finding.change) == (cause, True, False)
    (finding,) = judging.findings(replace(given, saves=[*given.saves, OWN]))
    assert (finding.cause, said in finding.change, unsaid in finding.change) == (cause, False, True)
    assert finding.where == SAVED.where


def test_a_page_cache_that_our_checkpointer_fills_is_told_why():
    (finding,) = judging.findings(replace(AFTER_SAVES, saves=[OWN]))
    assert "direct I/O" in finding.change
    assert NEW not in finding.change


@pytest.mark.parametrize("name", ["per batch", "cold"])
def test_a_script_with_our_loader_is_not_told_to_take_it(name):
    given, causes = CASES[name]
    (stock,) = judging.findings(given)
    (ours,) = judging.findings(replace(given, own_passes=1, per_item=False))
    assert [stock.cause] == [ours.cause] == causes
    assert ("AsyncDataLoader" in stock.change, "AsyncDataLoader" in ours.change) == (True, False)
