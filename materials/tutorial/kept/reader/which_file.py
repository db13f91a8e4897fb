"""Which file of a folder is its checkpoint."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from npydata.errors import CheckpointError
from tutorial.kept.reader.containers import containers
from tutorial.kept.reader.foreign import foreign_folder
from tutorial.kept.reader.manifest import root_of_checkpoints

INDEX_SUFFIX = ".index.json"
FOLDER_FILES = (
    ("model.safetensors", "model_[0-9]*.safetensors"),
    (f"*.safetensors{INDEX_SUFFIX}",),
    (f"*{INDEX_SUFFIX}",),
    ("*.safetensors",),
    ("pytorch_model.bin",),
    ("*.bin", "*.pt", "*.pth", "*.ckpt"),
)
"""Which file of a folder is its checkpoint: the first of these that it has, if it has one. Those of
Hugging Face's names come as ``from_pretrained`` looks for them."""
BESIDE = ("training_args.bin", f"*.h5{INDEX_SUFFIX}", f"*.msgpack{INDEX_SUFFIX}")
"""What lies beside them: its trainer's options, and the indexes of other libraries' files."""
PART_OF_SET = re.compile(r".*-\d{5}-of-(\d{5})\..*")


def only_checkpoint_in(folder: Path) -> str:
    """Return the name of the one checkpoint that a folder holds."""
    visible = sorted(
        path.name for path in folder.iterdir() if path.is_file() and may_be_checkpoint(path.name)
    )
    for patterns in folder_patterns():
        found = [name for name in visible if any(fnmatchcase(name, one) for one in patterns)]
        if len(found) == 1:
            require_no_part(found[0])
            return found[0]
        if found:
            break
    if (what := root_of_checkpoints(folder)) is not None:
        raise CheckpointError(what)
    if (what := foreign_folder(folder.iterdir(), alone=not found)) is not None:
        raise CheckpointError(what)
    if found:
        kinds = " or ".join(patterns)
        raise CheckpointError(f"holds {len(found)} of {kinds}, expected one; name the file")
    raise CheckpointError(
        "holds no checkpoint, expected one of "
        + ", ".join(pattern for patterns in folder_patterns() for pattern in patterns)
    )


def may_be_checkpoint(name: str) -> bool:
    """Whether a file is looked at: hidden ones and those of other programs are not."""
    return name[0] != "." and not any(fnmatchcase(name, one) for one in BESIDE)


def require_no_part(name: str) -> None:
    """Refuse a file that says in its name that it is one of several."""
    if (part := PART_OF_SET.fullmatch(name)) is not None and int(part[1]) > 1:
        raise CheckpointError(
            f"{name} is one of {int(part[1])} files by its name, and there is no index of them; "
            "name the file to open what it holds"
        )


def folder_patterns() -> list[tuple[str, ...]]:
    """Return :data:`FOLDER_FILES`, and what other containers' files are called."""
    listed = {pattern for patterns in FOLDER_FILES for pattern in patterns}
    others = [f"*{suffix}" for one in containers().values() for suffix in one.suffixes]
    unlisted = tuple(pattern for pattern in others if pattern not in listed)
    return [*FOLDER_FILES, *([unlisted] if unlisted else [])]
