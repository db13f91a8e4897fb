"""One-line changes that break a promise: the learner predicts the symptom, CI confirms it."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tutorial.symbols import ROOT, Symbol, find, first_line, module_source, parse_symbol


def diff(symbol: str, line: str, mutant: str, root: Path = ROOT) -> list[str]:
    """The changed line with one line around it, as `diff -u` would show it."""
    before = module_source(parse_symbol(symbol, root).module, root).splitlines()
    after = mutated(symbol, line, mutant, root).splitlines()
    return list(difflib.unified_diff(before, after, n=1, lineterm=""))[3:]


def mutated(symbol: str, line: str, mutant: str, root: Path = ROOT) -> str:
    """The whole module's source with that one line changed."""
    parsed = parse_symbol(symbol, root)
    lines = module_source(parsed.module, root).splitlines()
    number = _only_line(parsed, line, lines)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = indent + mutant.strip()
    return "\n".join(lines) + "\n"


def _only_line(symbol: Symbol, line: str, lines: list[str]) -> int:
    nodes = find(symbol, "\n".join(lines))
    inside = [n for node in nodes for n in range(first_line(node) - 1, node.end_lineno or 0)]
    found = [number for number in inside if lines[number].strip() == line.strip()]
    if len(found) != 1:
        raise ValueError(f"{symbol.dotted}: {line!r} occurs {len(found)} times, expected once")
    return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A one-line change of the library, what one would notice of it, and the promise it breaks."""

    name: str
    symbol: str
    line: str
    mutant: str
    promise: Callable[[Any], None]
    symptoms: tuple[str, ...]
    right: int
    """The number of the symptom, from 1."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why another symptom is not what happens, by its number."""


def own_name(module: str) -> str:
    """Return the name under which a module is imported: these two folders are on the path."""
    return module.removeprefix("examples.").removeprefix("materials.")


def infect(card: Card) -> None:
    """Give the library's function the mutant's code, wherever it is used; in a child, for good."""
    symbol = parse_symbol(card.symbol)
    module = import_module(own_name(symbol.module))
    mutant = {"__name__": symbol.module, "__file__": "<mutant>"}
    exec(mutated(card.symbol, card.line, card.mutant), mutant)
    healthy, ill = getattr(module, symbol.name), mutant[symbol.name]
    if symbol.member:
        healthy, ill = vars(healthy)[symbol.member], vars(ill)[symbol.member]
    healthy.__code__ = ill.__code__
