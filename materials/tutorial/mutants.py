"""Every one-line mutant of a function: how many of them does its check tell apart?"""

import ast
import copy
from collections.abc import Iterator

SWAPS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,), ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.BitXor: (ast.BitAnd,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,),
}  # fmt: skip


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(the changed statement, the whole source) of each mutant of a body; headers are given."""
    tree = ast.parse(source)
    headers = [node for node in ast.walk(tree) if isinstance(node, ast.arguments)]
    given = {id(node) for header in headers for node in ast.walk(header)}
    for number, node in enumerate(ast.walk(tree)):
        for change in () if id(node) in given else _changes(node):
            mutant = copy.deepcopy(tree)
            target = list(ast.walk(mutant))[number]
            change(target)
            text = ast.unparse(ast.fix_missing_locations(mutant))
            if text != ast.unparse(tree):
                yield _first_difference(ast.unparse(tree), text), text


def _changes(node: ast.AST) -> Iterator:
    """Functions that change a node in place."""
    if isinstance(node, ast.Compare):
        for other in SWAPS.get(type(node.ops[0]), ()):
            yield lambda target, other=other: target.ops.__setitem__(0, other())
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        for other in SWAPS.get(type(node.op), ()):
            yield lambda target, other=other: setattr(target, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for step in (1, -1):
            yield lambda target, step=step: setattr(target, "value", target.value + step)
    elif isinstance(node, ast.IfExp | ast.If):
        yield lambda target: setattr(target, "test", ast.UnaryOp(ast.Not(), target.test))
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        yield lambda target: target.value.elts.reverse()
    body = getattr(node, "body", None)
    for place, statement in enumerate(body if isinstance(body, list) else []):
        if not _is_text(statement) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield lambda target, place=place: target.body.__setitem__(place, ast.Pass())


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _first_difference(before: str, after: str) -> str:
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((f"{a.strip()}  ->  {b.strip()}" for a, b in pairs if a != b), "shorter")
