"""Find, check and load checkpoints.

Built in ``notebooks/07_async_checkpointer``.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from npydata.errors import CheckpointError
from npydata.system.progress import NoBar, progress_bar
from tutorial.kept.checkpointer.commit import latest_in, named_latest
from tutorial.kept.checkpointer.file_layout import flatten_state_dict, unflatten_state_dict
from tutorial.kept.checkpointer.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    TRAINING,
    Manifest,
    check_content,
    check_file,
    check_sizes,
    read_manifest,
)
from tutorial.kept.checkpointer.runs import continue_run
from tutorial.kept.checkpointer.training_state import TrainingState
from tutorial.kept.reader.checkpoint import LazyCheckpoint
from tutorial.kept.reader.held_folder import HeldFolder, read_held
from tutorial.kept.reader.load import require_device
from tutorial.kept.reader.manifest import (
    CAN_NOT_TELL,
    MAY_NOT_SEE,
    IfThereIsOne,
    hold,
    in_place,
    root_of_checkpoints,
)
from tutorial.kept.reader.open import open_files
from tutorial.kept.reader.targets import own_state
from tutorial.kept.reader.training_folder import PARTS, files_of
from tutorial.kept.reader.typed_json import decode
from tutorial.kept.system.garbage import without_collecting

ReadTensors = Callable[[LazyCheckpoint, list[str]], dict[str, torch.Tensor]]
Loaded = tuple[dict[str, Any], dict[str, Any] | None, TrainingState]


def load_checkpoint(
    dir: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    mmap: bool = True,
    verify: bool = False,
    into: Any = (),
) -> Loaded:
    """Return model state, optimizer state and training state of a checkpoint folder.

    Sizes and headers are always checked; ``verify=True`` also compares everything with the
    checksums: while it is read, or in a read of its own where tensors are mapped. With ``mmap`` the
    tensors on the CPU are mapped copy-on-write: they are read when used, and may be written to.
    That is better where some are used, or all of them later; what is wanted at once is read faster
    without, see :meth:`LazyCheckpoint.load`. Tied tensors share memory again.

    ``into`` takes the model, or ``(model, optimizer)``: their own tensors are filled, and are those
    of the states. A ``state_dict()`` stands for what it is of; ``None`` fills nothing. An optimizer
    that has made no state yet has none to fill; give its state to ``load_state_dict`` instead. Its
    settings, like the learning rate, are not set.

    All of it is of one checkpoint. If another save replaces the folder meanwhile, that is the old
    one, or the new one.

    Raises:
        CheckpointError: The folder is no complete checkpoint, something in it is damaged, or it was
            removed while it was read; or ``into`` is not what was saved, and nothing was filled.
    """
    require_device(device)
    mapped = mmap and torch.device(device).type == "cpu"
    read = read_maps if mapped else partial(LazyCheckpoint.load, device=device, verify=verify)
    ours = to_fill(into)
    held = partial(hold_checkpoint, dir)
    return read_held(held, lambda folder: load_from(folder, read, verify, ours))


def to_fill(into: Any) -> Sequence[Any]:
    """Return the model and the optimizer to fill, as far as they are given; one alone is a model.

    Raises:
        CheckpointError: It is neither, or the optimizer without its model.
    """
    given = (into,) if is_state(into) else into
    fits = isinstance(given, tuple | list) and len(given) <= len(PARTS)
    fits = fits and all(one is None or is_state(one) for one in given)
    if fits and not any(isinstance(one, torch.optim.Optimizer) for one in given[:1]):
        return cast("Sequence[Any]", given)
    kinds = [type(one).__name__ for one in (given if isinstance(given, tuple | list) else [given])]
    raise CheckpointError(
        f"into={', '.join(kinds)}: expected the model, or (model, optimizer), or a state_dict() in "
        "the place of each; (None, optimizer) fills the optimizer only"
    )


def is_state(one: Any) -> bool:
    """Whether something has tensors to fill, or is a mapping of them."""
    return hasattr(one, "state_dict") or isinstance(one, Mapping)


def load_from(folder: HeldFolder, read: ReadTensors, verify: bool, into: Sequence[Any]) -> Loaded:
    """Return the states of a checkpoint that is held open."""
    manifest = check(folder, content=False)
    ours = dict(zip(PARTS, (*into, None, None), strict=False))
    if verify:
        compare_maps(folder, manifest, [p for p in PARTS if ours[p] is None and read is read_maps])
    metadata = read_metadata(folder, manifest)
    for part in PARTS:
        if ours[part] is not None:
            require_fits(folder, manifest, part, ours[part])
    states = {
        part: load_state(folder, manifest, part, metadata, read, ours[part], verify)
        for part in PARTS
        if files_of(part, manifest.files)
    }
    training = training_state_of(folder.path, metadata)
    require_unchanged(folder, manifest)
    continue_run(folder.path, manifest.run)
    return states["model"], states.get("optimizer"), training


def require_fits(folder: HeldFolder, manifest: Manifest, part: str, into: Any) -> None:
    """Refuse a model or an optimizer that does not fit, before anything is written to either."""
    if not files_of(part, manifest.files):
        raise CheckpointError(f"{folder.path}: has no {part}, and into has one")
    with open_part(folder, manifest, part) as tensors:
        tensors.require_fits(tensors_to_fill(into))


def compare_maps(folder: HeldFolder, manifest: Manifest, parts: Sequence[str]) -> None:
    """Compare the files of parts that will be mapped, and of what is no tensor; others later."""
    tensors = {part: files_of(part, manifest.files) for part in PARTS}
    later = {name for part in PARTS if part not in parts for name in tensors[part]}
    for name in manifest.files:
        if name not in later:
            check_file(folder, manifest, name, NoBar())


def hold_checkpoint(dir: str | os.PathLike[str]) -> HeldFolder:
    """Open a checkpoint's folder, and say what else is there if it is none."""
    try:
        return hold(Path(dir))
    except FileNotFoundError:
        raise CheckpointError(f"{Path(dir)}: there is no such folder") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{Path(dir)}: is a file, expected a checkpoint's folder; open_checkpoint reads files"
        ) from None


