"""Every baseline does what its table asks for: all that are registered, a new one as well."""

import os
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from bench_tools import make_task

from npydata import load_checkpoint, open_checkpoint
from npydata.bench import baselines, memory, reader, states
from npydata.bench.baselines import (
    OURS,
    REGISTRY,
    ROLES,
    baseline,
    baselines_of,
    limits,
    loaders,
    random_reads,
    windows,
)
from npydata.bench.baselines.readers import TORCH_LOAD
from npydata.bench.tokens import check_pair

TENSOR_BYTES = 1 << 20
STATE = states.make_state(1 << 16, 1 << 14)
baselines_of("")  # imports all of them

TOKEN_TABLES = ("dataset", "loader")


def rows_of(*beginnings):
    """The registered baselines of tables whose names begin so, as parameters."""
    found = [one for one in REGISTRY if one.table.startswith(beginnings) and one.available()]
    return [pytest.param(one, id=f"{one.table}: {one.name}, {one.setting}") for one in found]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("bench"))


def test_a_baseline_stands_in_its_tables_by_role_and_in_the_order_of_its_settings(monkeypatch):
    monkeypatch.setattr(baselines, "REGISTRY", REGISTRY.copy())
    monkeypatch.setattr(baselines, "TABLES", ("one", "two"))
    with pytest.raises(AssertionError, match="expected some of one, two"):
        baseline("one, three", "mine", "ours")

    @baseline("one, two", "limit", "limit")
    def limit():
        """Nobody is better."""

    @baseline("one", "mine", "ours", settings={"a": {"x": 1}, "b": {"x": 2}}, full={"c": {}})
    @baseline("one", "mine too", "ours")
    def mine(x=3):
        return x

    baseline("one", "missing", "peer", available=lambda: False)(lambda: None)
    names = [(one.name, one.setting) for one in baselines_of("one")]
    assert names == [("mine", "a"), ("mine", "b"), ("mine", "c"), ("mine too", ""), ("limit", "")]
    assert [one.setting for one in baselines_of("one", quick=True)] == ["a", "b", "", ""]
    assert [one.start() for one in baselines_of("one")[:4]] == [1, 2, 3, 3]
    assert [one.name for one in baselines_of("two")] == ["limit"]


def test_a_module_that_is_put_beside_the_others_is_found_by_itself(tmp_path, monkeypatch):
    (tmp_path / "newcomer.py").write_text(
        "from npydata.bench.baselines import baseline\n"
        "@baseline('found', 'newcomer', 'peer')\n"
        "def newcomer():\n    return 7\n"
    )
    monkeypatch.setattr(baselines, "REGISTRY", REGISTRY.copy())
    monkeypatch.setattr(baselines, "TABLES", ("found",))
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    baselines.import_all.cache_clear()
    try:
        (found,) = baselines_of("found")
        assert (found.name, found.start()) == ("newcomer", 7)
    finally:
        sys.modules.pop(f"{baselines.__name__}.newcomer", None)


@pytest.mark.parametrize("table", sorted({one.table for one in REGISTRY}))
def test_no_row_of_a_table_stands_there_twice(table):
    rows = [(one.name, one.setting) for one in baselines_of(table)]
    assert len(set(rows)) == len(rows)
    assert all(one.role in ROLES for one in baselines_of(table))


@pytest.mark.parametrize("one", [
    param for param in rows_of(*TOKEN_TABLES)
    if not param.values[0].bytes_per_token
    and (param.values[0].role == "ours" or param.values[0].options.get("workers", 0) <= 1)
])  # fmt: skip
def test_baselines_over_tokens_deliver_batches_without_end(one, task):
    batches = one.start(task)
    for batch in islice(batches, 5):
        check_pair(batch, task)
    batches.close()


@pytest.mark.parametrize("setting", [(0, 0), (1, 1), (2, 4)])
def test_a_loader_goes_on_over_epochs(setting, task):
    batches = loaders.through_loader(task, *setting)
    per_epoch = len(task.random_dataset()) // task.batch_size
    assert len(list(islice(batches, per_epoch + 3))) == per_epoch + 3
    batches.close()


def test_without_hints_the_kernel_learns_nothing_of_the_windows_to_come(task, monkeypatch):
    advised = []
    monkeypatch.setattr(
        "npydata.dataset.datasets.TokenWindows.will_need", lambda *_, **__: advised.append(1)
    )
    for method, expected in ((loaders.without_hints, 0), (loaders.through_loader, 1)):
        batches = method(task, 1, 2)
        next(batches)
        batches.close()
        assert min(len(advised), 1) == expected


