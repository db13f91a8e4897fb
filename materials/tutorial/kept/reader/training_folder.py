"""The folder of a training checkpoint of npydata's own: which files it has, and what they mean.

Two safetensors files hold the tensors, or two folders of them where many processes saved; how they
are nested, and all that is no tensor, stands in ``training_state.json``. The manifest says that the
folder is one of ours.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.reader.held_folder import HeldFolder

FORMAT, VERSIONS = "npydata checkpoint", (1, 2, 3)
MANIFEST, TRAINING = "manifest.json", "training_state.json"
PARTS = ("model", "optimizer")
RANK_FILE = re.compile(r"(model|optimizer)/rank_\d{1,9}(-\d{1,9})?\.safetensors")
"""What a process writes of a sharded state."""
RNG_FILE = re.compile(r"rng/rank_\d{1,9}\.json")
MAX_BYTES = 1 << 28


def manifest_of(folder: HeldFolder) -> dict[str, Any] | None:
    """Return the manifest of a folder that has one of ours."""
    try:
        manifest = read_object(folder, MANIFEST)
    except (CheckpointError, OSError):
        return None
    ours = manifest.get("format") == FORMAT and manifest.get("version") in VERSIONS
    return manifest if ours and isinstance(manifest.get("files"), dict) else None


def is_training_state(folder: HeldFolder) -> bool:
    """Whether a folder has the file of that name, and it is one of ours."""
    try:
        return read_object(folder, TRAINING).keys() >= {*PARTS[:1], "training_state"}
    except (CheckpointError, OSError):
        return False


def files_of(part: str, files: Collection[str]) -> list[str]:
    """Return which of a checkpoint's files hold a part: one, or those of every process."""
    if f"{part}.safetensors" in files:
        return [f"{part}.safetensors"]
    return sorted(one for one in files if RANK_FILE.fullmatch(one) and one.startswith(f"{part}/"))


def read_object(folder: HeldFolder, name: str) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        data = json.loads(folder.read(name, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{name} is a {type(data).__name__}, expected an object")
    return data
