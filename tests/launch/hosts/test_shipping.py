"""What goes to hosts that share no folder with the head, and the digests by which all tell that they have the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import distflow
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError
from distflow.flow.document import read_worker_document
from distflow.flow.planner import make_plan
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import resolve
from distflow.launch.agent.host_facts import code_digest, code_files
from distflow.launch.deploy.folder_contents import Beginning, CheckedHost, RunContents
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.job_environment import forwarded
from distflow.launch.deploy.placement import place_workers
from distflow.launch.run.folder import SHIPPED_BYTES, plugin_files, rewritten, shipped_files, shipped_names

PACKAGE = Path(distflow.__file__).parent


def test_the_digest_of_the_code_does_not_depend_on_where_and_how_it_is_installed(tmp_path):
    installed = tmp_path / "site-packages" / "distflow"
    for name, path in code_files(PACKAGE):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, installed / name)
    assert {"launch/cli.py", "workers/trainer.py", "recipes/quickstart.yaml"} <= {n for n, _ in code_files(installed)}
    assert code_digest(installed) == code_digest(PACKAGE)
    with (installed / "workers" / "trainer.py").open("a") as file:
        file.write("\n")
    assert code_digest(installed) != code_digest(PACKAGE)


def test_plug_ins_of_one_folder_stay_together_and_keep_their_names():
    recipe = {
        "a": ["/x/one.py:f", "+/x/two.py:g"],
        "b": {"script": "/y/one.py"},
        "c": "module:name",
        "d": "/etc/passwd",
    }
    files = plugin_files(recipe)
    assert shipped_names(files) == {
        Path("/x/one.py"): "plugins/0/one.py",
        Path("/x/two.py"): "plugins/0/two.py",
        Path("/y/one.py"): "plugins/1/one.py",
    }
    moved = {file: Path("/run") / name for file, name in shipped_names(files).items()}
    assert rewritten(recipe, moved) == {
        "a": ["/run/plugins/0/one.py:f", "+/run/plugins/0/two.py:g"],
        "b": {"script": "/run/plugins/1/one.py"},
        "c": "module:name",
        "d": "/etc/passwd",
    }


def test_a_host_with_copies_of_plug_ins_plans_the_same_run(tmp_path):
    """The interface digest is equal, so its workers are let in by the others."""
    (tmp_path / "mine.py").write_text("from parts.value import VALUE\n\n\ndef judge(sample):\n    return VALUE\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "value.py").write_text("from .other import VALUE\n")
    (tmp_path / "parts" / "other.py").write_text("VALUE = 0.25\n")
    (tmp_path / "parts" / "not_needed.py").touch()
    loaded, plan = plan_recipe("quickstart", [f"flow.steps.reward.with.function={tmp_path}/mine.py:judge"])
    placement = place_workers(plan, parse_hosts("a slots=2\nb", "hosts"))
    there = tmp_path / "there"
    checked = {
        0: CheckedHost(tmp_path / "here", "10.0.0.1", same_folder=True, gpus=0, missing_plugins=False),
        1: CheckedHost(there, "10.0.0.2", same_folder=False, gpus=0, missing_plugins=True),
    }
    contents = RunContents(loaded, plan, Beginning(), tmp_path / "here", placement, checked)
    for name, content in (contents.documents(1) | contents.plugin_copies()).items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    (tmp_path / "mine.py").unlink()
    shutil.rmtree(tmp_path / "parts")
    document = read_worker_document(there / "workers" / "rollout-1.yaml")
    moved = make_plan(document.recipe)
    assert moved.digest == plan.digest
    judge = next(step for step in moved.steps if step.name == "reward").settings["function"]
    assert resolve(judge)(None) == 0.25
    assert not (there / "plugins" / "0" / "parts" / "not_needed.py").exists()
    # What a host was sent goes to those that come later, from there.
    files = plugin_files(loaded.resolved)
    assert shipped_files(files, there) == {name: there / name for name in contents_of(there / "plugins")}
    assert str(tmp_path / "mine.py") not in yaml_text(document.recipe.model_dump(mode="json"))


def contents_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}


def test_plug_ins_with_data_in_them_are_not_sent(tmp_path):
    (tmp_path / "mine.py").write_text("import table\n")
    (tmp_path / "table.py").write_text(f"TABLE = '{'x' * (SHIPPED_BYTES + 1)}'\n")
    told = r"16\.0 MiB, .*/table\.py the most of it; at most 16 MiB are copied to other hosts — install them as"
    with pytest.raises(UserError, match=told):
        shipped_files([tmp_path / "mine.py"])


def test_the_gpus_of_this_machine_are_not_forwarded_unless_they_are_named():
    here = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_LAUNCH_BLOCKING": "1"}
    assert forwarded(here, [], []) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert forwarded(here, ["CUDA_*"], []) == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert forwarded(here, ["CUDA_VISIBLE_DEVICES"], []) == here
    assert forwarded({}, [], ["CUDA_VISIBLE_DEVICES=2"]) == {"CUDA_VISIBLE_DEVICES": "2"}


def test_only_what_is_meant_for_other_hosts_is_forwarded():
    here = {
        "PATH": "/bin",
        "HOME": "/me",
        "NCCL_DEBUG": "INFO",
        "DISTFLOW_RUN_KEY": "secret",
        "MY_TOKEN": "x",
        "MY_OTHER": "y",
    }
    assert forwarded(here, [], []) == {"NCCL_DEBUG": "INFO"}
    assert forwarded(here, ["MY_TOKEN,MY_O*"], ["NCCL_DEBUG=WARN", "A=b=c"]) == {
        "NCCL_DEBUG": "WARN",
        "MY_TOKEN": "x",
        "MY_OTHER": "y",
        "A": "b=c",
    }
    with pytest.raises(UserError, match="--forward MY_TOKE: not set here — set it, or give it a value: --set MY_TOKE="):
        forwarded(here, ["MY_TOKE"], [])