def test_batches_go_on_over_epochs_without_a_short_one():
    got = list(islice(windows.batches_of(10, 4), 3))
    assert [(indices.tolist(), epoch) for indices, epoch in got] == [
        ([0, 1, 2, 3], 0), ([4, 5, 6, 7], 0), ([0, 1, 2, 3], 1),
    ]  # fmt: skip
    assert next(windows.batches_of(3, 5))[0].tolist() == [0, 1, 2, 0, 1]


# limits


def test_memory_copies_count_the_bytes_copied(monkeypatch):
    monkeypatch.setattr(limits, "COPY_BYTES", 1000)
    assert list(islice(limits.memory_copies(None), 2)) == [1000, 1000]


def test_random_reads_report_whole_blocks_that_arrived(task, tmp_path):
    with task.path.open("rb") as file:
        counts = list(islice(random_reads.aio_reads(file.fileno(), 20), 5))
    assert all(count > 0 and count % random_reads.BLOCK == 0 for count in counts)
    only_for_writing = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        next(random_reads.aio_reads(only_for_writing, 20))
    os.close(only_for_writing)


def test_a_file_that_cannot_be_read_directly_gives_a_reason(tmp_path):
    assert "No such file" in random_reads.direct_reads_problem(tmp_path / "missing")


def test_a_machine_whose_calls_are_not_known_gives_a_reason(task, monkeypatch):
    monkeypatch.setattr(random_reads.platform, "machine", lambda: "pdp11")
    assert "x86_64 and aarch64" in random_reads.direct_reads_problem(task.path)


def test_random_offsets_are_block_aligned_and_inside_the_file():
    offsets = np.array(list(islice(random_reads.random_offsets(20, seed=1), 10_000)))
    assert set(offsets.tolist()) == set(range(0, 20 * 4096, 4096))


@pytest.mark.parametrize("one", rows_of("checkpoint stall limit", "checkpoint durable limit"))
def test_a_limit_of_saving_works_again_and_again_and_leaves_nothing(one, tmp_path):
    work = one.start(10_000, tmp_path / "file")
    work()
    work()
    assert list(tmp_path.iterdir()) == []


# readers


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint of four tensors in each format, by format."""
    folder = tmp_path_factory.mktemp("checkpoints")
    source = states.make_random(folder / "random.bin", 4 * TENSOR_BYTES)
    state = states.mapped_state(source, TENSOR_BYTES, 4)
    return {format: states.write_as(format, state, folder) for format in states.FORMATS}


@pytest.mark.parametrize("format", states.FORMATS)
def test_the_files_are_of_the_format_that_they_are_said_to_be(files, format):
    with open_checkpoint(files[format]) as checkpoint:
        assert checkpoint.format == format
        assert list(checkpoint) == [states.name_of(place) for place in range(4)]
        assert {checkpoint.info(name).nbytes for name in checkpoint} == {TENSOR_BYTES}


@pytest.mark.parametrize("format", states.FORMATS)
def test_all_readers_read_the_same_tensor_and_rows(files, format):
    path, name = files[format], states.name_of(2)
    readers = baselines_of(f"reader {format}")
    reader.check_same(readers, path, name)
    wrong = [one for one in REGISTRY if one.table == f"reader {format} slice"][:1]
    with pytest.raises(AssertionError, match="readers disagree"):
        reader.check_same([*readers, *wrong], path, name)
    for one in baselines_of(f"reader {format} slice"):
        assert one.start(path, name).shape == (states.SLICE_ROWS, states.COLUMNS)
    for one in baselines_of(f"reader {format} open"):
        one.start(path)


@pytest.mark.parametrize("one", rows_of("reader convert"))
def test_what_is_converted_or_copied_is_there(one, files, tmp_path):
    one.start(files["zip"], tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert len(checkpoint) == 4


def test_memory_is_that_of_the_tensor_alone_for_ours_and_of_the_file_for_the_standard_loader(files):
    path, name = files["legacy"], states.name_of(2)
    ours, _ = memory.extra_memory(reader.reading, "legacy", OURS, path, name)
    standard, anonymous = memory.extra_memory(reader.reading, "legacy", TORCH_LOAD, path, name)
    assert 1 <= ours < standard
    assert standard >= anonymous >= 1


# savers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("one", [
    param for param in rows_of("checkpoint")
    if param.values[0].table == "checkpoint" or param.values[0].name == "no saves"
])  # fmt: skip
def test_savers_save_twice_what_they_were_given(one, tmp_path):
    saver = one.start(STATE)
    for k in range(2):
        saver.save(tmp_path / str(k))
        saver.finish(tmp_path / str(k))
        files = [path for path in (tmp_path / str(k)).rglob("*") if path.is_file()]
        assert one.name == "no saves" or sum(path.stat().st_size for path in files) >= 1 << 16
    saver.close()
    if one.role == "ours":
        model, _, _ = load_checkpoint(tmp_path / "1")
        assert all(torch.equal(model[key], STATE[key]) for key in STATE)
