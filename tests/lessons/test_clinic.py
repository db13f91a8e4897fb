"""The clinic's cases: each has its symptom, its deciding measurement decides, its fix fixes.

What a report suspects is ruled out by a measurement, which finds it where it is so.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from clinic import make_clinic
from clinic.answers import case_1 as answer_1
from clinic.answers import case_2 as answer_2
from clinic.answers import case_3 as answer_3
from clinic.case_1 import slim
from clinic.case_2 import train_two
from clinic.case_3 import keep_one

import npydata


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    build = tmp_path_factory.mktemp("build")
    make_clinic.main(build)
    return build / "clinic"


# Case 1

NAMES = ("embedding", "query", "key", "head", "value")


def test_1_spans_are_longer_than_what_was_copied_of_them(evidence):
    folder = evidence / "case_1"
    lines = (folder / "log.txt").read_text().splitlines()
    assert [line[:10] for line in lines if "EOFError" in line] == ["value[8:16", "value[24:3"]
    assert lines[-1].endswith("704 floats expected, the file has 0")
    found = answer_1.spanned_and_kept(folder)
    assert found["value"] == (12_032, 4_096)
    short = {name for name, (spanned, kept) in found.items() if spanned > kept}
    assert short == {"query", "key", "value"}
    original = torch.load(folder / "model.pt")
    for name in ("query", "key"):  # these are wrong without an error
        assert not np.array_equal(slim.read_rows(folder, name, 24, 32), original[name][24:])


def test_1_the_fixed_copy_has_every_row(evidence, tmp_path):
    model = evidence / "case_1" / "model.pt"
    answer_1.fixed_slim(model, NAMES, tmp_path)
    for name, tensor in torch.load(model).items():
        assert np.array_equal(slim.read_rows(tmp_path, name, 0, len(tensor)), tensor)


def test_1_neither_is_the_file_cut_off_nor_the_index_wrong_nor_the_checkpoint(evidence, tmp_path):
    folder, model = evidence / "case_1", evidence / "case_1" / "model.pt"
    assert answer_1.missing_at_the_end(folder) == 0
    assert answer_1.begins_right(folder, model)
    with npydata.open_checkpoint(model) as tensors:
        assert torch.equal(tensors.get_slice("value")[24:32], torch.load(model)["value"][24:32])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data, index = tmp_path / "data.bin", tmp_path / "index.json"
    data.write_bytes(data.read_bytes()[:-100])
    assert answer_1.missing_at_the_end(tmp_path) == 100
    shifted = json.loads(index.read_text())
    shifted["value"]["begin"] += 4
    index.write_text(json.dumps(shifted))
    assert not answer_1.begins_right(tmp_path, model)


# Case 2


def test_2_ranks_were_given_the_same_documents_and_what_was_missed_was_not_learnt(evidence):
    folder = evidence / "case_2"
    orders = [
        [np.loadtxt(folder / f"given_epoch_{epoch}_rank_{rank}.txt", dtype=int) for rank in (0, 1)]
        for epoch in (0, 1)
    ]
    for ranks in orders:
        never, _, twice = answer_2.summary(*ranks)  # as many as there are: none was cut off
        assert 48 <= never == twice <= 80
        assert [answer_2.summary(rank) for rank in ranks] == [[128, 128]] * 2  # none drawn twice
    assert not np.array_equal(orders[0][0], orders[1][0])
    losses = [np.loadtxt(folder / f"loss_after_epoch_{epoch}.txt") for epoch in (0, 1)]
    untouched = [int((abs(loss - math.log(train_two.CLASSES)) < 1e-3).sum()) for loss in losses]
    assert untouched[0] == answer_2.summary(*orders[0])[0]
    assert 0 < untouched[1] < untouched[0]


def test_2_with_one_seed_every_document_is_given_once(tmp_path):
    data, table = train_two.make_data(tmp_path), train_two.Table()
    given = train_two.train_epoch(table, answer_2.fixed_loaders(data))
    assert answer_2.summary(*given) == [0, 256]


# Case 3


def journal_of(save):
    journal = keep_one.Journal(answer_3.disk_with_step_100())
    save(journal, 200, keep_one.parts_of(200))
    return journal.lines


def test_3_a_file_got_its_name_before_its_bytes_and_was_empty_after_the_power_cut(evidence):
    folder = evidence / "case_3"
    found = (folder / "after_the_power_cut.txt").read_text().splitlines()
    assert {line.split(".")[0] for line in found} == {"step_200"}
    assert {"step_200.moments_0: 0 bytes", "step_200.moments_1: 24 bytes"} <= {*found}
    journal = (folder / "journal.txt").read_text().splitlines()
    assert journal == journal_of(keep_one.save)
    assert answer_3.renamed_unsynced(journal) == ["step_200.moments_0"]
    assert answer_3.cut_short(keep_one.save) == ["step_200.moments_0"]
    assert len({frozenset(files) for files in answer_3.after_a_power_cut(keep_one.save)}) == 1
    calls = [line.split("(")[0] for line in journal]
    assert calls.index("rename") < calls.index("fsync_folder") < calls.index("remove")


def test_3_kills_and_unequal_files_never_show_it_and_the_fixed_save_loses_nothing():
    killed, cut = answer_3.after_each_call(keep_one.save)
    assert set(killed) == {100, 200}
    assert None in set().union(*cut)
    _, cut = answer_3.after_each_call(keep_one.save, answer_3.random_parts)
    assert set().union(*cut) == {100, 200}
    killed, cut = answer_3.after_each_call(answer_3.fixed_save)
    assert set(killed) == set().union(*cut) == {100, 200}
    assert answer_3.renamed_unsynced(journal_of(answer_3.fixed_save)) == []
