"""OLMo's token files: named ``.npy``, but headerless, so only the caller knows their dtype."""

from pathlib import Path

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    count_tokens,
)
from npydata.errors import TokenFileError


def evidence(file: Candidate) -> Evidence:
    """Go by the name; a file that begins with numpy's magic is claimed more strongly elsewhere."""
    return Evidence.SUFFIX if file.path.suffix == ".npy" else Evidence.NONE


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Count the ids; once the dtype is known the file is like any raw one, and is called so."""
    if dtype is None:
        with open(path, "rb") as file:
            head = file.read(6)
        raise TokenFileError(
            f"{path}: starts with {head!r}, not with the .npy magic b'\\x93NUMPY'; "
            "if it holds headerless ids (OLMo), give dtype="
        )
    size = path.stat().st_size
    return TokenLayout(path, "raw", dtype, (count_tokens(path, size, dtype),), 0, size)


FORMAT = TokenFormat(name="olmo", evidence=evidence, read_layout=read_layout, stores_dtype=False)
