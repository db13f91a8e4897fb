"""The folder of a training checkpoint of npydata's own: which files it has, and what they mean.

Two safetensors files hold the tensors; how they are nested, and all that is no tensor, stands in
``training_state.json``. The manifest says that the folder is one of ours.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.lazy.files import OpenFile
from npydata.lazy.records import TensorRecord
from npydata.lazy.typed_json import Named

FORMAT, VERSION = "npydata checkpoint", 1
MANIFEST, TRAINING = "manifest.json", "training_state.json"
TENSORS = ("model.safetensors", "optimizer.safetensors")
MAX_BYTES = 1 << 28


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that has one of ours."""
    try:
        told = read_object(folder / MANIFEST)
    except (CheckpointError, OSError):
        return None
    ours = (told.get("format"), told.get("version")) == (FORMAT, VERSION)
    return told if ours and isinstance(told.get("files"), dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; a link is not followed."""
    if path.is_symlink():
        raise CheckpointError(f"{path.name} is a link, expected a file")
    file = OpenFile(path)
    if file.size > MAX_BYTES:
        raise CheckpointError(f"{path.name} has {file.size:,} bytes, expected {MAX_BYTES:,}")
    try:
        told = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from None
    finally:
        file.close()
    if not isinstance(told, dict):
        raise CheckpointError(f"{path.name} is a {type(told).__name__}, expected an object")
    return told


def with_records(value: Any, records: Mapping[str, TensorRecord]) -> Any:
    """Return a state as it was saved, with the file's records in the places of its tensors."""
    if isinstance(value, Named):
        return records[value.name]
    if isinstance(value, dict):
        return {key: with_records(one, records) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_records(one, records) for one in value)
    return value