def training_state_of(folder: Path, metadata: dict[str, Any]) -> TrainingState:
    """Return the training state from what is stored beside the tensors."""
    try:
        return TrainingState(**decode(metadata["training_state"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / TRAINING}: is not a training state: {error}") from None


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint folder in ``root``, or ``None`` if there is none.

    Newest is what was committed last, whatever its step.

    Raises:
        OSError: It can't be told: ``latest``, or the checkpoint that it names, may not be read by
            this user; or the disk fails.
    """
    root = Path(root)
    if not root.is_dir():
        return None
    found, named = latest_in(root), named_latest(root)
    if named not in (None, found):
        with IfThereIsOne(MAY_NOT_SEE | CAN_NOT_TELL):
            read_manifest(named)
    return found


def verify_checkpoint(dir: str | os.PathLike[str], *, progress: bool = False) -> Manifest:
    """Read a whole checkpoint and compare it with what was written; return its manifest.

    With ``progress`` a bar shows how far it is, if that takes longer than a second.

    Raises:
        CheckpointError: The first file that is missing, cut off or changed, and where.
    """
    return read_held(lambda: hold_checkpoint(dir), lambda folder: verify_held(folder, progress))


def verify_held(folder: HeldFolder, progress: bool) -> Manifest:
    """Read a whole checkpoint that is held open; return its manifest."""
    manifest = check(folder, content=True, progress=progress)
    metadata = read_metadata(folder, manifest, verified=True)
    for part in PARTS:
        if files_of(part, manifest.files):
            with open_part(folder, manifest, part) as tensors:
                infos = {name: tensors.info(name) for name in tensors}
                nested_state(tensors.path, metadata[part], infos)
    training_state_of(folder.path, metadata)
    require_unchanged(folder, manifest)
    return manifest


def to_verify(dir: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's folder, or of a folder of checkpoints the latest."""
    folder = Path(dir)
    if (in_place(folder) / MANIFEST).exists():
        return folder
    return latest_checkpoint(folder) or folder


def check(folder: HeldFolder, *, content: bool, progress: bool = False) -> Manifest:
    """Check manifest and sizes, and the content if asked; return the manifest."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        if (what := root_of_checkpoints(folder.path)) is not None:
            raise CheckpointError(f"{folder.path}: {what}") from None
        raise
    check_sizes(folder.path, manifest)
    if content:
        total = sum(entry.size for entry in manifest.files.values())
        with closing(progress_bar("verifying", total, "B", show=progress)) as bar:
            check_content(folder, manifest, bar)
    return manifest


def require_unchanged(folder: HeldFolder, manifest: Manifest) -> None:
    """Refuse what was read from a folder in which another checkpoint was put file by file.

    A save never does that: it replaces the folder, and removes what was held open.
    """
    with suppress(FileNotFoundError):
        if folder.read(MANIFEST, MAX_MANIFEST_BYTES) != manifest.to_json():
            raise CheckpointError(f"{folder.path}: was changed while it was read")


def read_metadata(
    folder: HeldFolder, manifest: Manifest, *, verified: bool = False
) -> dict[str, Any]:
    """Return what is stored beside the tensors: their tree specs, and the training state.

    It is short, so its checksum is always compared; unless all were ``verified`` just now.
    """
    path = folder.path / TRAINING
    if not verified:
        check_file(folder, manifest, TRAINING, NoBar())
    wanted = {re.split(r"[./]", name)[0] for name in manifest.files} - {"rng"}
    try:
        metadata = json.loads(folder.read(TRAINING, MAX_STATE_BYTES))
        if not isinstance(metadata, dict) or not wanted <= metadata.keys():
            raise ValueError(f"it does not hold {', '.join(sorted(wanted))}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a training state: {error}") from None
    return metadata


@without_collecting
def load_state(
    folder: HeldFolder,
    manifest: Manifest,
    part: str,
    metadata: dict[str, Any],
    read: ReadTensors,
    into: Any,
    verify: bool,
) -> dict[str, Any]:
    """Return a nested state with its tensors; equal names stay the same tensor."""
    with open_part(folder, manifest, part) as tensors:
        ties = tensors.ties()
        path = tensors.path
        names = [name for name in tensors if name not in ties]
        state = read(tensors, names) if into is None else filled(tensors, into, verify)
    state |= {alias: state[name] for alias, name in ties.items() if alias not in state}
    return nested_state(path, metadata[part], state)


def read_maps(tensors: LazyCheckpoint, names: list[str]) -> dict[str, torch.Tensor]:
    """Return tensors that are read when they are used."""
    return {name: tensors[name] for name in names}


def filled(tensors: LazyCheckpoint, into: Any, verify: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a model or an optimizer, filled."""
    return tensors.load(into=tensors_to_fill(into), verify=verify)


def tensors_to_fill(into: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model or an optimizer by their names in a checkpoint."""
    return flatten_state_dict(own_state(into) if hasattr(into, "state_dict") else into)[0]


def nested_state(path: Any, tree_spec: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it was nested, from its leaves by their names."""
    try:
        state = unflatten_state_dict(tree_spec, leaves.__getitem__)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}, expected a dict")
        return state
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not hold what it should: {error}") from None


def open_part(folder: HeldFolder, manifest: Manifest, part: str) -> LazyCheckpoint:
    """Open the tensors of a model or an optimizer: one file, or what many ranks wrote."""
    names = files_of(part, manifest.files)
    path = folder.path / (part if "/" in names[0] else names[0])
    return open_files(folder, names, path, manifest)
