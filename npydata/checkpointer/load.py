"""Load and verify an npydata checkpoint: one folder that commit.py put in place.

Both use ``opened``, which opens all files of one manifest, as ``open_checkpoint`` does. (scan.py
looks at folders of any tool's checkpoints, and compares no bytes.)
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from npydata.checkpointer.state import TrainingState
from npydata.errors import CheckpointError
from npydata.reader.checkpoint import LazyCheckpoint
from npydata.reader.file import Folder, naming
from npydata.reader.formats import Contents
from npydata.reader.formats.training import (
    PARTS,
    TRAINING,
    Manifest,
    check_sizes,
    checksums,
    continue_run,
    decode,
    read_manifest,
)
from npydata.reader.load import run_all
from npydata.reader.open import open_folder, open_parts
from npydata.reader.targets import targets_of
from npydata.system.accelerator import why_unusable
from npydata.system.progress import ProgressBar
from npydata.system.threads import without_collecting

# ``Any`` for None: callers that saved an optimizer need no None check before they use it.
Loaded = tuple[dict[str, Any], dict[str, Any] | Any, TrainingState]


def load_checkpoint(
    dir: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    mmap: bool = True,
    into: Any = None,
    verify: bool = False,
) -> Loaded:
    """Return model state, optimizer state and training state of a checkpoint folder.

    An optimizer state that was not saved is None.

    Args:
        dir: The folder, such as ``latest_checkpoint(root)`` returns.
        device: Where the tensors go.
        mmap: Map CPU tensors copy-on-write: they are read when used, and may be written to. Those
            below 64 KiB are read at once, together. To use everything right away, reading without
            it is faster.
        into: The model, or ``(model, optimizer)``: their own tensors are filled, and returned. A
            ``state_dict()`` works in place of either; None fills nothing. An optimizer that has no
            state yet has nothing to fill: give the state to its ``load_state_dict`` instead. An
            optimizer's settings, such as the learning rate, are not set.
        verify: Compare everything with the checksums: mapped tensors at once, the rest while it is
            read. Sizes and headers are always checked.

    Everything comes from one checkpoint: if a save replaces the folder meanwhile, from the old or
    the new one.

    Raises:
        CheckpointError: The folder is not a complete checkpoint, something in it is damaged, or it
            was removed while it was read: some of ``into`` may be filled by then. Or ``into`` does
            not match what was saved, and nothing was filled.
    """
    if dir is None:
        raise CheckpointError(
            "there is no checkpoint yet: at a first start latest_checkpoint(root) returns None, so "
            "write: if (newest := latest_checkpoint(root)) is not None: load_checkpoint(newest)"
        )
    if (why := why_unusable(device)) is not None:
        raise CheckpointError(why)
    mapped = mmap and torch.device(device).type == "cpu"
    owners = into if type(into) is tuple else (into, None)
    if len(owners) != 2:
        raise CheckpointError(f"into has {len(owners)} values, expected a model, or two")
    with naming(dir):
        targets = {
            p: targets_of(one) for p, one in zip(PARTS, owners, strict=True) if one is not None
        }

    manifest, values, parts = opened(Path(dir), verify=verify)
    if verify and mapped:
        compare(one for part, one in parts.items() if part not in targets)
    for part in targets:
        if part not in parts:
            raise CheckpointError(f"{dir}: has no {part}, and into has one")
        parts[part].require_fits(targets[part])
    states = {}
    for part, tensors in parts.items():
        if part in targets:
            loaded = tensors.load(into=targets[part], verify=verify)
        elif mapped:
            loaded = tensors.mapped()
        else:
            loaded = tensors.load(device=device, verify=verify)
        states[part] = unflatten(Path(tensors.path), values[part], loaded)
    continue_run(Path(dir), manifest)
    return states["model"], states.get("optimizer"), training_state(Path(dir), values)


def verify_checkpoint(dir: str | os.PathLike[str], *, progress: bool = False) -> Manifest:
    """Read a whole checkpoint and compare it with its checksums; return its manifest.

    With ``progress`` a progress bar appears if that takes longer than a second.

    Raises:
        CheckpointError: A file is missing, cut off or changed; the message names the first piece
            that differs, and the tensors in it.
    """
    manifest, values, parts = opened(Path(dir), verify=True)
    compare(parts.values(), progress=progress)
    for part, tensors in parts.items():
        unflatten(Path(tensors.path), values[part], dict.fromkeys(tensors))
    training_state(Path(dir), values)
    return manifest


@without_collecting
def opened(
    path: Path, *, verify: bool = False
) -> tuple[Manifest, dict[str, Any], dict[str, LazyCheckpoint]]:
    """Open all files of a checkpoint: return its manifest, its values, and its tensors by part.

    Everything comes from one checkpoint, and stays so while it is open, whatever is saved
    meanwhile. With ``verify`` the JSON files are compared with their checksums, too.
    """

    def read(folder: Folder) -> tuple[Manifest, dict[str, Any], dict[str, Contents]]:
        check_sizes(path, read_manifest(path))
        manifest, values, parts = open_parts(folder)
        for name, entry in manifest.files.items() if verify else ():
            small = name.endswith(".json")
            if small and checksums(folder.read(name, entry.size)) != entry.crc32:
                raise CheckpointError(f"{path / name}: damaged, its checksum differs")
        return manifest, values, parts

    try:
        with naming(path):
            manifest, values, parts = open_folder(path, True, read)
    except (FileNotFoundError, NotADirectoryError):
        read_manifest(path)  # says that it isn't there, or was removed meanwhile
        raise
    return manifest, values, {part: LazyCheckpoint(path / part, one) for part, one in parts.items()}


def compare(some: Iterable[LazyCheckpoint], *, progress: bool = False) -> None:
    """Compare every byte of some tensors' files with its checksum.

    The open files are read, as by now the path may lead to another checkpoint.
    """
    jobs = [one for tensors in some for one in tensors.checks()]
    with closing(ProgressBar("verifying", sum(n for n, _ in jobs), "B", show=progress)) as bar:
        run_all(jobs, bar.update)


def unflatten(path: Path, tree: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``flatten``: return a nested state from its tree and its tensors by name."""
    try:
        state = decode(tree, tensors.__getitem__)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}, expected a dict")
        return state
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not hold what it should: {error}") from None


def training_state(folder: Path, values: Mapping[str, Any]) -> TrainingState:
    """Return the training state from the values saved beside the tensors."""
    try:
        return TrainingState(**decode(values["training_state"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / TRAINING}: is not a training state: {error}") from None
