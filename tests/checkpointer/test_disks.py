"""Real disks: full ones, and ones whose power is cut."""

import errno
import itertools
import os
import random
import sys
import threading
from contextlib import suppress

import pytest
from children import run_child
from faults.children import Child
from faults.disks import PowerSupply, cannot_cut_power, cannot_mount, ext4, tmpfs
from faults.saving import holds, save_step, saved, saves_again, unfinished

from npydata import AsyncCheckpointer

pytestmark = pytest.mark.timeout(120)
MEGA = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A file system of 8 MiB that is as good as empty."""
    if why := cannot_mount():
        pytest.skip(why)
    where = tmp_path / "disk"
    if request.param == "tmpfs":
        with tmpfs(where, "8m") as root:
            yield root
    else:
        with ext4(where, 8 * MEGA, tmp_path / "disk.img") as root:
            yield root


def fill_up(disk, leave):
    """Take all but so many bytes of a disk."""
    with open(disk / "ballast", "wb", buffering=0) as file:
        for size in (65536, 4096):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        file.truncate(max(file.tell() - leave, 0))


@pytest.mark.parametrize("elements", [400_000, 2_000_000])
def test_a_full_disk_is_told_with_the_path_and_costs_nothing(disk, elements):
    root = disk / "run"
    saved(root / "a", 1)
    fill_up(disk, 200_000)
    keeper = AsyncCheckpointer(keep_last=2)
    for name in "ab":
        save_step(keeper, root / name, 2, elements)
        with pytest.raises(OSError, match=r"No space left.*run") as caught:
            keeper.wait()
        assert caught.value.errno == errno.ENOSPC
        keeper.wait()
        assert holds(root, 1, ["a"]) == 1
        assert unfinished(root) == []
    (disk / "ballast").unlink()
    save_step(keeper, root / "b", 3, 400_000)
    keeper.wait()
    assert holds(root, 3, ["a"]) == 3
    saves_again(root, "a", 4)


def test_a_disk_with_any_number_of_bytes_left_keeps_what_it_had(disk):
    root = disk / "run"
    saved(root / "a", 1)
    codes = set()
    for leave in range(0, 160_000, 8192):
        fill_up(disk, leave)
        try:
            saved(root / "b", 2, keep_last=2)
        except OSError as error:
            codes.add((error.errno, str(root) in str(error)))
        holds(root, 1, ["a"])
        (disk / "ballast").unlink()
    assert codes == {(errno.ENOSPC, True)}
    saves_again(root, "b", 3)


def test_a_write_past_the_limit_on_file_sizes_is_reported(tmp_path):
    """The kernel makes a short write up to the limit, then refuses."""
    child = run_child(
        """
import resource, sys
from faults.saving import holds, saved
saved(sys.argv[1] + "/a", 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
from npydata import AsyncCheckpointer
from faults.saving import save_step
keeper = AsyncCheckpointer()
save_step(keeper, sys.argv[1] + "/a", 2, 1_000_000)
try:
    keeper.wait()
except OSError as error:
    print(error)
holds(sys.argv[1], 1, ["a"])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
save_step(keeper, sys.argv[1] + "/a", 3, 1_000_000)
keeper.wait()
assert holds(sys.argv[1], 3) == 3
""",
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    assert "File too large" in child.stdout
    assert "model.safetensors" in child.stdout


def save_for_ever(report, root, first):
    keeper = AsyncCheckpointer(keep_last=2)
    for step in itertools.count(first):
        name = f"step{step}" if step % 3 == 0 else f"reused{step % 2}"
        save_step(keeper, root / name, step)
        keeper.wait()
        report(step)


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


def test_3_power_cuts_lose_nothing_that_was_confirmed(tmp_path, record_property):
    record_property("power cuts of a disk", 3)
    assert survivors(tmp_path, 3, save_for_ever, 0) == [True] * 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_60_power_cuts_lose_nothing_that_was_confirmed(tmp_path, record_property):
    record_property("power cuts of a disk", 60)
    assert survivors(tmp_path, 60, save_for_ever, 1) == [True] * 60


@pytest.mark.nightly
def test_power_cuts_take_what_was_never_synced(tmp_path):
    """The control: were nothing lost here, the tests above would prove nothing."""
    assert True not in survivors(tmp_path, 5, save_for_ever_unsynced, 2)
