"""Power cuts without root: a save is filmed, and every disk it may leave is looked at."""

import random
import re
import shutil

import pytest
from children import run_child
from faults.film import frames
from faults.power_cuts import final, power_cuts, written_out
from faults.protocols import PROTOCOLS
from faults.tools import cannot_trace

pytestmark = pytest.mark.timeout(280)
CONTROLS = ("new folders, old ones go", "a small file")


@pytest.fixture(params=PROTOCOLS.values(), ids=list(PROTOCOLS))
def protocol(request):
    return request.param


def filmed(protocol, folder, unsynced=None):
    """Film a protocol on a new disk; return the film, and the disk."""
    disk, film = folder / "disk", folder / "film"
    disk.mkdir()
    protocol.prepare(disk)
    protocol.film(disk, film, unsynced)
    return film, disk


def losses(protocol, cuts, folder, each=50):
    """Return what was lost in each of these power cuts; after every ``each``, save again."""
    lost = []
    for number, (files, confirmed) in enumerate(cuts):
        left = folder / "left"
        left.mkdir()
        written_out(files, left)
        try:
            protocol.check(left, confirmed)
            if number % each == 0:
                protocol.go_on(left)
        except Exception as error:
            lost.append(f"{type(error).__name__}: {error}; {confirmed} was confirmed")
        shutil.rmtree(left)
    return lost


def part_of(cuts, count):
    """Return a seeded sample of power cuts."""
    cuts = list(cuts)
    return random.Random(0).sample(cuts, min(count, len(cuts)))


def test_a_sample_of_all_power_cuts_loses_nothing(protocol, memory_folder, record_property):
    film, disk = filmed(protocol, memory_folder)
    assert final(film) == files_of(disk), "the film does not show all that was done"
    cuts = part_of(power_cuts(film, most=20), 30)
    record_property("replayed power cuts", len(cuts))
    assert losses(protocol, cuts, memory_folder) == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_power_cut_loses_anything(protocol, memory_folder, record_property):
    film, _ = filmed(protocol, memory_folder)
    cuts = list(power_cuts(film, most=1500))
    lost = losses(protocol, cuts, memory_folder)
    record_property("replayed power cuts", len(cuts))
    record_property("lost", len(lost))
    assert lost == []


@pytest.mark.parametrize("unsynced", ["file", "folder"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in CONTROLS else pytest.mark.nightly)
        for name in PROTOCOLS
    ],
)
def test_a_save_that_syncs_no_file_or_no_folder_loses(name, unsynced, memory_folder):
    """The control: were nothing lost here, the tests above would prove nothing."""
    film, _ = filmed(PROTOCOLS[name], memory_folder, unsynced)
    cuts = part_of(power_cuts(film, most=20), 60)
    assert losses(PROTOCOLS[name], cuts, memory_folder, each=10**9)


def files_of(disk):
    """Return what a folder holds, by path."""
    paths = {path: f"{path.relative_to(disk)}" for path in disk.rglob("*")}
    return {
        name if path.is_file() else f"{name}/": path.read_bytes() if path.is_file() else None
        for path, name in paths.items()
    }


FILMED = """
import sys
from pathlib import Path
from faults.protocols import PROTOCOLS
PROTOCOLS[sys.argv[1]].film(Path(sys.argv[2]), Path(sys.argv[3]))
"""
TRACED = "open,openat,fsync,fdatasync,rename,renameat,renameat2,link,linkat,symlink,symlinkat,"
TRACED += "unlink,unlinkat,mkdir,mkdirat,rmdir"


@pytest.mark.nightly
def test_the_kernel_saw_the_calls_that_the_film_shows(tmp_path):
    if why := cannot_trace():
        pytest.skip(why)
    disk, film, trace = (tmp_path / name for name in ("disk", "film", "trace"))
    name = "new folders, old ones go"
    disk.mkdir()
    PROTOCOLS[name].prepare(disk)
    tracer = ["strace", "-f", "-y", "-o", trace, "-e", f"trace={TRACED}"]
    run_child(FILMED, name, disk, film, before=tracer)
    seen = list(filmed_steps(film))
    assert len(seen) > 40
    assert seen == list(traced_steps(trace.read_text(), str(disk)))


def filmed_steps(film):
    """Yield ``sync`` or ``names`` for each step of a film that is one of these."""
    before = None
    for kind, value in frames(film):
        if kind == "synced":
            yield "sync"
        elif kind == "looked":
            names = {one: held for one, held in value["inodes"].items() if isinstance(held, dict)}
            if before not in (None, names):
                yield "names"
            before = names


def traced_steps(trace, disk):
    """Yield the same for each call below a folder that succeeded."""
    for line in trace.splitlines():
        call = re.match(r"\d+ +(\w+)\(.* = \d", line)
        if call is None or disk not in line:
            continue
        if "sync" in call[1]:
            yield "sync"
        elif "open" not in call[1] or "O_CREAT" in line:
            yield "names"
