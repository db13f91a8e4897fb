"""Masks of packed rows: a row's losses are those of its documents alone."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from token_builders import write, write_documents

from npydata import PackedDataset

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import masks


def test_the_losses_of_a_row_are_those_of_its_documents_alone(tmp_path):
    lengths = np.random.default_rng(3).integers(1, 40, 60)
    batch = PackedDataset(write_documents(tmp_path / "a.ds", lengths), 64).fetch(range(8))
    torch.manual_seed(0)
    model = masks.TinyModel(int(batch.inputs.max()) + 1, 64).double()
    packed = masks.losses(
        model(batch.inputs, batch.position_ids, masks.document_mask(batch.document_ids)),
        batch.targets,
    ).reshape(-1)
    bounds = batch.cu_seqlens.tolist()
    flat = [part.reshape(-1) for part in (batch.inputs, batch.position_ids, batch.targets)]
    for begin, end in pairwise(bounds):
        x, positions, y = (part[None, begin:end] for part in flat)
        alone = masks.losses(
            model(x, positions, torch.ones(end - begin, end - begin, dtype=torch.bool).tril()), y
        )
        torch.testing.assert_close(packed[begin:end], alone[0], rtol=1e-13, atol=1e-13)


def test_both_masks_give_the_same_and_none_does_not(tmp_path, monkeypatch, capsys):
    path = write_documents(tmp_path / "a.ds", [20, 30, 7, 50])
    monkeypatch.setattr(sys, "argv", ["masks.py", str(path), "--seq-len", "64"])
    masks.main()
    plain, flex, none = (line.split()[0] for line in capsys.readouterr().out.splitlines())
    assert float(plain) == pytest.approx(float(flex), rel=1e-4)
    assert float(plain) != pytest.approx(float(none), rel=1e-4)


def test_a_file_that_does_not_say_where_documents_end_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["masks.py", str(write(tmp_path / "a.npy"))])
    with pytest.raises(SystemExit):
        masks.main()
    assert "expected eot_id=" in capsys.readouterr().err.splitlines()[-1]
