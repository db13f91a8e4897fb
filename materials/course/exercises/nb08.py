"""Lesson 08: a save that survives kills and power cuts, first on a toy disk, then in a folder."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from course.grading.exercise import Exercise
from course.lesson import defined, solution
from course.play.power import ends, left_by_power_cuts
from course.play.toy_disk import NAME, NEW, OLD, ToyDisk

GIVEN = defined("08")

# The toy disk


def on_disk(files: Mapping[str, bytes]) -> str:
    """Return what is there under the name of the checkpoint, in a word."""
    content = files.get(NAME)
    words = {OLD: "the old one", NEW: "the new one", None: "none", b"": "an empty file"}
    return words.get(content, "half a file")


def disk_seen(answer: Any, cut: bool, first: bool) -> dict[str, Any]:
    """Observe what a kill, or a power cut, at any step may leave."""
    disk = ToyDisk({} if first else {NAME: OLD})
    found: set[str] = set()

    def note(_: str) -> None:
        found.update(map(on_disk, disk.power_cuts()) if cut else {on_disk(disk.seen())})

    disk.did = note
    answer(disk, NEW)
    note("")
    end = sorted(set(map(on_disk, disk.power_cuts()))) if cut else on_disk(disk.seen())
    return {
        f"a {'power cut' if cut else 'kill'} at any step leaves": sorted(found),
        "after the return": end,
        "other files left": sorted(set(disk.seen()) - {NAME}),
    }


def disk_text(name: str, cut: bool, first: bool) -> str:
    return f"{name}(disk, new)  # {'a first save' if first else 'the disk has an old checkpoint'}"


SAVE_UNSYNCED = Exercise(
    solution("08", "save_unsynced"),
    [(False, False), (False, True)],
    disk_seen,
    """
    disk.write("checkpoint.new", content) >> disk.write("checkpoint", content); disk.write("checkpoint.new", content) | You open `checkpoint` itself: the old one is gone before the new one is there.
    disk.rename("checkpoint.new", "checkpoint") >> pass | The new one never gets the name that a reader looks for.
    disk.rename("checkpoint.new", "checkpoint") >> disk.write("checkpoint", content) | You write `checkpoint` a second time: a kill in the middle leaves half of it.
    "checkpoint.new", "checkpoint" >> "checkpoint", "checkpoint.new" | You rename the old one away: then there is nothing under its name.
    """,
    show=lambda *case: disk_text("save_unsynced", *case),
)


def syncs_late(disk: ToyDisk, content: bytes) -> None:
    disk.write("checkpoint.new", content)
    disk.rename("checkpoint.new", NAME)
    disk.fsync(NAME)
    disk.fsync_folder()


SAVE_COMMITTED = Exercise(
    solution("08", "save_committed"),
    [(True, False), (True, True)],
    disk_seen,
    """
    disk.fsync("checkpoint.new") >> pass | The name may reach the disk before the bytes do.
    disk.fsync_folder() >> pass | The rename may be lost: nothing has made the new name durable.
    """,
    others={"You sync the bytes when they already have their good name.": syncs_late},
    show=lambda *case: disk_text("save_committed", *case),
)

# A folder


def make_root(root: Path, made: tuple[tuple[str, str], ...], latest: str | None = None) -> None:
    """Commit checkpoints in this order, as "whole" or "damaged" ones; then write `latest`."""
    for name, how in made:
        temporary = root / f"{name}.tmp"
        temporary.mkdir()
        (temporary / "model").write_text(name)
        GIVEN["write_manifest"](temporary, root)
        temporary.rename(root / name)
        if how == "damaged":
            (root / name / "model").write_text("")
    if latest is not None:
        (root / "latest").write_text(latest)


def root_text(made: tuple[tuple[str, str], ...]) -> str:
    words = [name + " (damaged)" * (how == "damaged") for name, how in made]
    return ", ".join(words) or "nothing"


def latest_seen(answer: Any, made: Any, latest: str | None) -> Any:
    with TemporaryDirectory() as folder:
        make_root(Path(folder), made, latest)
        found = answer(Path(folder))
        return found if found is None else getattr(found, "name", found)


A, B, C, D = (("a", "whole"), ("b", "whole"), ("c", "whole"), ("d", "whole"))
BAD_B, BAD_C, BAD_D = (("b", "damaged"), ("c", "damaged"), ("d", "damaged"))

LATEST_IN = Exercise(
    solution("08", "latest_in"),
    [
        ((), None),
        ((A,), "a"),
        ((B, A), None),
        ((A, B), "a"),
        ((A, BAD_B), "b"),
        ((A, BAD_B), None),
        ((A,), "gone"),
        ((BAD_B,), "b"),
        ((A, B, BAD_C), "c"),
    ],
    latest_seen,
    """
    named is not None and is_complete(named) >> named is not None | `latest` may name a checkpoint that is damaged or gone; whole ones lie beside it.
    named is not None and is_complete(named) >> False | Somebody wrote an older name into `latest`, to go back: you pass it over.
    next(filter(is_complete, committed(root)), None) >> next(iter(committed(root)), None) | The newest may be damaged: nobody has looked at its sizes yet.
    return next(filter(is_complete, committed(root)), None) >> return None | Without a good `latest` you give up, although whole checkpoints are there.
    next(filter(is_complete, committed(root)), None) >> next(filter(is_complete, reversed(committed(root))), None) | That is the oldest one.
    named is not None and >> | Without a file `latest` there is no folder to look at.
    """,
    show=lambda made, latest: (
        f"latest_in(root)  # committed, in this order: {root_text(made)}; "
        + ("no file `latest`" if latest is None else f"`latest` names {latest}")
    ),
)


def removed_seen(answer: Any, made: Any, keep_last: int, newest: str) -> dict[str, Any]:
    emptied: list[str] = []
    real = shutil.rmtree

    def rmtree(folder: Any, *given: Any, **options: Any) -> None:
        emptied.extend([Path(folder).name] * (Path(folder).suffix != ".tmp"))
        real(folder, *given, **options)

    with TemporaryDirectory() as folder:
        root = Path(folder)
        make_root(root, made)
        with patch("shutil.rmtree", rmtree):
            answer(root, keep_last, root / newest)
        left = sorted(path.name for path in root.iterdir())
    return {"left": left, "emptied under its good name": sorted(emptied)}


REMOVE_OLD = Exercise(
    solution("08", "remove_old"),
    [
        ((A,), 1, "a"),
        ((A, B), 1, "b"),
        ((A, B, C), 2, "c"),
        ((A, B, BAD_C, D), 2, "d"),
        ((A, BAD_B, C), 1, "c"),
        ((A, B, C), 1, "b"),
        ((A, B, C), 5, "c"),
        ((C, B, A), 1, "a"),
    ],
    removed_seen,
    """
    if is_complete(folder)] >> ] | You count damaged checkpoints among those that stay, and remove them, too.
    whole[keep_last:] >> whole[keep_last + 1 :] | One too many stays: the newest is among those you keep.
    whole[keep_last:] >> whole[:keep_last] | You remove the newest and keep the old.
    whole[keep_last:] >> whole[:-keep_last] | Those at the end of the list are the oldest: you keep them.
    if folder != newest: >> if True: | The one just saved may stand further down, when another process saved after it.
    remove_checkpoint(folder) >> shutil.rmtree(folder) | While its files go one by one, a reader meets half a checkpoint under its good name.
    """,
    show=lambda made, keep_last, newest: (
        f"remove_old(root, {keep_last}, newest={newest})"
        f"  # committed, in this order: {root_text(made)}"
    ),
)


# The commit


def commit_seen(answer: Any, keep_last: int | None, first: bool) -> dict[str, Any]:
    """Observe what may load after a kill or a power cut at any call, and after the return."""

    def save(root: Path, step: str) -> None:
        temporary = root / f"{step}.tmp"
        temporary.mkdir()
        GIVEN["write_small"](temporary / "model", step.encode())
        commit = GIVEN["commit"] if step == "old" else answer
        commit(temporary, root / step, keep_last)

    def load(root: Path) -> str:
        found, new = GIVEN["latest_in"](root), root / "new"
        lacks.add(new.exists() and not GIVEN["is_complete"](new))
        if found is None:
            return "nothing"
        whole = (found / "model").read_text() == found.name
        return f"the {found.name} one" if whole else "a damaged one"

    def before(root: Path) -> None:
        if not first:
            save(root, "old")

    lacks: set[bool] = set()
    cuts = ends(left_by_power_cuts(lambda root: save(root, "new"), before), load)
    with TemporaryDirectory() as folder:
        before(Path(folder))
        save(Path(folder), "new")
        left = sorted(path.name for path in Path(folder).iterdir())
        manifest = GIVEN["read_manifest"](Path(folder, "new")) or {"files": {}}
    return {
        "a power cut at any call leaves": sorted(
            {w for c in cuts.values() for w in c.split(" or ")}
        ),
        "a power cut after the return leaves": cuts["   (returned)"],
        "the new folder may lack files": True in lacks,
        "in the root": left,
        "in the manifest": sorted(manifest["files"]),
    }


def removes_first(temporary: Path, folder: Path, keep_last: int | None = None) -> None:
    g = GIVEN
    g["write_manifest"](temporary, folder.parent)
    g["sync_folder"](temporary)
    temporary.rename(folder)
    g["name_latest"](folder)
    if keep_last is not None:
        g["remove_old"](folder.parent, keep_last, folder)
    g["sync_folder"](folder.parent)


COMMIT = Exercise(
    solution("08", "commit"),
    [(None, False), (1, False), (1, True)],
    commit_seen,
    """
    write_manifest(temporary, root) >> pass | Without a manifest no reader takes it for a checkpoint.
    sync_folder(temporary) >> pass | The names inside the new folder aren't durable when it gets its own.
    sync_folder(root) >> pass | The new name isn't durable when you return.
    name_latest(folder) >> pass | `latest` still names the checkpoint before, and that one loads.
    remove_old(root, keep_last, folder) >> pass | Nothing is ever removed.
    """,
    others={
        "You remove the old one before the new one is durable.": removes_first,
    },
    show=lambda keep_last, first: (
        f"commit(temporary, folder, keep_last={keep_last})"
        f"  # {'a first save' if first else 'the root has an old checkpoint'}"
    ),
)
