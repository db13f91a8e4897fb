"""What every format returns, and what people mistake for a checkpoint.

Each format is a file here with a function ``read_FORMAT(whole) -> Contents``: zip, legacy and tar
are torch's, and hold a pickle; safetensors has a header in JSON; dcp reads a folder. sharded.py
joins files that hold pieces of the same tensors, and training.py has what is ours: the manifest,
its checksums, and values as typed JSON. ``open.py`` decides which format reads a file.

A file is recognised by its first bytes, or by a name that only one program uses.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from npydata.reader.file import File

START_BYTES = 512
"""How many bytes it takes to recognise a file."""
Checksums = dict[File, list[tuple[int, int, int]]]
"""For each file, its ranges as ``(begin, end, crc32)``."""


@dataclass(slots=True)
class Contents:
    """Everything that a checkpoint holds; no tensor has been read.

    ``root`` and ``leaves`` hold the same objects, nested and by name. A format without nesting has
    one dictionary for both.
    """

    format: str
    """``zip``, ``legacy``, ``tar``, ``safetensors``, ``sharded``, ``dcp`` or ``npydata``."""
    files: list[File]
    root: Any
    """Values and :class:`TensorSpec` objects as they are nested."""
    leaves: dict[str, Any]
    """The entries of ``root`` by name, as ``flatten`` returns them."""
    byteorder: str = "little"
    unknown: set[str] = field(default_factory=set)
    """Names that only the program that wrote the file can look up."""
    values: dict[str, Any] = field(default_factory=dict)
    """What the format keeps beside the tensors: the metadata of safetensors."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the whole tensors of which this file has chunks, if the file gives them."""
    checksums: Checksums = field(default_factory=dict)
    """Checksums of what was written, in our own folders."""
    on_load: Callable[[], None] | None = None
    """Called at the end of ``LazyCheckpoint.load``."""


FOREIGN = (
    ("*", b"\x1f\x8b", "a gzip file: unpack it with gunzip"),
    ("*", b"GGUF", "a GGUF file: the gguf package reads it"),
    ("*", b"\x89HDF\r\n\x1a\n", "an HDF5 file: h5py reads it"),
    ("*", b"\x93NUMPY", "a numpy array: numpy.load reads it, or open_tokens"),
    ("*", b"version https://git-lfs", "a pointer of Git LFS: run git lfs pull"),
    ("*", b"<", "a web page: download the file again"),
    ("*.nemo", b"", "an archive of NeMo: unpack it, and open the model_weights.ckpt in it"),
    ("*.distcp", b"", "a shard of torch.distributed.checkpoint: open the folder"),
    ("*.metadata", b"", "the metadata of torch.distributed.checkpoint: open the folder"),
)
"""What people mistake for a checkpoint, by its name and first bytes, and what to do instead."""
FOREIGN_FOLDERS = (
    (
        "__[0-9]*.metadata *.distcp",
        "a part of a torch.distributed.checkpoint without its .metadata",
    ),
    (
        "zero_to_fp32.py mp_rank_*_model_states.pt layer_*-model_states.pt *zero_pp_rank_* "
        "global_step*",
        "a checkpoint of DeepSpeed: its zero_to_fp32.py makes one file of it",
    ),
    ("pytorch_model_fsdp_[0-9]*", "a checkpoint of accelerate: open a folder of a model in it"),
    (
        "latest_checkpointed_iteration.txt iter_[0-9]* mp_rank_?? mp_rank_??_???* "
        "model_optim_rng.pt",
        "a checkpoint of Megatron: open the model_optim_rng.pt of a rank, or convert it there",
    ),
)
"""Names in a folder, any of which is enough; what the folder is, and what to do instead."""


def foreign_file(name: str, start: bytes) -> str | None:
    """Return what a file is if it is no checkpoint, and what to do; None if unknown."""
    for pattern, begin, what in FOREIGN:
        if fnmatchcase(name, pattern) and start.startswith(begin):
            return f"is {what}"
    return None


def foreign_folder(names: Iterable[str]) -> str | None:
    """Return what a folder with these names is, and what to do; None if unknown."""
    for patterns, what in FOREIGN_FOLDERS:
        if any(fnmatchcase(name, one) for name in names for one in patterns.split()):
            return f"is {what}"
    return None
