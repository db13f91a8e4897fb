"""Find, check and load checkpoints.

Built in ``notebooks/07_async_checkpointer``.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from npydata.checkpointer.commit import in_place, latest_in
from npydata.checkpointer.file_layout import unflatten_state_dict
from npydata.checkpointer.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    TRAINING,
    Manifest,
    check_content,
    check_file,
    check_sizes,
    read_manifest,
    read_small,
)
from npydata.checkpointer.training_state import TrainingState
from npydata.errors import CheckpointError
from npydata.reader.checkpoint import LazyCheckpoint
from npydata.reader.open import open_checkpoint
from npydata.reader.training_folder import PARTS, files_of, require_no_link
from npydata.reader.typed_json import decode
from npydata.system.progress import NoBar, progress_bar

Loaded = tuple[dict[str, Any], dict[str, Any] | None, TrainingState]


def load_checkpoint(
    dir: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    mmap: bool = True,
    verify: bool = False,
) -> Loaded:
    """Return model state, optimizer state and training state of a checkpoint folder.

    Sizes and headers are always checked; ``verify=True`` also reads everything and compares the
    checksums. With ``mmap`` the tensors on the CPU are mapped copy-on-write: they are read when
    used, and may be written to. Tied tensors share memory again.

    Raises:
        CheckpointError: The folder is no complete checkpoint, or something in it is damaged.
    """
    folder = in_place(Path(dir))
    manifest = check(folder, content=verify)
    metadata = read_metadata(folder, manifest)
    model = load_state(folder, manifest, "model", metadata, device, mmap)
    optimizer = None
    if files_of("optimizer", manifest.files):
        optimizer = load_state(folder, manifest, "optimizer", metadata, device, mmap)
    return model, optimizer, training_state_of(folder, metadata)


def training_state_of(folder: Path, metadata: dict[str, Any]) -> TrainingState:
    """Return the training state from what is stored beside the tensors."""
    try:
        return TrainingState(**decode(metadata["training_state"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / TRAINING}: is not a training state: {error}") from None


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint folder in ``root``, or ``None`` if there is none.

    Newest is what was committed last, whatever its step.
    """
    root = Path(root)
    return latest_in(root) if root.is_dir() else None


def verify_checkpoint(dir: str | os.PathLike[str], *, progress: bool = False) -> Manifest:
    """Read a whole checkpoint and compare it with what was written; return its manifest.

    With ``progress`` a bar shows how far it is, if that takes longer than a second.

    Raises:
        CheckpointError: The first file that is missing, cut off or changed, and where.
    """
    folder = in_place(Path(dir))
    manifest = check(folder, content=True, progress=progress)
    metadata = read_metadata(folder, manifest, verified=True)
    for part in PARTS:
        if files_of(part, manifest.files):
            with open_part(folder, manifest, part) as tensors:
                infos = {name: tensors.info(name) for name in tensors}
                nested_state(tensors.path, metadata[part], infos)
    training_state_of(folder, metadata)
    return manifest


def to_verify(dir: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's folder, or of a folder of checkpoints the latest."""
    folder = in_place(Path(dir))
    if (folder / MANIFEST).exists():
        return folder
    return latest_checkpoint(folder) or folder


def check(folder: Path, *, content: bool, progress: bool = False) -> Manifest:
    """Check manifest and sizes, and the content if asked; return the manifest."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    if content:
        total = sum(entry.size for entry in manifest.files.values())
        with closing(progress_bar("verifying", total, "B", show=progress)) as bar:
            check_content(folder, manifest, bar)
    return manifest


def read_metadata(folder: Path, manifest: Manifest, *, verified: bool = False) -> dict[str, Any]:
    """Return what is stored beside the tensors: their tree specs, and the training state.

    It is short, so its checksum is always compared; unless all were ``verified`` just now.
    """
    path = folder / TRAINING
    if not verified:
        check_file(folder, manifest, TRAINING, NoBar())
    wanted = {re.split(r"[./]", name)[0] for name in manifest.files} - {"rng"}
    try:
        metadata = json.loads(read_small(path, MAX_STATE_BYTES))
        if not isinstance(metadata, dict) or not wanted <= metadata.keys():
            raise ValueError(f"it does not hold {', '.join(sorted(wanted))}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a training state: {error}") from None
    return metadata


def load_state(
    folder: Path,
    manifest: Manifest,
    part: str,
    metadata: dict[str, Any],
    device: str | torch.device,
    mmap: bool,
) -> dict[str, Any]:
    """Return a nested state with its tensors; equal names stay the same tensor."""
    with open_part(folder, manifest, part) as tensors:
        ties = tensors.ties()
        path = tensors.path
        state = {name: moved(tensors[name], device, mmap) for name in tensors if name not in ties}
    state |= {alias: state[name] for alias, name in ties.items()}
    return nested_state(path, metadata[part], state)


def nested_state(path: Any, tree_spec: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it was nested, from its leaves by their names."""
    try:
        return dict(unflatten_state_dict(tree_spec, leaves.__getitem__))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not hold what it should: {error}") from None


def open_part(folder: Path, manifest: Manifest, part: str) -> LazyCheckpoint:
    """Open the tensors of a model or an optimizer: one file, or what many ranks wrote."""
    names = files_of(part, manifest.files)
    require_no_link(folder, names)
    return open_checkpoint(folder / (part if "/" in names[0] else names[0]))


def moved(tensor: torch.Tensor, device: str | torch.device, mmap: bool) -> torch.Tensor:
    """Return a tensor on its device; on the CPU mapped, or in memory of its own."""
    there = tensor.to(device)
    return there.clone() if there is tensor and not mmap else there
