"""What the endings of file names say, so that nothing is written under another format's name."""

import os
from pathlib import Path

ENDINGS = {
    ".npy": "a numpy array",
    ".npz": "an archive of numpy arrays",
    ".bin": "ids without a header, or a file of torch.save",
    ".raw": "ids without a header",
    ".idx": "the index of a Megatron file",
    ".ds": "ids of datatrove, without a header",
    ".index": "the index of a token file",
    ".pt": "a file of torch.save",
    ".pth": "a file of torch.save",
    ".ckpt": "a file of torch.save",
    ".safetensors": "a safetensors file",
    ".distcp": "a shard of torch.distributed.checkpoint",
    ".gguf": "a GGUF file",
    ".h5": "an HDF5 file",
    ".msgpack": "a checkpoint of Flax",
    ".arrow": "an Arrow file",
    ".parquet": "a Parquet file",
    ".json": "text",
    ".jsonl": "text",
    ".csv": "text",
    ".txt": "text",
    ".tar": "an archive",
    ".zip": "an archive",
    ".gz": "a compressed file",
    ".zst": "a compressed file",
}
"""Those that people and programs go by; any other ending says nothing."""


def contradiction(path: str | os.PathLike[str], written: str) -> str | None:
    """Say that a name's ending is that of another format than the one ``written``, if it is."""
    found = Path(path).suffix.lower()
    if found == written or found not in ENDINGS:
        return None
    return (
        f"{os.fspath(path)}: {ENDINGS[written]} would be written, and {found} says "
        f"{ENDINGS[found]}: let the name end in {written}"
    )
