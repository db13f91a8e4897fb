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
from npydata.system.page_cache import evict


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


# The clinic itself


@pytest.mark.parametrize("case", make_clinic.CASES)
def test_a_report_names_its_evidence(case, request):
    folder = request.getfixturevalue(f"evidence_{case}")
    report = (make_clinic.HERE / f"case_{case}/report.md").read_text()
    shown = report.partition("**The evidence**")[2]
    for path in folder.iterdir():
        stem = path.name.split("_")[0]
        assert path.name in shown or f"`{stem}_" in shown, path.name


def test_one_case_can_be_made_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_clinic, "BUILD", tmp_path)
    make_clinic.main(["5"])
    assert [path.name for path in tmp_path.iterdir()] == ["case_5"]
    assert "build/clinic/case_5" in capsys.readouterr().out


def test_no_page_of_the_clinic_leads_to_an_answer():
    for page in make_clinic.HERE.rglob("*.md"):
        assert not re.search(r"\]\([^)]*answers", page.read_text()), page.name


def test_an_unknown_case_is_refused(capsys):
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


def test_1_the_run_is_far_slower_than_its_steps_whatever_the_settings(evidence_1):
    rates = [answer_1.batches_per_s(trace) for trace in traces(evidence_1)]
    assert max(rates) < 0.4 / train.STEP_S


def test_1_the_log_says_what_a_batch_costs_whoever_else_is_at_work(evidence_1):
    lines = (evidence_1 / "log.txt").read_text().splitlines()
    costs = [int(re.search(r"(\d+) ms of a processor", line)[1]) for line in lines]
    assert len(costs) == 3
    assert min(costs) > 1000 * train.STEP_S  # more than a step, with any setting
    assert max(costs) < 3 * min(costs)


def test_1_the_trace_says_too_slow(evidence_1):
    assert answer_1.diagnose(traces(evidence_1)[0]) == "too slow"


def counts_beside(job):
    """Of five, because a busy machine may stop any thread at any place."""
    return [answer_1.counted_beside(job) for _ in range(5)]


def test_1_nobody_gets_to_run_beside_the_renumbering(tokens_1):
    faulty, mended = train.Renumbered(*tokens_1), answer_1.Mended(*tokens_1)
    beside_faulty = min(counts_beside(lambda: faulty.fetch(range(train.BATCH))))
    beside_mended = max(
        counts_beside(lambda: [mended.fetch(range(train.BATCH)) for _ in range(50)])
    )
    assert beside_faulty < 10
    assert beside_mended > 2 * beside_faulty


def test_1_the_mend_feeds_the_same_batches(tokens_1):
    faulty, mended = train.Renumbered(*tokens_1), answer_1.Mended(*tokens_1)
    for one, other in zip(
        faulty.fetch(range(train.BATCH)), mended.fetch(range(train.BATCH)), strict=True
    ):
        assert torch.equal(one, other)
    runs = [train.train(mended)[0] for _ in range(3)]
    assert "fed" in map(answer_1.diagnose, runs)
    assert max(map(answer_1.batches_per_s, runs)) > 0.5 / train.STEP_S


def test_1_it_is_not_for_lack_of_room(evidence_1):
    assert answer_1.wait_shares(traces(evidence_1)[0])[1] < 0.1
    short_of_room = modelled([2, 2, 2, 14], step=4, window=1)
    assert answer_1.diagnose(short_of_room) == "no room"


def test_1_it_is_not_the_disk(tokens_1):
    data, path = train.Renumbered(*tokens_1), tokens_1[0]
    assert answer_1.disk_work(data, path) == (0, 0)


def test_1_a_cold_file_would_show(tokens_1, tmp_path):
    path = shutil.copy(tokens_1[0], tmp_path / "cold.npy")
    try:
        if evict(path):
            pytest.skip("this file stays in memory")
    except OSError as error:
        pytest.skip(str(error))
    missing, _ = answer_1.disk_work(train.Renumbered(path, tokens_1[1]), path)
    assert missing > 0


def test_1_it_is_not_the_step(evidence_1):
    assert answer_1.wait_shares(traces(evidence_1)[0])[0] > 0.1
    assert answer_1.step_s(train.gpu_step) < 2 * train.STEP_S
    slow_step = modelled([2], step=20, window=2)
    assert answer_1.diagnose(slow_step) == "fed"


