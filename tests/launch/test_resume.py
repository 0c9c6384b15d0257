"""A run that is resumed goes on as what it was, except for what the command line changes and shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distflow.config.load import LoadedRecipe
from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe, plan_resized
from distflow.launch.deploy.folder_contents import Beginning, RunContents, fill
from distflow.launch.deploy.launch_request import Options, as_asked, overridden, recipe_of
from distflow.launch.deploy.launcher import begin
from distflow.launch.run.folder import create_run_folder

MINE = """
defaults: [quickstart, _self_]
run: {name: mine, training_steps: 30}
models: {policy: {optimizer: {lr: 0.001}}}
layout: {pools: {rollout: {count: 3}}}
"""


class Folder:
    """A folder of runs, and what is typed there."""

    def __init__(self, root: Path) -> None:
        self.runs_dir = root / "runs"
        self.recipe = root / "mine.yaml"
        self.recipe.write_text(MINE)
        none: tuple[str, ...] = ()
        self._plain = Options(
            recipe=None, overrides=none, name=None, runs_dir=self.runs_dir, resume=False, recipe_as_written=False,
            detach=False, dry_run=False, hosts=None, include=None, exclude=None, ssh_config=None, ssh_options="",
            sweep=none, forward=none, settings=none, ship_code=False, env=False, slurm=none, prepared=False,
            worker_entry=None,
        )  # fmt: skip

    def launch(self, *overrides: str) -> Path:
        """As far as the run folder."""
        run_dir = create_run_folder(self.runs_dir, "mine", explicit=False)
        loaded, plan = plan_recipe(str(self.recipe), overrides)
        fill(RunContents(loaded, plan, Beginning(), run_dir))
        return run_dir

    def resume(self, recipe: str | None, *overrides: str, **more: object) -> LoadedRecipe:
        """The recipe that the run goes on with."""
        given = replace(self._plain, recipe=recipe, overrides=overrides, resume=True, **more)
        return recipe_of(as_asked(given), need_files=True)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_resume_has_the_recipe_and_the_overrides_of_the_run_whatever_the_file_says_now(folder):
    folder.launch("run.training_steps=12", "models.policy.optimizer.lr=0.0001")
    folder.recipe.write_text(MINE.replace("30", "500").replace("0.001", "0.003"))
    for recipe in (None, str(folder.recipe)):
        loaded = folder.resume(recipe)
        assert loaded.recipe.run.training_steps == 12
        assert loaded.recipe.models["policy"].optimizer.lr == 0.0001
        assert loaded.recipe.layout.pools["rollout"].count == 3
        assert loaded.overrides == ("run.training_steps=12", "models.policy.optimizer.lr=0.0001")
        assert loaded.source == folder.recipe


def test_overrides_go_on_top_and_are_shown(folder, capsys):
    run_dir = folder.launch("run.training_steps=12", "layout.pools.rollout.count=2")
    loaded = folder.resume("run.training_steps=20", "layout.pools.rollout.count=2", name="mine")
    assert loaded.recipe.run.training_steps == 20
    assert loaded.recipe.layout.pools["rollout"].count == 2
    plan = plan_recipe(str(folder.recipe), loaded.overrides)[1]
    begin(run_dir, loaded, plan, resume=True)
    assert capsys.readouterr().out.splitlines() == [
        "no complete checkpoint yet: restarting at training step 1",
        "override: run.training_steps was 12, is 20",
    ]
    fill(RunContents(loaded, plan, Beginning(), run_dir))
    assert folder.resume(None).recipe.run.training_steps == 20, "the next resume goes on with that"
    assert folder.resume(None, "run.training_steps=12").recipe.run.training_steps == 12


@pytest.mark.parametrize(
    ("schedule", "done", "rates"),
    [
        ("linear", 12, ("0", "0.0004")),
        ("cosine", 12, ("0", "0.000345")),
        ("linear", 6, ("0.0005", "0.0007")),
        ("wsd", 6, None),
        ("constant", 12, None),
    ],
)
def test_a_learning_rate_that_leaps_since_a_run_is_prolonged_is_told_with_both_rates(folder, schedule, done, rates):
    own = ("models.policy.optimizer.lr=0.001", f"models.policy.optimizer.schedule={schedule}")
    run_dir = folder.launch("run.training_steps=12", *own)
    plan = plan_recipe(str(folder.recipe), ("run.training_steps=20", *own))[1]
    told = [line for line in overridden(run_dir, plan.recipe, plan, done) if line.startswith("warning")]
    start = None if rates is None else f"the learning rate of policy goes from {rates[0]} to {rates[1]} after training"
    assert len(told) == (rates is not None)
    if start is not None:
        assert told[0].startswith(
            f"warning: {start} step {done}: schedule {schedule} ends at run.training_steps, which"
        )
    assert list(overridden(run_dir, plan.recipe, plan, 0)) == ["override: run.training_steps was 12, is 20"]


@pytest.mark.parametrize("own", [(), ("models.critic.dtype=float64",)])
def test_a_copy_of_the_policy_inherits_again_what_it_inherited(folder, capsys, own):
    """Else workers that join, or come back, would have another plan than those that are there."""
    given = ("flow=ppo", "models.policy.gradient_checkpointing=true", *own)
    run_dir = folder.launch(*given)
    plan = plan_recipe(str(folder.recipe), given)[1]
    critic = plan.recipe.models["critic"]
    assert (critic.gradient_checkpointing, critic.dtype) == (True, "float64" if own else "float32")
    loaded = folder.resume(None)
    begin(run_dir, loaded, plan, resume=True)
    assert "override" not in capsys.readouterr().out
    assert plan_recipe(str(run_dir / "recipe.yaml"), resolved=True)[1].digest == plan.digest
    assert plan_resized(run_dir, {"rollout": 3}).digest == plan.digest


def test_another_layout_replaces_the_former_one_and_the_same_one_keeps_what_was_changed_in_it(folder):
    folder.launch("layout=async", "layout.pools.rollout.count=2")
    again = folder.resume(None, "layout=async", "layout.pools.rollout.count=2").recipe.layout
    assert (again.max_staleness, again.pools["rollout"].count) == (1, 2)
    other = folder.resume(None, "layout=colocated").recipe.layout
    assert list(other.pools) == ["worker"]


def test_a_layout_that_includes_another_replaces_the_former_one(folder):
    folder.launch()
    other = folder.resume(None, "layout=async").recipe.layout
    assert (other.max_staleness, other.pools["rollout"].count) == (1, 2)


def test_where_to_stop_was_said_of_one_launch(folder):
    folder.launch("run.stop_after=6")
    assert folder.resume(None).recipe.run.stop_after is None
    assert folder.resume(None, "run.stop_after=9").recipe.run.stop_after == 9
    assert folder.resume(None, "run.stop_after=6").recipe.run.stop_after == 6


def test_the_recipe_as_written_is_read_anew(folder):
    folder.launch("run.training_steps=12")
    folder.recipe.write_text(MINE.replace("30", "500"))
    for recipe in (None, str(folder.recipe)):
        loaded = folder.resume(recipe, recipe_as_written=True)
        assert (loaded.recipe.run.training_steps, loaded.overrides) == (500, ())


@pytest.mark.parametrize(
    "way, option, cure",
    [
        ({}, {"settings": ("A=b",)}, r"--set has no effect on a run on this machine — .* --hosts or --env"),
        ({}, {"forward": ("A",)}, "--forward has no effect on a run on this machine"),
        ({}, {"ship_code": True}, "--ship-code has no effect on a run on this machine"),
        ({}, {"include": "gpu-1"}, "--include has no effect on a run on this machine — leave it out, or give --hosts"),
        ({"env": True}, {"ssh_options": "-p 7"}, "--ssh-options has no effect on a run by --env"),
        ({"slurm": ("nodes=2",)}, {"settings": ("A=b",)}, "--set has no effect on a run by --slurm"),
    ],
)
def test_options_that_would_be_ignored_are_refused(folder, way, option, cure):
    with pytest.raises(UserError, match=cure):
        as_asked(replace(folder._plain, recipe="quickstart", **way, **option))
    everywhere = {"forward": ("HOME",), "ship_code": True}
    assert as_asked(replace(folder._plain, recipe="quickstart", slurm=("nodes=2",), **everywhere)).ship_code


def test_what_cannot_be_meant_is_refused(folder):
    folder.launch()
    with pytest.raises(UserError, match=r"--resume: .*/runs/mine was launched from .*mine.yaml, not from .*quickstart"):
        folder.resume("quickstart", name="mine")
    with pytest.raises(UserError, match=r"launch: no recipe given — give a shipped name .* or --resume"):
        as_asked(replace(folder._plain, recipe=None))
    with pytest.raises(UserError, match="--recipe-as-written: a new run always reads its recipe"):
        as_asked(replace(folder._plain, recipe="quickstart", recipe_as_written=True))
    with pytest.raises(UserError, match="--env and --slurm are different ways to get to hosts — keep one of them"):
        as_asked(replace(folder._plain, recipe="quickstart", env=True, slurm=("nodes=2",)))
    with pytest.raises(UserError, match="there is no run 'other'"):
        folder.resume(None, name="other")


def test_without_a_name_the_newest_run_goes_on(folder):
    folder.launch("run.training_steps=11")
    folder.launch("run.training_steps=22")
    assert folder.resume(None).recipe.run.training_steps == 22
    assert folder.resume(None, name="mine").recipe.run.training_steps == 11
