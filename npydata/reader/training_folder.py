"""The folder of a training checkpoint of npydata's own: which files it has, and what they mean.

Two safetensors files hold the tensors, or two folders of them where many processes saved; how they
are nested, and all that is no tensor, stands in ``training_state.json``. The manifest says that the
folder is one of ours.
"""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.files import OpenFile

FORMAT, VERSION = "npydata checkpoint", 1
MANIFEST, TRAINING = "manifest.json", "training_state.json"
PARTS = ("model", "optimizer")
RANK_FILE = re.compile(r"(model|optimizer)/rank_\d{1,9}(-\d{1,9})?\.safetensors")
"""What a process writes of a sharded state."""
RNG_FILE = re.compile(r"rng/rank_\d{1,9}\.json")
MAX_BYTES = 1 << 28


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that has one of ours."""
    try:
        manifest = read_object(folder / MANIFEST)
    except (CheckpointError, OSError):
        return None
    ours = (manifest.get("format"), manifest.get("version")) == (FORMAT, VERSION)
    return manifest if ours and isinstance(manifest.get("files"), dict) else None


def files_of(part: str, files: Collection[str]) -> list[str]:
    """Return which of a checkpoint's files hold a part: one, or those of every process."""
    if f"{part}.safetensors" in files:
        return [f"{part}.safetensors"]
    return sorted(one for one in files if RANK_FILE.fullmatch(one) and one.startswith(f"{part}/"))


def require_no_link(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder inside a checkpoint that is a link: it would lead out of it."""
    for inner in {name.split("/")[0] for name in names if "/" in name}:
        if (folder / inner).is_symlink():
            raise CheckpointError(f"{inner} is a link, expected a folder")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; a link is not followed."""
    if path.is_symlink():
        raise CheckpointError(f"{path.name} is a link, expected a file")
    file = OpenFile(path)
    if file.size > MAX_BYTES:
        raise CheckpointError(f"{path.name} has {file.size:,} bytes, expected {MAX_BYTES:,}")
    try:
        data = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    finally:
        file.close()
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} is a {type(data).__name__}, expected an object")
    return data
