"""Answers to case 3. Do your own ten minutes first: `case_3.md` beside this file has the words."""

from functools import partial

from clinic.case_3.keep_one import Batch, newest, parts_of, save
from course.play.toy_disk import ToyDisk


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


def cut_short(save):
    """Files of which a power cut may leave other bytes than were written."""
    outcomes = after_a_power_cut(save)
    return sorted({n for files in outcomes for n in files if len({f.get(n) for f in outcomes}) > 1})


def after_a_power_cut(save):
    """All that a power cut may leave once `save` of step 200 has returned."""
    disk = disk_with_step_100()
    save(disk, 200, parts_of(200))
    return list(disk.power_cuts())


def after_each_call(save, parts=parts_of):
    """For every step of the disk while step 200 is saved: what loads if the process dies, and all
    that may load if the power fails."""
    disk, killed, cut = disk_with_step_100(), [], []
    disk.did = lambda step: (
        killed.append(newest(disk.seen())),
        cut.append({newest(files) for files in disk.power_cuts()}),
    )
    save(disk, 200, parts(200))
    return killed, cut


def disk_with_step_100():
    """A disk on which step 100 is durable."""
    disk = ToyDisk()
    fixed_save(disk, 100, parts_of(100))
    return disk


class EveryFile(Batch):
    """Syncs every file, also one whose bytes another one has."""

    def sync(self):
        for name in self.checksums:
            self.disk.fsync(f"{name}.new")


fixed_save = partial(save, batch=EveryFile)


def random_parts(step):
    """Files of which no two are equal, as the tests of the report had them."""
    return {name: f"{name} {step}".encode() for name in parts_of(step)}
