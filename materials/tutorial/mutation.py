"""One-line changes that break a promise: the learner predicts the symptom, CI confirms it."""

import difflib
from pathlib import Path

from tutorial.symbols import ROOT, Symbol, find, first_line, module_source, parse_symbol


def mutation_card(symbol: str, *, line: str, mutant: str, promise: str) -> None:
    """Print the change and the promise it breaks.

    `line` is a line of the symbol's source, stripped, that occurs there exactly once; `mutant`
    takes its place; `promise` is the test that must fail.
    """
    print(symbol)
    print("\n".join(diff(symbol, line, mutant)))
    print(f"breaks {promise}")


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
