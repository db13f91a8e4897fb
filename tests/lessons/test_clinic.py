"""The clinic's cases: each has its symptom, its deciding measurement decides, its mend mends.

And every wrong diagnosis that a report suggests is ruled out by a measurement, which would not
rule it out if it were right: it is shown a case where it is.
"""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from clinic import make_clinic
from clinic.answers import case_1 as answer_1
from clinic.answers import case_2 as answer_2
from clinic.answers import case_3 as answer_3
from clinic.answers import case_4 as answer_4
from clinic.answers import case_5 as answer_5
from clinic.case_1 import train
from clinic.case_2 import slim
from clinic.case_3 import experiment, saver
from clinic.case_4 import train_two
from clinic.case_5 import keep_one
from course.lesson import defined

import npydata


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small tensors: threads would only stand in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def evidence(case):
    @pytest.fixture(scope="module")
    def made(tmp_path_factory):
        folder = tmp_path_factory.mktemp("clinic") / f"case_{case}"
        make_clinic.make(case, folder)
        return folder

    return made


evidence_1, evidence_2, evidence_3, evidence_4, evidence_5 = map(evidence, make_clinic.CASES)


def copied(folder, to):
    return shutil.copytree(folder, to, dirs_exist_ok=True)


def test_an_unknown_case_is_refused():
    with pytest.raises(SystemExit, match="usage"):
        make_clinic.main(["6"])


# Case 1


def traces(folder):
    """With 1 worker, with 4, and with 1 that may work far ahead."""
    names = "1_workers_prefetch_2", "4_workers_prefetch_2", "1_workers_prefetch_16"
    return [json.loads((folder / f"trace_{name}.json").read_text()) for name in names]


@pytest.fixture(scope="module")
def tokens_1(evidence_1):
    return evidence_1 / "tokens.npy", evidence_1 / "vocabulary.json"


def modelled(fetch, step, window):
    return defined("04")["follow"](fetch * 10, step, 1, window)


def test_1_the_run_is_far_slower_than_its_steps_and_the_trace_says_too_slow(evidence_1):
    rates = [answer_1.batches_per_s(trace) for trace in traces(evidence_1)]
    assert max(rates) < 0.4 / train.STEP_S
    lines = (evidence_1 / "log.txt").read_text().splitlines()
    costs = [int(re.search(r"(\d+) ms of a processor", line)[1]) for line in lines]
    assert min(costs) > 1000 * train.STEP_S  # of a batch, with any setting
    assert max(costs) < 3 * min(costs)
    assert answer_1.diagnose(traces(evidence_1)[0]) == "too slow"


def counts_beside(job):
    """Of five, because a busy machine may stop any thread at any place."""
    return [answer_1.counted_beside(job) for _ in range(5)]


def test_1_nobody_gets_to_run_beside_the_renumbering_and_the_mend_feeds_the_same(tokens_1):
    faulty, mended = train.Renumbered(*tokens_1), answer_1.Mended(*tokens_1)
    indices = range(train.BATCH)
    beside_faulty = min(counts_beside(lambda: faulty.fetch(indices)))
    beside_mended = max(counts_beside(lambda: [mended.fetch(indices) for _ in range(50)]))
    assert beside_faulty < 10
    assert beside_mended > 2 * beside_faulty
    assert all(map(torch.equal, faulty.fetch(indices), mended.fetch(indices)))
    assert "fed" in [answer_1.diagnose(train.train(mended)[0]) for _ in range(3)]


def test_1_it_is_neither_lack_of_room_nor_the_disk_nor_the_step(evidence_1, tokens_1):
    too_slow = traces(evidence_1)[0]
    of_the_step, of_room = answer_1.wait_shares(too_slow)[:2]
    assert of_room < 0.1 < of_the_step
    assert answer_1.diagnose(modelled([2, 2, 2, 14], step=4, window=1)) == "no room"
    assert answer_1.diagnose(modelled([2], step=20, window=2)) == "fed"
    assert answer_1.step_s(train.gpu_step) < 2 * train.STEP_S
    assert answer_1.disk_work(train.Renumbered(*tokens_1), tokens_1[0]) == (0, 0)


# Case 2

NAMES = ("embedding", "query", "key", "head", "value")


def test_2_spans_are_longer_than_what_was_copied_of_them(evidence_2):
    lines = (evidence_2 / "log.txt").read_text().splitlines()
    failed = [line.split(":")[0] + ":" + line.split(":")[1] for line in lines if "EOFError" in line]
    assert failed == ["value[8:16]", "value[24:32]"]
    assert lines[-1].endswith("704 floats expected, the file has 0")
    found = answer_2.spanned_and_kept(evidence_2)
    assert found["value"] == (12_032, 4_096)
    assert {name for name, (spanned, kept) in found.items() if spanned > kept} == {
        "query", "key", "value"}  # fmt: skip
    for name in ("query", "key"):  # these are wrong without an error
        original = answer_2.last_rows_of_the_original(evidence_2 / "model.pt", name)
        assert not np.array_equal(slim.read_rows(evidence_2, name, 24, 32), original)


