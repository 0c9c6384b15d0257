"""What words of a shell script stand for: quotes, variables, arrays, defaults, arithmetic."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

ASSIGNS = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9@*#?])(\[[@*]\])?(.*)", re.S)
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[[^]]*\]\+?=")
_UNKNOWN = re.compile(r"\$(?:\{[#!]?([\w@*]*)(?::\?line_(\d+))?[^}]*\}|\([^)]*\)?)")
WORD = re.compile(r"[A-Za-z_]\w*")
HEREDOC = re.compile(r"(?<!<)\d*<<(-?)[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|([^\s;&|()<>]+))")
_SETTLED = ("HOME", "USER", "LOGNAME")
"""What no file that a script reads is taken to set."""
Value = str | tuple[str, ...]
"""A variable's, or an array's."""


_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    # The shell's division is that of C.
    **{ast.Div: lambda a, b: int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)},
    **{ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1)},
}


def unknown_in(text: str) -> list[str]:
    """Return what of a word only running the script would tell: names of variables, and commands."""
    told = (
        f"{one[1]}, which line {one[2]} may set," if one[2] else one[1] or one[0] for one in _UNKNOWN.finditer(text)
    )
    return list(dict.fromkeys(told))


def unknown(name: str, line: int) -> str:
    """Return what stands for the value of a variable that a line may set."""
    return f"${{{name}:?line_{line}}}"


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


class Words:
    """A reader of words, and what variables hold by now."""

    def __init__(self) -> None:
        self._variables: dict[str, Value] = {"@": ()}
        """By name. `@`: the words that the script is given, taken to be none; ``: any name may have been set."""
        self._line = 1

    def _forget(self, names: Iterable[str]) -> None:
        """Leave variables unknown from here on."""
        for name in names:
            self._variables[name] = unknown(name, self._line)

    def _set(self, name: str, value: Value | None) -> None:
        if value is None:
            self._variables.pop(name, None)
        else:
            self._variables[name] = value

    def _word(self, text: str, at: int, *, assigns: bool) -> tuple[list[str], int]:
        """Read a word, which is several where an unquoted variable holds several; an assignment is carried out."""
        begins = ASSIGNS.match(text, at) if assigns else None
        element = ELEMENT.match(text, at) if assigns else None
        if begins is not None and text.startswith("(", begins.end()):
            return self._array(begins, text)
        fields = _Fields()
        while at < len(text) and not text[at].isspace() and not sign_at(text, at):
            if HEREDOC.match(text, at) is not None:
                break
            at = self._piece(text, at, fields, quoted=begins is not None)
        fields.close()
        if element is not None:
            self._forget([element[1]])
            return [f"{element[1]}=", *fields.done[1:]], at
        if begins is not None and fields.done:
            name, value = begins[1], "".join(fields.done)[len(begins[0]) :]
            former = self._variables.get(name, "")
            if isinstance(former, tuple):
                self._forget([name])
            else:
                self._variables[name] = (self._value(name) or "") + value if begins[2] else value
        return fields.done, at

    def _array(self, begins: re.Match[str], text: str) -> tuple[list[str], int]:
        """Read the words of an array, which the command that uses it gets, too, where it is written."""
        at, found = begins.end() + 1, list[str]()
        while at < len(text) and text[at] != ")":
            if text.startswith("\\\n", at) or text[at].isspace():
                at += 1 + (text[at] == "\\")
            elif text[at] == "#":
                at = line_end(text, at)
            else:
                words, after = self._word(text, at, assigns=False)
                found += words
                at = max(after, at + 1)
        self._variables[begins[1]] = (*((self._several(begins[1]) or ()) if begins[2] else ()), *found)
        return [], at + 1

    def _piece(self, text: str, at: int, fields: _Fields, *, quoted: bool) -> int:
        """Read a quoted string, an expansion or a character of a word; return where the next one begins."""
        char = text[at]
        if char == "\\":
            fields.add("" if text[at + 1 : at + 2] == "\n" else text[at + 1 : at + 2])
            return at + 2
        if char == "'" and (end := text.find("'", at + 1)) > 0:
            fields.add(text[at + 1 : end])
            return end + 1
        if char == '"' and (end := closing(text, at + 1, '"')) > 0:
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
        if text.startswith("$((", at) and (end := closing(text, at + 3, ")")) > 0 and text[end : end + 2] == "))":
            inner = text[at + 3 : end]
            number = self._number(inner)
            self._forget(WORD.findall(inner) if changes(inner) else ())
            return [f"$({inner.strip()})" if number is None else str(number)], end + 2
        if text.startswith("$(", at) and (end := closing(text, at + 2, ")")) > 0:
            return [text[at : end + 1]], end + 1
        if text[at] == "`" and (end := text.find("`", at + 1)) > 0:
            return [f"$({text[at + 1 : end]})"], end + 1
        if text.startswith("${", at) and (end := closing(text, at + 2, "}")) > 0:
            return self._parameter(text[at + 2 : end]), end + 1
        if text.startswith("$'", at) and (end := closing(text, at + 2, "'")) > 0 and "\\" not in text[at:end]:
            return [text[at + 2 : end]], end + 1
        if text[at] == "$" and (name := _NAME.match(text, at + 1)) is not None:
            return self._parameter(name[0]), name.end()
        return [text[at]], at + 1

    def _value(self, name: str) -> str | None:
        words = self._variables["@"]
        if name.isdecimal() and name != "0":
            if not isinstance(words, tuple):
                return words
            return words[int(name) - 1] if int(name) <= len(words) and all(map(_is_known, words)) else None
        found = self._variables.get(name)
        if found is None and "" in self._variables and name not in _SETTLED:
            return str(self._variables[""]).replace("any", name)
        found = os.environ.get(name) if found is None else found
        return next(iter(found), None) if isinstance(found, tuple) else found

    def _several(self, name: str) -> list[str] | None:
        """Return what an array holds; None: there is none."""
        found = self._variables.get(name)
        if isinstance(found, tuple):
            return list(found)
        value = self._value(name)
        return None if value is None else [value]

    def _parameter(self, inner: str) -> list[str]:
        found = _PARAMETER.fullmatch(inner)
        unknown = [f"${{{inner}}}"]
        if found is None or (found[3] and found[4]):
            return unknown
        name, rest = "@" if found[2] == "*" else found[2], found[4]
        if found[1]:
            return self._length(name, found[3] or "") or unknown if found[1] == "#" and not rest else unknown
        if name == "#":
            return self._length("@", "") or unknown
        if name == "@" or found[3]:
            several = self._several(name)
            return unknown if several is None or (several and rest) else several
        value, sign = self._value(name), rest.lstrip(":")[:1]
        if not rest:
            return unknown if value is None else [value]
        if sign in ("-", "=", "+", "?"):
            return self._chosen(name, value, rest, unknown)
        return unknown if value is None else self._cut(value, rest) or unknown

    def _chosen(self, name: str, value: str | None, rest: str, unknown: list[str]) -> list[str]:
        """Return a variable's value or what stands for it where it has none."""
        sign = rest.lstrip(":")[:1]
        if value and not _UNKNOWN.sub("", value):
            return [value]
        given = self._joined(rest.lstrip(":")[1:]) if sign != "?" else ""
        is_set = value is not None and not (rest[0] == ":" and not value)
        if sign == "+":
            return [given if is_set else ""]
        chosen = str(value) if is_set else given
        if sign == "=":
            self._variables[name] = chosen
        return unknown if sign == "?" and not is_set else [chosen]

    def _length(self, name: str, all_of: str) -> list[str]:
        """Count an array's words or a value's characters; empty where that is not known."""
        several = self._several(name) if all_of or name == "@" else None
        if several is not None:
            return [str(len(several))] if all(map(_is_known, several)) else []
        value = self._value(name)
        return [str(len(value))] if value is not None and _is_known(value) and not all_of else []

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


def line_end(text: str, at: int) -> int:
    """Return where a line ends."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end


_SIGN = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;|&)\n]")


def sign_at(text: str, at: int) -> str:
    """Return the sign at a place that ends a command or an array; empty: none, or one within a word, as in `2>&1`."""
    found = _SIGN.match(text, at)
    if found is None or (text[at] == "|" and text[at - 1 : at] == ">"):
        return ""
    redirects = found[0] == "&" and (text[at - 1 : at] in (">", "<") or text[at + 1 : at + 2] == ">")
    return "" if redirects else found[0]


def changes(expression: str) -> bool:
    """Tell arithmetic that sets variables."""
    return re.search(r"(?<![=!<>])=(?!=)|<<=|>>=|\+\+|--", expression) is not None


def _is_known(text: str) -> bool:
    return _UNKNOWN.search(text) is None


def closing(text: str, at: int, sign: str) -> int:
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
            inner = closing(text, at + 2, "}" if text[at + 1] == "{" else ")")
        elif char == opening or (char == '"' and sign != '"'):
            inner = closing(text, at + 1, sign if char == opening else '"')
        elif char == "'" and sign != '"':
            inner = text.find("'", at + 1)
        at = max(inner, at) + 1
    return -1