# Case 2

NAMES = ("embedding", "query", "key", "head", "value")


def test_2_only_the_last_rows_of_the_last_matrix_cannot_be_read(evidence_2):
    lines = (evidence_2 / "log.txt").read_text().splitlines()
    failed = [line.split(":")[0] + ":" + line.split(":")[1] for line in lines if "EOFError" in line]
    assert failed == ["value[8:16]", "value[24:32]"]
    assert lines[-1].endswith("704 floats expected, the file has 0")


def test_2_the_span_is_longer_than_what_was_copied(evidence_2):
    found = answer_2.spanned_and_kept(evidence_2)
    assert found["value"] == (12_032, 4_096)
    assert {name for name, (spanned, kept) in found.items() if spanned > kept} == {
        "query", "key", "value"}  # fmt: skip


def test_2_two_other_matrices_are_wrong_without_an_error(evidence_2):
    for name in ("query", "key"):
        original = answer_2.last_rows_of_the_original(evidence_2 / "model.pt", name)
        assert not np.array_equal(slim.read_rows(evidence_2, name, 24, 32), original)


def test_2_the_mended_copy_has_every_row(evidence_2, tmp_path):
    answer_2.mended_slim(evidence_2 / "model.pt", NAMES, tmp_path)
    with npydata.open_checkpoint(evidence_2 / "model.pt") as tensors:
        for name in NAMES:
            rows = slim.read_rows(tmp_path, name, 0, len(tensors[name]))
            assert np.array_equal(rows, tensors[name].numpy())


def copied(folder, to):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def test_2_the_file_was_not_cut_off(evidence_2, tmp_path):
    assert answer_2.missing_at_the_end(evidence_2) == 0
    cut = copied(evidence_2, tmp_path) / "data.bin"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert answer_2.missing_at_the_end(tmp_path) == 100


def test_2_the_places_in_the_index_are_right(evidence_2, tmp_path):
    assert answer_2.begins_right(evidence_2, evidence_2 / "model.pt")
    shifted = copied(evidence_2, tmp_path) / "index.json"
    index = json.loads(shifted.read_text())
    index["value"]["begin"] += 4
    shifted.write_text(json.dumps(index))
    assert not answer_2.begins_right(tmp_path, evidence_2 / "model.pt")


def test_2_the_checkpoint_is_not_damaged(evidence_2, tmp_path):
    slim.make_checkpoint(tmp_path / "model.pt")
    rows = answer_2.last_rows_of_the_original(evidence_2 / "model.pt", "value")
    expected = torch.load(tmp_path / "model.pt")["value"][24:32].numpy()
    assert np.array_equal(rows, expected)
    damaged = tmp_path / "model.pt"
    damaged.write_bytes((evidence_2 / "model.pt").read_bytes()[:-2000])
    with pytest.raises(npydata.CheckpointError):
        answer_2.last_rows_of_the_original(damaged, "value")


# Case 3


@pytest.fixture(scope="module")
def data_3(evidence_3):
    return npydata.NpyTokensDataset(evidence_3 / "tokens.npy", seq_len=32)


def losses(folder):
    rows = [line.replace(",", "").split() for line in (folder / "log.txt").read_text().splitlines()]
    return [(float(row[2]), float(row[4])) for row in rows]


def test_3_the_first_resumed_step_agrees_and_the_second_does_not(evidence_3):
    first, second, *_ = losses(evidence_3)
    assert first[0] == first[1]
    assert second[0] != second[1]


def test_3_the_optimizer_was_written_at_several_steps(evidence_3):
    steps = answer_3.steps_in(evidence_3 / "step_20")
    assert min(steps.values()) < max(steps.values())
    assert max(steps.values()) > experiment.SAVE_AT


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


def test_4_a_quarter_of_the_documents_has_the_loss_of_an_untrained_model(evidence_4):
    first = np.loadtxt(evidence_4 / "loss_after_epoch_0.txt")
    second = np.loadtxt(evidence_4 / "loss_after_epoch_1.txt")
    assert 48 <= untouched(first) <= 80
    assert 0 < untouched(second) < untouched(first)


