"""Statements at the top level of a file or a cell, and the names that they give. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_OWN_SCOPE = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def is_main_guard(node: ast.stmt) -> bool:
    """Tell whether this is `if __name__ == "__main__":`, whose body nobody runs who imports the file."""
    match node:
        case ast.If(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            return {ast.unparse(left), ast.unparse(right)} == {"__name__", "'__main__'"}
    return False


def imported_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """List what an import runs, in its order: also what stands within `if`, `for`, `with` and `try`, behind those."""
    for node in body:
        if isinstance(node, ast.If) and is_main_guard(node):
            yield from imported_statements(node.orelse)
            continue
        yield node
        for block in blocks(node):
            yield from imported_statements(block)


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """List the blocks of a compound statement; none of a function or a class, which have names of their own."""
    if isinstance(node, Definition):
        return []
    found: list[ast.AST] = [node]
    found += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.ExceptHandler | ast.match_case)]
    lists = (value for one in found for _, value in ast.iter_fields(one) if isinstance(value, list))
    return [value for value in lists if value and isinstance(value[0], ast.stmt)]


def names_given(node: ast.stmt, *, whole: bool = True) -> list[str]:
    """List the names that a statement gives, in their order; `whole`: also within its blocks."""
    visitor = _Names(whole)
    visitor.visit(node)
    return list(dict.fromkeys(visitor.found))


def names_changed(node: ast.stmt) -> list[str]:
    """List the names whose objects a statement changes by an assignment, such as `x` of `x.a = 1` and `x[0] = 1`."""
    targets = [one for one in ast.walk(node) if isinstance(one, ast.Attribute | ast.Subscript)]
    return [root for one in targets if isinstance(one.ctx, ast.Store) and (root := root_of(one))]


def root_of(node: ast.expr) -> str:
    """Return the name at which an expression such as `x.a[0].b` begins; empty if it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Names(ast.NodeVisitor):
    """Notes the names that are given in the scope of what it visits."""

    def __init__(self, whole: bool) -> None:
        self.found: list[str] = []
        self._whole = whole
        self._top: ast.AST | None = None

    def visit(self, node: ast.AST) -> None:
        """Note the names of a node and of what is below it."""
        if self._top is None:
            self._top = node
        elif isinstance(node, ast.stmt) and not self._whole:
            return
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.found.append(node.name)
            case ast.Import() | ast.ImportFrom():
                self.found += [one.asname or one.name.partition(".")[0] for one in node.names]
            case ast.Lambda() | ast.AnnAssign(value=None):
                pass
            case ast.Name(id=name, ctx=ast.Store()):
                self.found.append(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                self.found.append(name)
                self.generic_visit(node)
            case _ if isinstance(node, _OWN_SCOPE):
                given = (one.target for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
                self.found += [target.id for target in given]
            case _:
                self.generic_visit(node)
