"""What becomes of an attack: how each of its files ended, and what that cost."""

import re
import tempfile
from pathlib import Path
from typing import Any

from checkpoint_files import PAYLOAD, small_zip
from checkpoint_reading import Reading, bytes_of, measured, read_everything

from attacks import family


def outcome(question: str) -> dict[str, Any]:
    """How an attack's files ended, by ``"FAMILY NAME"``, and what they took: seconds and MiB."""
    (attack,) = (one for one in family(question.split()[0]) if str(one) == question)
    with tempfile.TemporaryDirectory() as folder:
        paths = list(attack.files(Path(folder)))
        ends, seconds, mebibytes = measured(lambda: sorted({end_of(path) for path in paths}))
    return {"ends": ends, "seconds": seconds, "mebibytes": mebibytes}


def end_of(path: Path) -> tuple[str, str]:
    """How reading a file ended: ``opening`` or ``reading`` (refused there), ``read``, or wrong."""
    try:
        reading = read_everything(path)
    except OSError as error:
        return "OSError", f"{type(error).__name__}: {error}"[:300]
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"[:300]
    if leak := foreign_bytes(reading):
        return "leaked", leak
    if not reading.refused:
        return "read", ""
    for error in reading.refused:
        message = str(error)
        named = path.name[:50] in message or path.parent.name in message
        if not named or len(message) > 1000 or not re.fullmatch(r"[^\n\0\x1b]*", message):
            return "unclear", message[:300]
    return reading.stage, str(reading.refused[0])[:300]


def foreign_bytes(reading: Reading) -> str:
    for name, tensor in reading.tensors.items():
        if strange := set(bytes_of(tensor)) - {PAYLOAD}:
            return f"{name} has bytes {sorted(strange)[:8]}"
    return ""


with tempfile.TemporaryDirectory() as warm:  # what is imported once is no attack's doing
    read_everything(small_zip(Path(warm) / "a.pt"))
