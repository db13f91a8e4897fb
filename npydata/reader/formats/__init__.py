"""The formats of checkpoints, and what other files are that people take for one.

A file is known by its first bytes, or by a name that only one program gives.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from npydata.reader.file import File, FormatError
from npydata.reader.names import as_value, flatten, free_name
from npydata.reader.pickle.objects import TensorSpec
from npydata.reader.tensor import check_spec

START_BYTES = 512
"""How much of a file it takes to recognise it."""
Checksums = Callable[[], dict[File, list[tuple[int, int, int]]]]


@dataclass(slots=True)
class Contents:
    """Everything that a checkpoint holds; nothing of its tensors has been read."""

    format: str
    """``zip``, ``legacy``, ``tar``, ``safetensors``, ``sharded``, ``dcp`` or ``npydata``."""
    files: list[File]
    root: Any
    """Values and tensors as they are nested."""
    leaves: dict[str, Any]
    """What stands in ``root`` under each name."""
    byteorder: str = "little"
    unknown: set[str] = field(default_factory=set)
    """Names that only the program which wrote the file can look up."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the format keeps beside the tensors."""
    checksums: Checksums | None = None
    """Returns ranges ``(begin, end, crc32)`` of each file."""
    on_load: Callable[[], None] | None = None
    """Called when all of it has been loaded."""


def nested(format: str, files: list[File], root: Any, nbytes: int, **others: Any) -> Contents:
    """Return what a pickle of ``nbytes`` describes, by name, with every tensor checked."""
    leaves = flatten(root, nbytes)
    checked = set()
    for name, value in leaves.items():
        spec = as_value(value)
        if isinstance(spec, TensorSpec) and id(value) not in checked and spec.chunks is None:
            try:
                check_spec(spec)
            except FormatError as error:
                raise FormatError(f"{name:.200}: {error}") from None
            checked.add(id(value))
    return Contents(format, files, root, leaves, **others)


def with_values(contents: Contents) -> dict[str, Any]:
    """Return everything by name; what stands beside the tensors gets names that are free."""
    found = dict(contents.leaves)
    for key, value in contents.values.items():
        found[free_name((key,), found) if key in found else key] = value
    return found


WHOLE = "open the folder with all of its files"
TENSORFLOW = "tf.train.load_checkpoint reads it"
FOREIGN_NAMES = (
    (r".*\.distcp", "a shard of torch.distributed.checkpoint", WHOLE),
    (r"(__\d+)?\.metadata", "the metadata of torch.distributed.checkpoint", WHOLE),
    (r".*\.data-\d{5}-of-\d{5}", "a shard of a TensorFlow checkpoint", TENSORFLOW),
    (r".*\.ckpt(-\d+)?\.(index|meta)", "the index of a TensorFlow checkpoint", TENSORFLOW),
    (r".*\.msgpack", "a checkpoint of Flax", "flax.serialization reads it"),
)
"""For file names: what the file is, and what to do instead."""
WEB_PAGE = "a web page, not what was to be downloaded", "download it again"
FOREIGN_STARTS = (
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip or tar -xzf"),
    (b"BZh", "a bzip2 file", "unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "an xz file", "unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it with unzstd"),
    (b"GGUF", "a GGUF file of llama.cpp", "the gguf package reads it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as of Keras", "h5py reads it"),
    (b"\x93NUMPY", "a numpy array", "numpy.load reads it, and open_tokens if it holds tokens"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file", "run git lfs pull"),
    (b"<!DOCTYPE", *WEB_PAGE),
    (b"<html", *WEB_PAGE),
)
"""For a file's first bytes: what it is, and what to do instead."""
FOREIGN_FOLDERS = (
    (("__[0-9]*.metadata",), "a folder of torch.distributed.checkpoint whose ranks each described "
     "their own part (use_collectives=False)", "dcp.load reads it, on as many ranks"),
    (("*.distcp",), "a folder of torch.distributed.checkpoint without its .metadata",
     "fetch that file, which says what lies where"),
    (("zero_to_fp32.py", "mp_rank_*_model_states.pt", "layer_*-model_states.pt", "*zero_pp_rank_*",
      "global_step*", "latest_universal"), "a checkpoint of DeepSpeed", "its zero_to_fp32.py makes "
     "one file of it; mp_rank_*_model_states.pt in its global_step* can be opened"),
    (("latest_checkpointed_iteration.txt", "iter_[0-9]*", "mp_rank_??", "mp_rank_??_???*",
      "model_optim_rng.pt"), "a checkpoint of Megatron", "open the model_optim_rng.pt of one rank "
     "(iter_*/mp_rank_*), or have Megatron's tools/checkpoint/convert.py join them; an iter_* with "
     ".metadata opens whole"),
    (("*.data-?????-of-?????", "saved_model.pb"), "a TensorFlow checkpoint", TENSORFLOW),
    (("_CHECKPOINT_METADATA", "_METADATA"), "a checkpoint of Orbax (JAX)", "orbax reads it"),
    (("*.msgpack",), "a checkpoint of Flax", "flax.serialization reads it"),
    (("*.h5",), "a folder with HDF5 files, as of Keras", "h5py reads them"),
)  # fmt: skip
"""For names in a folder, one of which is enough: what it is, and what to do instead."""


def foreign_file(name: str, start: bytes) -> str | None:
    """Return what a file is that is no checkpoint, and what to do; None if that isn't known."""
    for pattern, what, instead in FOREIGN_NAMES:
        if re.fullmatch(pattern, name):
            return f"is {what}: {instead}"
    for signature, what, instead in FOREIGN_STARTS:
        if start.startswith(signature):
            return f"is {what}: {instead}"
    return None


def foreign_folder(names: Iterable[str]) -> str | None:
    """Return what a folder with these names is, and what to do; None if that isn't known."""
    names = list(names)
    for patterns, what, instead in FOREIGN_FOLDERS:
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return f"is {what}: {instead}"
    return None
