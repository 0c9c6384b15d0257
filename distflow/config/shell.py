"""The words of a shell script's commands, with its variables in their places: it is never run.

Straight-line code is followed, and functions where they are called. What may or may not run, and what sets variables
otherwise, leaves them unknown: of a branch only itself knows what it has set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from distflow.config.shell_words import (
    ASSIGNS,
    ELEMENT,
    HEREDOC,
    WORD,
    Value,
    Words,
    changes,
    closing,
    line_end,
    sign_at,
    unknown,
    unknown_in,
)

__all__ = ["Command", "commands_of", "unknown_in"]


class Command(NamedTuple):
    """One command of a script."""

    line: int
    """That of its first word, from 1."""
    words: tuple[str, ...]
    """What is not known stands in them as `${NAME}` or `$(COMMAND)`; `${NAME:?line_3}`: that line may set it."""
    lines: tuple[int, ...]
    """That of each word."""


_BARE = re.compile(r"(?<![\w.${])[A-Za-z_]\w*")

_FUNCTION = re.compile(r"(?:function[ \t]+([\w:.-]+)(?:[ \t]*\([ \t]*\))?|([\w:.-]+)[ \t]*\([ \t]*\))\s*(?=[{(])")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac|time|coproc|[{}!])(?=[\s;()&|]|$)"
)
_CLOSES: Mapping[str, tuple[str, ...]] = {
    **{"fi": ("if",), "esac": ("case",), "done": ("for", "select", "while", "until"), "}": ("{",), ")": ("(",)},
    **{"else": ("if",), "elif": ("if",), ";;": ("case",), ";;&": ("case",)},
}
"""What a sign ends, or an alternative of what."""
_LOOPS = _CLOSES["done"]
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_SETS = ("unset", "read", "mapfile", "readarray", "getopts", "let")
"""They set variables that they name, in a way that is not followed."""
_WRAPPERS = ("command", "builtin", "exec")
_HARMLESS = ("activate", "conda.sh")
"""Files that are read with `source` and set no variables of the script's."""


def commands_of(text: str, folder: Path) -> Iterator[Command]:
    """Yield the commands of a script, in their order. `folder`: where files are that it reads with `source`."""
    return _Shell(folder).commands(text)


@dataclass(slots=True)
class _Frame:
    """What is open: a branch, a loop, a group, a list of commands with `&&` in it, or a text that is read."""

    kind: str
    line: int
    start: dict[str, Value]
    """What variables held where the list of commands began that is read now."""
    before: dict[str, Value] | None = None
    """What they held before a branch; None: it runs for certain."""
    changed: dict[str, Value | None] = field(default_factory=dict)
    """What other alternatives of the branch have set."""
    sign: str = ""
    """That in front of the command that is read, in a list."""


@dataclass(slots=True)
class _Place:
    """Where the reader is in a text, and the command that it reads."""

    text: str
    at: int
    words: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    former: dict[str, Value] = field(default_factory=dict)
    """What variables held before the command."""
    documents: list[tuple[str, str]] = field(default_factory=list)
    """Ends of the documents (`<<END`) that begin in the next line."""
    later: dict[str, Value | None] = field(default_factory=dict)
    """What `export` and its like set, once all their words have been read."""
    waits: bool = False
    """Nothing has come since `&&` or `|`."""

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1


