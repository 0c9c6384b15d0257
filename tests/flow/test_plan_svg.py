"""The picture of a plan says all of it, within its frame."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distflow.flow.plan import Plan
from distflow.flow.plan_svg import LETTER, render_svg
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import run as distflow

SVG = "{http://www.w3.org/2000/svg}"
LARGER = {"title": 1.6, "name": 1.4, "edge behind": 1.25, "edge": 1.25, "": 1.15}
"""Than small text."""
CASES = {
    "split": (),
    "colocated": ("layout=colocated",),
    "services": ("layout=services", "flow=grpo_kl"),
    "critic": ("flow=ppo", "layout=critic", "layout.pools.rollout.count=40"),
    "self_play": ("flow=self_play", "layout=self_play"),
    "long names": ("run.name=a-name-of-sixty-four-letters-is-the-longest-that-a-run-can-have--",),
}


@pytest.fixture(params=CASES)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_recipe("quickstart", CASES[request.param], need_files=False)[1]


def texts_of(root: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """Left, right and height of all texts, by an estimate of their letters, and what they say."""
    found = []
    for text in root.iter(f"{SVG}text"):
        said = "".join(text.itertext())
        width = len(said) * LETTER * LARGER.get(text.attrib["class"], 1.0)
        left = float(text.attrib["x"]) - (width / 2 if text.attrib["text-anchor"] == "middle" else 0)
        found.append((left, left + width, float(text.attrib["y"]), said))
    return found


def test_all_of_a_plan_is_in_its_picture(plan: Plan) -> None:
    root = ElementTree.fromstring(render_svg(plan))
    words = set(re.split(r"[,\s]+", " ".join(said for *_, said in texts_of(root))))
    assert words >= {pool.name for pool in plan.pools}
    assert words >= {step for pool in plan.pools for step in pool.steps}
    assert words >= {name for edge in plan.edges for name in (edge.name, *edge.fields, *edge.back)}
    assert words >= {model.name for model in plan.models}
    arrows = [line for line in root.iter() if line.attrib.get("class", "").startswith("line ")]
    assert len(arrows) == sum(2 if edge.back and edge.source != edge.target else 1 for edge in plan.edges)


def test_every_text_has_room(plan: Plan) -> None:
    root = ElementTree.fromstring(render_svg(plan))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    texts = texts_of(root)
    for left, right, y, said in texts:
        assert 0 < left < right < width, said
        assert 0 < y < height - 5, said
    for number, (left, right, y, said) in enumerate(texts):
        for other_left, other_right, other_y, other in texts[:number]:
            apart = right <= other_left or other_right <= left or abs(y - other_y) >= 11
            assert apart, f"{said!r} is written over {other!r}"


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert distflow(["plan", "quickstart", "--svg", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text() == render_svg(plan_recipe("quickstart")[1])
    assert distflow(["plan", "quickstart", "--svg", str(tmp_path / "no" / "plan.svg")]) == 2
    assert "plan.svg cannot be written (No such file or directory) — give a file" in capsys.readouterr().err


def test_names_are_escaped() -> None:
    odd = dataclasses.replace(plan_recipe("quickstart", ["layout=colocated"])[1], run_name="a<b>&c")
    assert "a<b>&c" in [said for *_, said in texts_of(ElementTree.fromstring(render_svg(odd)))]


def test_the_picture_that_the_readme_shows_is_of_today() -> None:
    shown = Path(__file__).resolve().parents[2] / "docs" / "images" / "quickstart-plan.svg"
    today = render_svg(plan_recipe("quickstart")[1])
    assert shown.read_text() == today, f"distflow plan quickstart --svg {shown}"
