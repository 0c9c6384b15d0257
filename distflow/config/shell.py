"""The words of a shell script's commands, with its variables in their places: it is never run."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """One command of a script."""

    line: int
    """That of its first word, from 1."""
    words: tuple[str, ...]
    """What is not known stands in them as `${NAME}` or `$(COMMAND)`."""
    lines: tuple[int, ...]
    """That of each word."""


_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9@*#?])(\[[@*]\])?(.*)", re.S)
_UNKNOWN = re.compile(r"\$(?:\{(\w+)[^}]*\}|\([^)]*\)?)")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_PREFIXES = ("export", "declare", "local", "readonly", "typeset", "env", "then", "else", "do", "{")
_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    # The shell's division is that of C.
    **{ast.Div: lambda a, b: int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)},
    **{ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1)},
}


def commands_of(text: str, folder: Path) -> Iterator[Command]:
    """Yield the commands of a script, in their order. `folder`: where files are that it reads with `source`."""
    return _Shell(folder).commands(text)


def unknown_in(text: str) -> list[str]:
    """Return what of a word only running the script would tell: names of variables, and commands."""
    return list(dict.fromkeys(found[1] or found[0] for found in _UNKNOWN.finditer(text)))


@dataclass(slots=True)
class _Fields:
    """The words that one word of a script becomes."""

    done: list[str] = field(default_factory=list)
    open: str | None = None

    def add(self, text: str) -> None:
        self.open = (self.open or "") + text

    def split(self, text: str) -> None:
        """Add what an unquoted variable holds."""
        parts = text.split()
        if text[:1].isspace():
            self.close()
        self.several(parts)
        if parts and text[-1:].isspace():
            self.close()

    def several(self, texts: list[str]) -> None:
        for number, text in enumerate(texts):
            if number:
                self.close()
            self.add(text)

    def close(self) -> None:
        self.done += [] if self.open is None else [self.open]
        self.open = None


class _Shell:
    """A reader of scripts, and what their variables hold by now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[str]] = {}
        self._depth = 0
        self._read = set[Path]()

    def commands(self, text: str) -> Iterator[Command]:
        at, words, lines = 0, list[str](), list[int]()
        while at <= len(text):
            if at == len(text) or text[at] == "\n" or _ends_word(text, at):
                if words:
                    yield self._ended(words, lines)
                    yield from self._sourced(words)
                words, lines, at = [], [], at + 1
            elif text.startswith("\\\n", at):
                at += 2
            elif text[at].isspace():
                at += 1
            elif text[at] == "#":
                at = _line_end(text, at)
            else:
                line = text.count("\n", 0, at) + 1
                leads = all(_ASSIGNS.match(word) for word in words) or words[0] in _PREFIXES
                found, at = self._word(text, at, assigns=leads)
                words += found
                lines += [line] * len(found)

    def _ended(self, words: list[str], lines: list[int]) -> Command:
        self._depth = max(0, self._depth + (words[0] in _OPENS) - (words[0] in _CLOSES))
        return Command(lines[0], tuple(words), tuple(lines))

    def _sourced(self, words: list[str]) -> Iterator[Command]:
        """Read a file that a command reads into the script, if it is there."""
        file = self._folder / words[1] if words[0] in ("source", ".") and len(words) > 1 else None
        if file is not None and file.is_file() and file not in self._read:
            self._read.add(file)
            yield from self.commands(file.read_text(encoding="utf-8", errors="replace"))

    # -- words

    def _word(self, text: str, at: int, *, assigns: bool) -> tuple[list[str], int]:
        """Read a word, which is several where an unquoted variable holds several; an assignment is carried out."""
        begins = _ASSIGNS.match(text, at) if assigns else None
        if begins is not None and text.startswith("(", begins.end()):
            return self._array(begins, text)
        fields = _Fields()
        while at < len(text) and not text[at].isspace() and not _ends_word(text, at):
            at = self._piece(text, at, fields, quoted=begins is not None)
        fields.close()
        if begins is not None and fields.done:
            name, value = begins[1], "".join(fields.done)[len(begins[0]) :]
            self._assign(name, self._variables.get(name, "") + value if begins[2] else value)
        return fields.done, at

    def _array(self, begins: re.Match[str], text: str) -> tuple[list[str], int]:
        """Read the words of an array, which the command that uses it gets, too, where it is written."""
        at, found = begins.end() + 1, list[str]()
        while at < len(text) and text[at] != ")":
            if text.startswith("\\\n", at) or text[at].isspace():
                at += 1 + (text[at] == "\\")
            elif text[at] == "#":
                at = _line_end(text, at)
            else:
                words, after = self._word(text, at, assigns=False)
                found += words
                at = max(after, at + 1)
        self._arrays[begins[1]] = [*(self._arrays.get(begins[1], []) if begins[2] else []), *found]
        return [], at + 1

    def _assign(self, name: str, value: str) -> None:
        """Set a variable; one that is set in a branch to something else than before is not known."""
        if self._depth and self._variables.get(name, value) != value:
            value = f"${{{name}}}"
        self._variables[name] = value

    def _piece(self, text: str, at: int, fields: _Fields, *, quoted: bool) -> int:
        """Read a quoted string, an expansion or a character of a word; return where the next one begins."""
        char = text[at]
        if char == "\\":
            fields.add("" if text[at + 1 : at + 2] == "\n" else text[at + 1 : at + 2])
            return at + 2
        if char == "'" and (end := text.find("'", at + 1)) > 0:
            fields.add(text[at + 1 : end])
            return end + 1
        if char == '"' and (end := _closing(text, at + 1, '"')) > 0:
            self._quoted(text[at + 1 : end], fields)
            return end + 1
        if char in "$`":
            values, at = self._expanded(text, at)
            if len(values) != 1:
                fields.several(values)
            elif quoted or values[0].startswith(("${", "$(")):
                fields.add(values[0])
            else:
                fields.split(values[0])
            return at
        fields.add(char)
        return at + 1

    def _quoted(self, text: str, fields: _Fields) -> None:
        """Add what stands in double quotes: one word, but for an array."""
        at = 0
        if not re.fullmatch(r"\$(?:@|\{(?:\w+\[@\]|@)\})", text):
            fields.add("")
        while at < len(text):
            if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
                fields.add(text[at + 1].strip("\n"))
                at += 2
            elif text[at] in "$`":
                values, at = self._expanded(text, at)
                fields.several(values)
            else:
                fields.add(text[at])
                at += 1

    def _joined(self, text: str) -> str:
        """Expand what is one word wherever it stands, such as a default."""
        fields, at = _Fields(), 0
        while at < len(text):
            at = self._piece(text, at, fields, quoted=True)
        fields.close()
        return " ".join(fields.done)

    # -- expansions

    def _expanded(self, text: str, at: int) -> tuple[list[str], int]:
        """Return what an expansion gives, and where it ends."""
        if text.startswith("$((", at) and (end := _closing(text, at + 3, ")")) > 0 and text[end : end + 2] == "))":
            inner = text[at + 3 : end]
            number = self._number(inner)
            return [f"$({inner.strip()})" if number is None else str(number)], end + 2
        if text.startswith("$(", at) and (end := _closing(text, at + 2, ")")) > 0:
            return [text[at : end + 1]], end + 1
        if text[at] == "`" and (end := text.find("`", at + 1)) > 0:
            return [f"$({text[at + 1 : end]})"], end + 1
        if text.startswith("${", at) and (end := _closing(text, at + 2, "}")) > 0:
            return self._parameter(text[at + 2 : end]), end + 1
        if text[at] == "$" and (name := _NAME.match(text, at + 1)) is not None:
            return self._parameter(name[0]), name.end()
        return [text[at]], at + 1

    def _value(self, name: str) -> str | None:
        found = self._variables.get(name, os.environ.get(name))
        first = self._arrays.get(name)
        return first[0] if found is None and first else found

    def _parameter(self, inner: str) -> list[str]:
        found = _PARAMETER.fullmatch(inner)
        unknown = [f"${{{inner}}}"]
        if found is None or found[1] or (found[3] and found[4]):
            return unknown
        name, rest = found[2], found[4]
        if name in ("@", "*"):
            # As if the script were run without arguments.
            return []
        if found[3]:
            return self._arrays.get(name, unknown)
        value, sign = self._value(name), rest.lstrip(":")[:1]
        if not rest:
            return unknown if value is None else [value]
        if sign in ("-", "=", "+", "?"):
            given = self._joined(rest.lstrip(":")[1:]) if sign != "?" else ""
            is_set = value is not None and not (rest[0] == ":" and not value)
            if sign == "+":
                return [given if is_set else ""]
            chosen = str(value) if is_set else given
            if sign == "=":
                self._assign(name, chosen)
            return unknown if sign == "?" and not is_set else [chosen]
        return unknown if value is None else self._cut(value, rest) or unknown

    def _cut(self, value: str, rest: str) -> list[str]:
        """Return a value without an end that matches a pattern; empty for other operations."""
        sign = next((one for one in ("##", "#", "%%", "%") if rest.startswith(one)), "")
        if not sign or unknown_in(value):
            return []
        pattern = self._joined(rest[len(sign) :])
        cuts = range(len(value) + 1) if sign in ("#", "%%") else range(len(value), -1, -1)
        for at in cuts:
            if fnmatchcase(value[:at] if sign[0] == "#" else value[at:], pattern):
                return [value[at:] if sign[0] == "#" else value[:at]]
        return [value]

    def _number(self, text: str) -> int | None:
        """Compute with whole numbers and variables that hold them; None where it cannot be known."""
        plain = " ".join(self._joined(text).split())
        try:
            return self._computed(ast.parse(plain, mode="eval").body, 0)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None

    def _computed(self, node: ast.expr, depth: int) -> int:
        """Raises ValueError for what is no such number."""
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=one):
                return -self._computed(one, depth)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power < 64:
                return int(self._computed(left, depth) ** power)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
                return _SIGNS[type(sign)](self._computed(left, depth), self._computed(right, depth))
            case ast.Name(id=name) if depth < 8 and (value := self._value(name)) is not None:
                return self._computed(ast.parse(value.strip(), mode="eval").body, depth + 1)
        raise ValueError(ast.unparse(node))


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _ends_word(text: str, at: int) -> bool:
    """Tell a sign that separates commands, or the end of an array, from one within a word, as in `2>&1`."""
    if text[at] == "&":
        return text[at - 1 : at] not in (">", "<") and text[at + 1 : at + 2] != ">"
    return text[at] in ";|)"


def _closing(text: str, at: int, sign: str) -> int:
    """Find the sign that closes what is open at a place, with what is opened in there; -1: there is none."""
    opening = {")": "(", "}": "{"}.get(sign, "")
    while at < len(text):
        char = text[at]
        if char == sign:
            return at
        if char == "\\":
            at += 2
            continue
        inner = -1
        if char == "$" and text[at + 1 : at + 2] in ("{", "("):
            inner = _closing(text, at + 2, "}" if text[at + 1] == "{" else ")")
        elif char == opening or (char == '"' and sign != '"'):
            inner = _closing(text, at + 1, sign if char == opening else '"')
        elif char == "'" and sign != '"':
            inner = text.find("'", at + 1)
        at = max(inner, at) + 1
    return -1
