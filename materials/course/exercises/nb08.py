"""Lesson 08: a save that survives kills and power cuts, first on a toy disk, then in a folder."""

from pathlib import Path
from tempfile import TemporaryDirectory

from course.grading.exercise import Exercise
from course.lesson import defined, solution
from course.play.nb08 import film, in_a_word, make_root, saver_of
from course.play.toy_disk import NAME, NEW, OLD, ToyDisk

GIVEN = defined("08")

# The toy disk


def disk_seen(answer):
    """Observe what a power cut at any step may leave."""
    disk, found = ToyDisk({NAME: OLD}), []
    disk.did = lambda _: found.extend(disk.power_cuts())
    answer(disk, NEW)
    left = list(disk.power_cuts())
    return {
        "after a power cut at any step loads": in_a_word(found + left),
        "after the return loads": in_a_word(left),
        "other files left": len(set(disk.seen()) - {NAME}),
    }


SAVE_COMMITTED = Exercise(
    solution("08", "save_committed"),
    [()],
    disk_seen,
    """
    disk.fsync("checkpoint.new") >> pass | The name may reach the disk before the bytes do.
    disk.fsync_folder() >> pass | The rename may be lost: nothing has made the new name durable.
    disk.fsync("checkpoint.new") >> disk.rename("checkpoint.new", "checkpoint"); disk.fsync("checkpoint"); disk.fsync_folder(); return | You sync the bytes when they already have their good name.
    """,
    show=lambda: "save_committed(disk, new)  # the disk has an old checkpoint",
)

# A folder


def root_text(made):
    return ", ".join(made.split()).replace("!", " (damaged)") or "nothing"


def latest_seen(answer, made, latest):
    with TemporaryDirectory() as folder:
        make_root(Path(folder), made, latest)
        found = answer(Path(folder))
        return found if found is None else getattr(found, "name", found)


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


# The commit


def commit_seen(answer, keep_last, first):
    """Observe what may load after a power cut at any call, and what is there after the return."""
    save, _, _ = saver_of(answer, None, keep_last)
    _, before, load = saver_of(SOLUTION.define(), GIVEN["latest_in"])
    before = (lambda root: None) if first else before
    lacks = set()

    def noted(root):
        new = root / "step-20"
        lacks.add(new.exists() and not GIVEN["is_complete"](new))
        return load(root)

    _, cuts = film(save, before, noted)
    with TemporaryDirectory() as folder:
        before(Path(folder))
        save(Path(folder))
        left = sorted(path.name for path in Path(folder).iterdir())
    return {
        "a power cut at any call leaves": sorted(set(cuts.values())),
        "a power cut after the return leaves": cuts["   (returned)"],
        "the new folder may lack files": True in lacks,
        "in the root": ", ".join(left),
    }


SOLUTION = solution("08", "commit")
UNNAMED = SOLUTION.define(SOLUTION.source.replace("name_latest(folder)", "pass"))
COMMIT = Exercise(
    SOLUTION,
    [(None, False), (1, False), (1, True)],
    commit_seen,
    """
    write_manifest(temporary, root) >> pass | Without a manifest no reader takes it for a checkpoint.
    sync_folder(temporary) >> pass | The names inside the new folder aren't durable when it gets its own.
    sync_folder(root) >> pass | The new name isn't durable when you return.
    name_latest(folder) >> pass | `latest` still names the checkpoint before, and that one loads.
    remove_old(root, keep_last, folder) >> pass | Nothing is ever removed.
    name_latest(folder) >> name_latest(folder); keep_last is None or remove_old(root, keep_last, folder) | You remove the old one before the new one is durable.
    """,
    others={
        "`latest` is written after your last sync.": lambda *given: (
            UNNAMED(*given) or GIVEN["name_latest"](given[1])
        )
    },
    show=lambda keep_last, first: (
        f"commit(temporary, folder, keep_last={keep_last})"
        f"  # {'a first save' if first else 'step 10 is there, you commit step 20'}"
    ),
)
