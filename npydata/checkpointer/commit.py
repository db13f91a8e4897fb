"""From files to a checkpoint: everything appears at once, or nothing does.

All files of a save are written into a temporary folder beside their destination. Only when the
disk has them all, the manifest last, is that folder renamed. Then ``latest`` names it, and older
ones are removed. ``Root`` does that in the order of its methods; the functions below are its steps,
and the last section finds checkpoints again.

After a kill at any moment, or a power cut, the checkpoint that ``latest`` names loads, whole and
verified: the previous one until the new one is in place. Nothing unfinished has a checkpoint's
name.
"""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from npydata.checkpointer.writer import write_small
from npydata.errors import CheckpointError
from npydata.reader.formats.training import (
    MANIFEST,
    MAX_SEQUENCE,
    TRAINING,
    FileEntry,
    Manifest,
    check_sizes,
    loaded_run,
    read_manifest,
    read_small,
)
from npydata.reader.remote import is_url
from npydata.system.atomic import (
    clear_stale,
    make_public,
    name_file,
    new_temporary,
    sync_folder,
    temporary_folder,
)
from npydata.system.progress import warn_caller

LATEST = "latest"
MAX_TRIES = 100
"""How often to try to take a name that other processes take and free meanwhile."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV}
INCONCLUSIVE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ETIMEDOUT}
"""Errors of the machine or the disk, which leave open whether there is a checkpoint."""
DENIED = {errno.EACCES, errno.EPERM}

libc = ctypes.CDLL(None, use_errno=True)
_runs: dict[tuple[int, str], str] = {}
"""The run that commits, by process and root; a forked process begins a run of its own."""


@dataclass(slots=True)
class Root:
    """A folder of checkpoints, as one training run sees it.

    A run is a random text in its manifests. A process that loaded a checkpoint of this root
    continues that checkpoint's run (``continue_run`` noted it); any other begins a new one.
    """

    path: Path
    committed: dict[str, Manifest] = field(default_factory=dict)
    """This run's checkpoints, by name."""
    run: str = ""
    """Empty until ``find_run``."""
    last_sequence: int = 0
    """The largest sequence number seen, of any run; the next commit's is one more."""
    warned: set[str] = field(default_factory=set)
    """Names of checkpoints that could not be removed; each is warned about once."""

    def temporary(self) -> AbstractContextManager[Path]:
        """Make this root and a new private folder in it, which is removed at the end.

        After a commit, that folder is the checkpoint that the new one replaced, if any.
        """
        make_folder(self.path)
        clear_stale(self.path)
        if not self.run:
            self.find_run()
        return temporary_folder(self.path)

    def find_run(self) -> None:
        """Find out which run this is, and what it has committed.

        Raises:
            CheckpointError: A manifest's sequence number is so large that later ones could not be
                read again.
        """
        key = os.getpid(), os.path.realpath(self.path)
        found = list_checkpoints(self.path)
        for folder, manifest in found:
            self.note_sequence(folder, manifest)
        run = _runs.setdefault(key, loaded_run(self.path) or secrets.token_hex(8))
        self.committed = {
            folder.name: manifest
            for folder, manifest in found
            if manifest.run == run and manifest.name == folder.name
        }
        self.run = run

    def note_sequence(self, folder: Path, manifest: Manifest) -> None:
        """Give later commits larger sequence numbers than this one's."""
        if manifest.sequence >= MAX_SEQUENCE:
            raise CheckpointError(
                f"{folder}: its manifest has sequence {manifest.sequence}, expected less than "
                f"{MAX_SEQUENCE}, or later saves could not be ordered after it: move it away"
            )
        self.last_sequence = max(self.last_sequence, manifest.sequence)

    def commit(
        self,
        temporary: Path,
        folder: Path,
        step: int,
        entries: Mapping[str, FileEntry],
        keep_last: int | None,
        keep_every: int | None,
    ) -> None:
        """Make a folder of files, flushed already, the checkpoint ``folder`` and the latest."""
        with suppress_missing():  # another job may have committed; no other manifest is read
            if (latest := named_latest(self.path)) is not None:
                self.note_sequence(latest, read_manifest(latest))
        manifest = Manifest(self.last_sequence + 1, step, self.run, folder.name, dict(entries))
        write_small(temporary / MANIFEST, manifest.to_json())
        for path in (temporary, *temporary.rglob("*")):
            make_public(path, 0o777 if path.is_dir() else 0o666)
        for inner in (*(path for path in temporary.iterdir() if path.is_dir()), temporary):
            sync_folder(inner)
        put_in_place(temporary, folder)
        self.last_sequence = manifest.sequence
        self.committed[folder.name] = manifest
        name_latest(folder)
        if keep_last is not None:
            self.remove_old(folder.name, keep_last, keep_every)

    def remove_old(self, just_saved: str, keep_last: int, keep_every: int | None) -> None:
        """Remove all but the newest checkpoints of this run and its milestones.

        Another run's, copies, and damaged ones are neither counted nor removed.
        """
        order = sorted(self.committed.values(), key=lambda one: one.sequence, reverse=True)
        whole = [one for one in order if is_complete(self.path / one.name, one)]
        for manifest in whole[keep_last:]:
            folder = self.path / manifest.name
            if manifest.name == just_saved:
                continue
            try:
                if keep_every is None or manifest.step % keep_every:
                    with suppress(CheckpointError):  # not what was committed: not ours to remove
                        remove_checkpoint(folder, manifest)
                del self.committed[manifest.name]  # a milestone need not be looked at again
            except OSError as error:
                if manifest.name not in self.warned:
                    self.warned.add(manifest.name)
                    with suppress(Warning):  # where warnings are errors: the save is committed
                        warn_caller(f"{folder}: could not be removed: {error}", RuntimeWarning)


