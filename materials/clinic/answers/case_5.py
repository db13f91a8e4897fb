"""Answers to case 5. Do your own ten minutes first: `case_5.md` beside this file has the words."""

import json
import zlib

from clinic.case_5.keep_one import PARTS, durably, newest, parts_of
from tutorial.toy_disk import ToyDisk


def renamed_unsynced(journal):
    """Files that got their name before their bytes were synced."""
    calls = [line.rstrip(")").split("(") for line in journal]
    synced, found = set(), []
    for call, arguments in calls:
        if call == "fsync":
            synced.add(arguments)
        if call == "rename" and arguments.split(", ")[0] not in synced:
            found.append(arguments.split(", ")[1])
    return found


def removed_before_the_names(journal):
    """Whether an old file is removed while a new name is not synced yet."""
    pending = False
    for line in journal:
        call = line.split("(")[0]
        pending = {"rename": True, "fsync_folder": False}.get(call, pending)
        if call == "remove" and pending:
            return True
    return False


def names_after_a_power_cut(save):
    """The sets of names that a power cut may leave; one set: no name is at the disk's mercy."""
    return {frozenset(files) for files in after_a_power_cut(save)}


def cut_short(save):
    """Files of which a power cut may leave other bytes than were written."""
    outcomes = after_a_power_cut(save)
    return sorted({n for files in outcomes for n in files if len({f.get(n) for f in outcomes}) > 1})


def after_a_power_cut(save):
    """All that a power cut may leave once `save` of step 200 has returned."""
    disk = disk_with_step_100()
    save(disk, 200, parts_of(200))
    return list(disk.power_cuts())


def after_each_call(save):
    """For every step of the disk while step 200 is saved: what loads if the process dies, and all
    that may load if the power fails."""
    disk, killed, cut = disk_with_step_100(), [], []
    disk.did = lambda step: (
        killed.append(newest(disk.seen())),
        cut.append({newest(files) for files in disk.power_cuts()}),
    )
    save(disk, 200, parts_of(200))
    return killed, cut


def disk_with_step_100():
    """A disk on which step 100 is durable."""
    disk = ToyDisk()
    mended_save(disk, 100, parts_of(100))
    return disk


def mended_save(disk, step, parts):
    """As `save`, but the manifest is synced before it gets its name, like everything else."""
    older = [name for name in disk.seen() if not name.startswith(f"step_{step}.")]
    for part in PARTS:
        durably(disk, f"step_{step}.{part}", parts[part])
    manifest = {part: [len(parts[part]), zlib.crc32(parts[part])] for part in PARTS}
    durably(disk, f"step_{step}.manifest", json.dumps(manifest).encode())
    disk.fsync_folder()
    for name in sorted(older, key=lambda one: not one.endswith(".manifest")):
        disk.remove(name)
    disk.fsync_folder()
