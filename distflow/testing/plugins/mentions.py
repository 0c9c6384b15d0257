"""What a plug-in's file says of what it gets: keys of tasks, and the shape of fields. Imports no torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from distflow.data.formats import PROMPT

Shape = Literal["sample", "token", "text"]
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_READ_BY: dict[str, Shape] = {"dense": "sample", "ragged": "token", "padded": "token", "texts": "text"}


def needed_keys(node: ast.AST) -> list[str]:
    """The keys of tasks that a function declares by `@needs("key", …)`."""
    named = [
        decorator.args
        for decorator in (node.decorator_list if isinstance(node, _FUNCTION) else ())
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == "needs"
    ]
    return [str(key.value) for keys in named for key in keys if isinstance(key, ast.Constant)]


def made_up_tasks(
    keys: Sequence[str] = (), value: Callable[[int], Any] = str, *, chat: bool = False
) -> list[tuple[str, str]]:
    """Prompts whose tasks have a gold answer of a kind, as the docs have it, and these keys, and no others.

    `chat`: as of conversations, whose messages are in the task.
    """
    given = ["answer", *keys]
    return [
        (f"{n}=", json.dumps({**({PROMPT: _said(n)} if chat else {}), **dict.fromkeys(given, value(2 * n))}))
        for n in (1, 2, 6, 21, 30)
    ]


def _said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number}="}]


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