# Where a checkpoint may be


def destination(dir: str | os.PathLike[str]) -> Path:
    """Return the absolute folder that a path names, in case the process changes its folder."""
    path = local_path(dir)
    if path.name in ("", ".."):
        raise CheckpointError(f"{os.fsdecode(dir)!r}: expected a path that ends with a name")
    return path.absolute()


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path; refuse a URL, which would lead to a folder called ``s3:``."""
    if is_url(text := os.fsdecode(path)):
        raise CheckpointError(f"{text}: is a URL, expected a folder")
    return Path(text)


def require_replaceable(folder: Path) -> None:
    """Refuse a destination that can't become a checkpoint, or holds anything but one of ours."""
    if folder.name == LATEST or folder.name.endswith((".npydata-tmp", "\n")) or "\0" in str(folder):
        raise CheckpointError(f"{folder}: {folder.name!r} can't be the name of a checkpoint")
    latest = folder.parent / LATEST
    if latest.exists() and not (latest.is_symlink() or latest.is_file()):
        raise CheckpointError(f"{latest}: is no file, expected one that names a checkpoint")
    with suppress(OSError):  # DeepSpeed's ``latest`` names one of its own
        named = named_latest(folder.parent)
        if named and (names := os.listdir(named)) and {MANIFEST, TRAINING}.isdisjoint(names):
            raise CheckpointError(
                f"{latest}: names {named.name!r}, which is no checkpoint of ours: save elsewhere"
            )
    why = None
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        why = "is a file or a link, expected a folder or nothing"
    elif os.path.ismount(folder):
        why = "is a mount point, which can't be replaced: choose a folder in it"
    else:
        with suppress(FileNotFoundError):  # another process of the run may replace or remove it
            if folder.is_dir() and any(folder.iterdir()):
                if not (folder / MANIFEST).exists():
                    why = f"holds files, but no {MANIFEST} of ours"
                elif names := foreign_files(folder):
                    why = f"holds files that no checkpoint has: {names[:5]}"
    if why is not None:
        raise CheckpointError(f"{folder}: {why}")


def foreign_files(folder: Path) -> list[str]:
    """Return the other files in a checkpoint's folder, which are never removed with it."""
    ours = {MANIFEST, *read_manifest(folder).files}
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - ours)


# Temporaries


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            why = "is a file, or a link that leads nowhere, expected a folder"
            raise NotADirectoryError(errno.ENOTDIR, why, str(folder)) from None
        sync_folder(folder.parent)


# Steps of a commit


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a folder its final name; a checkpoint that had that name is loadable until then.

    The old one then has the name of ``temporary``, and is removed with it.

    Raises:
        CheckpointError: Something else has the name, or it is that of the latest checkpoint and
            names can't be exchanged here.
    """
    for _ in range(MAX_TRIES):
        require_replaceable(folder)
        try:
            temporary.rename(folder)  # nothing is there, or an empty folder
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(FileNotFoundError):  # another process of the run has just removed it
            if not exchange(temporary, folder):
                replace_in_steps(temporary, folder)
            elif foreign_files(temporary):  # added a moment ago: put the old one back
                exchange(temporary, folder)
                require_replaceable(folder)
            break
    else:
        raise CheckpointError(f"{folder}: other processes took this name {MAX_TRIES} times")
    sync_folder(folder.parent)


def replace_in_steps(temporary: Path, folder: Path) -> None:
    """Replace a checkpoint where names can't be exchanged; the latest would be missing meanwhile.

    Raises:
        CheckpointError: It is the latest, or holds other files.
    """
    if latest_checkpoint(folder.parent) in (None, folder):
        raise CheckpointError(
            f"{folder}: this file system can't replace the latest checkpoint: choose a new folder"
        )
    aside = new_temporary(folder.parent)
    folder.rename(aside)
    try:
        if foreign_files(aside):  # added a moment ago
            raise CheckpointError(f"{folder}: holds files that no checkpoint has")
        temporary.rename(folder)
    except (CheckpointError, OSError):
        aside.rename(folder)
        raise
    aside.rename(temporary)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False if this system or file system can't."""
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def name_latest(folder: Path) -> None:
    """Make ``latest`` name a checkpoint of its root; a link of that name is replaced."""
    temporary = new_temporary(folder.parent)
    try:
        write_small(temporary, os.fsencode(folder.name))
        make_public(temporary)
        temporary.replace(folder.parent / LATEST)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        name_file(error, folder.parent / LATEST)
        raise
    sync_folder(folder.parent)


