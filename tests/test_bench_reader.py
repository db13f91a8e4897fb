"""``npydata bench reader``: its rows, its verdicts, its files. Nothing here judges a time."""

import argparse
import json

import pytest
import torch

from npydata.bench import add_arguments, reader, reader_files, readers, targets
from npydata.bench.measure import Row, take_turns
from npydata.bench.report import find, table
from npydata.errors import NpyDataError
from npydata.lazy.checkpoint import open_checkpoint

TENSOR_BYTES = 1 << 20


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    return parser.parse_args(["bench", "reader", *argv])


def row(group, name, value, *, unit="ms", setting=""):
    return Row(name=name, setting=setting, group=group, role="ours", rates=(value,), unit=unit)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint of four tensors in each format, by format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    source = reader_files.make_random(folder / "random.bin", 4 * TENSOR_BYTES)
    state = reader_files.mapped_state(source, TENSOR_BYTES, 4)
    return {format: reader_files.save(state, folder, format) for format in reader_files.SAVERS}


@pytest.fixture
def small(monkeypatch):
    """The bench on files of a few MiB."""
    monkeypatch.setattr(reader, "QUICK", (4, 1, 20, 4, 1))
    monkeypatch.setattr(reader, "WARM_SECONDS", 0.0)


@pytest.mark.parametrize("format", reader_files.SAVERS)
def test_the_files_are_of_the_format_that_they_are_said_to_be(files, format):
    with open_checkpoint(files[format]) as checkpoint:
        assert checkpoint.format == format
        assert list(checkpoint) == [reader_files.name_of(place) for place in range(4)]
        assert {checkpoint.info(name).nbytes for name in checkpoint} == {TENSOR_BYTES}


