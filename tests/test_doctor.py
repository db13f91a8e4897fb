"""The doctor names the right cause first, with its evidence, and leaves the training as it is."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from sick_runs import RUNS

from npydata import cli
from npydata.doctor import counters, judging, launching
from npydata.doctor.counters import Counters, Growth, Save
from npydata.doctor.finding import Finding
from npydata.doctor.page import page
from npydata.doctor.sampling import Sample, Samples, sample_of, tree

HEALTHY = Counters(
    steps=1000, batches=1000, starts=1, wait_s=0.1, wait_cpu_s=0.05, step_s=20.0, step_cpu_s=2.0,
    fetches=1000, items=32_000, per_item=True, fetch_s=0.1, fetch_cpu_s=0.1, collate_cpu_s=0.03,
    batch_bytes=500_000_000, tensors=2000, else_n=999, else_wait_s=0.1,
    lines={"wait": {"a.py:1 loop": 9, "data.py:3 get": 7, "data.py:4 get": 5}},
)  # fmt: skip
STARVED = replace(HEALTHY, wait_s=10.0, fetch_s=10.0, fetch_cpu_s=5.0, collate_cpu_s=2.0)
BY_WORKERS = replace(STARVED, processes=2)
SAVED = Save(kind="torch.save", path="/run/a.pt", where="train.py:7 main", stall_s=1.0,
             bytes=10**8, synced=True, renamed=True)  # fmt: skip
AFTER_SAVES = replace(
    STARVED, saves=[SAVED], after_n=100, after_wait_s=9.0, after_read_bytes=10**8, else_n=899,
    else_wait_s=1.0,
)  # fmt: skip
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
    "unknown iterator": (replace(STARVED, fetches=0), ["data_wait"]),
    "cold": (replace(STARVED, fetch_cpu_s=1.0, fetch_read_bytes=10**9), ["cold_reads"]),
    "cold, and little of it": (
        replace(STARVED, fetch_cpu_s=4.0, fetch_read_bytes=10**7),
        ["per_item_fetch"],
    ),
    "slow for want of a core": (
        replace(STARVED, fetch_cpu_s=1.0, fetch_core_s=8.5, fetch_read_bytes=10**9),
        ["per_item_fetch"],
    ),
    "no core for the loop": (replace(STARVED, wait_core_s=9.0), []),
    "idle workers": (BY_WORKERS, ["worker_copies"]),
    "busy workers": (replace(BY_WORKERS, fetch_s=55.0), ["per_item_fetch"]),
    "few batches": (replace(STARVED, batches=3), []),
    "epochs": (replace(HEALTHY, starts=9, start_s=5.0), ["epoch_starts"]),
    "first batches like others": (replace(STARVED, starts=250, start_s=2.5), ["per_item_fetch"]),
    "a short run": (replace(HEALTHY, wait_s=0.09, step_s=0.1), []),
    "one slow start": (replace(HEALTHY, start_s=5.0), []),
    "step in Python": (replace(HEALTHY, step_held=0.9, step_cpu_s=15.0), ["gil_step"]),
    "step in C": (replace(HEALTHY, step_held=0.1, step_cpu_s=19.0), []),
    "lock of others": (replace(HEALTHY, step_held=0.9), []),
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
        replace(with_saves(over=True, renamed=False), save_s=0.6),
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


RUN = {"command": "python train.py", "seconds": 31.0, "torch": "2", "blind": False, "notes": []}


def test_the_page_shows_phases_findings_and_no_escape_sequences():
    finding = Finding("x", "A cause", 10.0, 1 / 3, ["\x1b[2Jseen"], "do this", "a.py:1 f")
    c = replace(STARVED, wait_core_s=5.0, startup_s=4.0, watched_s=40.0)
    shown = page(RUN, c, [finding])
    assert "data        5.00 s  12%   20%  ######\n" in shown
    assert "1. A cause (10.0 s, 33% of the loop)" in shown
    assert "\x1b" not in shown


def test_the_rows_of_the_page_are_all_of_the_watched_time():
    c = replace(STARVED, start_s=1.0, save_s=2.0, load_s=3.0, step_core_s=0.5, startup_s=4.0,
                watched_s=45.0)  # fmt: skip
    rows = dict(re.findall(r"^  (\S[a-z -]*\w) +([0-9.]+) s ", page(RUN, c, []), re.MULTILINE))
    assert list(rows) == ["start-up", "data", "saves", "loads", "step", "no core", "other"]
    assert sum(map(float, rows.values())) == pytest.approx(45.0)
    assert rows["other"] == "5.00"


@pytest.mark.parametrize(("c", "changes", "said"), [
    (HEALTHY, {}, "Healthy: 99.5% of the loop is step."),
    (Counters(), {}, "No training loop was seen"),
    (Counters(), {"blind": True}, "Nothing unusual from outside."),
])  # fmt: skip
def test_the_page_says_what_no_finding_means(c, changes, said):
    assert said in page(RUN | changes, c, [])


def report(pid, role, parent=1, **counts):
    kept = {"saves": [], "loads": {}, "grown": {}, "lines": [], "torch": "2", "began": 0.0,
            "going_on": None}  # fmt: skip
    return {"pid": pid, "role": role, "parent": parent, "counts": {"cpu_s": 0.0} | counts, **kept}


def test_the_busiest_process_is_judged_with_its_own_workers_only():
    reports = [
        report(1, "main", steps=9, step_s=1.0, step_held=2, step_wakes=8),
        report(2, "main", steps=3, step_s=5.0),
        report(3, "worker", parent=1, fetches=4, fetch_cpu_s=1.0) | {"lines": [["fetch a:1 f", 3]]},
        report(4, "worker", parent=2, fetches=100),
    ]
    reports[2]["counts"]["cpu_s"] = 3.0
    c = counters.counters_of(reports, Samples())
    assert (c.steps, c.step_s, c.fetches, c.hand_over_cpu_s) == (9, 1.0, 4, 2.0)
    assert c.step_held == 0.25
    assert c.lines == {"fetch": {"a:1 f": 3}}


@pytest.mark.parametrize("phase", ["wait", "step", "save", "load"])
def test_what_goes_on_when_the_page_is_shown_counts_as_what_it_is(phase):
    begun = report(1, "main", steps=9, wait_s=1.0) | {"began": 107.0}
    ended = counters.counters_of([begun], Samples(), began=100.0, watched_s=30.0)
    assert (ended.startup_s, ended.run_s, ended.other_s) == (7.0, 1.0, 22.0)
    begun["going_on"] = {"phase": phase, "s": 22.0}
    going_on = counters.counters_of([begun], Samples(), began=100.0, watched_s=30.0)
    assert getattr(going_on, f"{phase}_s") - getattr(ended, f"{phase}_s") == 22.0
    assert going_on.other_s == 0.0


def test_memory_is_judged_once_it_has_settled():
    def at(second, anonymous):
        return Sample(7, 1, "python", second, 0.0, 0, 0, anonymous, False)

    seen = [at(0, 1), at(1, 50), *(at(k, 100 + k % 2) for k in range(2, 9)), at(9, 100)]
    samples = Samples({7: [at(-1, 900), *seen]})
    (growth,) = counters.growths(samples, {7: "main"}, {7: 0.0}, blind=False)
    assert (growth.first, growth.last, growth.seconds) == (101, 100, 6)
    assert growth.rising == pytest.approx(2 / 5)


def test_memory_that_grows_before_the_loop_is_no_leak():
    seen = [Sample(7, 1, "python", k, 0.0, 0, 0, k << 30, False) for k in range(9)]
    samples = Samples({7: seen})
    assert counters.counters_of([], samples).growth == []
    assert len(counters.counters_of([], samples, blind=True).growth) == 1
    assert counters.counters_of([report(7, "main") | {"began": None}], samples).growth == []
    assert len(counters.counters_of([report(7, "main")], samples).growth) == 1


def test_a_process_is_sampled_with_its_children():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {os.getpid(), child.pid} <= set(tree(os.getpid()))
            sample = sample_of(os.getpid())
            assert sample.anonymous > 10**6
            assert sample.cpu_s > 0
        finally:
            child.kill()
    assert sample_of(child.pid) is None


def test_our_hooks_stand_before_the_pythonpath_that_was_given():
    given = launching.environment("/f", {"PYTHONPATH": "/theirs", "HOME": "/h"})
    assert given["PYTHONPATH"] == f"{launching.HOOKS}{os.pathsep}/theirs"
    assert given["HOME"] == "/h"
    assert launching.environment("/f", {})["PYTHONPATH"] == str(launching.HOOKS)


def doctor(folder, *command, **options):
    """Run a command under the doctor; return what is done, and the findings' JSON."""
    whole = [sys.executable, "-m", "npydata", "doctor", "--json", "page.json", "--", *command]
    done = subprocess.run(whole, cwd=folder, capture_output=True, text=True, **options)
    page = folder / "page.json"
    return done, json.loads(page.read_text()) if page.exists() else None


