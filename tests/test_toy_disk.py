"""The disk of notebook 07 that forgets, and the processes that are killed while they save."""

from itertools import permutations

import pytest
from tutorial import killed_writer, toy_disk
from tutorial.toy_disk import ACTIONS, NEW, OLD, RealDisk, ToyDisk


def save_in_place(disk, content):
    disk.write("checkpoint", content)


def save_committed(disk, content):
    disk.write("checkpoint.new", content)
    disk.fsync("checkpoint.new")
    disk.rename("checkpoint.new", "checkpoint")
    disk.fsync_folder()


@pytest.fixture
def disk():
    return ToyDisk({"a": b"old"})


def test_what_was_only_written_is_seen_and_not_kept(disk):
    disk.write("a", b"new")
    assert disk.seen() == {"a": b"new"}
    assert disk.power_cut() == {"a": b"old"}


def test_fsync_keeps_the_bytes_of_a_file_whose_name_is_kept(disk):
    disk.write("a", b"new")
    disk.fsync("a")
    assert disk.power_cut() == {"a": b"new"}


def test_a_new_name_is_kept_only_when_the_folder_was_synced(disk):
    disk.write("b", b"new")
    disk.fsync("b")
    assert "b" not in disk.power_cut()
    disk.fsync_folder()
    assert disk.power_cut() == {"a": b"old", "b": b"new"}


def test_a_rename_reaches_the_disk_whole_or_not_at_all(disk):
    disk.write("b", b"new")
    disk.fsync("b")
    disk.rename("b", "a")
    found = [files.get("a") for files in disk.power_cuts()]
    assert set(found) == {b"old", b"new"}


def test_the_name_of_a_file_may_reach_the_disk_before_its_bytes():
    disk = ToyDisk()
    disk.write("a", b"new!")
    assert {"a": b""} in disk.power_cuts()
    assert {} in disk.power_cuts()


def test_the_certain_outcome_is_one_of_the_possible_ones(disk):
    disk.write("b", b"new")
    disk.rename("b", "a")
    disk.write("c", b"third")
    disk.remove("c")
    assert disk.power_cut() in list(disk.power_cuts())


def test_a_real_folder_ends_like_what_programs_see_of_a_toy_disk(tmp_path):
    toy, real = ToyDisk({"checkpoint": OLD}), RealDisk(tmp_path)
    (tmp_path / "checkpoint").write_bytes(OLD)
    for disk in (toy, real):
        save_committed(disk, NEW)
        disk.write("more", b"")
        disk.remove("more")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == toy.seen()


def test_killed_writers_leave_what_the_step_says():
    assert list(toy_disk.after_kills(save_in_place).values()) == ["nothing", "nothing", "new"]
    assert list(toy_disk.after_kills(save_committed).values()) == ["old"] * 4 + ["new"] * 2


def test_a_power_cut_can_undo_a_write_in_place_but_not_a_commit():
    assert set(toy_disk.after_power_cuts(save_in_place).values()) == {"maybe nothing"}
    assert "maybe nothing" not in toy_disk.after_power_cuts(save_committed).values()


def test_only_one_order_of_the_actions_is_safe_and_ends_with_the_new_checkpoint():
    safe = [
        order
        for order in permutations(ACTIONS)
        if "nothing" not in "".join(toy_disk.play(*order)) and toy_disk.play(*order)[-1] == "new"
    ]
    assert safe == [ACTIONS]


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="none of the actions"):
        toy_disk.play("hope")


def test_the_library_killed_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path):
    ends = list(killed_writer.kill_everywhere(tmp_path).values())
    assert ends == sorted(ends)
    assert set(ends) == {1, 2}
