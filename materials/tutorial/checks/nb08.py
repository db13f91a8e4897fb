"""What lesson 08 lets the learner build, and the wrong answers that people give."""

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

from tutorial.building import Build
from tutorial.crashes import files_of
from tutorial.kept import CheckpointError
from tutorial.kept.checkpointer.commit import (
    LATEST,
    by_sequence,
    commit,
    committed,
    is_complete,
    latest_in,
    name_latest,
    named_latest,
    next_sequence,
    open_to_others,
    put_in_place,
    remove_checkpoint,
    remove_old,
    write_small,
)
from tutorial.kept.checkpointer.manifest import (
    MANIFEST,
    MODEL,
    PIECE_BYTES,
    FileEntry,
    check_sizes,
    checksums,
)
from tutorial.kept.system.atomic_write import sync_folder
from tutorial.killed_writer import shown
from tutorial.promised.checkpointer import (
    CARDS,  # noqa: F401
    PROMISES,  # noqa: F401
    names_in,
    run_of,
)
from tutorial.toy_disk import NAME, NEW, OLD, ToyDisk, loads

PART = "checkpointer"


def library():
    """The part's module as it is while nothing is the learner's."""
    from tutorial import keeping, lessons  # they import this module

    return keeping.load(lessons.PARTS[PART], {})


# On the toy disk


def survived(answer, first, power):
    """What may load at any moment of a save to the toy disk, and at its end."""
    disk, kills, cuts = ToyDisk({} if first else {NAME: OLD}), set(), set()
    steps = []

    def look(step):
        steps.append(step)
        kills.add(loads(disk.seen()))
        cuts.update(map(loads, disk.power_cuts()))

    disk.did = look
    answer(disk, NEW)
    seen = {"a kill leaves": sorted(kills), "at the end there loads": loads(disk.seen())}
    if power:
        after = sorted(set(map(loads, disk.power_cuts())))
        seen |= {"a power cut leaves": sorted(cuts), "a power cut after it leaves": after}
    else:
        seen |= {"the disk is asked to sync": any("synced" in step for step in steps)}
    return seen | {"files": len(disk.names)}


def shown_save(name, power, case):
    was = "an empty disk" if case[0] else "a disk that has the old checkpoint"
    return f"{name}(disk, content)  # {was}; {'the power fails' if power else 'a kill'}"


def acts(*names):
    """A save that does these, in this order."""

    def save(disk, content):
        does = {
            "write": lambda: disk.write("new", content),
            "in place": lambda: disk.write(NAME, content),
            "remove": lambda: NAME in disk.names and disk.remove(NAME),
            "rename": lambda: disk.rename("new", NAME),
            "rename back": lambda: disk.rename(NAME, "new"),
            "set aside": lambda: disk.rename(NAME, "old"),
            "sync": lambda: disk.fsync("new" if "new" in disk.names else NAME),
            "sync folder": disk.fsync_folder,
        }
        for name in names:
            does[name]()

    return save


def save_unsynced(disk, content):
    disk.write("checkpoint.new", content)
    disk.rename("checkpoint.new", "checkpoint")


def save_committed(disk, content):
    disk.write("checkpoint.new", content)
    disk.fsync("checkpoint.new")
    disk.rename("checkpoint.new", "checkpoint")
    disk.fsync_folder()


SAVE_UNSYNCED = Build(
    name="save_unsynced",
    reference=save_unsynced,
    kept=False,
    cases=[(False, False), (True, False)],
    observe=survived,
    show=partial(shown_save, "save_unsynced", False),
    wrong={
        "You write over the only checkpoint: half-way, neither the old nor the new is there.": (
            acts("in place")
        ),
        "The new file never gets the name that a reader looks for.": acts("write"),
        "A rename takes the place of the old file. Removing it first leaves a moment with none.": (
            acts("write", "remove", "rename")
        ),
        "You write the new file, and then the old one's place as well.": acts("write", "in place"),
        "You take the name away from the old file: the first argument is the name that goes.": (
            acts("write", "rename back")
        ),
        "You set the old one aside first: until the new one is there, nothing has the name.": (
            acts("set aside", "in place")
        ),
        "You set the old one aside, and for a moment no file has the name.": (
            acts("write", "set aside", "rename")
        ),
        "You sync as well. That is section 2: leave it out, and see there what it is for.": acts(
            "write", "sync", "rename", "sync folder"
        ),
    },
)

