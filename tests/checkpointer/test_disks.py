"""Real disks: full ones, and ones whose power is cut."""

import errno
import os
import random
import sys
import threading
from contextlib import suppress

import pytest
from faults.children import Child
from faults.disks import PowerSupply, cannot_cut_power, cannot_mount, ext4
from faults.saving import holds, save_for_ever, save_step, saved, saves_again, unfinished

from npydata import AsyncCheckpointer

pytestmark = pytest.mark.timeout(120)
MEGA = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB that is as good as empty."""
    if why := cannot_mount():
        pytest.skip(why)
    with ext4(tmp_path / "disk", 8 * MEGA) as root:
        yield root


def fill_up(disk, leave):
    """Take all but so many bytes of a disk."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        for size in (65536, 4096):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        file.truncate(max(file.tell() - leave, 0))


def test_a_full_disk_is_told_with_the_path_and_costs_nothing(disk):
    """Whatever is left: nothing, room for some of the files, or for half of one."""
    root = disk / "run"
    saved(root / "a", 1)
    keeper = AsyncCheckpointer(keep_last=2)
    for leave in (*range(0, 160_000, 8192), 4 * MEGA):
        fill_up(disk, leave)
        for name in "ab":
            save_step(keeper, root / name, 2, 40_000 if leave < MEGA else 2_000_000)
            with pytest.raises(OSError, match=r"No space left.*run") as caught:
                keeper.wait()
            assert caught.value.errno == errno.ENOSPC
            keeper.wait()
            assert holds(root, 1, ["a"]) == 1
            assert unfinished(root) == []
        (disk / "ballast").unlink()
    save_step(keeper, root / "b", 3)
    keeper.wait()
    assert holds(root, 3, ["a"]) == 3
    saves_again(root, "a", 4)


def save_for_ever_unsynced(report, root, first):
    os.fsync = lambda descriptor: None
    save_for_ever(report, root, first)


def survivors(tmp_path, times, writer, seed):
    """Cut the power so many times; return for each cut whether the confirmed step was there."""
    if why := cannot_cut_power():
        pytest.skip(why)
    chance, pause, held = random.Random(seed), threading.Event(), []
    with PowerSupply(tmp_path).on() as power:
        root = power.disk / "deep" / "run"  # made by the first save
        child = Child(lambda report: writer(report, root, 1))
        try:
            for _ in range(times):
                confirmed = int(child.line())
                os.set_blocking(child._read, False)
                pause.wait(chance.random() * 0.3)
                while (line := next_line(child)) is not None:
                    confirmed = int(line)
                os.set_blocking(child._read, True)
                cut = power.cut()
                with power.after(cut) as after:
                    held.append(survived(after / "deep" / "run", confirmed))
        finally:
            child.kill()
            child.end()
            child.close()
    return held


def next_line(child):
    """Return a line that has come already, or ``None``."""
    try:
        return child.line()
    except BlockingIOError:
        return None


def survived(root, confirmed):
    """Whether a disk holds what was confirmed, and can be saved to again."""
    try:
        step = holds(root, confirmed)
    except Exception as error:
        print(f"lost: {error}", file=sys.stderr)
        return False
    saves_again(root, "reused0", step + 1, of_the_living=True)
    return True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [3, pytest.param(60, marks=pytest.mark.nightly)])
def test_power_cuts_lose_nothing_that_was_confirmed(tmp_path, record_property, times):
    record_property("power cuts of a disk", times)
    assert survivors(tmp_path, times, save_for_ever, times) == [True] * times


@pytest.mark.nightly
def test_power_cuts_take_what_was_never_synced(tmp_path):
    """The control: were nothing lost here, the tests above would prove nothing."""
    assert True not in survivors(tmp_path, 5, save_for_ever_unsynced, 2)
