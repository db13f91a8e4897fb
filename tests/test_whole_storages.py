"""What shares elements in a file does so in memory, and of a large storage a small part is read."""

from zipfile import ZipFile

import numpy as np
import pytest
import torch

from npydata import open_checkpoint
from npydata.reader.whole_storages import covered, do_overlap

BASE = torch.arange(10_000.0)
SQUARE = BASE[:100].view(10, 10)
COMPLEX = torch.arange(10_000.0).to(torch.complex64)
SHARING = {
    "turned": (SQUARE, SQUARE.t()),
    "turned twice": (SQUARE.t(), SQUARE.t()),
    "flat": (SQUARE, BASE[:100]),
    "every other twice": (BASE[0:100:2], BASE[0:100:2]),
    "the same": (SQUARE, SQUARE),
    "a parameter": (SQUARE, torch.nn.Parameter(SQUARE)),
    "a leaf": (SQUARE, SQUARE.detach().requires_grad_()),
    "conjugates": (COMPLEX[:10].conj(), COMPLEX[:10].conj()),
    "a conjugate": (COMPLEX[:10].conj(), COMPLEX[:10]),
    "a part": (BASE[500:510], BASE[505:515]),
    "behind nothing": (BASE[500:510], BASE[505:505], BASE[505:515]),
    "whole": (BASE, BASE[3:]),
}


@pytest.mark.parametrize(("kind", "swapped"), [
    (kind, swapped) for kind in SHARING for swapped in (False, True)
    if not swapped or "conjugate" not in kind  # torch turns the bytes of those in another way
])  # fmt: skip
def test_a_write_to_one_shows_in_the_others_as_in_torch(tmp_path, kind, swapped):
    state = dict(zip("abc", SHARING[kind], strict=False))
    torch.save(state, path := tmp_path / "a.pt")
    if swapped:
        path = swapped_file(path)
    ours, theirs = open_checkpoint(path).load(), torch.load(path)
    for name in state:
        assert torch.equal(ours[name], theirs[name])
        assert ours[name].requires_grad == theirs[name].requires_grad
        assert type(ours[name]) is type(theirs[name])
    with torch.no_grad():
        ours["a"].fill_(-7), theirs["a"].fill_(-7)
    for name in state:
        assert torch.equal(ours[name], theirs[name]), name


def swapped_file(path):
    """Return a copy of a file whose numbers have the other order of bytes."""
    with ZipFile(path) as old, ZipFile(path.with_name("b.pt"), "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("byteorder"):
                content = b"big"
            if "/data/" in name:
                content = np.frombuffer(content, "<f4").astype(">f4").tobytes()
            new.writestr(name, content)
    return path.with_name("b.pt")


LARGE = torch.zeros(1 << 20)
SMALL = {
    "under two names": (LARGE[: 1 << 18], LARGE[: 1 << 18]),
    "seen many times": (LARGE[:1].expand(1 << 20),),
    "at both ends": (LARGE[:10], LARGE[-10:]),
}


@pytest.mark.parametrize("kind", SMALL)
def test_of_a_large_storage_a_small_part_is_read(tmp_path, kind):
    torch.save(dict(zip("ab", SMALL[kind], strict=False)), path := tmp_path / "a.pt")
    for one in open_checkpoint(path).load().values():
        assert one.untyped_storage().nbytes() < LARGE.nbytes // 2


@pytest.mark.parametrize(("spans", "overlap", "nbytes"), [
    ([], False, 0), ([(0, 9), (9, 12), (4, 4)], False, 12), ([(0, 9), (5, 5), (5, 9)], True, 9),
    ([(0, 9), (0, 4)], True, 9), ([(0, 9), (0, 9)], True, 9), ([(3, 5), (20, 22)], False, 4),
    ([(5, 5)], False, 0), ([(0, 4), (2, 6), (5, 8)], True, 8),
])  # fmt: skip
def test_ranges_overlap_where_they_have_a_byte_in_common(spans, overlap, nbytes):
    for some in (spans, spans[::-1]):
        assert do_overlap(some) is overlap
        assert covered(some) == nbytes