SAVE_COMMITTED = Build(
    name="save_committed",
    reference=save_committed,
    kept=False,
    cases=[(False, True), (True, True)],
    observe=survived,
    show=partial(shown_save, "save_committed", True),
    wrong={
        "Nothing is on the disk for sure: neither the bytes nor the name.": acts("write", "rename"),
        "The name may be on the disk without its bytes.": acts("write", "rename", "sync folder"),
        "When you return, the new name is not on the disk for sure.": (
            acts("write", "sync", "rename")
        ),
        "The bytes are synced too late: the name had its moment without them.": (
            acts("write", "rename", "sync", "sync folder")
        ),
        "You write over the only checkpoint.": acts("in place", "sync", "sync folder"),
        "The new file never gets the name that a reader looks for.": (
            acts("write", "sync", "sync folder")
        ),
    },
)


# A folder's names


def synced(answer, fails):
    """What was synced, and what is left open."""
    with TemporaryDirectory() as name:
        folder, calls = Path(name).resolve() / "run", []
        folder.mkdir()
        (folder / "a").touch()

        def fsync(descriptor):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
            known = {folder: "the folder", folder.parent: "the one above", folder / "a": "a file"}
            calls.append(known.get(path, "something else"))
            if fails:
                raise failure

        failure = OSError("the disk fails")
        before, end = len(os.listdir("/proc/self/fd")), "nothing"
        everything = patch("os.sync", lambda: calls.append("every disk"))
        with patch("os.fsync", fsync), patch("os.fdatasync", fsync), everything:
            try:
                answer(folder)
            except OSError as error:
                said = f"{type(error).__name__}: {error.strerror}"
                end = "the disk's error" if error is failure else said
        left = len(os.listdir("/proc/self/fd")) - before
        return {"synced": calls, "left open": left, "raised": end}


def sync_as(folder, sync=True, close=True, always=True, where=lambda folder: folder):
    descriptor = os.open(where(folder), os.O_RDONLY)
    try:
        if sync:
            os.fsync(descriptor)
    except OSError:
        close = close and always
        raise
    finally:
        if close:
            os.close(descriptor)


