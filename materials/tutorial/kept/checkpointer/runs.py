"""Which training run commits into a folder of checkpoints: one that was loaded there, or a new one.

A run goes on in another process when that loads one of its checkpoints and then saves beside it.
"""

import os
import secrets
from pathlib import Path

_loaded: dict[Path, str] = {}
_begun: dict[tuple[int, Path], str] = {}
"""By process as well: a forked one begins a run of its own."""


def continue_run(folder: Path, run: str) -> None:
    """Let this process, if it has saved nothing there yet, go on with the run of a checkpoint."""
    _loaded[Path(os.path.realpath(folder)).parent] = run


def run_in(root: Path) -> str:
    """Return the name of the run that this process commits into a root."""
    root = Path(os.path.realpath(root))
    return _begun.setdefault((os.getpid(), root), _loaded.get(root) or secrets.token_hex(8))
