"""Tell token files apart by their sizes and a few blocks of their content."""

import hashlib
import os
from collections.abc import Sequence

from npydata.dataset.tokens import TokenFile

BLOCKS = 64
BLOCK_BYTES = 4096


def fingerprint_of(files: Sequence[TokenFile], *parameters: int) -> str:
    """Hash the files' sizes and dtypes, some parameters, and 64 blocks spread over all files.

    Where the files lie does not count. The blocks are read around the page cache's readahead.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(repr((file.dtype.str, file.shape)).encode())
    digest.update(repr(parameters).encode())
    for file, begin in spread_blocks(files):
        digest.update(read_block(file, begin))
    return digest.hexdigest()


def spread_blocks(files: Sequence[TokenFile]) -> list[tuple[TokenFile, int]]:
    """Return 64 evenly spread places as (file, byte among its tokens)."""
    total = sum(file.nbytes for file in files)
    places = [k * max(0, total - BLOCK_BYTES) // (BLOCKS - 1) for k in range(BLOCKS)]
    found, passed = [], 0
    for file in files:
        while places and places[0] < passed + file.nbytes:
            found.append((file, places.pop(0) - passed))
        passed += file.nbytes
    return found


def read_block(file: TokenFile, begin: int) -> bytes:
    """Read up to 4 KiB of a file's tokens, and no page beside them."""
    size = min(BLOCK_BYTES, file.nbytes - begin)
    with open(file.path, "rb", buffering=0) as plain:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(plain.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(plain.fileno(), size, file.layout.offset + begin)
