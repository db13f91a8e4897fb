"""What shares elements in a file does so in memory, and of a large storage a small part is read."""

import copy
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from checkpoint_files import legacy_file, ordered_dict, program, storage, tensor

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
    assert storages_of(ours) == storages_of(theirs)
    with torch.no_grad():
        ours["a"].fill_(-7), theirs["a"].fill_(-7)
    for name in state:
        assert torch.equal(ours[name], theirs[name]), name


def storages_of(state):
    """Return the number of each tensor's storage: of different ones, no copy knows they share."""
    numbers = {}
    places = [tensor.untyped_storage()._cdata for tensor in state.values()]
    return [numbers.setdefault(place, len(numbers)) for place in places]


@pytest.mark.parametrize("swapped", [False, True])
def test_tensors_read_one_by_one_stay_tied_when_they_are_copied(tmp_path, swapped):
    torch.save({"a": SQUARE, "b": SQUARE.t()}, path := tmp_path / "a.pt")
    path = swapped_file(path) if swapped else path
    read = copy.deepcopy(dict(open_checkpoint(path)))
    read["a"].fill_(-7)
    assert torch.equal(read["b"], torch.full((10, 10), -7.0))


def test_a_storage_lives_as_long_as_a_tensor_in_it(tmp_path):
    torch.save({"a": SQUARE, "b": SQUARE.t()}, path := tmp_path / "a.pt")
    with open_checkpoint(path) as checkpoint:
        first = checkpoint["a"].fill_(-7)
        second = checkpoint["b"]
        del first
        assert checkpoint["a"][0, 0] == -7
        del second
        assert torch.equal(checkpoint["a"], SQUARE)


VIEWS = {"all": None, "v": ("v", 2, 4), "again": ("v", 2, 4), "w": ("w", 0, 5), "none": ("n", 3, 0),
         "x": ("x", 0, 1), "y": ("y", 4, 1)}  # fmt: skip
"""Views of a storage of six elements, as files from before 2018 have them: key, first, how many."""


NAMES = ["all v", "v w", "v again", "w", "none v", "x y"]


def file_of_views(path, names):
    def seen(view):
        count, first = (5, 1) if view is None else (view[2], 0)
        return tensor(storage("0", 6, "FloatStorage", "cpu", view), first, (count,), (1,))

    items = ordered_dict({name: seen(VIEWS[name]) for name in names})
    return legacy_file(path, program(items), [("0", 6, BASE[1:7].numpy().tobytes())])


@pytest.mark.parametrize("way", ["load", "one by one"])
def test_a_view_of_a_storage_stays_when_another_tensor_moves(tmp_path, way):
    checkpoint = open_checkpoint(file_of_views(tmp_path / "a.pt", ["all", "v"]))
    ours = checkpoint.load() if way == "load" else dict(checkpoint)
    ours["all"].share_memory_().fill_(-7)
    assert ours["v"].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("way", ["load", "one by one", "into"])
def test_views_of_a_storage_share_its_memory_as_in_torch(tmp_path, names, way):
    path, names = file_of_views(tmp_path / "a.pt", names.split()), names.split()
    checkpoint, theirs = open_checkpoint(path), torch.load(path)
    ours = dict(checkpoint) if way == "one by one" else checkpoint.load()
    if way == "into":
        checkpoint.load(into=ours)
    for name in names:
        assert torch.equal(ours[name], theirs[name])
    assert storages_of(ours) == storages_of(theirs)
    for one in ours, theirs:
        one[names[-1]].fill_(-7)
    for name in names:
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
    "with a size of 1": (LARGE[:21].view(3, 7).t()[:, None, :1],),
}


@pytest.mark.parametrize("kind", SMALL)
def test_of_a_large_storage_a_small_part_is_read(tmp_path, kind):
    torch.save(dict(zip("ab", SMALL[kind], strict=False)), path := tmp_path / "a.pt")
    theirs = torch.load(path)
    for name, one in open_checkpoint(path).load().items():
        assert one.untyped_storage().nbytes() < LARGE.nbytes // 2
        assert (one.shape, one.stride()) == (theirs[name].shape, theirs[name].stride())


@pytest.mark.parametrize(("spans", "overlap", "nbytes"), [
    ([], False, 0), ([(0, 9), (9, 12), (4, 4)], False, 12), ([(0, 9), (5, 5), (5, 9)], True, 9),
    ([(0, 9), (0, 4)], True, 9), ([(0, 9), (0, 9)], True, 9), ([(3, 5), (20, 22)], False, 4),
    ([(5, 5)], False, 0), ([(0, 4), (2, 6), (5, 8)], True, 8),
])  # fmt: skip
def test_ranges_overlap_where_they_have_a_byte_in_common(spans, overlap, nbytes):
    for some in (spans, spans[::-1]):
        assert do_overlap(some) is overlap
        assert covered(some) == nbytes
