"""Which checkpoint of a folder can be resumed from, whoever wrote it: ``npydata verify FOLDER``.

Looks at headers, sizes, indexes and zip directories alone: no tensor is loaded, no pickle is run.
So it finds what a kill, a full disk or a power cut leaves: files that are missing or cut off. It
does not find bytes that changed; :func:`~npydata.verify_checkpoint` does, in our own checkpoints.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.formats.training import MANIFEST, TRAINING, check_sizes, read_manifest
from npydata.reader.open import open_checkpoint

LOCAL_HEADER = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of ``torch.save`` began before 1.6: a pickled magic number."""
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
KINDS = {".safetensors": "safetensors", ".ckpt": "lightning", ".pt": "torch", ".pth": "torch"}
MAX_DEPTH, MAX_JSON_BYTES = 6, 1 << 28
STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|global_step|ckpt)[-_=]?(\d+)", re.IGNORECASE)
ACCELERATE = re.compile(r"random_states_\d+\.pkl|(optimizer|scheduler)\.bin")
STATE = re.compile(
    r"(model|pytorch_model|adapter_model|optimizer|scheduler|rng_state|random_states|scaler|sampler"
    r"|custom_checkpoint|dl_state_dict)[^/]*\.(safetensors|bin|pt|pth|pkl)"
)
"""Files without which a run does not go on as it was."""


@dataclass(slots=True)
class Found:
    """One checkpoint, complete or not."""

    path: Path
    kind: str
    """npydata, transformers, accelerate, lightning, dcp, torch or safetensors."""
    step: int | None
    nbytes: int
    changed: float
    """When a file of it was last changed, in seconds since the epoch."""
    why: str = ""
    """Why it is not complete; empty if it is."""
    sequence: int = 0

    @property
    def complete(self) -> bool:
        """Whether every file is there, and none is cut off."""
        return not self.why

    def to_json(self) -> dict[str, object]:
        """Return what ``npydata verify --json`` prints."""
        return {"path": str(self.path), "kind": self.kind, "step": self.step,
                "complete": self.complete, "why": self.why}  # fmt: skip


def scan(root: str | os.PathLike[str]) -> list[Found]:
    """Return the checkpoints in a folder and the folders in it, the newest first.

    Newest is: last committed, of our own; with the largest step, where all have one; else last
    changed. Links are not followed.

    Raises:
        CheckpointError: There is no such folder or file.
    """
    root = Path(root)
    if not root.exists():
        raise CheckpointError(f"{root}: there is no such file or folder")
    found = list(walk(root, 0))
    for one in found:
        adopt_siblings(one, found)
    found.sort(key=lambda one: (one.changed, str(one.path)), reverse=True)
    if all(one.sequence for one in found):
        found.sort(key=lambda one: one.sequence, reverse=True)
    elif all(one.step is not None for one in found):
        found.sort(key=lambda one: one.step or 0, reverse=True)
    return found


def walk(path: Path, depth: int) -> Iterator[Found]:
    """Yield what a file or folder is, or what the folders in it are."""
    if path.is_symlink() and depth:
        return
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    kind = kind_of(path, names)
    if kind is None:
        for name in names:
            if depth < MAX_DEPTH and not name.startswith("."):
                yield from walk(path / name, depth + 1)
        return
    files = files_in(path)
    found = Found(
        path, kind, step_in(path.name), sum(file.lstat().st_size for file in files),
        max((file.lstat().st_mtime for file in [path, *files]), default=0.0),
    )  # fmt: skip
    try:
        check(found, files)
    except (CheckpointError, OSError) as error:
        found.why = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")
    yield found


def kind_of(path: Path, names: list[str]) -> str | None:
    """Return who wrote a file or folder, by the names in it; None if it is no checkpoint."""
    if not path.is_dir():
        if path.suffix == ".bin" and not path.name.startswith("pytorch_model"):
            with path.open("rb") as file:
                return "torch" if file.read(4) in (LOCAL_HEADER, LEGACY[:4]) else None  # or tokens
        return KINDS.get(path.suffix)
    if TRAINING in names or (MANIFEST in names and "model.safetensors" in names):
        return "npydata"
    if path.suffix == ".ckpt":
        return "lightning"
    if "trainer_state.json" in names or re.fullmatch(r"checkpoint-\d+", path.name):
        return "transformers"
    if any(map(ACCELERATE.fullmatch, names)) or re.fullmatch(r"checkpoint_\d+", path.name):
        return "accelerate"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "dcp"
    if any(name.endswith(".safetensors.index.json") for name in names):
        return "safetensors"
    if "config.json" in names and any(STATE.fullmatch(name) for name in names):
        return "safetensors" if any(n.endswith(".safetensors") for n in names) else "torch"
    return None