def remove_checkpoint(folder: Path, known: Manifest | None = None) -> None:
    """Remove a checkpoint: a first step makes it no checkpoint, then its files are deleted.

    One that holds other files stays, and so does a link. ``known`` is the manifest that it was
    committed with; without it, whatever checkpoint has the name is removed.

    Raises:
        CheckpointError: Another one has taken its name meanwhile, and stays.
        OSError: It can't be removed, and stays.
    """
    doomed, known = new_temporary(folder.parent), known or read_manifest(folder)
    if folder.is_symlink() or foreign_files(folder):
        return
    try:
        folder.rename(doomed)
    except FileNotFoundError:  # another process was faster
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        doomed = folder  # a lower layer of overlayfs: what is there can't be renamed
    try:
        if read_manifest(doomed) != known or foreign_files(doomed):  # they came a moment ago
            raise CheckpointError(f"{folder}: is not what was committed")
        sync_folder(folder.parent)  # or a power cut could keep the name and lose the manifest
        (doomed / MANIFEST).unlink()
    except (CheckpointError, OSError):
        if doomed != folder:  # else it would be hidden, and its space taken
            doomed.rename(folder)
        raise
    if doomed == folder:
        sync_folder(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# What is in a root


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint folder in ``root``, or None if there is none.

    The newest is the one committed last, whatever its step: the one that ``latest`` names if it is
    complete, else the newest complete one. A warning says if there are some, but none is complete.

    Raises:
        CheckpointError: ``root`` is itself a checkpoint, or a URL.
        OSError: It can't be determined: this user may not read ``latest`` or the checkpoint that it
            names, or the disk fails.
    """
    root = local_path(root)
    if not root.is_dir():
        return None
    if (root / MANIFEST).is_file() and (root / TRAINING).is_file():
        raise CheckpointError(f"{root}: is a checkpoint, expected the folder that it is in")
    named = named_latest(root)
    with suppress_missing(INCONCLUSIVE | DENIED):
        if named is not None and not named.is_symlink():
            check_sizes(named, read_manifest(named))
            return named
    found = list_checkpoints(root)
    newest = next((folder for folder, _ in found if is_complete(folder)), None)
    if found and newest is None:
        warn_caller(
            f"{root}: none of its {len(found)} checkpoints is complete: see npydata verify {root}"
        )
    return newest


def named_latest(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, whether or not it exists; None if it names none."""
    name = ""
    with suppress_missing(INCONCLUSIVE | DENIED):
        name = os.fsdecode(read_small(root / LATEST, 4096)).removesuffix("\n")
    if name in ("", "..") or name != Path(name).name or "\0" in name:
        return None
    return root / name


def is_complete(folder: Path, manifest: Manifest | None = None) -> bool:
    """Whether every file of a checkpoint is there, with the size that was written."""
    complete = False
    with suppress_missing():
        check_sizes(folder, manifest or read_manifest(folder))
        complete = True
    return complete


def list_checkpoints(root: Path) -> list[tuple[Path, Manifest]]:
    """Return each checkpoint of a root with its manifest, the newest first.

    Raises:
        OSError: The disk or the machine failed, which says nothing about checkpoints.
    """
    found = []
    for folder in root.iterdir():
        if folder.is_symlink() or folder.name.endswith(".npydata-tmp"):
            continue
        with suppress_missing():
            manifest = read_manifest(folder)
            age = manifest.sequence, folder.stat().st_mtime_ns, folder.name
            found.append((age, folder, manifest))
    return [one[1:] for one in sorted(found, key=lambda one: one[0], reverse=True)]


@contextmanager
def suppress_missing(inconclusive: Set[int] = INCONCLUSIVE) -> Iterator[None]:
    """Suppress the errors that mean that there is no readable checkpoint here.

    System errors that are ``inconclusive`` are raised: there may be one.
    """
    try:
        yield
    except CheckpointError:
        pass
    except OSError as error:
        if error.errno in inconclusive:
            raise
