"""The clinic's cases: each has its symptom, what its answer measures decides, and its fix fixes."""

import re
import types
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from clinic import make_clinic
from clinic.case_1 import slim
from clinic.case_2 import train_two
from clinic.case_3 import keep_one
from pages import blocks

ANSWERS = Path(make_clinic.__file__).parent / "answers"
CASES = {1: slim, 2: train_two, 3: keep_one}


def page_of(case):
    return ANSWERS / f"case_{case}.md"


def measured(case, folder, monkeypatch):
    """What the answer's measurement prints in a folder of evidence."""
    (code,) = blocks(page_of(case))
    monkeypatch.chdir(folder)
    with redirect_stdout(StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()


def fixed(case):
    """A case's code with the changes of its answer."""
    source = Path(CASES[case].__file__).read_text(encoding="utf-8")
    (diff,) = blocks(page_of(case), "diff")
    for hunk in re.findall(r"(?:^-.*\n)+(?:^\+.*\n)+", diff, flags=re.M):
        old, new = ("".join(re.findall(rf"^\{sign}(.*\n)", hunk, flags=re.M)) for sign in "-+")
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType(f"fixed_{case}")
    exec(source, vars(module))
    return module


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    build = tmp_path_factory.mktemp("build")
    make_clinic.main(build)
    return build / "clinic"


@pytest.mark.parametrize("case", CASES)
def test_the_measurement_of_an_answer_prints_what_its_page_says(case, evidence, monkeypatch):
    assert blocks(page_of(case), "text") == [measured(case, evidence / f"case_{case}", monkeypatch)]


def test_1_the_last_rows_can_not_be_read_and_can_once_it_is_fixed(evidence, tmp_path, monkeypatch):
    assert (
        "value[24:32]: 704 floats expected, the file has 0"
        in (evidence / "case_1" / "log.txt").read_text()
    )
    fixed(1).reproduce(tmp_path)
    assert "EOFError" not in (tmp_path / "log.txt").read_text()
    for line in measured(1, tmp_path, monkeypatch).splitlines():
        _, span, copied = line.split()
        assert span == copied


def test_2_documents_that_no_rank_was_given_are_not_learnt_and_all_are_once_it_is_fixed(
    evidence, tmp_path, monkeypatch
):
    def untouched(folder):
        return int((np.loadtxt(folder / "loss_after_epoch_0.txt") == 2.773).sum())

    never = int(measured(2, evidence / "case_2", monkeypatch).split()[0])
    assert untouched(evidence / "case_2") == never > 48
    fixed(2).reproduce(tmp_path)
    assert untouched(tmp_path) == 0
    assert "twice: [256]" in measured(2, tmp_path, monkeypatch)


def test_3_no_checkpoint_is_left_and_always_one_is_once_it_is_fixed(
    evidence, tmp_path, monkeypatch
):
    found = (evidence / "case_3" / "after_the_power_cut.txt").read_text().splitlines()
    assert {"step_200.moments_0: 0 bytes", "step_200.moments_1: 24 bytes"} <= {*found}
    with suppress(StopIteration):  # of the power cuts after which none is valid
        fixed(3).reproduce(tmp_path)
        pytest.fail("a power cut leaves no valid checkpoint")
    assert measured(3, tmp_path, monkeypatch) == ""
