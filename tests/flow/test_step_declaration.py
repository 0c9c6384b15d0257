"""Declarations are read from source, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.errors import PluginError
from distflow.flow.resolve import find_source
from distflow.flow.step_declaration import COMPUTED, REQUIRED, read_declaration

GOOD = "@step(role='score', reads=['a'], writes=['b'])\n"
GENERATES = "@step(role='generate', reads=[], writes=['b'])\n"


def declare(folder: Path, text: str) -> object:
    (folder / "s.py").write_text(text)
    return read_declaration(f"{folder}/s.py:f")


def test_everything_about_a_step_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "raise RuntimeError('never run')\n"
        "@distflow.step(role='train', reads=('a',), writes=[], scope='batch', reads_when={'k': ['r']},\n"
        "      fills={'n': 0.0}, plugins={'fn': ['x']}, choices={'fn': ['a', 'b']})\n"
        "def f(batch, ctx, *, k, fn: str = 'a', n: float = -1.5, late=len('x')): ...\n"
    )
    found = read_declaration(f"{tmp_path}/s.py:f")
    assert (found.spec.role, found.spec.scope, found.spec.reads) == ("train", "batch", ("a",))
    assert found.spec.reads_when == {"k": ("r",)}
    assert found.spec.fills == {"n": 0.0}
    assert found.spec.plugins == {"fn": ("x",)}
    assert found.spec.choices == {"fn": ("a", "b")}
    assert found.parameters.settings == {"k": REQUIRED, "fn": "a", "n": -1.5, "late": COMPUTED}
    assert found.line == 4


def test_modules_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "never_imported"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "steps.py").write_text(GOOD + "def f(batch, ctx): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read_declaration("never_imported.steps:f").file == package / "steps.py"


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    declare(tmp_path, GOOD + "def f(batch, ctx): ...\n")
    (tmp_path / "s.py").write_text("def g(): ...  # longer than before, or at another time\n")
    with pytest.raises(PluginError, match="defines no 'f'"):
        find_source(f"{tmp_path}/s.py:f")


@pytest.mark.parametrize(
    "text, message",
    [
        ("def f(batch, ctx): ...", r"s\.py:1: 'f' is not a step; declare it: @step\(role="),
        (GOOD + "async def f(batch, ctx): ...", "'f' is an async function; a step is a plain function"),
        (
            GENERATES + "def f(leases, ctx, *, temperature=1.0): ...",
            r"s\.py:2: 'f' cannot generate: the runtime takes leases .* drives the engine itself — expected "
            r"async def f\(episode, generate, ctx, \*, setting=default, …\), which makes one sample: it awaits "
            r"completion = await generate\(episode.prompt_ids, SamplingParams\(…\)\)",
        ),
        (
            GENERATES + "async def f(generate, ctx): ...",
            r"'f' cannot generate: .* expected async def f\(episode, generate, ctx, ",
        ),
        (
            "@step(role='generate', reads=[], writes=[], environment=['repeat'])\nasync def f(e, g, c): ...",
            r"environment=….* names 'repeat'; did you mean 'repeatable'",
        ),
        (
            GOOD.replace(")", ", environment=[])") + "def f(batch, ctx): ...",
            r"environment=….* is for the role generate, and 'f' has the role 'score'",
        ),
        ("class f: ...", "'f' is a class"),
        (GOOD + "def f(batch): ...", r"positional parameters \(batch\); expected def f\(batch, ctx, \*"),
        (GOOD + "def f(batch, ctx, **rest): ...", r"takes \*args or \*\*kwargs"),
        ("@step(role='scorer', reads=[], writes=[])\ndef f(b, c): ...", "did you mean 'score'"),
        (
            "@step(role='score', reads=[], writes=[], scope='rows')\ndef f(b, c): ...",
            r"scope='rows'.*batch, group, sample",
        ),
        ("@step(role='score', reads=FIELDS, writes=[])\ndef f(b, c): ...", r"reads=FIELDS\) is not a literal"),
        (
            "@step(role='score', **FIELDS)\ndef f(b, c): ...",
            r"@step\(\*\*…\) cannot be read .* write the arguments out",
        ),
        ("@step(role='score', reads='a', writes=[])\ndef f(b, c): ...", "must be a list of names, got 'a'"),
        ("@step(role='score', reads=[])\ndef f(b, c): ...", "lacks writes"),
        ("@step(role='score', read=[], writes=[])\ndef f(b, c): ...", "has no argument 'read'; did you mean 'reads'"),
        (
            "@step(role='score', reads=[], writes=[], choices={'kl': 'k1'})\ndef f(b, c, *, kl): ...",
            r"@step\(choices=\{'kl': 'k1'\}\) must be a list of names, or bounds as in '> 0, <= 1'",
        ),
        (
            "@step(role='score', reads=[], writes=[], only_with={'kl': 'kl_coeff'})\ndef f(b, c, *, kl, kl_coef): ...",
            r"@step\(only_with=…\) names the setting 'kl_coeff', which 'f' lacks; did you mean 'kl_coef'",
        ),
        (
            "@step(role='score', reads=[], writes=[], only_with={'kl': ['kl_coef']})\ndef f(b, c, *, kl, kl_coef): ...",
            r"@step\(only_with=\{'kl': …\}\) must be the name of a setting, got \['kl_coef'\]",
        ),
        (
            "@step(role='score', reads=[], writes=[], choices={'los': ['a']})\ndef f(b, c, *, loss): ...",
            r"@step\(choices=…\) names the setting 'los', which 'f' lacks; did you mean 'loss'",
        ),
        (
            "@step(role='train', reads=[], writes=[], may_write=['drop_reason'])\ndef f(b, c): ...",
            "is for the role score, and 'f' has the role 'train'; a step of another role writes all its fields",
        ),
        ("@step(role='score', reads=[], writes=[], may_write='a')\ndef f(b, c): ...", r"may_write=…\) must be a list"),
        ("@step('score', reads=[], writes=[])\ndef f(b, c): ...", "takes keywords only"),
        ("def g(): ...", r"defines no 'f' at its top level; allowed: g"),
        ("def f(:", r"s\.py:1: invalid syntax"),
    ],
)
def test_declarations_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=message):
        declare(tmp_path, text + "\n")


@pytest.mark.parametrize(
    "call, message",
    [
        ("no_colon", "expected module:name"),
        ("no_such_module_at_all:f", "there is no module 'no_such_module_at_all'"),
        ("distflow.flow.nothing:f", "there is no module 'distflow.flow.nothing'"),
        ("/nowhere/x.py:f", "there is no file /nowhere/x.py"),
        ("math:sin", "has no Python source"),
    ],
)
def test_plugins_that_do_not_exist(call: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        read_declaration(call)
