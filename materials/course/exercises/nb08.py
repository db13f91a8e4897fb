"""Lesson 08: a save that survives kills and power cuts, first on a toy disk, then in a folder."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from course.grading.exercise import Exercise
from course.lesson import defined, solution
from course.play.nb08 import film, in_a_word, left_on, make_root, saver_of
from course.play.toy_disk import NAME, NEW, OLD, ToyDisk

GIVEN = defined("08")

# The toy disk


def disk_seen(answer, end):
    """Observe what a kill, or a power cut, at any step may leave."""
    disk, found = ToyDisk({NAME: OLD}), []
    disk.did = lambda _: found.extend(left_on(disk, end))
    answer(disk, NEW)
    now = left_on(disk, end)
    return {
        f"after a {end} at any step loads": in_a_word(found + now),
        "some step leaves no `checkpoint`": any(NAME not in files for files in found),
        "after the return loads": in_a_word(now),
        "other files left": len(set(disk.seen()) - {NAME}),
    }


SAVE_UNSYNCED = Exercise(
    solution("08", "save_unsynced"),
    [("kill",)],
    disk_seen,
    """
    disk.write("checkpoint.new", content) >> disk.write("checkpoint", content); disk.write("checkpoint.new", content) | You open `checkpoint` itself: the old one is gone before the new one is there.
    disk.rename("checkpoint.new", "checkpoint") >> pass | The new one never gets the name that a reader looks for.
    disk.rename( >> disk.rename("checkpoint", "old"); disk.rename( | Between two renames nothing has the name.
    disk.rename("checkpoint.new", "checkpoint") >> disk.write("checkpoint", content) | You write `checkpoint` a second time: a kill in the middle leaves half of it.
    """,
    show=lambda _: "save_unsynced(disk, new)  # the disk has an old checkpoint",
)


SAVE_COMMITTED = Exercise(
    solution("08", "save_committed"),
    [("power cut",)],
    disk_seen,
    """
    disk.fsync("checkpoint.new") >> pass | The name may reach the disk before the bytes do.
    disk.fsync_folder() >> pass | The rename may be lost: nothing has made the new name durable.
    disk.fsync("checkpoint.new") >> disk.rename("checkpoint.new", "checkpoint"); disk.fsync("checkpoint"); disk.fsync_folder(); return | You sync the bytes when they already have their good name.
    """,
    show=lambda _: "save_committed(disk, new)  # the disk has an old checkpoint",
)

# A folder


def root_text(made):
    return ", ".join(made.split()).replace("!", " (damaged)") or "nothing"


def latest_seen(answer, made, latest):
    with TemporaryDirectory() as folder:
        make_root(Path(folder), made, latest)
        # a folder lists its names in any order: here in one that isn't the order of the commits
        with patch.object(Path, "iterdir", lambda root: iter(sorted(root.glob("*")))):
            found = answer(Path(folder))
        return Path(found.name) if isinstance(found, Path) else found


LATEST_IN = Exercise(
    solution("08", "latest_in"),
    [
        ("", None),
        ("a", "a"),
        ("b a", None),
        ("a b", "a"),
        ("a b!", "b"),
        ("a b!", None),
        ("a", "gone"),
        ("b!", "b"),
        ("a b c!", "c"),
    ],
    latest_seen,
    """
    None and is_complete(named) >> None | `latest` may name a checkpoint that is damaged or gone; whole ones lie beside it.
    named is not None and is_complete(named) >> False | Somebody wrote an older name into `latest`, to go back: you pass it over.
    filter(is_complete, committed(root)) >> iter(committed(root)) | The newest may be damaged: nobody has looked at its sizes yet.
    next(filter(is_complete, committed(root)), None) >> None | Without a good `latest` you give up, although whole checkpoints are there.
    next(filter(is_complete, committed(root)), None) >> ([None] + [*filter(is_complete, root.iterdir())])[-1] | The last name in a folder need not be that of the newest.
    named is not None and >> | Without a file `latest` there is no folder to look at.
    """,
    show=lambda made, latest: (
        f"latest_in(root)  # committed, in this order: {root_text(made)}; "
        + ("no file `latest`" if latest is None else f"`latest` names {latest}")
    ),
)


def removed_seen(answer, made, keep_last, newest):
    """Observe what is removed where another process is about to commit `other`."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        make_root(root, made)
        shutil.copytree(root / newest, root / "other.tmp")
        with patch("shutil.rmtree", wraps=shutil.rmtree) as rmtree:
            answer(root, keep_last, root / newest)
        left = sorted(path.name for path in root.iterdir())
    emptied = sorted(Path(call.args[0]).name for call in rmtree.mock_calls)
    return {"left": ", ".join(left), "emptied, under this name": emptied}


REMOVE_OLD = Exercise(
    solution("08", "remove_old"),
    [
        ("a b", 1, "b"),
        ("a b", 0, "b"),
        ("a b c", 2, "c"),
        ("a b c! d", 2, "d"),
        ("a b! c", 1, "c"),
        ("a b c d", 1, "b"),
        ("c b a", 5, "a"),
    ],
    removed_seen,
    """
    if is_complete(folder)] >> ] | You count damaged checkpoints among those that stay, and remove them, too.
    whole[keep_last:] >> whole[keep_last + 1 :] | One too many stays: the newest is among those you keep.
    whole[keep_last:] >> whole[:keep_last] | You remove the newest and keep the old.
    folder != newest >> True | The one just saved may stand further down, when another process saved after it.
    remove_checkpoint(folder) >> shutil.rmtree(folder) | While its files go one by one, a reader meets half a checkpoint under its good name.
    whole[keep_last:] >> [one for one in committed(root)[keep_last:] if one in whole] | Damaged checkpoints take the places of good ones that should stay.
    """,
    show=lambda made, keep_last, newest: (
        f"remove_old(root, {keep_last}, {newest})  # committed, in this order: {root_text(made)}"
    ),
)


# The commit


def commit_seen(answer, keep_last, first):
    """Observe what may load after a power cut at any call, and what is there after the return."""
    save, _ = saver_of(answer, None, keep_last)
    before, load = saver_of(SOLUTION.define(), GIVEN["latest_in"])
    before = (lambda *_: None) if first else before
    lacks = set()

    def noted(root):
        new = root / "step-20"
        lacks.add(new.exists() and not GIVEN["is_complete"](new))
        return load(root)

    _, cuts = film(save, noted, before=before)
    with TemporaryDirectory() as folder:
        before(10, Path(folder))
        save(20, Path(folder))
        left = sorted(path.name for path in Path(folder).iterdir())
    return {
        "a power cut at any call leaves": sorted(set(cuts.values())),
        "a power cut after the return leaves": cuts["   (returned)"],
        "the new folder may lack files": True in lacks,
        "`latest` comes first": "latest.tmp" in "".join(cuts).rpartition("step-20.tmp")[0],
        "in the root": ", ".join(left),
    }


SOLUTION = solution("08", "commit")
COMMIT = Exercise(
    SOLUTION,
    [(None, False), (0, False), (1, True)],
    commit_seen,
    """
    write_manifest(temporary, root) >> pass | Without a manifest no reader takes it for a checkpoint.
    sync_folder(temporary) >> pass | The names inside the new folder aren't durable when it gets its own.
    sync_folder(root) >> pass | The new name isn't durable when you return.
    temporary.rename(folder) >> name_latest(folder); temporary.rename(folder) | `latest` names a folder that isn't there yet.
    name_latest(folder) >> pass | `latest` still names the checkpoint before, and that one loads.
    remove_old(root, keep_last, folder) >> pass | Nothing is removed, though keep_last isn't None.
    name_latest(folder) >> name_latest(folder); keep_last is None or remove_old(root, keep_last, folder) | You remove the old one before the new one is durable.
    name_latest(folder) >> sync_folder(root); name_latest(folder); keep_last is None or remove_old(root, keep_last, folder); return | `latest` isn't durable when you return: sync the root.
    """,
    show=lambda keep_last, first: (
        f"commit(temporary, folder, keep_last={keep_last})"
        f"  # {'a first save' if first else 'step 10 is there, you commit step 20'}"
    ),
)
