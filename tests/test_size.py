"""How large the tree is: code tokens and files of each folder, held against `size.txt`.

``python -m pytest tests/test_size.py -s`` prints the table; ``python tests/test_size.py --write``
writes it anew, and refuses to raise its total. Docstrings, comments and blank lines are free, so
nothing is gained by dense lines. An f-string is one token on every Python, and a string over
several lines counts its words.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("size.txt")
SLACK = 0.02
"""The share of a row that may lie unused before a reminder is printed."""

FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER}  # fmt: skip
FSTRING_START = getattr(
    tokenize, "FSTRING_START", None
)  # from Python 3.12 on, f-strings have parts
FSTRING_END = getattr(tokenize, "FSTRING_END", None)

Place = tuple[int, int]


def code_tokens(source: str) -> int:
    """Count the tokens of Python code, docstrings and comments excepted."""
    docstrings = docstring_lines(source)
    lines = source.splitlines(keepends=True)
    return sum(
        words(lines, start, end) if is_string else 1
        for is_string, start, end in tokens(source)
        if start[0] not in docstrings
    )


def docstring_lines(source: str) -> set[int]:
    """Return the lines of strings that stand alone as statements."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }


def tokens(source: str) -> Iterator[tuple[bool, Place, Place]]:
    """Yield (whether it is a string, start, end) of each token; an f-string is one."""
    begin, depth = (0, 0), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if FSTRING_START is not None and token.type == FSTRING_START:
            begin = begin if depth else token.start
            depth += 1
        elif FSTRING_END is not None and token.type == FSTRING_END:
            depth -= 1
            if not depth:
                yield True, begin, token.end
        elif not depth and token.type not in FREE:
            yield token.type == tokenize.STRING, token.start, token.end


def words(lines: list[str], start: Place, end: Place) -> int:
    """Return 1 for a string on one line, else the number of its words."""
    if start[0] == end[0]:
        return 1
    inside = [lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1]]
    return len("".join([*inside, lines[end[0] - 1][: end[1]]]).split())


def python_files() -> list[Path]:
    """Return the files that git tracks, or would with the next `git add`."""
    ask = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def row_of(path: Path) -> str:
    """Name the row that a file counts in: two folders deep."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."


def measure() -> tuple[Counter[str], Counter[str]]:
    """Return the code tokens and the number of files of each row."""
    sizes, files = Counter[str](), Counter[str]()
    for path in python_files():
        sizes[row_of(path)] += code_tokens(path.read_text(encoding="utf-8"))
        files[row_of(path)] += 1
    return sizes, files


def read_table() -> dict[str, int]:
    """Return the committed tokens of each row."""
    rows = (line.split() for line in TABLE.read_text(encoding="utf-8").splitlines())
    return {name: int(size) for name, size, _ in rows}


def render(sizes: Counter[str], files: Counter[str]) -> str:
    """Return the rows as lines of `size.txt`."""
    rows = sorted(sizes)
    return "".join(f"{row:32} {sizes[row]:>8} {files[row]:>4}\n" for row in rows)


def summed(sizes: Counter[str], files: Counter[str]) -> str:
    """Return the totals of the top folders and of the tree, for people."""
    tops = Counter[str](), Counter[str]()
    for row in sizes:
        for name in ("all", row.split("/")[0]):
            tops[0][name] += sizes[row]
            tops[1][name] += files[row]
    return "\n".join(
        f"{name:32} {size:>8,} {tops[1][name]:>4}" for name, size in sorted(tops[0].items())
    )


def test_no_folder_has_grown():
    sizes, files = measure()
    committed = read_table()
    print("\n" + render(sizes, files) + "\n" + summed(sizes, files))
    grown = {
        row: f"{size:,} tokens, {committed.get(row, 0):,} committed"
        for row, size in sizes.items()
        if size > committed.get(row, 0)
    }
    slack = sum(committed.values()) - sum(sizes.values())
    if slack > SLACK * sum(committed.values()):
        print(f"{slack:,} tokens fewer than committed: python tests/test_size.py --write")
    assert not grown, (
        "cut as much elsewhere, then python tests/test_size.py --write; "
        "CONTRIBUTING.md says what a new feature does"
    )


def main() -> int:
    sizes, files = measure()
    total = sum(sizes.values())
    if "--write" in sys.argv[1:]:
        if TABLE.exists() and total > (committed := sum(read_table().values())):
            print(f"{total:,} tokens; the committed table has {committed:,}, and it only falls")
            return 1
        TABLE.write_text(render(sizes, files), encoding="utf-8")
    print(render(sizes, files) + "\n" + summed(sizes, files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
