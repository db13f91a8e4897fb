"""The containers of checkpoints, one module each; a module added here is found by itself.

A module holds a :class:`Container` called ``CONTAINER``, which recognises its files and reads them;
opening, inspecting and converting go by the table of these.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.foreign import foreign_content, foreign_name
from tutorial.kept.reader.pickle_names import OPCODES, may_name

START_BYTES = 512
"""How much of a file it takes to recognise it."""


@dataclass(frozen=True, slots=True)
class Container:
    """One kind of file that holds tensors."""

    format: str
    """As :attr:`LazyCheckpoint.format` says it."""
    description: str
    """In words, with its article."""
    matches: Callable[[bytes, int], bool]
    """Whether a file of this kind begins with these bytes, and has so many."""
    read: Callable[[OpenFile], Archive]
    torch_takes: Callable[[bytes], bool] | None = None
    """Whether torch takes a file that begins like this for one of this kind."""
    suffixes: tuple[str, ...] = ()
    """Of files that are taken for this kind even if they don't begin like it: to say why not."""


@cache
def containers() -> dict[str, Container]:
    """Return every container by its format."""
    modules = (import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__))
    return {module.CONTAINER.format: module.CONTAINER for module in modules}


def recognise(start: bytes, nbytes: int) -> Container | None:
    """Return the container of a file of ``nbytes`` that begins with ``start``, if it is known."""
    return next((one for one in containers().values() if one.matches(start, nbytes)), None)


def open_container(path: Path, format: str | None = None) -> Archive:
    """Open one file and read what it describes.

    Raises:
        CheckpointError: It is damaged, or of no kind that is known here: then the message says
            what it is, if that shows.
    """
    return read_container(OpenFile(path), format)


def read_container(file: OpenFile, format: str | None = None) -> Archive:
    """Read what an open file describes; it is closed after an error."""
    try:
        return (containers()[format] if format else container_of(file)).read(file)
    except BaseException:
        file.close()
        raise


def require_one_reading(file: OpenFile, start: bytes, found: Container) -> None:
    """Refuse a file that torch would take for one of another kind, whatever it is called.

    torch looks for a zip file's first bytes, then for a tar header, and runs what it finds as a
    pickle else. A header of safetensors can be written so that it is each of these as well.
    """
    kinds = containers()
    for format in ("zip", "tar"):
        if found.format == format:
            return
        other = kinds[format]
        if other.torch_takes is not None and other.torch_takes(start):
            raise CheckpointError(f"begins like {found.description} and like {other.description}")
    if found.format not in ("legacy", "zip") and start[0] in OPCODES and may_say_names(file):
        raise CheckpointError(f"begins like {found.description} and like a pickle that says names")


def may_say_names(file: OpenFile) -> bool:
    """Whether a file, taken for a pickle, may come as far as to name something."""
    with file.view() as data:
        return may_name(data)


def container_of(file: OpenFile) -> Container:
    """Return the container that a file is."""
    start = file.read(0, min(START_BYTES, file.size))
    if not start:
        raise CheckpointError("is empty, expected a checkpoint")
    if (what := foreign_name(file.path.name)) is not None:
        raise CheckpointError(what)
    if (found := recognise(start, file.size)) is not None:
        require_one_reading(file, start, found)
        return found
    if (what := foreign_content(start)) is not None:
        raise CheckpointError(what)
    for one in containers().values():
        if file.path.suffix in one.suffixes:
            return one
    raise CheckpointError(
        f"begins with {start[:16]!r}, like no checkpoint: expected "
        f"{', '.join(one.description for one in containers().values())}"
    )


containers()  # now: a child forked while a thread imports them would wait for ever
