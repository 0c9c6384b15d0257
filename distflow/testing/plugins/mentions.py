"""What a plug-in's file mentions: keys of tasks, and fields that no shipped step writes. Imports no torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

Shape = Literal["sample", "token", "text"]
_READ_BY: dict[str, Shape] = {"dense": "sample", "ragged": "token", "padded": "token", "texts": "text"}


def task_keys(text: str) -> list[str]:
    """Keys of `….task["key"]`, `….task.get("key")`, of a variable called task, and of `@needs("key")`, in the order of
    the file."""
    return list(dict.fromkeys(_keys(ast.parse(text))))


def made_up_tasks(keys: Sequence[str], value: Callable[[int], Any] = str) -> list[tuple[str, str]]:
    """Prompts whose tasks have these keys, with answers of a kind."""
    given = list(keys) or ["answer"]
    return [(f"{n}=", json.dumps(dict.fromkeys(given, value(2 * n)))) for n in (1, 2, 6, 21, 30)]


def _keys(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if _is_task(value):
                yield key
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(key)), *_]) if (
                _is_task(value)
            ):
                yield key
            case (
                ast.Call(func=ast.Attribute(value=ast.Name(id="row"), attr="response"), args=names)
                | ast.Call(func=ast.Name(id="needs"), args=names)
            ):
                yield from (str(name.value) for name in names if isinstance(name, ast.Constant))


def _is_task(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "task") or (
        isinstance(node, ast.Name) and node.id == "task"
    )


def shape_of(field: str, text: str) -> Shape:
    """How a file reads a field: `batch.dense(field)` one value a sample, `.ragged` and `terms[field]` one a token."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=name), *_]) if (
                name == field and method in _READ_BY
            ):
                return _READ_BY[method]
            case ast.Subscript(value=ast.Name(id="terms"), slice=ast.Constant(value=name)) if name == field:
                return "token"
    return "sample"
