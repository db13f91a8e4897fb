"""Power cuts without root: a save is filmed, and every disk it may leave is looked at."""

import random
import shutil

import pytest
from faults.power_cuts import final, power_cuts, written_out
from faults.protocols import PROTOCOLS

pytestmark = pytest.mark.timeout(280)
CONTROLS = ("new folders, old ones go", "a token file")


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


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=list(PROTOCOLS))
@pytest.mark.parametrize(
    "most, count", [(20, 30), pytest.param(1500, 10**9, marks=pytest.mark.nightly)]
)
def test_no_power_cut_loses_anything(protocol, memory_folder, record_property, most, count):
    film, disk = filmed(protocol, memory_folder)
    assert final(film) == files_of(disk), "the film does not show all that was done"
    cuts = part_of(power_cuts(film, most), count)
    lost = losses(protocol, cuts, memory_folder)
    record_property("replayed power cuts", len(cuts))
    record_property("lost", len(lost))
    assert lost == []


@pytest.mark.filterwarnings("ignore:.*none of its")
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
