"""What torch saves is shown as torch loads it; ``test_attacks`` asks the same of hostile files."""

import io
import struct
import tarfile

import pytest
import torch
from agreement import answer
from checkpoint_files import TarTensor, tar_file, tar_members, zip_file
from children import answers
from fuzz import is_explained, saved_values
from pickle_code import (
    EMPTY_ARRAY,
    build,
    call,
    dict_of,
    numpy_dtype,
    persistent,
    program,
    short_string,
    value,
)

IN_PARTS = {"nested", "meta"}
"""Kinds of tensors of which only the plain tensors in them can be read."""


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_each_kind_of_value_that_torch_saves_is_shown_as_it_was(tmp_path, zipped):
    paths = []
    for title, one in saved_values().items():
        paths.append(tmp_path / f"{title}.pt")
        torch.save(one, paths[-1], _use_new_zipfile_serialization=zipped)
    for path, one in zip(paths, answers("agreement", "answer", paths), strict=True):
        in_parts = path.stem in IN_PARTS and one["end"] == "refused"
        assert one["end"] == "agree" or is_explained(one) or in_parts, (path, one)


def with_fractions_of_seconds(path, members):
    """Write a tar file as ``torch.save`` did: the times are in headers of their own."""
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as file:
        for member in members:
            header = tarfile.TarInfo(member.name)
            header.size, header.mtime, header.uid = len(member.data), 1480000000.123456, 1 << 22
            file.addfile(header, io.BytesIO(member.data))
    return path


@pytest.mark.parametrize("write", [tar_file, with_fractions_of_seconds])
def test_a_view_of_a_view_is_counted_from_the_view(tmp_path, write):
    """As torch reads it: element 1 of the elements from 2 on."""
    members = tar_members(
        program(persistent("30", python=2)),
        [(10, "FloatStorage", 4, struct.pack("<4f", 0, 1, 2, 3))],
        [TarTensor(key=30, storage=12, size=(1,), stride=(1,))],
        views=[(11, 10, 2, 2), (12, 11, 1, 1)],
    )
    assert answer(write(tmp_path / "a.tar", members))["end"] == "agree"


@pytest.mark.parametrize("content", [bytes(8), b"-\0\0\0\0\0\0\0"])
def test_numbers_of_numpy_that_python_2_wrote_are_read(tmp_path, content):
    """Its bytes come as text where they are UTF-8, as those of zeros are."""
    dtype, raw = numpy_dtype("i8"), short_string(content)
    best = call("numpy._core.multiarray.scalar", dtype, raw)
    history = build(EMPTY_ARRAY, (1, (1,), dtype, False, raw))
    pairs = value("best") + best + value("history") + history
    path = zip_file(tmp_path / "a.pt", program(dict_of(pairs)), {})
    assert answer(path)["end"] == "agree"