@pytest.mark.parametrize("format", readers.PEERS)
def test_all_readers_read_the_same_tensor(files, format):
    path, name = files[format], reader_files.name_of(2)
    plan = reader.Plan(tensors=4, tensor_bytes=TENSOR_BYTES, tiny=1, converted=1, repeats=1)
    assert plan.name == name
    ways = {**readers.PEERS[format], reader.RAW: reader.raw_way(path, plan)}
    reader.check_same(ways, path, name)
    wrong = {**ways, "wrong": lambda *_: torch.zeros(TENSOR_BYTES // 4)}
    with pytest.raises(AssertionError, match="readers disagree"):
        reader.check_same(wrong, path, name)


def test_rows_of_a_tensor_are_its_first_ones(files):
    for way in (readers.our_rows, readers.safe_open_rows):
        rows = way(files["safetensors"], reader_files.name_of(1))
        assert rows.shape == (readers.SLICE_ROWS, reader_files.COLUMNS)


def test_touching_reaches_every_page():
    tensor = torch.zeros(5 * readers.PAGE_SIZE + 4, dtype=torch.uint8)
    tensor[:: readers.PAGE_SIZE] = 1
    tensor[-1] = 7
    assert readers.touch(tensor.view(torch.float32)) == 6 + 7


def test_memory_is_that_of_the_tensor_alone_for_ours_and_of_the_file_for_the_standard_loader(files):
    path, name = files["legacy"], reader_files.name_of(2)
    ours, _ = readers.extra_memory("read", "legacy", targets.OURS, path, name)
    standard, _ = readers.extra_memory("read", "legacy", targets.TORCH_LOAD, path, name)
    assert 1 <= ours < standard
    assert standard >= 4


def test_a_memory_measurement_that_fails_says_why(tmp_path):
    with pytest.raises(NpyDataError, match=r"memory of convert failed: .*missing\.pt"):
        readers.extra_memory("convert", tmp_path / "missing.pt", tmp_path / "out")


def test_turns_are_taken_by_all_and_the_first_is_dropped():
    order = []

    def measure(way):
        order.append(way)
        return len(order)

    assert take_turns(["a", "b"], 2, measure) == [[3, 5], [4, 6]]
    assert order == ["a", "b"] * 3


def test_of_rows_in_milliseconds_the_best_is_the_shortest():
    rows = [row("g", "x", 5.0), row("g", "x", 3.0), row("g", "x", 9.0)]
    assert find(rows, "g", "x").median == 3.0
    rates = [row("g", "x", 5.0, unit="MB/s"), row("g", "x", 9.0, unit="MB/s")]
    assert find(rates, "g", "x").median == 9.0


def test_the_table_names_the_unit_and_what_is_anonymous():
    one = Row(name="ours", setting="zip", group="memory", role="ours", rates=(4.5,), unit="MiB",
              anonymous=0.25)  # fmt: skip
    head, line = table([one]).splitlines()
    assert head.split()[1] == "MiB"
    assert "zip, 0.25 of it anonymous" in line


def test_verdicts_say_how_many_times_as_fast_ours_is():
    rows = [
        row("legacy cold", targets.OURS, 2.0),
        row("legacy cold", targets.TORCH_LOAD, 120.0),
        row("zip warm", targets.OURS, 2.0),
        row("zip warm", targets.TORCH_MMAP, 1.0),
        row("zip warm", targets.TORCH_LOAD, 900.0),
        row("safetensors warm", targets.OURS, 1.0),
        row("safetensors warm", targets.SAFE_OPEN, 1.5),
    ]
    found = [(v.value, v.target, v.met) for v in targets.reader_verdicts(rows, 16.0)]
    assert found == [(60, 50, True), (0.5, 1, False), (1.5, 1, True)]


def test_memory_may_be_the_tensor_and_a_little_more():
    rows = [
        row("memory", targets.OURS, 33.0, unit="MiB", setting="zip"),
        row("memory", targets.TORCH_LOAD, 900.0, unit="MiB", setting="zip"),
        row("memory", targets.CONVERT, 79.0, unit="MiB", setting="zip"),
    ]
    found = [(v.value, v.target, v.met) for v in targets.reader_verdicts(rows, 16.0)]
    assert found == [(33, 32, False), (79, 80, True)]


def test_converting_is_judged_by_a_copy_of_the_same_file():
    rows = [
        row("convert", targets.CONVERT, 60.0, unit="MB/s", setting="zip"),
        row("convert", targets.COPY, 100.0, unit="MB/s", setting="zip"),
        row("convert", targets.CONVERT, 80.0, unit="MB/s", setting="legacy"),
        row("convert", targets.COPY, 100.0, unit="MB/s", setting="legacy"),
    ]
    found = [(round(v.value, 2), v.met) for v in targets.reader_verdicts(rows, 16.0)]
    assert found == [(0.6, False), (0.8, True)]


def test_the_command_measures_every_part_and_leaves_nothing_but_its_results(
    tmp_path, small, monkeypatch
):
    monkeypatch.setattr(reader, "extra_memory", lambda *_: (5.0, 0.1))  # nine processes
    out = tmp_path / "out.json"
    args = parse("--quick", "--dir", str(tmp_path), "--json", str(out),
                 "--plot", str(tmp_path / "out.png"))  # fmt: skip
    assert args.run(args) == 0
    result = json.loads(out.read_text())
    assert (result["benchmark"], result["version"]) == ("reader", 1)
    groups = {row["group"] for row in result["rows"]}
    assert groups >= {"zip warm", "legacy warm", "safetensors warm", "memory", "many", "convert"}
    assert result["notes"] or groups == set(reader.TITLES)
    assert {row["unit"] for row in result["rows"]} == {"ms", "MiB", "MB/s"}
    text = "\n".join(verdict["text"] for verdict in result["verdicts"])
    for phrase in ("legacy, warm: ours is", "mmap=True", "safe_open", "ours takes",
                   "converting takes", "of a copy with fsync"):  # fmt: skip
        assert phrase in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_stays_in_memory_gives_no_cold_row(files, small, monkeypatch):
    monkeypatch.setattr(reader, "evict", lambda _: 0.4)
    monkeypatch.setattr(reader, "measure_memory", lambda *_: [])
    plan = reader.Plan(tensors=4, tensor_bytes=TENSOR_BYTES, tiny=1, converted=1, repeats=1)
    rows, notes = reader.measure_format(files["zip"], "zip", plan)
    assert {row.group for row in rows} == {"zip warm"}
    assert "zip: cold part skipped: 40% of the file stays in memory" in notes[0]


@pytest.mark.parametrize("part", ["make_random", "measure_format", "measure_many", "copy"])
def test_an_interrupted_bench_leaves_no_file(part, tmp_path, small, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "measure_format", lambda *_: ([], []))
    monkeypatch.setattr(reader, "measure_many", lambda *_: [])
    monkeypatch.setattr(reader, part, interrupt)
    args = parse("--quick", "--dir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_before_any_work(tmp_path):
    args = parse("--size-mb", "900000000", "--dir", str(tmp_path))
    with pytest.raises(NpyDataError, match=r"choose --dir, --size-mb or --convert-mb"):
        args.run(args)
    assert list(tmp_path.iterdir()) == []