TRANSPARENT = """
import os, sys, threading
print(sorted(name for name in sys.path if name.endswith("inside")), threading.active_count())
print(sys.modules["sitecustomize"].__file__, sys.argv[1:], file=sys.stdout)
print("oops", file=sys.stderr)
sys.exit(7)
"""


def test_the_script_runs_as_it_would(tmp_path):
    """Its output, arguments, path and exit code, with a ``sitecustomize`` of its own."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    (tmp_path / "train.py").write_text(TRANSPARENT)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done, written = doctor(tmp_path, sys.executable, "train.py", "--", "--lr",
                           env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        "theirs",  # of the doctor's own interpreter
        "theirs",
        "[] 1",
        f"{tmp_path}/sitecustomize.py ['--', '--lr']",
    ]
    assert done.stderr.startswith("oops\nnpydata doctor: ")
    assert "no word from inside" in done.stderr
    assert not written["healthy"]


def test_a_signal_to_the_doctor_reaches_the_training(tmp_path):
    script = "import signal, sys, time\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    script += "print('ready', flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-m", "npydata", "doctor", "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 5


def test_a_training_that_is_killed_gives_the_code_of_a_shell(tmp_path):
    done, _ = doctor(tmp_path, "sh", "-c", "kill -9 $$")
    assert done.returncode == 137


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "either a command after --, or --pid"),
    (["--pid", "1", "--", "true"], "either a command after --, or --pid"),
    (["--pid", "999999999"], "process 999999999: not there"),
    (["--", "/no/such/python"], "/no/such/python: No such file"),
    (["--seconds", "0", "--", "true"], "0, expected more than 0"),
])  # fmt: skip
def test_what_can_not_be_watched_is_said_in_a_line(capsys, arguments, said):
    assert cli.main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "said"), [
    ("train.py", "train.py: is not a command; write: npydata doctor -- python train.py --steps 2"),
    ("train", "train: is not a command; make it executable and write: npydata doctor -- ./train"),
])  # fmt: skip
def test_a_script_that_is_no_command_is_told_how_to_start(
    tmp_path, monkeypatch, capsys, name, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")
    assert cli.main(["doctor", "--", name, "--steps", "2"]) == 2
    assert said in capsys.readouterr().err


def test_a_process_that_runs_is_watched_from_outside(capsys):
    code = "data = []\nwhile True: data.append(bytearray(1 << 20)); __import__('time').sleep(.01)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            assert cli.main(["doctor", "--pid", str(child.pid), "--seconds", "2"]) == 0
        finally:
            child.kill()
    shown = capsys.readouterr().out
    assert f"process {child.pid}" in shown
    assert "can't be seen: data waits" in " ".join(shown.split())


def first_cause(tmp_path, name):
    run = RUNS[name]
    (tmp_path / "train.py").write_text(run.script)
    done, written = doctor(tmp_path, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    return written["findings"][0] if written["findings"] else None


@pytest.mark.stress
@pytest.mark.parametrize("name", RUNS)
def test_the_cause_is_named_first(tmp_path, name):
    found = first_cause(tmp_path, name)
    assert (found["cause"] if found else "") == RUNS[name].cause, found
    assert RUNS[name].where in (found["where"] if found else "")


@pytest.mark.parametrize("name", ["slow transform"])
def test_the_cause_of_a_real_run_is_named_first(tmp_path, name):
    """A real process, hooks and all; the others take their time under ``stress``."""
    found = first_cause(tmp_path, name)
    time = json.loads((tmp_path / "page.json").read_text())["time"]
    assert min(time["start-up"], time["data"], time["step"], time["other"]) > 0
    assert found["cause"] == RUNS[name].cause
    assert re.search(r"train\.py:\d+ ", found["where"])
