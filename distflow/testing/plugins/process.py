"""Tests plug-ins in child processes, so that one that hangs, exits or floods its output is told like any other fault.

A plug-in that passes is tested a second time in another process with another hash seed: what it gives there must be the
same, or two workers would disagree. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isclose, isnan
from pathlib import Path
from typing import Any, Self

import yaml

from distflow.config.paths import is_data_file
from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.reward_form import may_take_lists
from distflow.testing.plugins.findings import IMPORTING, PluginFinding, cut
from distflow.testing.plugins.subjects import KINDS, Subject, absolute, check_kind, kind_of, subjects_of

LIMIT_S = 30.0
START_S = 120.0
"""For the imports of the suites and of the plug-in, on a busy machine."""
FLOOD, TOO_MUCH = 1 << 16, 32 << 20
"""Bytes of output that are worth a note, and that end the test."""
SHOWN_OUTPUT = 2000
QUIET_S = 3.0
"""So often it is told what a test is at."""
_OVERRIDE = re.compile(r"~|\+{0,2}[A-Za-z_][\w.@]*=")
"""What a word begins with that is an override of a recipe, and no plug-in."""
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from distflow.testing.plugins.child import serve; serve(*sys.argv[2:])"
)


@dataclass(slots=True)
class Tested:
    """A plug-in and what was found out about it."""

    subject: Subject
    findings: list[PluginFinding] = field(default_factory=list)
    gave: Any = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with it."""
        return not any(finding.level == "wrong" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        findings = [finding._asdict() for finding in self.findings]
        return {"plugin": self.subject.name, "kind": self.subject.kind, "passed": self.passed, "findings": findings}

    def lines(self) -> list[str]:
        """For people."""
        return [f"{self.subject.name}: {KINDS[self.subject.kind]}", *map(_line, self.findings)]


def _line(finding: PluginFinding) -> str:
    text = finding.text.replace("\n", "\n         ")
    return f"  {finding.level:5}  {text}"


def find_subjects(words: Sequence[str], kind: str | None, settings: Sequence[str], data: str | None) -> list[Subject]:
    """What is to be tested: plug-ins by name, and all that recipes name, with the overrides among the words.

    Raises UserError.
    """
    if kind is not None:
        check_kind(kind)
    given = dict(_setting(text) for text in settings)
    source = None if data is None else _data(data)
    overrides = [word for word in words if _OVERRIDE.match(word)]
    names = [word for word in words if word not in overrides]
    if overrides and all(":" in name for name in names):
        raise UserError(f"{overrides[0]}: overrides belong to a recipe — name one, or --with NAME=VALUE for a plug-in")
    found, errors = list[Subject](), list[UserError]()
    for name in names:
        try:
            found += [_named(name, kind, given, source)] if ":" in name else _of_recipe(name, overrides, kind, given)
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise UserError("\n".join(map(str, errors)))
    if errors:
        raise errors[0]
    return found


def _named(name: str, kind: str | None, settings: Mapping[str, Any], data: str | None) -> Subject:
    call = absolute(name)
    kind = kind or kind_of(call)
    return Subject(name, call, kind, settings, data, data_prompts=kind == "reward" and may_take_lists(call))


def _of_recipe(name: str, overrides: Sequence[str], kind: str | None, settings: Mapping[str, Any]) -> list[Subject]:
    if kind is not None or settings:
        raise UserError(f"{name}: a recipe says itself what its plug-ins are and get; leave --as and --with out")
    found = subjects_of(plan_recipe(name, overrides)[1])
    if not found:
        raise UserError(
            f"{name}: the recipe names no plug-ins of your own — name one to test it: module:name or ./file.py:name"
        )
    return found


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--with {text}: expected NAME=VALUE, for example scale=2.0")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--with {text}: the value is no YAML: {error}") from error


def _data(data: str) -> str:
    if not is_data_file(data):
        return absolute(data) if ":" in data and not data.startswith("hub:") else data
    if not Path(data).exists():
        raise UserError(f"--data {data}: there is no such file or folder")
    return str(Path(data).resolve())


def examine(subject: Subject, limit_s: float = LIMIT_S, tell: Callable[[str], None] = lambda line: None) -> Tested:
    """Test one plug-in; each call of it may take `limit_s`. `tell` gets lines about what takes its time."""
    with _Child(subject, hash_seed=0) as first:
        if subject.kind in ("engine", "backend"):
            return first.watch(limit_s, tell)
        with _Child(subject, hash_seed=1) as second:
            tested = first.watch(limit_s, tell)
            if not tested.passed or tested.gave is None:
                return tested
            again = second.watch(limit_s, tell)
    apart = again.findings[-1].text if not again.passed else unlike(tested.gave, again.gave)
    if apart:
        text = f"two processes do not agree: {apart} — it must not depend on hash(), the order of sets, or the time"
        noisy = subject.kind == "reward" and again.passed
        tested.findings.append(PluginFinding("note" if noisy else "wrong", text))
    else:
        tested.findings.append(PluginFinding("ok", "gives the same in another process"))
    return tested


