"""Run `examples/train.py` on the learner's package: `python own_training.py --tokens ... --out ...`

`make_package()` brings `import mine` about. `compose(mine, train)` puts each piece of it in the
place of the library's:

| of the package | stands where the library, or the script, uses |
|---|---|
| a function that was accepted | the function that it was checked against |
| a class of a frame, such as `MySampler` | the class that it is derived from |

So `mine.order.MySampler` cuts the epochs of the loader, and `mine.checkpointer.commit`
ends each save of `mine.snapshot.MyCheckpointer`. What the package lacks stays as it is.
"""

import importlib
import sys
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType

if __package__ in (None, ""):  # run as a script
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import npydata
from tutorial import keeping
from tutorial.lessons import PARTS

SCRIPTS = Path(npydata.__file__).parents[1] / "examples"


def compose(mine: ModuleType, *scripts: ModuleType) -> dict[object, object]:
    """Put the learner's pieces to work; return them by what they took the place of."""
    parts = {name: getattr(mine, name) for name in PARTS if hasattr(mine, name)}
    taken: dict[object, object] = {}
    for name, module in parts.items():
        for build in PARTS[name].kept():
            if build.owner is None and hasattr(module, build.name):
                taken[build.reference] = getattr(module, build.name)
        for value in vars(module).values():
            if isclass(value) and value.__module__ == module.__name__:
                taken[value.__bases__[0]] = value
    taken = {theirs: own for theirs, own in taken.items() if own is not theirs}
    taken.pop(object, None)
    for module in [*library(), *parts.values(), *scripts]:
        put_in_place(vars(module), taken)
    return taken


def library() -> list[ModuleType]:
    """The modules of npydata."""
    for home in set(npydata.HOMES.values()):
        importlib.import_module(f"npydata.{home}")
    return [module for name, module in sys.modules.items() if name.startswith("npydata.")]


def put_in_place(names: dict[str, object], taken: dict[object, object]) -> None:
    """Let names stand for the learner's pieces where they stood for the library's."""
    for name, value in list(names.items()):
        if (isclass(value) or isfunction(value)) and value in taken:
            names[name] = taken[value]


def make_package() -> Path:
    """Write `lab/mine` with what was accepted so far, where `import` finds it; return its path."""
    for part in PARTS.values():
        keeping.write(part, keeping.pieces(part))
    folder = str(keeping.lab())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return keeping.lab() / "mine"


def main() -> int:
    sys.path.append(str(SCRIPTS))
    make_package()
    import mine  # it says which pieces are the learner's
    import train

    compose(mine, train)
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