def test_2_the_mended_copy_has_every_row(evidence_2, tmp_path):
    answer_2.mended_slim(evidence_2 / "model.pt", NAMES, tmp_path)
    with npydata.open_checkpoint(evidence_2 / "model.pt") as tensors:
        for name in NAMES:
            rows = slim.read_rows(tmp_path, name, 0, len(tensors[name]))
            assert np.array_equal(rows, tensors[name].numpy())


def test_2_neither_is_the_file_cut_off_nor_the_index_wrong_nor_the_checkpoint(evidence_2, tmp_path):
    model = evidence_2 / "model.pt"
    assert answer_2.missing_at_the_end(evidence_2) == 0
    assert answer_2.begins_right(evidence_2, model)
    expected = torch.load(model)["value"][24:32].numpy()
    assert np.array_equal(answer_2.last_rows_of_the_original(model, "value"), expected)
    copied(evidence_2, tmp_path)
    cut, shifted, damaged = (tmp_path / name for name in ("data.bin", "index.json", "model.pt"))
    cut.write_bytes(cut.read_bytes()[:-100])
    assert answer_2.missing_at_the_end(tmp_path) == 100
    index = json.loads(shifted.read_text())
    index["value"]["begin"] += 4
    shifted.write_text(json.dumps(index))
    assert not answer_2.begins_right(tmp_path, model)
    damaged.write_bytes(model.read_bytes()[:-2000])
    with pytest.raises(npydata.CheckpointError):
        answer_2.last_rows_of_the_original(damaged, "value")


# Case 3


@pytest.fixture(scope="module")
def data_3(evidence_3):
    return npydata.NpyTokensDataset(evidence_3 / "tokens.npy", seq_len=32)


def losses(folder):
    rows = [line.replace(",", "").split() for line in (folder / "log.txt").read_text().splitlines()]
    return [(float(row[2]), float(row[4])) for row in rows]


def test_3_the_second_resumed_step_differs_and_the_optimizer_is_of_several_steps(evidence_3):
    first, second, *_ = losses(evidence_3)
    assert first[0] == first[1]
    assert second[0] != second[1]
    steps = answer_3.steps_in(evidence_3 / "step_20").values()
    assert experiment.SAVE_AT < max(steps) > min(steps)


def test_3_the_moments_of_a_snapshot_are_those_of_training(data_3):
    model, optimizer = experiment.make_training()
    experiment.train_step(model, optimizer, *experiment.batch(data_3, 1))
    shared = answer_3.shared_with_training(model, optimizer)
    assert len(shared) == 9
    assert {name.split(".")[0] for name in shared} == {"optimizer"}
    assert answer_3.shared_with_training(model, optimizer, answer_3.mended_snapshot) == []


def test_3_the_mended_run_resumes_to_the_last_bit(data_3, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "snapshot", answer_3.mended_snapshot)
    uninterrupted = experiment.run(data_3, tmp_path / "step_20")
    assert experiment.resume(data_3, tmp_path / "step_20") == uninterrupted[experiment.SAVE_AT :]
    assert set(answer_3.steps_in(tmp_path / "step_20").values()) == {experiment.SAVE_AT}


def test_3_it_is_not_the_disk(evidence_3, tmp_path):
    assert answer_3.damaged(evidence_3 / "step_20") == []
    path = copied(evidence_3 / "step_20", tmp_path) / "model.1.bias.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert answer_3.damaged(tmp_path) == ["model.1.bias"]


def test_3_it_is_not_the_order_of_the_data(data_3, tmp_path):
    uninterrupted, resumed = answer_3.Watched(data_3), answer_3.Watched(data_3)
    shuffled_otherwise = answer_3.Watched(data_3, late=1)
    experiment.run(uninterrupted, tmp_path / "step_20")
    experiment.resume(resumed, tmp_path / "step_20")
    experiment.resume(shuffled_otherwise, tmp_path / "step_20")
    assert answer_3.same_batches(uninterrupted, resumed)
    assert not answer_3.same_batches(uninterrupted, shuffled_otherwise)


def test_3_it_is_not_the_weights(evidence_3, data_3, tmp_path):
    assert answer_3.weights_are_of(data_3, evidence_3 / "step_20", experiment.SAVE_AT)
    torn = copied(evidence_3 / "step_20", tmp_path)
    later = answer_3.weights_at(data_3, experiment.SAVE_AT + 1)["1.bias"]
    np.save(torn / "model.1.bias.npy", later.numpy())
    assert not answer_3.weights_are_of(data_3, torn, experiment.SAVE_AT)