def unlike(one: Any, other: Any, at: str = "") -> str:
    """The first place where plain values differ by more than rounding; empty if nowhere."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for key in one if (found := unlike(one[key], other[key], at or f"{key!r} "))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((found for a, b in zip(one, other, strict=True) if (found := unlike(a, b, at))), "")
    if isinstance(one, float) and isinstance(other, float):
        same = isclose(one, other, rel_tol=1e-3, abs_tol=1e-5) or (isnan(one) and isnan(other))
    else:
        same = one == other
    return "" if same else f"{at}{cut(one)} and {cut(other)}"


class _Child:
    """One process, and what it has told so far."""

    def __init__(self, subject: Subject, hash_seed: int) -> None:
        told, lines = os.pipe()
        lifeline, self._lifeline = os.pipe()
        arguments = (json.dumps(sys.path), json.dumps(asdict(subject), default=str), str(lines), str(lifeline))
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(lines, lifeline),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(lines)
            os.close(lifeline)
        assert self._process.stdout is not None, "a pipe"
        self._output = self._process.stdout
        self._told = told
        self._unread = b""
        self.tested = Tested(subject)
        self.doing = ""
        self.since = time.monotonic()
        self.over = False
        self.exit_code: int | None = None
        """As its go-between has told it; negative: the signal."""
        self.printed = 0
        self.tail = b""

    def __enter__(self) -> Self:
        return self

    def watch(self, limit_s: float, tell: Callable[[str], None]) -> Tested:
        """Until the suite is over, the process has ended, or a call takes too long; returns what was found out."""
        self.since = time.monotonic()
        began = told = self.since
        with selectors.DefaultSelector() as selector:
            selector.register(self._told, selectors.EVENT_READ, self._read_lines)
            selector.register(self._output, selectors.EVENT_READ, self._read_output)
            while self._goes_on and self._told in {key.fd for key in selector.get_map().values()}:
                limit = START_S if self.doing in ("", IMPORTING) else limit_s
                left = self.since + limit - time.monotonic()
                if left <= 0:
                    self._late(limit)
                    return self.tested
                if time.monotonic() - told >= QUIET_S and self.doing:
                    told = time.monotonic()
                    tell(f"  …      {self.doing} ({told - began:.0f} s)")
                for key, _ in selector.select(min(left, QUIET_S)):
                    if not key.data():
                        selector.unregister(key.fileobj)
        if not self.over:
            self._end_told()
        elif (signal_number := self._go_between_killed_by()) is not None:
            text = f"ends its parent process (signal {signal_number}), which is the agent of the worker, or the worker"
            self.tested.findings.append(PluginFinding("wrong", text))
        elif self.printed > FLOOD:
            text = f"prints {self.printed} bytes meanwhile, which a worker writes into its log"
            self.tested.findings.append(PluginFinding("note", text))
        return self.tested

    def __exit__(self, *error: object) -> None:
        """End the process with all that it has started."""
        # Nobody has waited for it yet, so its group still has this id.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
        os.close(self._told)
        os.close(self._lifeline)

    def _read_lines(self) -> bool:
        chunk = os.read(self._told, 1 << 16)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # it was killed while it wrote the line
                self._hear(json.loads(line))
        return bool(chunk)

    def _hear(self, message: Mapping[str, Any]) -> None:
        self.since = time.monotonic()
        if "begin" in message:
            self.doing = str(message["begin"])
        elif "ended" in message:
            self.exit_code = message["ended"]
        elif "done" in message:
            self.over, self.tested.gave = True, message["done"]
        else:
            # What is no text, such as half a surrogate pair in an error, could not be printed.
            text = message["text"].encode(errors="backslashreplace").decode()
            self.tested.findings.append(PluginFinding(message["level"], text))

    def _read_output(self) -> bool:
        chunk = os.read(self._output.fileno(), 1 << 16)
        if self.doing:
            self.printed += len(chunk)
        self.tail = (self.tail + chunk)[-SHOWN_OUTPUT:]
        return bool(chunk)

    @property
    def _goes_on(self) -> bool:
        return not self.over and self.exit_code is None and self.printed <= TOO_MUCH

    def _go_between_killed_by(self) -> int | None:
        """The signal that has ended the process between this one and that of the plug-in."""
        state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if state is None or state.si_code == os.CLD_EXITED else state.si_status

    def _late(self, limit_s: float) -> None:
        hint = "; with timeout_s beside `function` it would be killed and counted as a failure"
        text = (
            f"does not come back within {limit_s:g} s, {self.doing}: a worker would wait for it"
            f"{hint if self.tested.subject.kind == 'reward' else ''} (--limit gives it longer)"
            if self.doing
            else f"the suites were not imported within {START_S:g} s"
        )
        self.tested.findings.append(PluginFinding("wrong", text))

    def _end_told(self) -> None:
        doing = self.doing or "before it was imported"
        if self.printed > TOO_MUCH:
            text = f"has printed more than {TOO_MUCH >> 20} MiB, {doing}: a worker would fill the disk with its log"
            self.tested.findings.append(PluginFinding("wrong", text))
            return
        if self.exit_code is None:
            # Its go-between has ended with it: the signal was for both.
            state = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            assert state is not None, "waited for its end"
            self.exit_code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        how = f"exit code {self.exit_code}" if self.exit_code >= 0 else f"signal {-self.exit_code}"
        output = self.tail.decode(errors="replace").strip()
        text = f"ends its process ({how}), {doing}: a worker would end with it"
        self.tested.findings.append(PluginFinding("wrong", f"{text}\n{output}" if output else text))
