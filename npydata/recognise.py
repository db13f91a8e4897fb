"""Whether a file holds tokens or a checkpoint, by what it begins with."""

import os
from pathlib import Path

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
LEGACY_MAGIC_DIGITS = str(0x1950A86A20F9469CFC6C).encode()  # how pickle's protocol 0 writes it
TAR_MAGIC, TAR_MAGIC_OFFSET = b"ustar", 257
START_BYTES = 512
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")


def why_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Return what says that a path is a checkpoint, or ``None``: then it is a token file.

    What it holds decides; its name does only where the content says nothing.
    """
    path = Path(path)
    if path.is_dir():
        return "it is a folder"
    if path.name.endswith(".index.json"):
        return "its name ends in .index.json"
    if not path.is_file():
        return None  # whoever opens it says what is wrong
    with open(path, "rb") as file:
        start = file.read(START_BYTES)
    if content := checkpoint_content(start, path.stat().st_size):
        return f"it begins like {content}"
    if path.suffix in CHECKPOINT_SUFFIXES:
        return f"its name ends in {path.suffix}"
    return None


def checkpoint_content(start: bytes, size: int) -> str | None:
    """Return which kind of checkpoint a file of ``size`` bytes begins like, if any."""
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "a zip file"
    if LEGACY_MAGIC in start[:32] or LEGACY_MAGIC_DIGITS in start[:32]:
        return "a file of torch before 1.6"
    if start[TAR_MAGIC_OFFSET:][: len(TAR_MAGIC)] == TAR_MAGIC:
        return "a tar file"
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and start[9:10] in b'"} \n\t' and header <= size - 8:
        return "a safetensors file"
    return None
