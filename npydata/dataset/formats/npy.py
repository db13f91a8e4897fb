"""Numpy's own format, versions 1.0 and 2.0: 1-D or 2-D integers in C order."""

from pathlib import Path

import numpy as np

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    integer_dtype,
    require_size,
)
from npydata.errors import TokenFileError

MAGIC = b"\x93NUMPY"
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def evidence(file: Candidate) -> Evidence:
    """Go by the magic, whatever the file is called."""
    return Evidence.MAGIC if file.head.startswith(MAGIC) else Evidence.NONE


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Read the header with numpy's parser, which evaluates nothing but literals."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran_order, stored = HEADER_READERS[version](file)
        except KeyError:
            raise TokenFileError(f"{path}: .npy version {version}, expected 1.0 or 2.0") from None
        except Exception as error:  # numpy's parser raises many kinds; all mean a bad header
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TokenFileError(f"{path}: bad .npy header ({reason})") from None
        offset = file.tell()
    found = integer_dtype(path, stored)
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise TokenFileError(f"{path}: shape {shape}, expected (tokens,) or (rows, tokens per row)")
    if fortran_order and len(shape) == 2:
        raise TokenFileError(f"{path}: stored in Fortran order, expected C order (row by row)")
    size = path.stat().st_size
    require_size(path, size, offset + int(np.prod(shape, dtype=object)) * found.itemsize)
    return TokenLayout(path, FORMAT.name, found, shape, offset, size)


FORMAT = TokenFormat(name="npy", evidence=evidence, read_layout=read_layout)
