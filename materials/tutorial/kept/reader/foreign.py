"""Files and folders that people take for checkpoints of torch: what they are, and what to do.

A file is known by its first bytes (its signature), or by a name that only one program gives.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

WHOLE = "open the folder with all of its files"
TENSORFLOW = "tf.train.load_checkpoint reads it"
DEEPSPEED = (
    "its zero_to_fp32.py makes one file of it; mp_rank_*_model_states.pt in its global_step* can "
    "be opened"
)
MEGATRON = (
    "open the model_optim_rng.pt of one rank (iter_*/mp_rank_*), or have Megatron's "
    "tools/checkpoint/convert.py join them; an iter_* with .metadata opens whole"
)

FILES = (
    (r".*\.distcp", "a shard of torch.distributed.checkpoint", WHOLE),
    (r"(__\d+)?\.metadata", "the metadata of torch.distributed.checkpoint", WHOLE),
    (r".*\.data-\d{5}-of-\d{5}", "a shard of a TensorFlow checkpoint", TENSORFLOW),
    (r".*\.ckpt(-\d+)?\.(index|meta)", "the index of a TensorFlow checkpoint", TENSORFLOW),
    (r".*\.msgpack", "a checkpoint of Flax", "flax.serialization reads it"),
)
"""For file names: what the file is, and what to do instead."""

SIGNATURES = (
    (b"\x1f\x8b", "a gzip file", "unpack it with gunzip or tar -xzf"),
    (b"BZh", "a bzip2 file", "unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "an xz file", "unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it with unzstd"),
    (b"GGUF", "a GGUF file of llama.cpp", "the gguf package reads it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as of Keras", "h5py reads it"),
    (b"\x93NUMPY", "a numpy array", "numpy.load reads it, and open_tokens if it holds tokens"),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file",
        "fetch it with git lfs pull",
    ),
    (b"<!DOCTYPE", "a web page, not what was to be downloaded", "download it again"),
    (b"<html", "a web page, not what was to be downloaded", "download it again"),
    (b"\x0a\x0dmodel_checkpoint_path", "the list of TensorFlow's checkpoints", TENSORFLOW),
    (b"model_checkpoint_path:", "the list of TensorFlow's checkpoints", TENSORFLOW),
)
"""For a file's first bytes: what it is, and what to do instead."""
DCP_METADATA = b"torch.distributed.checkpoint.metadata"

FOLDERS = (
    (("__[0-9]*.metadata",), "a folder of torch.distributed.checkpoint whose ranks each described "
     "their own part (use_collectives=False)", "dcp.load reads it, on as many ranks"),
    (("*.distcp",), "a folder of torch.distributed.checkpoint without its .metadata",
     "fetch that file, which says what lies where"),
    (("zero_to_fp32.py", "mp_rank_*_model_states.pt", "layer_*-model_states.pt", "*zero_pp_rank_*",
      "global_step*", "latest_universal"), "a checkpoint of DeepSpeed", DEEPSPEED),
    (("latest_checkpointed_iteration.txt", "iter_[0-9]*", "mp_rank_??", "mp_rank_??_???*",
      "model_optim_rng.pt"), "a checkpoint of Megatron", MEGATRON),
    (("*.data-?????-of-?????", "saved_model.pb"), "a TensorFlow checkpoint", TENSORFLOW),
    (("_CHECKPOINT_METADATA", "_METADATA"), "a checkpoint of Orbax (JAX)", "orbax reads it"),
    (("*.msgpack",), "a checkpoint of Flax", "flax.serialization reads it"),
    (("*.h5",), "a folder with HDF5 files, as of Keras", "h5py reads them"),
)  # fmt: skip
"""For the names in a folder, one of which is enough: what it is, and what to do instead."""
MODEL_FILES = FOLDERS[-2:]
"""Those that say nothing of the files beside them."""


def foreign_name(name: str) -> str | None:
    """Say what a file of this name is, and what to do; ``None`` if it is not known."""
    for pattern, what, instead in FILES:
        if re.fullmatch(pattern, name):
            return f"is {what}: {instead}"
    return None


def foreign_content(start: bytes) -> str | None:
    """Say what a file is that begins like this, and what to do; ``None`` if it is not known."""
    for signature, what, instead in SIGNATURES:
        if start.startswith(signature):
            return f"is {what}: {instead}"
    if DCP_METADATA in start:
        return f"is the metadata of torch.distributed.checkpoint: {WHOLE}"
    return None


def foreign_folder(paths: Iterable[Path], *, alone: bool) -> str | None:
    """Say what a folder with these files is, and what to do; ``None`` if it is not known.

    They are ``alone`` where no other file may be a checkpoint.
    """
    names = [path.name for path in paths]
    for row in FOLDERS:
        patterns, what, instead = row
        if (alone or row not in MODEL_FILES) and any(
            fnmatchcase(name, pattern) for name in names for pattern in patterns
        ):
            return f"is {what}: {instead}"
    return None
