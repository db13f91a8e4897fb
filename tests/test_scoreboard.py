"""The scoreboard of the notebooks: what it measures, and how it shows it."""

import pytest
import torch
from tutorial import figures, naive_train, saving, scoreboard
from tutorial.scoreboard import Scoreboard, Stopwatch, between, measure, names, overlapped, table

pytestmark = pytest.mark.notebook_00


def ticking(*times):
    """A clock that shows these times, one at each look."""
    return iter(times).__next__


def one_batch_again_and_again(path):
    x = torch.arange(12).view(2, 6)
    while True:
        yield x, x + 1


def test_the_stopwatch_files_each_interval_under_its_part():
    watch = Stopwatch(ticking(10.0, 12.0, 12.0, 15.0, 20.0, 21.0))
    for lane, part in [("cpu", "data wait"), ("gpu", "compute"), ("cpu", "data wait")]:
        watch(lane, part, lambda: None)
    assert watch.score() == Scoreboard(data=3.0, compute=3.0, save=0.0, load=0.0)
    assert watch.trace() == (
        ("cpu", 0.0, 2.0, "data wait"),
        ("gpu", 2.0, 5.0, "compute"),
        ("cpu", 10.0, 11.0, "data wait"),
    )


def test_a_part_that_is_replaced_is_the_one_that_runs(tmp_path):
    calls = []
    run = measure(
        make_batches=lambda path: calls.append("batches") or one_batch_again_and_again(path),
        save=lambda state, path: calls.append(path.name),
        load=lambda path, name: calls.append((path.name, name)),
        steps=5,
        save_every=2,
    )
    wanted = [(f"step_0{step}.pt", "mlp.0.weight") for step in (2, 4)]
    assert calls == ["batches", "step_02.pt", "step_04.pt", *wanted]
    assert [row[3] for row in run.trace].count("compute") == len(run.losses) == 5


def test_the_naive_parts_train_save_and_load(tmp_path):
    run = measure(steps=4, save_every=2, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_02.pt", "step_04.pt"]
    assert all(seconds > 0 for seconds in run.score.parts().values())
    assert scoreboard.naive_load(tmp_path / "step_04.pt", scoreboard.WANTED).shape == (64, 32)


def test_measuring_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        measure(make_batches=lambda path: 1 / 0)
    assert torch.get_num_threads() == before


def test_the_naive_script_runs_as_it_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(naive_train, "STEPS", 6)
    naive_train.main(scoreboard.SMOKE, tmp_path)
    assert "step 6: loss" in capsys.readouterr().out
    assert (tmp_path / "step_06.pt").exists()


def test_a_share_does_not_hang_on_the_runs_in_which_the_disk_was_busy(monkeypatch, capsys):
    quiet, busy = Scoreboard(0.12, 0.2, 0.11, 0.12), Scoreboard(0.12, 0.21, 0.5, 0.12)
    runs = iter([busy, quiet, quiet, busy, quiet])
    monkeypatch.setattr(
        scoreboard, "measure", lambda **_: scoreboard.Run(next(runs), trace=(), losses=())
    )
    assert scoreboard.share_of("save stall") == scoreboard.share(quiet, "save stall") == 20
    assert "save stall took 20 to 53 % of 5 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "times, said",
    [(0.8, "nearly all: 1.2 x more"), (2.1, "about half: 2.1 x less"),
     (7.2, "hardly any: 7.2 x less"), (131.4, "hardly any: 131.4 x less")],
)  # fmt: skip
def test_what_is_left_of_a_part_has_one_name_however_short_it_got(monkeypatch, times, said):
    monkeypatch.setattr(scoreboard, "gained", lambda part, **_: times)
    assert scoreboard.left("data wait", steps=5) == said


@pytest.mark.parametrize(
    "clone, yours, more",
    [(34, 12, "the page faults: 65 %"), (49, 4.9, "the page faults: 90 %"),
     (20, 12, "the copy: 60 %"), (10, 12, "the copy: 100 %")],
)  # fmt: skip
def test_what_a_clone_waits_for_beyond_the_copy_are_page_faults(clone, yours, more):
    assert saving.more_of_the_clone(clone, yours) == more