@pytest.mark.parametrize("epoch", [0, 1])
def test_4_the_ranks_were_given_the_same_documents_and_missed_as_many(evidence_4, epoch):
    never, _, twice = answer_4.summary(*given(evidence_4, epoch))
    assert never == twice
    assert 48 <= never <= 80


def test_4_what_was_never_given_is_what_was_not_learnt(evidence_4):
    first = np.loadtxt(evidence_4 / "loss_after_epoch_0.txt")
    assert untouched(first) == answer_4.summary(*given(evidence_4))[0]


def test_4_with_one_seed_every_document_is_given_once(evidence_4):
    data = train_two.make_data(evidence_4)
    table = train_two.Table()
    mended = train_two.train_epoch(table, answer_4.mended_loaders(data))
    assert answer_4.summary(*mended) == [0, 256]
    assert untouched(train_two.loss_by_document(table, data)) == 0


def test_4_the_end_of_the_epoch_is_not_cut_off(evidence_4):
    assert answer_4.number_given(*given(evidence_4)) == train_two.DOCUMENTS
    data = npydata.MmapDataset(evidence_4 / "tokens.npy", seq_len=31)
    cutting = npydata.AsyncDataLoader(data, batch_size=100, drop_last=True, seed=0)
    kept = [(x[:, 0] // train_two.LENGTH).tolist() for x, _ in cutting]
    assert answer_4.number_given(*kept) == 200


def test_4_no_rank_draws_at_random(evidence_4):
    assert answer_4.drawn_twice_by_a_rank(*given(evidence_4)) == 0
    drawn = np.random.default_rng(0).integers(0, 256, (2, 128))
    assert answer_4.drawn_twice_by_a_rank(*drawn) > 10


def test_4_the_epochs_do_not_repeat_their_order(evidence_4):
    first, second = given(evidence_4, 0)[0], given(evidence_4, 1)[0]
    assert not answer_4.same_order(first, second)
    assert answer_4.same_order(first, given(evidence_4, 0)[0])


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


def test_5_after_the_power_cut_a_file_was_empty_and_no_other_step_was_there(evidence_5):
    shown = (evidence_5 / "after_the_power_cut.txt").read_text().splitlines()
    lengths = dict(line.split(": ") for line in shown)
    assert {name.split(".")[0] for name in lengths} == {"step_200"}
    assert lengths["step_200.moments_0"] in ("0 bytes", "12 bytes")
    assert lengths["step_200.moments_1"] == "24 bytes"


def test_5_one_file_got_its_name_before_its_bytes_were_synced(evidence_5):
    journal = (evidence_5 / "journal.txt").read_text().splitlines()
    assert journal == journal_of(keep_one.save)
    assert answer_5.renamed_unsynced(journal) == ["step_200.moments_0"]
    assert answer_5.cut_short(keep_one.save) == ["step_200.moments_0"]


def test_5_only_equal_files_show_it():
    _, cut = answer_5.after_each_call(keep_one.save, answer_5.random_parts)
    assert set().union(*cut) == {100, 200}


def test_5_the_mended_save_loses_nothing_at_any_step():
    killed, cut = answer_5.after_each_call(answer_5.mended_save)
    assert set(killed) == {100, 200}
    assert set().union(*cut) == {100, 200}
    assert answer_5.renamed_unsynced(journal_of(answer_5.mended_save)) == []


def test_5_kills_never_show_it():
    killed, cut = answer_5.after_each_call(keep_one.save)
    assert set(killed) == {100, 200}
    assert None in set().union(*cut)


def test_5_the_old_one_is_not_removed_too_early():
    assert not answer_5.removed_before_the_names(journal_of(keep_one.save))
    early = journal_of(removing_before_the_folder_is_synced)
    assert answer_5.removed_before_the_names(early)


def test_5_no_name_was_lost():
    assert len(answer_5.names_after_a_power_cut(keep_one.save)) == 1
    assert len(answer_5.names_after_a_power_cut(forgetting("fsync_folder"))) > 1


def test_5_the_disk_keeps_its_word():
    assert answer_5.cut_short(keep_one.save) == ["step_200.moments_0"]
    assert len(answer_5.cut_short(forgetting("fsync"))) == 4