def step_in(name: str) -> int | None:
    """Return the step that a name tells."""
    steps = STEP.findall(name) or re.findall(r"(?<![\d=.])(\d+)(?:\.\w+)?$", name)
    return int(steps[-1]) if steps and len(steps[-1]) < 19 else None


def files_in(path: Path) -> list[Path]:
    """Return the files of a checkpoint; links are not followed."""
    if not path.is_dir():
        return [path]
    return [one for one in sorted(path.rglob("*")) if one.is_file() and not one.is_symlink()]


def check(found: Found, files: list[Path]) -> None:
    """Refuse a checkpoint that is not complete; fill in what its files say of it.

    Raises:
        CheckpointError: A file is missing or cut off.
    """
    path, names = found.path, {file.name for file in files}
    if found.kind == "npydata":
        manifest = read_manifest(path)
        found.step, found.sequence = manifest.step, manifest.sequence
        check_sizes(path, manifest)
        return
    if found.kind == "transformers":
        if "trainer_state.json" not in names:
            raise CheckpointError("has no trainer_state.json, which is written last")
        step = read_json(path / "trainer_state.json").get("global_step")
        found.step = step if type(step) is int else found.step
    if found.kind == "accelerate" and not any(n.startswith("random_states_") for n in names):
        raise CheckpointError("has no random_states_0.pkl, which is written after the others")
    for file in files:
        check_file(file)
    folders = {file.parent for file in files if file.suffix == ".distcp"}
    for folder in folders | ({path} if found.kind == "dcp" else set()):
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{folder}: has no .metadata, which is written last")
        open_checkpoint(folder).close()  # compares the sizes of its files; runs nothing


def check_file(path: Path) -> None:
    """Refuse a file that is cut off, as far as its header or its directory tells."""
    if path.suffix == ".json":
        index = read_json(path)
        if path.name.endswith(".index.json"):
            for name in sorted(set(index.get("weight_map", {}).values())):
                if Path(name).name != name or not (path.parent / name).is_file():
                    raise CheckpointError(f"{path}: names {name!r:.80}, which is missing")
    elif path.suffix == ".safetensors":
        open_checkpoint(path).close()
    elif path.suffix in TORCH:
        check_torch(path)


def check_torch(path: Path) -> None:
    """Refuse a file of ``torch.save`` whose zip directory, at its end, is missing or wrong."""
    with path.open("rb") as file:
        start = file.read(len(LEGACY))
        if start[:4] == LOCAL_HEADER:
            try:
                with zipfile.ZipFile(file) as archive:
                    for entry in archive.infolist():
                        file.seek(entry.header_offset)
                        if file.read(4) != LOCAL_HEADER:
                            raise zipfile.BadZipFile(f"{entry.filename} is not where it should be")
            except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
                raise CheckpointError(f"{path}: is cut off or damaged: {error}") from None
            return
        if start == LEGACY:
            open_checkpoint(path).close()
            return
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if not start.startswith(b"\x80") or file.read(1) != b".":  # a pickle ends with a dot
            raise CheckpointError(f"{path}: is cut off, or not a file of torch.save")


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds."""
    if path.stat().st_size > MAX_JSON_BYTES:
        return {}
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is cut off, or not JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def adopt_siblings(one: Found, found: list[Found]) -> None:
    """Refuse what lacks a file that every complete checkpoint beside it has.

    Some files are written after the one that comes last otherwise, or not named by any other.
    """
    if one.why or one.kind == "npydata" or not one.path.is_dir():
        return
    pattern = one.kind, one.path.parent, numberless(one.path.name)
    others = [
        {numberless(file.name) for file in files_in(other.path) if STATE.fullmatch(file.name)}
        for other in found
        if other is not one and other.complete
        and (other.kind, other.path.parent, numberless(other.path.name)) == pattern
    ]  # fmt: skip
    mine = {numberless(file.name) for file in files_in(one.path)}
    if others and (missing := sorted(set.intersection(*others) - mine)):
        one.why = f"has no {missing[0].replace('#', '0')}, which the others beside it have"


def numberless(name: str) -> str:
    """Return a name with # in place of each number."""
    return re.sub(r"\d+", "#", name)