def test_the_table_of_one_run_gives_shares_and_of_two_runs_factors():
    slow, fast = Scoreboard(4.0, 4.0, 1.0, 1.0), Scoreboard(1.0, 4.0, 1.0, 1.0)
    assert table(slow).splitlines()[0].split() == ["data", "wait", "4.00", "s", "40%"]
    assert "4.0 x" in table(slow, fast).splitlines()[0]
    assert table(slow).splitlines()[-1].split() == ["total", "10.00", "s", "100%"]


def test_a_cut_of_a_trace_is_in_ms_from_its_start_and_clipped():
    trace = [("gpu", 1.0, 2.0, "compute"), ("disk", 2.0, 4.0, "save stall"), ("cpu", 5, 6, "load")]
    assert between(trace, 1.5, 3.0) == [
        ("disk", 500.0, 1500.0, "save stall"),
        ("gpu", 0.0, 500.0, "compute"),
    ]


def gpu_of(rows):
    return [row[1:] for row in rows if row[0] == "gpu"]


def test_in_the_model_a_short_data_part_hides_behind_compute():
    rows = overlapped(2, 5, copy=1, write=9, saves=[False, False])
    assert gpu_of(rows) == [(2, 7, "compute"), (7, 12, "compute")]


def test_in_the_model_a_long_data_part_sets_the_pace():
    rows = overlapped(5, 2, copy=1, write=9, saves=[False, False])
    assert gpu_of(rows) == [(5, 7, "compute"), (10, 12, "compute")]


def test_in_the_model_a_save_stops_the_gpu_for_the_copy_only():
    rows = overlapped(2, 5, copy=1, write=9, saves=[True, False])
    assert gpu_of(rows) == [(2, 7, "compute"), (7, 8, "save stall"), (8, 13, "compute")]
    assert ("disk", 8, 17, "save stall") in rows


def test_the_first_interval_of_each_part_carries_its_name():
    rows = overlapped(2, 5, copy=1, write=9, saves=[True, True])
    assert [rows[i][0] + " " + name for i, name in sorted(names(rows).items())] == [
        "disk save",
        "cpu batch",
        "gpu step",
    ]
    assert min(row[1] for row in rows if row[0] == "gpu") == rows[max(names(rows))][1]


def test_a_part_that_was_not_replaced_gets_no_factor():
    before, now = Scoreboard(4.0, 4.0, 1.0, 1.0), Scoreboard(1.0, 5.0, 0.25, 2.0)
    rows = table(before, now, ["data wait"]).splitlines()
    assert [row.split("   ")[-1].strip() for row in rows] == [
        "4.0 x less",
        "same code",
        "same code",
        "same code",
        "8.25 s",
    ]
    assert "2.0 x more" in table(before, now).splitlines()[3]


def test_a_lanes_label_is_left_out_where_its_bar_is_too_short():
    plt = pytest.importorskip("matplotlib.pyplot")
    _, ax = plt.subplots()
    rows = [("cpu", 0, 2, "data wait"), ("gpu", 2, 100, "compute")]
    figures.lanes(ax, rows, labels={0: "batch", 1: "step"})
    shown = [text.get_text() for text in ax.texts]
    plt.close(ax.figure)
    assert shown == ["step"]


@pytest.mark.parametrize(
    "heights, wanted",
    [([0.2, 0.9], [0.2, 0.9]), ([0.4, 0.4, 0.2], [0.4, 0.5, 0.2]), ([0.45, 0.4], [0.5, 0.4]),
     ([0, 0, 0], [0, 0.1, 0.2])],
)  # fmt: skip
def test_labels_that_would_touch_stand_apart_in_their_order(heights, wanted):
    assert figures.apart(heights, 0.1) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "compute, told",
    [("many", "compute: 'many' is no percentage"), (30, "compute 30 %"), (40, "add up to 110 %")],
)
def test_a_bar_of_one_s_own_is_taken_or_told_what_is_wrong_with_it(capsys, compute, told):
    bar = scoreboard.guess(data_wait=40, compute=compute, save_stall=20, load=10)
    assert told in capsys.readouterr().out
    assert bool(bar) == (compute == 30)
