"""Trackers that a recipe asks for: which there are, what they take, and what is refused before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distflow.config import plugins
from distflow.config.plugins import LIBRARIES, TRACKERS
from distflow.errors import RecipeError
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.trackers import TrackerPlan, trackers_of
from distflow.launch.deploy.host_checks import problems_here

OWN = """
class Base:
    def log(self, step, values): pass
    def samples(self, step, rows): pass
    def close(self): pass

class Mine(Base):
    def __init__(self, run, *, level=1):
        pass

class Open(Base):
    def __init__(self, run, **options):
        pass

class Nothing(Base):
    def __init__(self):
        pass

class Half:
    def __init__(self, run):
        pass
    def log(self, step, values):
        pass

def made(run, colour="red"):
    return Mine(run)
"""


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", overrides)[1]


def test_options_by_name_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "defaults: [quickstart, _self_]\n"
        "run: {trackers: {wandb: {project: x, mode: offline}, tensorboard: true, mine: {call: './mine.py:Mine'}}}\n"
    )
    overrides = ["run.trackers.wandb.project=y", "run.trackers.mine.samples=0", "run.trackers.trackio=false"]
    found = trackers_of(plan_recipe(str(recipe), overrides)[1].recipe.run)
    assert found == (
        TrackerPlan("wandb", TRACKERS["wandb"], 8, 60.0, {"project": "y", "mode": "offline"}),
        TrackerPlan("tensorboard", TRACKERS["tensorboard"], 8, 60.0, {}),
        TrackerPlan("mine", f"{tmp_path.resolve()}/mine.py:Mine", 0, 60.0, {}),
    )
    assert [one.name for one in trackers_of(plan_recipe(str(recipe), ["~run.trackers.wandb"])[1].recipe.run)] == [
        "tensorboard",
        "mine",
    ]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["run.trackers.wanb=true"], "run.trackers.wanb — there is no tracker 'wanb' — did you mean 'wandb'"),
        (["run.trackers.wandb.samples=many"], "run.trackers.wandb.samples — expected a whole number of samples"),
        (["run.trackers.wandb.timeout_s=0"], "run.trackers.wandb.timeout_s — expected seconds above 0, got 0"),
        (["run.trackers.wandb=3"], "run.trackers.wandb"),
        (["run.trackers.prometheus.prt=1"], "run.trackers.prometheus.prt — prometheus has no such option — did you "),
        (["run.trackers.x.call=./mine.py:Mine", "run.trackers.x.levl=2"], "run.trackers.x.levl — x has no such option"),
        (["run.trackers.x.call=./mine.py:made", "run.trackers.x.color=2"], "run.trackers.x.color — x has no such"),
        (["run.trackers.x.call=./mine.py:Nothing"], "run.trackers.x.call — .*mine.py:15: 'Nothing' takes no run"),
        (["run.trackers.x.call=./mine.py:Half"], "run.trackers.x.call — .*'Half' has no samples, no close — a tracker"),
        (["run.trackers.x.call=./mine.py:Min"], "run.trackers.x.call — .*no 'Min'"),
        (["run.trackers.x.call=./none.py:Mine"], "run.trackers.x.call — .*none.py"),
        (["run.trackers.x.call=3"], "run.trackers.x.call — expected text"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=f"command line: {message}"):
        planned(*overrides)


@pytest.mark.parametrize("port", ["abc", "-1", "65536", "[]", "null", "{a: 1}", "1e400", "true"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(
        RecipeError, match="run.trackers.prometheus.port — expected a port, got .* — 0 .one that is free"
    ):
        planned(f"run.trackers.prometheus.port={port}")


def test_a_tracker_may_take_any_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    (found,) = trackers_of(planned("run.trackers.x.call=./mine.py:Open", "run.trackers.x.anything=1").recipe.run)
    assert found.options == {"anything": 1}


def test_a_missing_package_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(LIBRARIES[TRACKERS["wandb"]], module="no_such_package")
    monkeypatch.setitem(plugins.LIBRARIES, TRACKERS["wandb"], lacking)  # type: ignore[arg-type]
    (problem,) = problems_here(planned("layout=split", "run.trackers.wandb.project=x"), lambda key: "here")
    assert problem.key == "run.trackers.wandb"
    assert "needs the package 'no_such_package'" in str(problem)
    assert "pip install 'wandb" in str(problem)


def test_a_store_that_nobody_knows_and_one_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="run.copy_to — there is no kind of store 's4' — allowed: abfs, gs, hf, s3"):
        planned("run.copy_to=s4://bucket/runs")
    lacking = replace(LIBRARIES["copy_to:s3"], module="no_such_package")
    monkeypatch.setitem(plugins.LIBRARIES, "copy_to:s3", lacking)  # type: ignore[arg-type]
    (problem,) = problems_here(planned("layout=split", "run.copy_to=s3://bucket/runs"), lambda key: "here")
    assert problem.key == "run.copy_to"
    assert "pip install s3fs" in str(problem)


def test_a_folder_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("defaults: [quickstart, _self_]\nrun: {copy_to: ../safe}\n")
    assert plan_recipe(str(recipe), [])[1].recipe.run.copy_to == str(tmp_path.resolve().parent / "safe")
    assert planned("run.copy_to=memory://safe").recipe.run.copy_to == "memory://safe"
