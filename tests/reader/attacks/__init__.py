"""Hostile checkpoint files, one function each: its name and its phrase say what the file tries.

A function writes one file (or a list of them) into a folder. ``caught`` says what must happen:

- ``opening``: ``open_checkpoint`` refuses the file;
- ``reading``: opening, or reading everything in it, raises ``CheckpointError``;
- ``system``: as ``opening``, or the system's own ``OSError`` for a path that can't be opened;
- ``harmless``: it may also succeed; limits of time and memory hold, and no foreign byte is read.

Every byte of every record here is ``PAYLOAD``: a tensor with another byte in it leaks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

FAMILIES = ("zip", "directory", "pickle", "bombs", "tensors", "legacy", "tar", "safetensors",
            "index", "shards", "places", "torch", "rare",
            "collisions")  # fmt: skip

Write = Callable[[Path], Path | Iterable[Path]]


@dataclass(frozen=True, slots=True)
class Attack:
    family: str
    name: str
    tries: str
    caught: str
    write: Write


REGISTERED: dict[tuple[str, str], Attack] = {}


def register(write: Write, name: str, tries: str, caught: str, module: str | None = None) -> None:
    """Add an attack to the family named like the module that it is written in."""
    family = (module or write.__module__).rpartition(".")[2]
    assert caught in ("opening", "reading", "harmless", "system")
    assert (family, name) not in REGISTERED, f"{family}: two attacks are called {name}"
    REGISTERED[family, name] = Attack(family, name, tries, caught, write)


def attack(tries: str, *, caught: str = "opening") -> Callable[[Write], Write]:
    """Register a function under its own name."""

    def decorator(write: Write) -> Write:
        register(write, write.__name__, tries, caught)
        return write

    return decorator


def damaged_everywhere(
    format: str, small: Callable[[Path], Path], beheaded: str = "opening", *, needed: int = 1
) -> None:
    """Register a good file that is cut off, and one that lacks its beginning, at every byte.

    ``beheaded`` says when the second is caught; lacking fewer than ``needed`` bytes is no harm.
    """

    def some(folder: Path, ends: bool) -> Iterable[Path]:
        whole = small(folder / f"whole.{format}")
        raw = whole.read_bytes()
        for length in range(0 if ends else needed, len(raw)):
            path = folder / f"{length}.{format}"
            path.write_bytes(raw[:length] if ends else raw[length:])
            yield path

    module = f"attacks.{format}"
    register(lambda folder: some(folder, True), f"{format}_cut_off_at_every_byte",
             "be cut off, at every byte", "opening", module)  # fmt: skip
    register(lambda folder: some(folder, False), f"{format}_without_its_first_bytes",
             "lack its beginning, at every byte", beheaded, module)  # fmt: skip


def family(name: str) -> list[Attack]:
    import_module(f"attacks.{name}")
    return [one for one in REGISTERED.values() if one.family == name]
