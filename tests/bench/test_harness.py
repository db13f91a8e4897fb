"""The harness: rows in turn, another checkout in the same turns, targets, and what is written."""

import json
import random
from pathlib import Path

import bench_paths  # noqa: F401
import pytest
from harness import (
    Bench,
    Skip,
    Target,
    as_text,
    best,
    judge,
    limit,
    main,
    measure,
    ours,
    parse,
    peer,
)

import npydata

ORDER = []


def turn(row, args):
    """Call the row's function; a section called `absent` can't be measured."""
    if row.section == "absent":
        raise Skip("there is none")
    ORDER.append(row.name)
    return {"speed": row.work(), "cost": 2.0}


def calls_so_far():
    return float(len(ORDER))


def where_npydata_is():
    return float(len(npydata.__file__))


def bench(*rows, **options):
    groups = {"speed": ("Speed", "Mtok/s"), "cost": ("Cost", "ms")}
    return Bench(name="fake", about="", groups=groups, rows=rows, turn=turn, **options)


def rows_of(made, *argv):
    return measured(made, *argv)["rows"]


def measured(made, *argv):
    args = parse(made, argv)
    args.folder = Path()
    return measure(made, args)


def test_rounds_are_of_all_rows_in_another_order_and_the_first_is_dropped():
    ORDER.clear()
    random.seed(0)
    rows = rows_of(
        bench(ours("s", "a", "", calls_so_far), peer("s", "b", "", calls_so_far)), "--repeats", "4"
    )
    rounds = ["".join(ORDER[k : k + 2]) for k in range(0, 10, 2)]
    assert set(rounds) == {"ab", "ba"}
    first, second = (row["rates"] for row in rows if row["group"] == "speed")
    assert sorted(first + second) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_a_section_that_cannot_be_measured_is_a_note():
    made = bench(ours("absent", "a", "", calls_so_far), ours("s", "b", "", calls_so_far))
    result = measured(made)
    assert {row["name"] for row in result["rows"]} == {"b"}
    assert result["notes"] == ["absent: there is none"]
    assert [row["name"] for row in rows_of(made, "--only", "s")] == ["b", "b"]


def test_another_checkout_is_measured_in_the_same_turns(tmp_path):
    other = tmp_path / "other"
    (other / "npydata").mkdir(parents=True)
    (other / "npydata" / "__init__.py").write_text("")
    made = bench(ours("s", "a", "", where_npydata_is), peer("s", "b", "", where_npydata_is))
    result = measured(made, "--against", str(other), "--repeats", "1")
    found = {(row["group"], row["name"]): row["median"] for row in result["rows"]}
    here, there = Path(npydata.__file__), other / "npydata" / "__init__.py"
    assert found["speed", "a"] == found["speed", "b"] == len(str(here))
    assert found["speed", "a, before"] == len(str(there))
    assert ("speed", "b, before") not in found
    assert any(note.startswith("cost, a,") and "1.00x" in note for note in result["notes"])


def row(name, rates, unit, setting=""):
    rates = [float(rate) for rate in rates]
    return {
        "group": "g",
        "name": name,
        "setting": setting,
        "rates": rates,
        "unit": unit,
        "median": sorted(rates)[len(rates) // 2],
    }


OURS, OTHER = "g | ours", "g | other"


@pytest.mark.parametrize(("target", "mine", "theirs", "unit", "value", "met"), [
    (Target("", OURS, OTHER, 2), [30], [10], "Mtok/s", 3, True),
    (Target("", OURS, OTHER, 2), [30], [10], "ms", 1 / 3, False),
    (Target("", OURS, OTHER, at_most=0.5), [30], [10], "ms", 3, False),
    (Target("", OURS, at_most=40), [30], [10], "MiB", 30, True),
    (Target("", OURS, OTHER, at_most=0.1, extra=True), [11, 33], [10, 30], "ms", 0.1, True),
    (Target("", OURS, OTHER, at_most=0.1, extra=True), [10, 30], [12, 36], "Mtok/s", 0.2, False),
])  # fmt: skip
def test_a_target_compares_medians_or_round_by_round(target, mine, theirs, unit, value, met):
    (verdict,) = judge(target, [row("ours", mine, unit), row("other", theirs, unit)])
    assert verdict["value"] == pytest.approx(value)
    assert verdict["met"] is met or abs(verdict["value"] - verdict["target"]) < 1e-9


def test_of_several_rows_that_match_the_best_counts():
    rows = [row("a", [5], "ms", setting="x"), row("a", [3], "ms", setting="y")]
    assert best(rows, "g | a")["setting"] == "y"
    assert best(rows, "g | a | x")["median"] == 5


def test_what_was_measured_is_printed_written_and_drawn(tmp_path, capsys):
    made = bench(
        ours("s", "ours", "fast", calls_so_far),
        limit("s", "copy", "", calls_so_far),
        targets=[Target("{} of it", "cost | ours", at_most=1, style="{:.1f}")],
        options={"tokens": None},
    )
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--targets", "--dir", str(tmp_path), "--json", str(out), "--plot", str(plot)]
    assert main(made, [*arguments, "--tokens", str(tmp_path / "secret.npy")]) == 0
    shown = capsys.readouterr().out
    assert "| ours | fast |" in shown
    assert "MISSED  2.0 of it (at most 1.0)" in shown
    assert str(tmp_path) not in out.read_text()
    assert as_text(made, json.loads(out.read_text()), targets=True) in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
