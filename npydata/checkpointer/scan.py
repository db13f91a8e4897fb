"""Which checkpoint of a folder can be resumed from, whoever wrote it: ``npydata verify FOLDER``.

Looks at headers, sizes, indexes and zip directories alone: no tensor is loaded, no pickle is run.
So it finds what a kill, a full disk or a power cut leaves: files that are missing or cut off. It
does not find bytes that changed; :func:`~npydata.verify_checkpoint` does, in our own checkpoints.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.file import FormatError, LocalFile, naming
from npydata.reader.formats import START_BYTES
from npydata.reader.formats.training import MANIFEST, TRAINING, check_sizes, read_manifest
from npydata.reader.formats.zip import read_directory
from npydata.reader.open import IGNORED, INDEX, formats_of, open_checkpoint
from npydata.system.progress import warn_caller

TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
FILES = {".safetensors": "safetensors", ".ckpt": "lightning", ".pt": "torch", ".pth": "torch"}
FOLDERS = (
    ("npydata", TRAINING),
    ("npydata", rf"{MANIFEST} model(\.safetensors)?"),
    ("lightning", r".*\.ckpt/"),
    ("transformers", r"trainer_state\.json"),
    ("accelerate", r"random_states_\d+\.pkl|(optimizer|scheduler)\.bin|checkpoint_(0|[1-9]\d*)/"),
    ("transformers", r"checkpoint-\d+/"),
    ("dcp", r"\.metadata|.*\.distcp"),
    ("deepspeed", r"mp_rank_\d+_model_states\.pt|.*zero_pp_rank_.*"),
    ("megatron", r"mp_rank_\d\d(_\d{3})*"),
    ("safetensors", r".*\.safetensors\.index\.json|.*-of-\d{5}\.safetensors"),
    ("safetensors", r"config\.json model\.safetensors"),
    ("torch", r".*\.bin\.index\.json|.*-of-\d{5}\.bin"),
    ("torch", r"config\.json pytorch_model\.bin"),
)
"""Which tool writes folders with these names in them; names separated by a space must all be there.
The first match counts. A name with a slash is the folder's own."""
SHARD = re.compile(r"-of-(?!00001\.)\d{5}\.(safetensors|bin)$")
MAX_DEPTH, MAX_JSON_BYTES = 6, 1 << 28
STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|global_step|ckpt)[-_=]?(\d+)", re.IGNORECASE)
STATE = re.compile(
    r"(model|pytorch_model|adapter_model|optimizer|scheduler|rng_state|random_states|scaler|sampler"
    r"|custom_checkpoint|dl_state_dict)[^/]*\.(safetensors|bin|pt|pth|pkl)"
)
"""Files without which a run can't resume as it was."""


