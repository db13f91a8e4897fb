"""What the tables compare: every method of doing the work, in one table, by the modules here.

To add one, put a function under :func:`baseline`, which says for which table, under which name and
in which role, into the module of its family or into a new one; modules here are found.

=============================  ===============================================================
table                          method
=============================  ===============================================================
``dataset warm``, ``... cold``  ``(task, **options)`` yields ``(x, y)`` without end
``loader warm``, ``... cold``,  the same; options are ``workers`` and ``prefetch``
``loader step``, ``sweep``
``packing``                     ``(task, count=)`` the same, or counts what an epoch holds
``packing loader``              as ``loader warm``
``load zip``, ...               ``(path, model, into=)`` loads all of a checkpoint
``load limit cold``, ...        ``(path)`` returns the work to be timed
``reader zip``, ...             ``(path, name)`` returns a tensor
``reader zip slice``, ...       ``(path, name)`` returns its first ``SLICE_ROWS`` rows
``reader zip open``, ...        ``(path)`` opens and closes a checkpoint
``reader convert``              ``(path, out)`` writes ``out``, and the disk has it
``checkpoint``, ``... loop``,   ``(state)`` returns a :class:`~tutorial.kept.bench.states.Saver`
``... memory``, ``... cache``,
``... distributed``
``survival``                    ``()`` returns a saver to be attacked
``survival loaders``            ``()`` returns a loader to be killed
``checkpoint stall limit``,     ``(nbytes, path)`` returns the work to be timed
``checkpoint durable limit``
=============================  ===============================================================
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from tutorial.kept.bench.measure import Row

OURS = "ours"
"""The name of ours in every table."""

ROLES = ("ours", "peer", "naive", "limit")
"""What a baseline is to the reader, in the order of a table: ours, the best of the others, what
people commonly write, and what nobody can beat. It decides the colour."""

Options = Mapping[str, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """One row of a table: a method at one setting."""

    table: str
    name: str
    role: str
    method: Callable[..., Any]
    setting: str = ""
    """What else one needs to know to do it again: workers, hints, depth."""
    options: Options = field(default_factory=dict)
    """Keywords for the method that make the setting."""
    quick: bool = True
    """Whether a quick run measures it as well."""
    available: Callable[[], bool] = lambda: True
    """Whether the installed packages have it."""
    bytes_per_token: Callable[[Any], float] | None = None
    """For a limit that yields bytes: how many of them one token of a task costs."""

    def start(self, *arguments: Any) -> Any:
        return self.method(*arguments, **self.options)

    def where(self, **options: Any) -> "Baseline":
        """Return it with other options."""
        return replace(self, options={**self.options, **options})

    def row(self, group: str, rates: Sequence[float], **rest: Any) -> Row:
        """Return what was measured as a row of a group; ``rest`` are other fields of it."""
        fields = {"name": self.name, "setting": self.setting, "role": self.role} | rest
        return Row(group=group, rates=tuple(rates), **fields)


TABLES = (
    "checkpoint",
    "checkpoint cache",
    "checkpoint distributed",
    "checkpoint durable limit",
    "checkpoint loop",
    "checkpoint memory",
    "checkpoint stall limit",
    "dataset cold",
    "dataset hints",
    "dataset warm",
    "load folder",
    "load legacy",
    "load limit cold",
    "load limit warm",
    "load safetensors",
    "load zip",
    "loader cold",
    "loader step",
    "loader warm",
    "packing",
    "packing loader",
    "reader convert",
    "reader legacy",
    "reader legacy open",
    "reader legacy slice",
    "reader safetensors",
    "reader safetensors open",
    "reader safetensors slice",
    "reader zip",
    "reader zip open",
    "reader zip slice",
    "survival",
    "survival loaders",
    "sweep",
)
"""What `npydata bench` and `sweep` show; a baseline says in which of them it stands."""
REGISTRY: list[Baseline] = []


def baseline(
    tables: str,
    name: str,
    role: str,
    *,
    settings: Mapping[str, Options] | None = None,
    full: Mapping[str, Options] | None = None,
    **rest: Any,
) -> Callable[[Method], Method]:
    """Register a method as rows of tables, whose names are separated by commas.

    ``settings`` and ``full`` give a row each: what it is called, and the keywords that make it; a
    quick run leaves out those of ``full``. ``rest`` are other fields of :class:`Baseline`.
    """
    assert role in ROLES, f"role {role!r}, expected one of {', '.join(ROLES)}"
    unknown = set(tables.split(", ")) - set(TABLES)
    assert not unknown, f"tables {unknown}, expected some of {', '.join(TABLES)}"

    def register(method: Method) -> Method:
        rows = [
            Baseline(table=table, name=name, role=role, method=method, setting=setting,
                     options=options, quick=quick, **rest)
            for table in tables.split(", ")
            for quick, each in ((True, settings or {"": {}}), (False, full or {}))
            for setting, options in each.items()
        ]  # fmt: skip
        # Decorators run from the last to the first, but rows stand as they are read.
        below = [k for k, one in enumerate(REGISTRY) if one.method is method]
        at = min(below, default=len(REGISTRY))
        REGISTRY[at:at] = rows
        return method

    return register


def baselines_of(table: str, *, quick: bool = False) -> list[Baseline]:
    """Return the rows of a table: ours first, the limits last."""
    import_all()
    found = [one for one in REGISTRY if one.table == table and one.available()]
    return sorted((one for one in found if one.quick or not quick),
                  key=lambda one: ROLES.index(one.role))  # fmt: skip


@cache
def import_all() -> None:
    """Import every module of this package once, so that it registers its baselines."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
