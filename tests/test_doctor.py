"""The doctor names the right cause first, with its evidence, and leaves the training as it is."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from statistics import mean, median, stdev

import pytest
from alternating_steps import ALTERNATING
from sick_runs import RUNS
from test_doctor_judging import HEALTHY, STARVED

from npydata import cli
from npydata.doctor import counters, launching
from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding
from npydata.doctor.page import page
from npydata.doctor.sampling import Sample, Samples, sample_of, tree

RUN = {"command": "python train.py", "seconds": 31.0, "torch": "2", "blind": False, "ending": "",
       "notes": []}  # fmt: skip


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
    (replace(HEALTHY, batches=0), {}, "No loader was seen: what is fetched is part of the step."),
    (Counters(), {}, "No training loop was seen"),
    (Counters(steps=1), {}, "Too short to judge."),
    (Counters(), {"blind": True}, "Nothing unusual from outside."),
])  # fmt: skip
def test_the_page_says_what_no_finding_means(c, changes, said):
    assert said in page(RUN | changes, c, [])


def report(pid, role, parent=1, **counts):
    kept = {"saves": [], "loads": {}, "grown": {}, "lines": [], "torch": "2", "began": 0.0,
            "going_on": None}  # fmt: skip
    return {
        "pid": pid,
        "role": role,
        "parent": parent,
        "counts": {"cpu_s": 0.0, "core_s": 0.0} | counts,
        **kept,
    }


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


def test_the_loop_is_judged_by_the_batches_that_it_waits_for():
    """Of two loaders, one with workers and one without."""
    crew = report(2, "worker", fetches=9, fetch_s=8.0, longest_fetch_s=3.0)
    crew["lines"] = [["fetch a:1 f", 3]]
    main = {"fetches": 5, "processes": 2, "wait_s": 4.0}
    itself = [report(1, "main", steps=9, fetch_s=3.0, longest_fetch_s=1.0, **main), crew]
    c = counters.counters_of(itself, Samples())
    assert (c.processes, c.fetches, c.fetch_s, c.longest_fetch_s) == (0, 5, 3.0, 1.0)
    assert not c.lines
    by_workers = [report(1, "main", steps=9, fetch_s=1.0, longest_fetch_s=1.0, **main), crew]
    c = counters.counters_of(by_workers, Samples())
    assert (c.processes, c.fetches, c.fetch_s, c.longest_fetch_s) == (2, 9, 8.0, 3.0)
    assert c.lines == {"fetch": {"a:1 f": 3}}


@pytest.mark.parametrize(("machine", "own", "others"), [
    (10.0, [10.0], 1.0),  # one thread can't wait for itself
    (20.0, [10.0], 1.0),
    (20.0, [10.0, 10.0], 0.0),
    (20.0, [20.0], 0.0),  # two threads of one process can
    (20.0, [10.0, 5.0], 1.0),  # both alike: the benefit of the doubt
    (20.0, [10.0, 8.0], 0.4),
])  # fmt: skip
def test_waits_for_a_core_are_others_doing_so_far_as_others_compute(machine, own, others):
    def seen(pid, cpu_s):
        return [Sample(pid, 1, "", when, cpu_s * when / 10, 0, 0, 0, False) for when in (0, 10)]

    processes = {pid: seen(pid, cpu_s) for pid, cpu_s in enumerate(own)}
    samples = Samples(processes, machine=[7, 7 + machine])
    assert samples.others_share() == others
    busy = report(1, "main", steps=1, wait_core_s=2.0, step_core_s=4.0, fetch_core_s=6.0)
    c = counters.counters_of([busy], samples)
    assert (c.wait_core_s, c.step_core_s, c.fetch_core_s) == (2 * others, 4 * others, 6 * others)


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
    assert "no word from inside: torch was not imported" in done.stderr
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


EARLY = "before a training step was seen"
NO_TORCH = "no word from inside: torch was not imported"
NO_PYTHON = "no word from inside: no Python was started"
NO_TIME = "no word from inside: the signal left no time"
NO_LOOP = "torch was imported, but no DataLoader, optimizer step, save or load was seen"
LOADER = "torch.utils.data.DataLoader(range(9))"
ENDINGS = {  # a script (None: not there; a list: a command), exit code, ending, note
    "raises": ("raise ValueError('a\\nb')", 1, f", {EARLY}: ValueError: a$", NO_TORCH),
    "raises without words": ("raise KeyError", 1, f", {EARLY}: KeyError", NO_TORCH),
    "has a syntax error": ("for x in", 1, f", {EARLY}: SyntaxError: invalid syntax", NO_TORCH),
    "is not there": (None, 2, f"It ended with exit status 2 after .* s, {EARLY}", NO_TORCH),
    "has no torch": ("pass", 0, f"It ended with exit status 0 after .* s, {EARLY}", NO_TORCH),
    "says why": ("exit('no data')", 1, f"with exit status 1 after .* s, {EARLY}$", NO_TORCH),
    "only imports torch": ("import torch", 0, f"status 0 after .* s, {EARLY}", NO_LOOP),
    "is killed": ("import os; os.kill(os.getpid(), 9)", 137,
                  f"It was ended by SIGKILL, as by .* after .* s, {EARLY}", NO_TIME),
    "is interrupted": ("raise KeyboardInterrupt", 130,
                       f"It was ended by SIGINT after .* s, {EARLY}: Keyb", NO_TIME),
    "is killed in a shell": (["sh", "-c", "sh -c 'kill -15 $$'; exit $?"], 143,
                             rf"status 143 \(SIGTERM\) after .* s, {EARLY}", NO_TIME),
    "is no Python": (["sh", "-c", "exit 255"], 255, f"status 255 after .* s, {EARLY}", NO_PYTHON),
    "fails in its loop": (f"import torch\nfor x in {LOADER}: 1 / (4 - x.item())", 1,
                          "It ended with exit status 1 after .* s: ZeroDiv", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_that_fails_or_ends_early_is_said_to(tmp_path, name):
    script, code, said, note = ENDINGS[name]
    if isinstance(script, str):
        (tmp_path / "train.py").write_text(script)
    command = script if isinstance(script, list) else [sys.executable, "train.py"]
    done, written = doctor(tmp_path, *command)
    assert done.returncode == code
    assert re.search(said, written["ending"])
    notes = [one for one in written["notes"] if "machine is busy" not in one]
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    shown = " ".join(done.stderr.split())
    assert written["ending"] in shown
    assert not written["healthy"]
    assert not re.search("Healthy|outside only|Nothing unusual", shown)


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


@pytest.mark.stress
def test_watching_slows_a_training_by_less_than_two_percent(tmp_path):
    """In turns within one process: whole runs that nobody watches differ by more than that."""
    (tmp_path / "train.py").write_text(ALTERNATING)
    taken = json.loads(doctor(tmp_path, sys.executable, "train.py")[0].stdout)
    more = sorted(on - off for on, off in zip(taken["on"], taken["off"], strict=True))
    kept, step = more[len(more) // 10 : -len(more) // 10], median(taken["off"])
    hooks, error = mean(kept), stdev(kept) / len(kept) ** 0.5
    slowdown, within = hooks / step + taken["watching"], error / step
    print(f"step {step * 1e3:.3g} ms; hooks {hooks * 1e6:.3g} us of it, {slowdown:.2%} in all, "
          f"give or take {within:.2%}")  # fmt: skip
    assert slowdown - 2 * within < 0.02


@pytest.mark.parametrize("name", ["slow transform"])
def test_the_cause_of_a_real_run_is_named_first(tmp_path, name):
    """A real process, hooks and all; the others take their time under ``stress``."""
    found = first_cause(tmp_path, name)
    time = json.loads((tmp_path / "page.json").read_text())["time"]
    assert min(time["start-up"], time["data"], time["step"], time["other"]) > 0
    assert found["cause"] == RUNS[name].cause
    assert re.search(r"train\.py:\d+ ", found["where"])