def puts_it_under_with(folder):
    with os.open(folder, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def closes_after_an_error(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        raise


def hides_the_error(folder):
    try:
        sync_folder(folder)
    except OSError:
        return


SYNC_FOLDER = Build(
    name="sync_folder",
    reference=sync_folder,
    cases=[(False,), (True,)],
    observe=synced,
    show=lambda case: f"sync_folder(folder){'  # and the disk fails' if case[0] else ''}",
    wrong={
        "You never ask the disk: `os.fsync` does, with the descriptor.": partial(
            sync_as, sync=False
        ),
        "What is opened must be closed: a long run has no descriptors left.": partial(
            sync_as, close=False
        ),
        "When the disk fails, the descriptor stays open.": partial(sync_as, always=False),
        "You sync the folder above: that keeps other names.": partial(
            sync_as, where=lambda folder: folder.parent
        ),
        "You sync a file in it: that keeps its bytes, and no name.": partial(
            sync_as, where=lambda folder: folder / "a"
        ),
        "You catch the disk's error, and nobody hears that nothing was saved.": hides_the_error,
        "A descriptor is a number: `with` has nothing to close.": puts_it_under_with,
        "A path is no descriptor, and `open` takes no folder.": (lambda folder: os.fsync(folder)),
        "`open` and `os.fdopen` make files of descriptors; a folder's is synced as it is.": (
            lambda folder: os.fdopen(os.open(folder, os.O_RDONLY))
        ),
        "You close it only when the disk fails.": closes_after_an_error,
        "`os.sync` is for every file of every program: it may take minutes, and hides errors.": (
            lambda folder: os.sync()
        ),
    },
)


# The manifest


def sums_as(content, piece_bytes=PIECE_BYTES, begins=None, running=False, cut=False):
    crc32, sums = 0, []
    for begin in range(0, len(content), piece_bytes):
        piece = content[begin : begin + piece_bytes]
        if cut and len(piece) < piece_bytes:
            continue
        crc32 = zlib.crc32(piece, crc32 if running else 0)
        sums.append(crc32)
    return tuple(sums)


def sums_seen(answer, content, piece_bytes):
    """The checksums; a list of them, or a generator, is told from a tuple."""
    found = answer(content, piece_bytes)
    kinds = {list: "a list", Iterator: "a generator"}
    kind = next((name for kind, name in kinds.items() if isinstance(found, kind)), None)
    return f"{kind}: {list(found)}" if kind else found


CHECKSUMS = Build(
    name="checksums",
    reference=checksums,
    observe=sums_seen,
    cases=[(b"", 4), (b"abc", 4), (b"abcdefgh", 4), (b"abcdefghi", 4), (b"abcdabcd", 4)],
    wrong={
        "One sum of all the content: a reader should know which piece is damaged.": (
            lambda content, piece_bytes=PIECE_BYTES: (zlib.crc32(content),)
        ),
        "The last piece may be shorter, and counts too.": partial(sums_as, cut=True),
        "Each piece is summed for itself, not on top of those before.": partial(
            sums_as, running=True
        ),
        "You fill the last piece up: its sum is of the bytes that are there.": (
            lambda content, piece_bytes=PIECE_BYTES: sums_as(
                content + bytes(-len(content) % piece_bytes), piece_bytes
            )
        ),
        "A sum of each byte is as long as four of the content.": (
            lambda content, piece_bytes=PIECE_BYTES: sums_as(content, 1)
        ),
        "The sums are right, and come in a list: who gets it could change it.": (
            lambda content, piece_bytes=PIECE_BYTES: list(sums_as(content, piece_bytes))
        ),
        "The sums are right, and come in a generator: whoever looks twice finds none.": (
            lambda content, piece_bytes=PIECE_BYTES: iter(sums_as(content, piece_bytes))
        ),
        "Where the content ends with a piece, no other one follows.": (
            lambda content, piece_bytes=PIECE_BYTES: tuple(
                zlib.crc32(content[begin : begin + piece_bytes])
                for begin in range(0, len(content) + 1, piece_bytes)
            )
        ),
        "Each slice ends with its own piece; yours end with the first.": (
            lambda content, piece_bytes=PIECE_BYTES: tuple(
                zlib.crc32(content[begin:piece_bytes])
                for begin in range(0, len(content), piece_bytes)
            )
        ),
        "A piece is bytes side by side; `[::step]` takes one here and one there.": (
            lambda content, piece_bytes=PIECE_BYTES: tuple(
                zlib.crc32(content[begin::piece_bytes]) for begin in range(piece_bytes)
            )
        ),
        "The sums alone are asked for: their order says where each piece begins.": (
            lambda content, piece_bytes=PIECE_BYTES: tuple(enumerate(sums_as(content, piece_bytes)))
        ),
    },
)


def sizes_seen(answer, there, listed):
    """What is said of a folder with these files: their lengths, or what else bears the name."""
    manifest = SimpleNamespace(files={name: FileEntry(size, ()) for name, size in listed.items()})
    with TemporaryDirectory() as name:
        folder, elsewhere = Path(name) / "step_1", Path(name) / "elsewhere"
        folder.mkdir()
        elsewhere.write_bytes(bytes(5))
        for one, size in there.items():
            if size == "link":
                (folder / one).symlink_to(elsewhere)
            elif size == "folder":
                (folder / one).mkdir()
            else:
                (folder / one).write_bytes(bytes(size))
        try:
            answer(folder, manifest)
        except CheckpointError as error:
            bad = [one for one in listed if there.get(one) != listed[one]]
            return {
                "raised": "CheckpointError",
                "names its path": bool(bad) and str(folder / bad[0]) in str(error),
            }
        except OSError as error:
            return {"raised": type(error).__name__}
    return {"raised": "nothing"}


def check_as(folder, manifest, wrong=lambda size, expected: size != expected, link=True, say=True):
    for name, entry in manifest.files.items():
        path = folder / name
        if (link and path.is_symlink()) or not path.is_file():
            raise CheckpointError(f"{path}: is no file" if say else "incomplete")
        if wrong(path.stat().st_size, entry.size):
            raise CheckpointError(f"{path}: has another size" if say else "incomplete")


def skips_what_is_missing(folder, manifest):
    there = {name: one for name, one in manifest.files.items() if (folder / name).is_file()}
    check_as(folder, SimpleNamespace(files=there))


def looks_at_one(folder, manifest):
    first = dict(list(manifest.files.items())[:1])
    check_as(folder, SimpleNamespace(files=first))


def says_whether(folder, manifest):
    try:
        check_as(folder, manifest)
    except CheckpointError:
        return False
    return True


def looks_at_what_is_there(folder, manifest):
    there = {path.name for path in folder.iterdir()}
    files = {name: one for name, one in manifest.files.items() if name in there}
    check_as(folder, SimpleNamespace(files=files))


def raises_another(folder, manifest):
    try:
        check_as(folder, manifest)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def asks_the_size_first(folder, manifest):
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size
        if (folder / name).is_symlink() or not (folder / name).is_file() or size != entry.size:
            raise CheckpointError(f"{folder / name}: is not what was written")


def refuses_others(folder, manifest):
    for path in sorted(folder.iterdir()):
        if path.name not in manifest.files:
            raise CheckpointError(f"{path}: is not in the manifest")
    check_as(folder, manifest)


def lets_stat_raise(folder, manifest):
    for name, entry in manifest.files.items():
        if (folder / name).stat().st_size != entry.size:
            raise CheckpointError(f"{folder / name}: has another size")


CHECK_SIZES = Build(
    name="check_sizes",
    reference=check_sizes,
    cases=[
        ({"a": 5}, {"a": 5}),
        ({}, {"a": 5}),
        ({"a": 4}, {"a": 5}),
        ({"a": 6}, {"a": 5}),
        ({"a": "link"}, {"a": 5}),
        ({"a": "folder"}, {"a": 5}),
        ({"a": 5, "b": 1}, {"a": 5, "b": 2}),
        ({"a": 5, "notes": 3}, {"a": 5}),
    ],
    observe=sizes_seen,
    show=lambda case: f"check_sizes(folder, manifest)  # has {case[0]}, the manifest {case[1]}",
    wrong={
        "You return whether it is right, and nobody looks at that: raise where it isn't.": (
            says_whether
        ),
        "`stat` raises where nothing is there: ask first whether there is a file.": (
            asks_the_size_first
        ),
        "A file that is missing is the first thing to refuse.": skips_what_is_missing,
        "A missing file ends in a FileNotFoundError; who catches waits for a CheckpointError.": (
            lets_stat_raise
        ),
        "A file that is too long is not what was written, either.": partial(
            check_as, wrong=lambda size, expected: size < expected
        ),
        "You look at the first file only.": looks_at_one,
        "A link is no file of ours: what it leads to may change or go.": partial(
            check_as, link=False
        ),
        "The message should name the file by its path: many folders have a file of that name.": (
            partial(check_as, say=False)
        ),
        "You look at the files that are there; the one that is missing is none of them.": (
            looks_at_what_is_there
        ),
        "Who loads a checkpoint catches a CheckpointError, and no ValueError.": raises_another,
        "Another file may lie there: a note of yours is no damage.": refuses_others,
        "An entry is more than a number: compare its `size`.": partial(
            check_as, wrong=lambda size, expected: True
        ),
    },
)


# The commit

WORDS = {"fsync manifest.json": "the manifest is synced",
         "fsync the temporary folder": "the temporary folder is synced",
         "rename the temporary folder": "the folder gets its name",
         "fsync the root": "the root is synced",
         "replace latest (new)": "latest names it",
         "rename step_1": "step 1 is removed"}  # fmt: skip


ORDER = ("the manifest is synced", "the temporary folder is synced", "the folder gets its name",
         "the root is synced", "latest names it", "step 1 is removed")  # fmt: skip


def commit_seen(answer, keep_last, again=False):
    """Where a commit leaves the order, and what it leaves on the disk."""
    order, held, mine = [], [], library()
    mine.commit = answer

    def noted(name):
        call = getattr(os, name)

        def wrapper(*args, **options):
            said = WORDS.get(f"{name} {shown(args[0])}")
            if name == "rename" and shown(args[0]) == "the temporary folder":
                held.extend(sorted(os.listdir(args[0])))
            result = call(*args, **options)
            if said and said not in order:
                order.append(said)
            return result

        return patch(f"os.{name}", wrapper)

    with run_of(library(), *([1, 2] if again else [1])) as root, chdir(root.parent):
        raised = "nothing"
        with noted("fsync"), noted("rename"), noted("replace"):
            try:
                mine.save(root / "step_2", 2, files_of(2), keep_last)
            except OSError as error:
                raised = type(error).__name__
        modes = {path.stat().st_mode & 0o077 for path in (root / "step_2").glob("*")}
        latest = (root / LATEST).read_text() if (root / LATEST).exists() else "none"
        left = {"raised": raised, "checkpoints": names_in(root), "latest": latest,
                "others may read it": 0 not in modes}  # fmt: skip
        if again:
            return left
        return left | {"done too early": too_early(order), "never done": never(order, keep_last),
                       "in it when it gets its name": held}  # fmt: skip


def too_early(order):
    """The first act of a commit that comes before another which it needs."""
    for place, act in enumerate(order):
        missing = [one for one in ORDER[: ORDER.index(act)] if one not in order[:place]]
        if missing:
            return f"{act}; still missing then: {missing[0]}"
    return "nothing"


def never(order, keep_last):
    """The first act that a commit leaves out."""
    wanted = ORDER if keep_last == 1 else ORDER[:-1]
    return next((one for one in wanted if one not in order), "nothing")


def commit_as(temporary, folder, manifest, keep_last, order="modes manifest sync place latest old"):
    mode = 0o600
    for act in order.split():
        if act == "modes":
            mode = open_to_others(temporary)
        elif act == "manifest":
            write_small(temporary / MANIFEST, manifest.to_json(), mode)
        elif act == "bytes":
            (temporary / MANIFEST).write_bytes(manifest.to_json())
        elif act == "nowhere":
            write_small(Path(MANIFEST), manifest.to_json(), mode)
        elif act == "sync":
            sync_folder(temporary)
        elif act == "place":
            put_in_place(temporary, folder)
        elif act == "rename":
            temporary.rename(folder)
        elif act == "late-manifest":
            write_small(folder / MANIFEST, manifest.to_json(), mode)
        elif act == "late-sync":
            sync_folder(folder)
        elif act == "latest":
            name_latest(folder)
        elif act == "all" or (act == "old" and keep_last is not None):
            remove_old(folder.parent, keep_last, folder)


def renames_and_syncs(temporary, folder, manifest, keep_last):
    mode = open_to_others(temporary)
    write_small(temporary / MANIFEST, manifest.to_json(), mode)
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)
    name_latest(folder)
    if keep_last is not None:
        remove_old(folder.parent, keep_last, folder)


def shown_commit(case):
    there = "step_1 and an older step_2 are there" if case[1:] else "step_1 is there"
    return f"commit(temporary, step_2, manifest, {case[0]})  # {there}"


COMMIT = Build(
    name="commit",
    reference=commit,
    cases=[(None,), (1,), (2,), (None, True)],
    observe=commit_seen,
    show=shown_commit,
    wrong={
        "The folder gets its name before the disk has the names in it.": partial(
            commit_as, order="modes manifest place latest old"
        ),
        "You sync the folder too early: the manifest's name came after.": partial(
            commit_as, order="modes sync manifest place latest old"
        ),
        "The manifest comes when the folder has its name: until then nothing tells that it is "
        "whole.": partial(commit_as, order="modes sync place late-manifest latest old"),
        "The manifest comes when the folder has its name; a sync after that mends only the end.": (
            partial(commit_as, order="modes place late-manifest late-sync latest old")
        ),
        "A bare rename is not on the disk for sure: `latest` may get there before it.": partial(
            commit_as, order="modes manifest sync rename latest old"
        ),
        "A bare rename fails where a checkpoint has that name already.": renames_and_syncs,
        "`latest` should name what is there: a reader may come in between.": partial(
            commit_as, order="modes manifest sync latest place old"
        ),
        "Nobody says which one is the latest.": partial(
            commit_as, order="modes manifest sync place old"
        ),
        "The old one goes while `latest` still names it.": partial(
            commit_as, order="modes manifest sync place old latest"
        ),
        "Nothing is removed: `remove_old` comes last, and is given the root.": partial(
            commit_as, order="modes manifest sync place latest"
        ),
        "The manifest's bytes are not synced: `write_small` does that, `write_bytes` doesn't.": (
            partial(commit_as, order="modes bytes sync place latest old")
        ),
        "The manifest belongs into the temporary folder: its path begins with that.": partial(
            commit_as, order="modes nowhere sync place latest old"
        ),
        "You never ask whether `keep_last` is None: then nothing goes.": partial(
            commit_as, order="modes manifest sync place latest all"
        ),
        "Only you can read it: the temporary folder was private.": partial(
            commit_as, order="manifest sync place latest old"
        ),
    },
)


# Which one loads

DAMAGE = {
    "nothing else happened": lambda root: None,
    "latest is lost": lambda root: (root / LATEST).unlink(),
    "latest says step_9": lambda root: (root / LATEST).write_text("step_9"),
    "latest says step_1": lambda root: (root / LATEST).write_text("step_1"),
    "step_2's model is cut short": lambda root: (root / "step_2" / MODEL).write_bytes(b"half"),
    "step_2 has no manifest": lambda root: (root / "step_2" / MANIFEST).unlink(),
    "step_2 was deleted": lambda root: shutil.rmtree(root / "step_2"),
    "both models are cut short": lambda root: [
        (root / f"step_{step}" / MODEL).write_bytes(b"half") for step in (1, 2)
    ],
}


def latest_seen(answer, steps, happened):
    with run_of(library(), *steps) as root:
        for one in happened:
            DAMAGE[one](root)
        found = answer(root)
        return f"a str, {found!r}" if isinstance(found, str) else getattr(found, "name", found)


def first_complete(root):
    return next(filter(is_complete, committed(root)), None)


def believes_latest(root):
    folder = named_latest(root)
    return folder if folder in committed(root) else first_complete(root)


def believes_any_name(root):
    folder = named_latest(root)
    return folder if folder is not None else first_complete(root)


def looks_into_nothing(root):
    folder = named_latest(root)
    return folder if is_complete(folder) else first_complete(root)


def expects_a_complete_one(root):
    folder = named_latest(root)
    if folder is not None and is_complete(folder):
        return folder
    return next(filter(is_complete, committed(root)))


def never_falls_back(root):
    folder = named_latest(root)
    return folder if folder in committed(root) and is_complete(folder) else None


def none_without_latest(root):
    folder = named_latest(root)
    if folder is None:
        return None
    if folder in committed(root) and is_complete(folder):
        return folder
    return first_complete(root)


def newest_by_name(root):
    folder = named_latest(root)
    if folder in committed(root) and is_complete(folder):
        return folder
    return next(filter(is_complete, sorted(committed(root), reverse=True)), None)


def complete(root):
    return [*filter(is_complete, committed(root))]


def takes_the_oldest(root):
    folder = named_latest(root)
    if folder in committed(root) and is_complete(folder):
        return folder
    return (complete(root) or [None])[-1]


def takes_the_first_of_none(root):
    folder = named_latest(root)
    if folder in committed(root) and is_complete(folder):
        return folder
    return complete(root)[0]


def newest_unchecked(root):
    folder = named_latest(root)
    if folder in committed(root) and is_complete(folder):
        return folder
    return next(iter(committed(root)), None)


LATEST_IN = Build(
    name="latest_in",
    reference=latest_in,
    cases=[
        *(((1, 2), (one,)) for one in DAMAGE),
        ((), ()),
        ((2, 1), ("latest is lost",)),
        ((1, 2), ("latest is lost", "step_2's model is cut short")),
    ],
    observe=latest_seen,
    show=lambda case: (
        f"latest_in(root)  # saved: {', '.join(f'step_{one}' for one in case[0]) or 'nothing'}; "
        f"{', '.join(case[1])}"
    ),
    wrong={
        "You believe `latest`, and it names half a checkpoint.": believes_latest,
        "You believe `latest`, whatever it names: that may be gone, or half of a checkpoint.": (
            believes_any_name
        ),
        "Where `latest` names nothing, there is no folder to look into.": looks_into_nothing,
        "Where none is complete, your search ends in an error.": expects_a_complete_one,
        "`latest` is wrong, and you stop there: a whole one lies beside it.": never_falls_back,
        "Nothing is named, and you return None: another one is complete.": none_without_latest,
        "You never ask `latest`: it is how a person chooses another one.": first_complete,
        "The newest is the one committed last, not the one with the highest name.": newest_by_name,
        "The newest may be damaged: take the newest that is complete.": newest_unchecked,
        "The newest is the first of `committed`, not the last.": takes_the_oldest,
        "Where none is complete, a list of them has no first.": takes_the_first_of_none,
        "The folder is asked for; you return its name.": (
            lambda root: (found := latest_in(root)) and found.name
        ),
    },
)


def sequence_seen(answer, steps, keep_last):
    with run_of(library(), *steps, keep_last=keep_last) as root:
        return answer(root)


def sequences(root):
    return [manifest.sequence for _, manifest in by_sequence(root)]


NEXT_SEQUENCE = Build(
    name="next_sequence",
    reference=next_sequence,
    cases=[((), None), ((7,), None), ((5, 2), None), ((1, 2, 3), 1)],
    observe=sequence_seen,
    show=lambda case: (
        f"next_sequence(root)  # steps saved: {list(case[0])}"
        + (f", with keep_last={case[1]}" if case[1] else "")
    ),
    wrong={
        "Older ones were removed: how many are left says nothing.": (
            lambda root: len(sequences(root)) + 1
        ),
        "That number is taken: the next one is one higher.": (
            lambda root: max(sequences(root), default=0)
        ),
        "A step is not a commit: a run may go back and save an earlier step.": (
            lambda root: max((one.step for _, one in by_sequence(root)), default=0) + 1
        ),
        "In an empty folder there is no highest one.": lambda root: max(sequences(root)) + 1,
        "The first of the list is the newest, the last is the oldest.": (
            lambda root: (sequences(root) or [0])[-1] + 1
        ),
        "The first commit into a root has number 1.": (
            lambda root: max(sequences(root), default=-1) + 1
        ),
        "Of an empty root there is no newest: the list has no first.": (
            lambda root: sequences(root)[0] + 1
        ),
    },
)


def retention_seen(answer, steps, keep_last, newest, others):
    """What is left of the checkpoints of a run, and of another run's."""
    theirs, mine = library(), library()
    theirs.run_in = lambda root: "another run"
    with run_of(mine) as root:
        for step in steps:
            (theirs if step in others else mine).save(
                root / f"step_{step}", step, files_of(step), None
            )
        renamed, rename = [], os.rename

        def noted(old, new, **options):
            renamed.append(Path(old).name)
            rename(old, new, **options)

        with patch("os.rename", noted):
            answer(root, keep_last, root / f"step_{newest}")
        return {"left": names_in(root), "renamed away before it was deleted": sorted(renamed)}


def remove_as(root, keep_last, newest, own=True, guard=True, which=lambda n: slice(n, None)):
    for folder in committed(root, run_of=newest if own else None)[which(keep_last)]:
        if folder != newest or not guard:
            remove_checkpoint(folder)


def counts_the_newest(root, keep_last, newest):
    others = [folder for folder in committed(root, run_of=newest) if folder != newest]
    for folder in others[keep_last - 1 :]:
        remove_checkpoint(folder)


def deletes_in_place(root, keep_last, newest):
    for folder in committed(root, run_of=newest)[keep_last:]:
        if folder != newest:
            shutil.rmtree(folder)


def removes_one(root, keep_last, newest):
    for folder in committed(root, run_of=newest)[keep_last:]:
        if folder != newest:
            return remove_checkpoint(folder)


def stops_at_the_newest(root, keep_last, newest):
    for folder in committed(root, run_of=newest)[keep_last:]:
        if folder == newest:
            break
        remove_checkpoint(folder)


def removes_by_name(root, keep_last, newest):
    for folder in sorted(committed(root, run_of=newest), reverse=True)[keep_last:]:
        if folder != newest:
            remove_checkpoint(folder)


REMOVE_OLD = Build(
    name="remove_old",
    reference=remove_old,
    cases=[
        ((1, 2, 3), 2, 3, ()),
        ((1, 2, 3), 1, 3, ()),
        ((1,), 3, 1, ()),
        ((3, 1, 2), 1, 2, ()),
        ((1, 2, 3, 4), 1, 2, ()),
        ((1, 2, 3), 1, 3, (1,)),
    ],
    observe=retention_seen,
    show=lambda case: (
        f"remove_old(root, {case[1]}, step_{case[2]})  # saved, in this order: {list(case[0])}"
        + (f"; step {case[3][0]} by another run" if case[3] else "")
    ),
    wrong={
        "`committed` has the newest first: these are the ones to keep.": partial(
            remove_as, which=lambda n: slice(None, n)
        ),
        "You remove all of them but the one just saved.": partial(
            remove_as, which=lambda n: slice(None)
        ),
        "You keep the end of the list. It has the newest first: these are the oldest.": partial(
            remove_as, which=lambda n: slice(None, -n)
        ),
        "`shutil.rmtree` deletes file by file: who looks meanwhile meets half a checkpoint.": (
            deletes_in_place
        ),
        "You keep one more than was asked for.": partial(
            remove_as, which=lambda n: slice(n + 1, None)
        ),
        "Another run's checkpoints are not yours to remove.": partial(remove_as, own=False),
        "The one just saved never goes, wherever it stands in the list.": partial(
            remove_as, guard=False
        ),
        "You count the one just saved among those that stay, wherever it stands in the list.": (
            counts_the_newest
        ),
        "The oldest is the one committed first, not the one with the lowest name.": removes_by_name,
        "You list what should go, and remove none of it.": lambda root, keep_last, newest: [],
        "A `return` in the loop ends it: one is removed, the others stay.": removes_one,
        "Behind the one just saved others may still have to go.": stops_at_the_newest,
    },
)

BUILDS = [
    SAVE_UNSYNCED,
    SAVE_COMMITTED,
    SYNC_FOLDER,
    CHECKSUMS,
    CHECK_SIZES,
    COMMIT,
    LATEST_IN,
    NEXT_SEQUENCE,
    REMOVE_OLD,
]