class _Shell(Words):
    """A reader of scripts, and what their variables hold by now."""

    def __init__(self, folder: Path, *, skims: bool = False) -> None:
        super().__init__()
        self._folder = folder
        self._functions: dict[str, tuple[str, int]] = {}
        self._frames: list[_Frame] = []
        self._read = set[Path]()
        self._left = ""
        """`exit` or `return`, behind which nothing is run."""
        self._skims = skims
        """It looks only for where a function ends."""
        self._calls = 0

    def commands(self, text: str, at: int = 0) -> Iterator[Command]:
        """Yield those of a text, or of the function whose body begins at a place."""
        place, floor, is_body, before = _Place(text, at), len(self._frames), at > 0, dict(self._variables)
        self._frames.append(_Frame("text", 1, before))
        while place.at <= len(text) and not self._left:
            sign = sign_at(text, place.at)
            if sign or place.at == len(text):
                if place.words:
                    for name, value in place.later.items():
                        self._set(name, value)
                    command = Command(place.lines[0], tuple(place.words), tuple(place.lines))
                    yield command
                    yield from self._run(command)
                self._separate(place, sign)
            else:
                self._advance(place)
            if is_body and place.at > at and all(one.kind == "rest" for one in self._frames[floor + 1 :]):
                break
        self._pop(floor + 1)
        for name in self._frames.pop().changed if is_body else ():
            self._variables[name] = before.get(name, unknown(name, self._line))
        self._at = place.at

    def _advance(self, place: _Place) -> None:
        """Read what stands at a place: a word, or what is between words."""
        text, at = place.text, place.at
        if text.startswith("\\\n", at):
            place.at += 2
        elif text[at].isspace():
            place.at += 1
        elif text[at] == "#":
            place.at = line_end(text, at)
        elif (document := HEREDOC.match(text, at)) is not None:
            place.documents.append((document[1], document[2] or document[3] or document[4].replace("\\", "")))
            place.at = document.end()
        else:
            place.waits = False
            self._line = place.line
            if place.words or not self._structure(place):
                self._add_word(place)

    def _structure(self, place: _Place) -> bool:
        """Read what may stand in the place of a command's first word only; False: a command begins."""
        text, at = place.text, place.at
        if (function := _FUNCTION.match(text, at)) is not None:
            skimmed = _Shell(self._folder, skims=True)
            for _ in skimmed.commands(text, function.end()):
                pass
            self._functions[function[1] or function[2]] = (text, function.end())
            place.at = skimmed._at
        elif (word := _RESERVED.match(text, at)) is not None:
            self._reserve(word[0], text, at)
            place.at = word.end()
        elif text.startswith("((", at) and (end := closing(text, at + 2, ")")) > 0 and text[end : end + 2] == "))":
            self._forget(WORD.findall(text[at + 2 : end]) if changes(text[at + 2 : end]) else ())
            place.at = end + 2
        elif text[at] == "(":
            self._open("(")
            place.at += 1
        else:
            return False
        return True

    def _add_word(self, place: _Place) -> None:
        text, words = place.text, place.words
        line, leads = place.line, all(ASSIGNS.match(word) for word in words)
        if not words:
            place.former = dict(self._variables)
        if leads and ASSIGNS.match(text, place.at) is None and ELEMENT.match(text, place.at) is None:
            # What stands in front of a command is for that alone, and not even for its words.
            for name in (word.partition("=")[0].rstrip("+") for word in words):
                self._set(name, place.former.get(name))
        if words and words[0] in _DECLARES:
            found = self._declare(place)
        else:
            found, place.at = self._word(text, place.at, assigns=leads)
        words += found
        place.lines += [line] * len(found)

    def _declare(self, place: _Place) -> list[str]:
        """Read a word of `export` or its like, which sets variables once all words have been read."""
        assigned = WORD.match(place.text, place.at)
        former = None if assigned is None else self._variables.get(assigned[0])
        found, place.at = self._word(place.text, place.at, assigns=True)
        if assigned is None:
            return found
        name, how, is_set = assigned[0], place.words[0], place.text[assigned.end() : assigned.end() + 1] in tuple("=+[")
        own = how in ("local", "declare", "typeset")
        if any(re.match(r"-\w*[inulA]", word) for word in place.words) or (own and not is_set):
            self._forget([name])
        if own:
            next(one for one in reversed(self._frames) if one.kind == "text").changed[name] = None
        place.later[name] = self._variables.get(name)
        self._set(name, former)
        return found

    # -- what may or may not run

    def _open(self, kind: str) -> None:
        before = None if kind == "{" else dict(self._variables)
        self._frames.append(_Frame(kind, self._line, dict(self._variables), before))

    def _reserve(self, word: str, text: str, at: int) -> None:
        """Open or close what a word of the shell's own does."""
        if word in _LOOPS:
            end = max((found.end() for found in re.finditer(r"\bdone\b", text)), default=len(text))
            bodies = "\n".join(body[start:] for body, start in self._functions.values())
            # What a later turn finds is what an earlier one has left.
            names = _BARE.findall(text[at:end] + bodies)
            self._forget(["@", *names] if {"set", "shift"} & {*names} else names)
        if word in ("if", "case", "{", *_LOOPS):
            self._open(word)
        elif word in _CLOSES:
            self._close(word)

    def _close(self, sign: str) -> None:
        """End what a sign closes, or an alternative of it."""
        text = self._floor()
        at = next((n for n in range(len(self._frames) - 1, text, -1) if self._frames[n].kind in _CLOSES[sign]), None)
        if at is None or (sign == ")" and at < len(self._frames) - 1):
            # A pattern of `case` has one, too.
            return
        if sign not in ("else", "elif", ";;", ";;&"):
            self._pop(at)
            return
        self._pop(at + 1)
        frame = self._frames[at]
        before = dict(frame.before or {})
        for name in {*before, *self._variables}:
            if before.get(name) != self._variables.get(name):
                frame.changed[name] = self._variables.get(name)
        self._variables = before

    def _pop(self, height: int) -> None:
        """Close frames down to so many of them."""
        while len(self._frames) > height:
            self._merge(self._frames.pop())

    def _merge(self, frame: _Frame) -> None:
        """Leave unknown what a branch has set."""
        if frame.before is None:
            return
        for name in {*frame.before, *self._variables, *frame.changed}:
            old, values = frame.before.get(name), [self._variables.get(name)]
            values += [frame.changed[name]] if name in frame.changed else []
            if any(new != old for new in values):
                more = (unknown(name, frame.line),)
                extends = isinstance(old, tuple) and all(
                    isinstance(new, tuple) and new[: len(old)] == old for new in values
                )
                self._variables[name] = (*old, *more) if isinstance(old, tuple) and extends else more[0]

    def _separate(self, place: _Place, sign: str) -> None:
        """Go past what ends a command, and carry out what it means for the list that the command is in."""
        place.words, place.lines, place.later = [], [], {}
        frame = self._frames[-1]
        if sign in ("&&", "||", "|", "|&", "&"):
            if frame.kind != "list":
                before = dict(self._variables) if sign in ("&&", "||") else frame.start
                self._frames.append(_Frame("list", self._line, {}, before))
            elif "||" in (sign, frame.sign):
                self._merge(frame)
                frame.before = dict(self._variables)
            self._frames[-1].sign, place.waits = sign, sign != "&"
        if sign in ("", "\n", ";", "&", ")", ";;", ";&", ";;&") and not (sign == "\n" and place.waits):
            if self._frames[-1].kind == "list":
                self._pop(len(self._frames) - 1)
            self._frames[-1].start = dict(self._variables)
        if sign in _CLOSES:
            self._close(sign)
        place.at += len(sign) or 1
        if sign == "\n":
            self._skip_documents(place)

    def _skip_documents(self, place: _Place) -> None:
        for dash, end in place.documents:
            line = None
            while place.at < len(place.text) and line != end:
                after = line_end(place.text, place.at)
                line = place.text[place.at : after].lstrip("\t" if dash else "")
                place.at = after + 1
        place.documents = []

    # -- commands that concern the reader

    def _forget_all(self) -> None:
        self._variables = {"@": self._variables["@"], "": unknown("any", self._line)}

    def _run(self, command: Command) -> Iterator[Command]:
        """Carry out what a command does to variables, and yield those that it runs of the script's own."""
        if self._skims:
            return
        words = list(command.words)
        given = [words.pop(0) for word in command.words if words and ASSIGNS.match(words[0])]
        while words and words[0] in _WRAPPERS:
            words.pop(0)
        name, self._line = (words or [""])[0], command.line
        if name in self._functions or name in ("source", "."):
            yield from self._called(words, given)
        elif name in _SETS:
            self._forget(WORD.findall(" ".join(words[1:])) + ["REPLY"] * (name == "read"))
        elif name == "printf" and words[1:2] == ["-v"]:
            self._forget(WORD.findall(" ".join(words[2:3])))
        elif name in ("cd", "pushd", "popd"):
            self._forget(["PWD", "OLDPWD"])
        elif name == "shift" or (
            name == "set" and any(word in ("-", "--") or word[0] not in "-+" for word in words[1:])
        ):
            self._variables["@"] = unknown("@", self._line)
        elif name == "eval":
            self._forget_all()
        elif name in ("exit", "return"):
            self._leave(name)

    def _leave(self, how: str) -> None:
        """Read no further, or take what follows for a branch."""
        floor = self._floor()
        inner = self._frames[floor + 1 :]
        if not inner and (how == "return" or floor == 0):
            self._left = how
        elif how == "return":
            branch = next((one.before for one in inner if one.before is not None), inner[0].start if inner else {})
            self._frames.insert(floor + 1, _Frame("rest", self._line, {}, dict(branch)))

    def _floor(self) -> int:
        """Return which frame is that of the text that is read."""
        return max((n for n, one in enumerate(self._frames) if one.kind == "text"), default=0)

    def _called(self, words: list[str], given: list[str]) -> Iterator[Command]:
        """Read a function, or a file that a command reads into the script, as if it stood there."""
        own, before = words[0] in self._functions, dict(self._variables)
        file = self._folder / (words[1] if len(words) > 1 else "")
        text, at = self._functions.get(words[0], ("", 0))
        if not own and file.is_file() and file not in self._read:
            self._read.add(file)
            text = file.read_text(encoding="utf-8", errors="replace")
        elif not own or self._calls > 8:
            if file.name not in _HARMLESS and file not in self._read:
                self._forget_all()
            return
        for word in given:
            name, _, value = word.partition("=")
            self._variables[name.rstrip("+")] = value
        if own or len(words) > 2:
            self._variables["@"] = tuple(words[1 if own else 2 :])
        self._calls += 1
        yield from self.commands(text, at)
        self._calls -= 1
        self._left = "" if self._left == "return" else self._left
        self._variables["@"] = before["@"]
        self._forget(word.partition("=")[0] for word in given)