@dataclass(slots=True)
class Found:
    """One checkpoint, complete or not."""

    path: Path
    kind: str
    """The first word of a row of ``FOLDERS`` or a value of ``FILES``, which name the tool."""
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

    @property
    def weights_alone(self) -> bool:
        """Whether it is a model that was exported, from which no training goes on."""
        return self.kind == "safetensors" or (self.kind == "torch" and self.path.is_dir())

    def to_json(self) -> dict[str, object]:
        """Return what ``npydata verify --json`` prints."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "step": self.step,
            "complete": self.complete,
            "why": self.why,
        }


def scan(root: str | os.PathLike[str]) -> list[Found]:
    """Return the checkpoints in a folder and the folders in it, the newest first.

    The newest is the last committed, if all are npydata's and of one root. It is the one with the
    largest step, if another tool's are among them and all have a step; else the last changed.
    Weights alone (exported models) come last, and don't count in this. Links are not followed.

    Raises:
        CheckpointError: There is no such folder or file, or a file's name is not a checkpoint's.
    """
    root = Path(root)
    if not root.exists():
        raise CheckpointError(f"{root}: there is no such file or folder")
    found = list(walk(root, 0))
    if not found and root.is_file():
        raise CheckpointError(f"{root}: its name ends in none of {', '.join(FILES)}")
    for one in found:
        compare_siblings(one, found)
    found.sort(key=lambda one: (one.changed, str(one.path)), reverse=True)
    ranked = [one for one in found if not one.weights_alone] or found
    roots = {one.path.parent if one.kind == "npydata" else None for one in ranked}
    if None in roots and all(one.step is not None for one in ranked):
        found.sort(key=lambda one: one.step or 0, reverse=True)
    elif len(roots) == 1:  # each root has its own count
        found.sort(key=lambda one: one.sequence, reverse=True)
    found.sort(key=lambda one: one.weights_alone)
    return found


def walk(path: Path, depth: int) -> Iterator[Found]:
    """Yield the checkpoint that a file or folder is, or those in the folders in it."""
    if path.is_symlink() and depth:
        return
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    kind = kind_of(path, names)
    inner = [name for name in names if re.fullmatch(r"checkpoint[-_]\d+", name)]
    if kind and inner:  # a trainer's folder: its last model is beside the checkpoints
        kind, names = None, inner
    if kind is None:
        for name in names:
            if depth < MAX_DEPTH and not any(fnmatchcase(name, one) for one in IGNORED):
                try:
                    yield from walk(path / name, depth + 1)
                except PermissionError:
                    if step_in(name) is not None:  # and not a lost+found, for example
                        warn_caller(f"{path / name}: may not be read")
        return
    files = files_in(path)
    found = Found(
        path,
        kind,
        step_in(path.name),
        sum(file.stat().st_size for file in files if file.exists()),
        max(file.lstat().st_mtime for file in [path, *files]),
    )
    try:
        check(found, files)
    except (CheckpointError, OSError) as error:
        found.why = str(error).removeprefix(f"{path}: ").removeprefix(f"{path}/")
    yield found


def kind_of(path: Path, names: list[str]) -> str | None:
    """Return which tool wrote a file or folder, by its names; None if it is not a checkpoint."""
    if not path.is_dir():
        if path.suffix == ".bin" and not path.name.startswith("pytorch_model"):
            if not path.is_file():  # opening a pipe would wait
                return None
            with path.open("rb") as file:
                return "torch" if formats_of(file.read(START_BYTES)) else None  # or it has tokens
        return FILES.get(suffix_of(path))
    names = [*names, f"{path.name}/"]
    for kind, patterns in FOLDERS:
        if all(any(re.fullmatch(one, name) for name in names) for one in patterns.split()):
            return kind
    return None


def suffix_of(path: Path) -> str:
    """Return a file's suffix; that of ``.pth.tar``, as PyTorch's examples write, is ``.pth``."""
    return Path(path.name.removesuffix(".tar")).suffix


def step_in(name: str) -> int | None:
    """Return the step in a name, if there is one."""
    steps = STEP.findall(name) or re.findall(r"(?:^|(?<!-of)[-_]|epoch)(\d+)(?:\.\w+)?$", name)
    return int(steps[-1]) if steps and len(steps[-1]) < 19 else None


def files_in(path: Path) -> list[Path]:
    """Return the files of a checkpoint; links to folders are not followed."""
    if not path.is_dir():
        return [path]
    return [one for one in sorted(path.rglob("*")) if not one.is_dir()]


def check(found: Found, files: list[Path]) -> None:
    """Refuse a checkpoint that is not complete; fill in what its files say about it.

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
        if SHARD.search(file.name) and not any(file.parent.glob(INDEX)):
            raise CheckpointError(f"{file}: by its name one of several, and there is no index")
    sets = {file.parent for file in files if file.suffix == ".distcp"}
    for folder in sets | ({path} if found.kind == "dcp" else set()):
        open_checkpoint(folder).close()  # compares the sizes of its files; runs nothing


def check_file(path: Path) -> None:
    """Refuse a file that is cut off, as far as its header or its zip directory shows."""
    if path.suffix == ".safetensors" or fnmatchcase(path.name, INDEX):
        open_checkpoint(path).close()
    elif path.suffix == ".json":
        read_json(path)
    elif suffix_of(path) in TORCH:
        with naming(path):
            check_torch(path)


def check_torch(path: Path) -> None:
    """Refuse a ``torch.save`` file that does not end where its directory or its pickle says."""
    file = LocalFile(path)
    start = file.read(0, min(START_BYTES, file.size))
    if start[:4] == b"PK\3\4":
        for record in read_directory(file.whole).values():
            record.check()
    elif formats_of(start):
        open_checkpoint(path).close()
    elif not start.startswith(b"\x80") or file.read(file.size - 1, 1) != b".":
        raise FormatError("is cut off, or not a file of torch.save")


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds."""
    try:
        data = json.loads(LocalFile(path).content(MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is cut off, or not JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def compare_siblings(one: Found, found: list[Found]) -> None:
    """Refuse a checkpoint that lacks a file that every complete one beside it has.

    Some files are written after the one that is otherwise last, or are named in no other file.
    """
    if one.why or one.kind == "npydata" or not one.path.is_dir():
        return
    pattern = one.kind, one.path.parent, numberless(one.path.name)
    others = [
        {numberless(file.name) for file in files_in(other.path) if STATE.fullmatch(file.name)}
        for other in found
        if other is not one
        and other.complete
        and (other.kind, other.path.parent, numberless(other.path.name)) == pattern
    ]
    mine = {numberless(file.name) for file in files_in(one.path)}
    if others and (missing := sorted(set.intersection(*others) - mine)):
        one.why = f"has no {missing[0].replace('#', '0')}, which the others beside it have"


def numberless(name: str) -> str:
    """Return a name with # in place of each number."""
    return re.sub(r"\d+", "#", name)
