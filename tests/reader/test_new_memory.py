"""New memory for what is read whole: where it lies, and what is dropped of it is given back."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from npydata import open_checkpoint
from npydata.reader import parallel_read
from npydata.reader.archive import Extent
from npydata.reader.files import SMALL_BYTES, OpenFile
from npydata.reader.new_memory import new_memory
from npydata.reader.private_memory import MAPS, PAGE
from npydata.system.huge_pages import HUGE_PAGE

MIB = 1 << 20


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    return OpenFile(tmp_path / "f")


def distances(reads):
    """Return how far each lies from the first in memory, less how far it does in the file."""
    first = reads[0]
    return [read.target.ctypes.data - first.target.ctypes.data - (read.offset - first.offset)
            for read in reads]  # fmt: skip


def made_for(file, places):
    """Return the reads into new memory for ranges (offset, nbytes) of a file, in its order."""
    reads = new_memory(Extent(file, *one) for one in places)
    return sorted(reads, key=lambda one: (one.offset, one.target.nbytes))


APART = {
    "overlapping": [(4096, MIB), (4096 + MIB - 8, MIB), (4096 + 2 * MIB - 16, MIB)],
    "far from each other": [(0, MIB), (MIB + MIB // 16, MIB), (2 * MIB + MIB // 8, MIB)],
    "not aligned in the file": [(0, MIB), (MIB + 4, MIB), (2 * MIB + 12, MIB)],
    "less than a huge page": [(0, HUGE_PAGE // 2), (HUGE_PAGE // 2, HUGE_PAGE // 4)],
    "small": [(0, MIB), (MIB, SMALL_BYTES - 8), (MIB + SMALL_BYTES, MIB)],
    "huge pages": [(0, 2 * MIB), (2 * MIB, 2 * MIB)],
}


@pytest.mark.parametrize("kind", APART)
def test_each_has_memory_of_its_own(file, kind):
    reads = made_for(file, APART[kind])
    assert [(one.offset, one.target.nbytes) for one in reads] == sorted(APART[kind])
    assert any(distances(reads))
    for k, one in enumerate(reads):
        one.target[:] = k
    assert all((one.target == k).all() for k, one in enumerate(reads))
    assert all(one.target.ctypes.data % 8 == 0 for one in reads)


def test_neighbours_in_a_file_are_neighbours_in_memory_and_lie_in_pages_as_there(file):
    places = [(72, MIB), (72 + MIB, MIB + 8), (80 + 2 * MIB, 100), (192 + 2 * MIB, MIB)]
    reads = made_for(file, places)
    together = [read for read in reads if read.target.nbytes > 100]
    assert not any(distances(together))
    assert all((read.target.ctypes.data - read.offset) % PAGE == 0 for read in together)


@pytest.mark.parametrize("nbytes", [SMALL_BYTES, MIB, 15 * MIB // 8])
def test_what_stays_together_is_little(file, nbytes):
    reads = made_for(file, [(k * nbytes, nbytes) for k in range(64)])
    moved = distances(reads)
    most = max(moved.count(one) for one in moved)
    assert 1 < most <= 4 * MIB // nbytes


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list maps")
def test_very_many_large_ones_take_few_maps(file):
    """A process can have some 65,000; nothing here is touched."""
    before = len(MAPS.read_text().splitlines())
    reads = made_for(file, [(k * 3 * MIB, 3 * MIB) for k in range(40_000)])
    assert len(MAPS.read_text().splitlines()) - before < 10_000
    assert all((read.target.ctypes.data - read.offset) % PAGE == 0 for read in reads)


def test_what_is_asked_for_twice_is_there_once(file):
    assert len(new_memory([Extent(file, 0, 100), Extent(file, 0, 100), Extent(file, 0, 50)])) == 2


def test_of_files_none_lies_in_the_memory_of_another(tmp_path):
    files = []
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
        files.append(OpenFile(tmp_path / name))
    reads = new_memory(Extent(file, k * MIB, MIB) for k in range(4) for file in files)
    for k, one in enumerate(reads):
        one.target[:] = k
    assert all((one.target == k).all() for k, one in enumerate(reads))


def resident_kib():
    fields = Path("/proc/self/smaps_rollup").read_text().split()
    return int(fields[fields.index("Anonymous:") + 1])


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="counts there")
@pytest.mark.parametrize("copied", [True, False])
def test_what_is_dropped_of_a_load_is_given_back_while_the_rest_stays(
    tmp_path, monkeypatch, copied
):
    state = {f"t{k}": torch.full((1 << 18,), float(k)) for k in range(64)}
    save_file(state, tmp_path / "a.safetensors")
    del state
    monkeypatch.setattr(parallel_read, "is_copied", lambda _: copied)
    gc.collect()
    before = resident_kib()
    loaded = open_checkpoint(tmp_path / "a.safetensors").load()
    assert resident_kib() - before >= 64 << 10
    kept = {name: loaded.pop(name) for name in ("t0", "t1", "t2", "t63")}
    loaded.clear()
    assert resident_kib() - before < 24 << 10
    assert all((one == float(name[1:])).all() for name, one in kept.items())
    assert all(one.untyped_storage().nbytes() == MIB for one in kept.values())
    kept.clear()
    assert resident_kib() - before < 12 << 10