# Case 4


def given(folder, epoch=0):
    return [np.loadtxt(folder / f"given_epoch_{epoch}_rank_{k}.txt", dtype=int) for k in (0, 1)]


def untouched(losses):
    return int((abs(losses - math.log(train_two.CLASSES)) < 1e-3).sum())


@pytest.mark.parametrize("epoch", [0, 1])
def test_4_ranks_were_given_the_same_documents_and_what_was_missed_was_not_learnt(
    evidence_4, epoch
):
    never, _, twice = answer_4.summary(*given(evidence_4, epoch))
    assert never == twice
    assert 48 <= never <= 80
    first, second = (
        untouched(np.loadtxt(evidence_4 / f"loss_after_epoch_{k}.txt")) for k in (0, 1)
    )
    assert 0 < second < first
    assert epoch or first == never


def test_4_with_one_seed_every_document_is_given_once(evidence_4):
    data = train_two.make_data(evidence_4)
    table = train_two.Table()
    mended = train_two.train_epoch(table, answer_4.mended_loaders(data))
    assert answer_4.summary(*mended) == [0, 256]
    assert untouched(train_two.loss_by_document(table, data)) == 0


def test_4_neither_is_the_epoch_cut_off_nor_drawn_at_random_nor_repeated(evidence_4):
    first, second = given(evidence_4, 0), given(evidence_4, 1)
    assert answer_4.number_given(*first) == train_two.DOCUMENTS
    assert answer_4.number_given(*(rank[:100] for rank in first)) < train_two.DOCUMENTS
    assert answer_4.drawn_twice_by_a_rank(*first) == 0
    drawn = np.random.default_rng(0).integers(0, 256, (2, 128))
    assert answer_4.drawn_twice_by_a_rank(*drawn) > 10
    assert not answer_4.same_order(first[0], second[0])
    assert answer_4.same_order(first[0], first[0])


# Case 5


def journal_of(save):
    journal = keep_one.Journal(answer_5.disk_with_step_100())
    save(journal, 200, keep_one.parts_of(200))
    return journal.lines


def forgetting(call):
    """The mended save on a disk that ignores one kind of call."""

    def save(disk, step, parts):
        before = getattr(disk, call)
        setattr(disk, call, lambda *args: None)
        answer_5.mended_save(disk, step, parts)
        setattr(disk, call, before)

    return save


def removing_before_the_folder_is_synced(disk, step, parts):
    sync, disk.fsync_folder = disk.fsync_folder, lambda: None
    answer_5.mended_save(disk, step, parts)
    disk.fsync_folder = sync
    disk.fsync_folder()


def test_5_a_file_got_its_name_before_its_bytes_and_was_empty_after_the_power_cut(evidence_5):
    shown = (evidence_5 / "after_the_power_cut.txt").read_text().splitlines()
    lengths = dict(line.split(": ") for line in shown)
    assert {name.split(".")[0] for name in lengths} == {"step_200"}
    assert lengths["step_200.moments_0"] in ("0 bytes", "12 bytes")
    assert lengths["step_200.moments_1"] == "24 bytes"
    journal = (evidence_5 / "journal.txt").read_text().splitlines()
    assert journal == journal_of(keep_one.save)
    assert answer_5.renamed_unsynced(journal) == ["step_200.moments_0"]
    assert answer_5.cut_short(keep_one.save) == ["step_200.moments_0"]


def test_5_kills_and_unequal_files_never_show_it_and_the_mended_save_loses_nothing():
    killed, cut = answer_5.after_each_call(keep_one.save)
    assert set(killed) == {100, 200}
    assert None in set().union(*cut)
    _, cut = answer_5.after_each_call(keep_one.save, answer_5.random_parts)
    assert set().union(*cut) == {100, 200}
    killed, cut = answer_5.after_each_call(answer_5.mended_save)
    assert set(killed) == set().union(*cut) == {100, 200}
    assert answer_5.renamed_unsynced(journal_of(answer_5.mended_save)) == []


def test_5_neither_was_the_old_one_removed_early_nor_a_name_lost_nor_does_the_disk_lie():
    assert not answer_5.removed_before_the_names(journal_of(keep_one.save))
    early = journal_of(removing_before_the_folder_is_synced)
    assert answer_5.removed_before_the_names(early)
    assert len(answer_5.names_after_a_power_cut(keep_one.save)) == 1
    assert len(answer_5.names_after_a_power_cut(forgetting("fsync_folder"))) > 1
    assert len(answer_5.cut_short(forgetting("fsync"))) == 4
