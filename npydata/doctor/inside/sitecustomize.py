"""Run by every watched interpreter as it starts: gets the hooks ready, and leaves no other trace.

The folder is taken off ``sys.path`` again, and a ``sitecustomize`` that this one hides is run.
"""

import importlib
import os
import sys
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def watch(folder: str) -> None:
    """Wait for torch to be imported, and record from then on.

    The neighbours of this file get a package's name that no script can mean.
    """
    package = ModuleType("_npydata_doctor")
    package.__path__ = [HERE]
    sys.modules[package.__name__] = package
    recording, watching, wrapping = (
        importlib.import_module(f"{package.__name__}.{name}")
        for name in ("recording", "watching", "wrapping")
    )
    recorder = recording.Recorder(folder, watching.start)
    wrapping.install(recorder)


def run_hidden() -> None:
    """Import the ``sitecustomize`` that stands further back on the path, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


if os.environ.get("NPYDATA_DOCTOR"):
    try:
        watch(os.environ["NPYDATA_DOCTOR"])
    except Exception as error:  # a training must not fail because nobody can watch it
        print(f"npydata doctor: can't watch this process: {error}", file=sys.stderr)
    run_hidden()
