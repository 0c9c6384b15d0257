"""What plug-in files import from beside them: found, kept apart, never in place of what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distflow.errors import PluginError
from distflow.flow.neighbours import mistakable, neighbours
from distflow.flow.resolve import resolve


def write(folder: Path, **files: str) -> Path:
    """Python files by name; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    "statement",
    [
        "from helper import parse",
        "from .helper import parse",
        "import helper\nparse = helper.parse",
        "from . import helper\nparse = helper.parse",
        "from parts.deep import parse",
        "from .parts.deep import parse",
        "import parts.deep as deep\nparse = deep.parse",
        "from parts import deep\nparse = deep.parse",
        "def parse(text):\n    from helper import parse\n    return parse(text)",
        "from spread.inside import parse",
    ],
)
def test_what_lies_beside_a_plug_in_is_imported(tmp_path: Path, statement: str) -> None:
    parse = "def parse(text):\n    return text.strip()\n"
    write(tmp_path, mine=f"{statement}\ndef score(text):\n    return parse(text)\n", helper=parse)
    write(tmp_path / "parts", __init__="", deep="from ..helper import parse\n")
    write(tmp_path / "spread", inside="from helper import parse\n")
    before = list(sys.path)
    assert resolve(f"{tmp_path}/mine.py:score")(" 7 ") == "7"
    assert sys.path == before
    assert "helper" not in sys.modules


def test_neighbours_of_one_name_do_not_mix(tmp_path: Path) -> None:
    text = "import helper\nfrom . import helper as same\nassert helper is same\ndef f():\n    return helper.VALUE\n"
    for name in ("a", "b"):
        write(tmp_path / name, mine=text, helper=f"VALUE = {name!r}\n")
    assert [resolve(f"{tmp_path}/{name}/mine.py:f")() for name in ("a", "b")] == ["a", "b"]


def test_plug_ins_of_a_folder_share_their_neighbours_and_each_other(tmp_path: Path) -> None:
    write(tmp_path, one="import helper\nf = helper.seen\n", helper="seen = []\n")
    write(tmp_path, two="from one import f as g\nfrom helper import seen\nf = g\n")
    assert resolve(f"{tmp_path}/one.py:f") is resolve(f"{tmp_path}/two.py:f") is resolve(f"{tmp_path}/two.py:seen")


def test_what_is_installed_is_never_hidden(tmp_path: Path) -> None:
    """By `python file.py` these would be the neighbours, for all that is imported in the process."""
    write(
        tmp_path, math="import math, random, yaml\nfrom .random import mine\nf = (math.pi, random.random, yaml.dump)\n"
    )
    write(tmp_path, random="mine = 1\n", yaml="mine = 2\n")
    import math
    import random

    import yaml

    assert resolve(f"{tmp_path}/math.py:f") == (math.pi, random.random, yaml.dump)
    assert resolve(f"{tmp_path}/math.py:mine") == 1
    told = list(mistakable(tmp_path / "math.py"))
    assert [text.partition(" means ")[0] for text in told] == [
        f"{tmp_path}/math.py: `import {n}`" for n in ("random", "yaml")
    ]
    write(tmp_path, other="from random import mine\n")
    with pytest.raises(PluginError, match="cannot import name 'mine'.*`import random` means that of the standard lib"):
        resolve(f"{tmp_path}/other.py:mine")


def test_a_neighbour_goes_before_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `python file.py`; so the current folder of a command does not matter."""
    write(tmp_path / "a", mine="import helper_here\nf = helper_here.VALUE\n", helper_here="VALUE = 'beside'\n")
    write(tmp_path / "b", mine="import helper_here\nf = helper_here.VALUE\n")
    write(tmp_path / "path", helper_here="VALUE = 'on the path'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.syspath_prepend(tmp_path / "path")
    assert resolve(f"{tmp_path}/a/mine.py:f") == "beside"
    assert resolve(f"{tmp_path}/b/mine.py:f") == "on the path"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from helper_of_mine import f",
            "no module 'helper_of_mine': it is not installed, and there is no helper_of_mine.py in {}",
        ),
        ("from .gone import f", "no module 'gone': there is no gone.py in {}\n"),
        ("from there.gone import f", "no module 'there.gone': there is no gone.py in {}/there\n"),
        ("from . import gone", "ImportError: cannot import name 'gone' from {}\n"),
        ("from ..gone import f", "beyond top-level package — the imports of a plug-in reach {} and what"),
        ("from there.bad import f", "raised ZeroDivisionError: division by zero\n"),
        ("import sys\nsys.exit(3)", "raised SystemExit: 3\n"),
    ],
)
def test_the_users_frames_are_shown(tmp_path: Path, statement: str, message: str) -> None:
    write(tmp_path, mine=f"{statement}\n")
    write(tmp_path / "there", __init__="", bad="1 / 0\n")
    with pytest.raises(PluginError) as raised:
        resolve(f"{tmp_path}/mine.py:f")
    assert message.format(tmp_path) in str(raised.value)
    frames = [line.split('"')[1] for line in str(raised.value).splitlines() if line.startswith("  File ")]
    deeper = [f"{tmp_path}/there/bad.py"] if "bad" in statement else []
    assert frames == [f"{tmp_path}/mine.py", *deeper]


def test_a_neighbour_that_appears_is_found(tmp_path: Path) -> None:
    write(tmp_path, mine="from helper_of_mine import f\n")
    with pytest.raises(PluginError, match="no module 'helper_of_mine'"):
        resolve(f"{tmp_path}/mine.py:f")
    write(tmp_path, helper_of_mine="f = 3\n")
    assert resolve(f"{tmp_path}/mine.py:f") == 3


def test_the_files_that_a_plug_in_needs(tmp_path: Path) -> None:
    write(tmp_path, mine="import json, random, helper\nfrom parts import deep\nfrom spread.inside import x\n")
    write(tmp_path, helper="def f():\n    from .late import g\n", late="import mine, helper\n", random="", unused="")
    write(tmp_path / "parts", __init__="from .other import y", deep="from .. import far", other="", unused="")
    write(tmp_path / "spread", inside="from .near import z\n", near="")
    write(tmp_path, far="")
    expected = ["far.py", "helper.py", "late.py", "parts/__init__.py", "parts/deep.py", "parts/other.py"]
    found = neighbours(tmp_path / "mine.py")
    assert list(found) == [*expected, "spread/inside.py", "spread/near.py"]
    assert found["parts/deep.py"] == tmp_path / "parts" / "deep.py"
    write(tmp_path, late="def f(:\n")
    with pytest.raises(PluginError, match=r"late\.py:1: "):
        neighbours(tmp_path / "mine.py")
