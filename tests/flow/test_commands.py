"""plan, validate and config, as users call them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from distflow.comm.keys import own_keys, public_hex
from distflow.config.load import load_recipe
from distflow.config.paths import shipped_recipes
from distflow.flow.document import read_worker_document
from distflow.launch.cli import run
from distflow.runtime.assembly import read_setting

IN_TWO = ("layout.pools.rollout.engine=sglang", "layout.pools.rollout.engine_options.tensor_parallel=2")


def test_validate_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "quickstart"]) == 0
    assert capsys.readouterr().out.startswith(
        "ok: quickstart, 600 training steps of 256 samples each, on 3 workers, by a flow of 4 functions"
    )


def test_validate_reports_everything_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "quickstart", "run.sed=1", "batch.prompts=33"]) == 2
    error = capsys.readouterr().err
    assert "run.sed — unknown key" in error
    assert "33 prompts do not divide" in error
    assert "Traceback" not in error


def test_a_name_that_no_run_can_have_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "quickstart", "--dry-run", "--run", "../x"]) == 2
    assert "run name '../x': expected at most 64 letters" in capsys.readouterr().err


def test_validate_of_a_recipe_for_other_machines_asks_nothing_of_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ["validate", "quickstart", "layout.pools.rollout.device=cuda:99"]
    assert run(gpu) == 2
    err = capsys.readouterr().err
    assert "but this host has" in err
    assert "for other machines there are --elsewhere and --hosts FILE" in err
    assert run([*gpu, "--elsewhere"]) == 0


def test_validate_refuses_a_name_that_is_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "quickstart", "flow.steps.reward.with.function=exactmatch"]) == 2
    error = capsys.readouterr().err
    assert (
        "command line: flow.steps.reward.with.function — there is no 'exactmatch' — did you mean 'exact_match'" in error
    )
    assert "or a function as module:name or ./file.py:name" in error


def test_validate_refuses_a_missing_model_and_plan_only_notes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["validate", "reasoning"]) == 2
    assert "for SmolLM2 run `make smollm2`" in capsys.readouterr().err
    assert run(["plan", "reasoning"]) == 0
    assert "there is no folder models/smollm2-135m" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_engine_and_backend_of_any_shipped_recipe_are_exchanged_alike(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = "layout.pools"
    chosen = [
        "layout=split",
        f"{pools}.rollout.engine=sglang",
        f"{pools}.trainer.backend=deepspeed",
        f"{pools}.trainer.zero=2",
    ]
    assert run(["plan", recipe, *chosen]) == 0
    page = capsys.readouterr().out
    assert "SGLangEngine" in page
    assert "DeepSpeedBackend" in page


def test_plan_prints_a_page_json_and_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "quickstart"]) == 0
    assert "32 prompts × 8 samples" in capsys.readouterr().out
    assert run(["plan", "quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["owners"] == ["trainer/0"]
    assert run(["plan", "quickstart", "--worker", "rollout/0"]) == 0
    assert "def script(w):" in capsys.readouterr().out
    assert run(["plan", "quickstart", "--worker", "rollout/7"]) == 2
    assert "this layout has rollout/0, rollout/1, trainer/0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["gsm8k"],
        ["quickstart", "val.every=2", "val.data.source=distflow.data.arithmetic:copy_digits"],
        ["quickstart", "val.data.mix={a: {source: ./a.parquet}, b: {source: ./b.jsonl}}", "--hosts"],
    ],
)
def test_a_plan_with_validation_is_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    assert run(["plan", *words, *[str(tmp_path / "hosts")] * (words[-1] == "--hosts"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["val"]["data"]
    val = load_recipe(words[0], [word for word in words[1:] if "=" in word]).recipe.val
    assert val is not None
    assert val.data is not None
    assert told == json.loads(val.data.model_dump_json())


def test_plan_draws_the_chart_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "quickstart", "--mermaid"]) == 0
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert capsys.readouterr().out == text.partition("```mermaid\n")[2].partition("```")[0]


def test_plan_writes_a_document_and_a_script_for_each_worker(tmp_path: Path) -> None:
    assert run(["plan", "quickstart", "--write", str(tmp_path)]) == 0
    names = {f"{stem}.{kind}" for stem in ("rollout-0", "rollout-1", "trainer-0") for kind in ("yaml", "py")}
    assert {path.name for path in tmp_path.iterdir()} == names
    document = read_worker_document(tmp_path / "trainer-0.yaml")
    assert (document.worker, document.script, document.run_dir) == ("trainer/0", "trainer-0.py", str(tmp_path))
    assert set(document.roster) == {"rollout/0", "rollout/1", "trainer/0"}


@pytest.mark.parametrize(
    ("lines", "addresses"),
    [
        (["a address=10.0.0.1", "b slots=2 address=fd00::2 dir=/scratch"], ["tcp://10.0.0.1", "tcp://[fd00::2]"]),
        (["127.0.0.3 slots=2", "127.0.0.4"], ["tcp://127.0.0.3", "tcp://127.0.0.4"]),
    ],
)
def test_documents_for_several_hosts_tell_where_the_others_listen(
    tmp_path: Path, lines: list[str], addresses: list[str]
) -> None:
    hosts, folder = tmp_path / "hosts", tmp_path / "by-hand"
    hosts.write_text("\n".join(lines))
    assert run(["plan", "quickstart", "--hosts", str(hosts), "--write", str(folder)]) == 0
    found = {name: read_worker_document(folder / f"{name}.yaml") for name in ("rollout-0", "rollout-1", "trainer-0")}
    for document in found.values():
        for name, address in document.roster.items():
            peer = found[name.replace("/", "-")]
            if peer.host == document.host:
                assert address.startswith("ipc://")
            else:
                place, _, key = address.partition("#")
                assert place == f"{addresses[peer.host]}:{peer.port}"
                assert key == public_hex(own_keys(folder, name.replace("/", "-")))
    assert len({document.port for document in found.values()}) == 3
    assert {document.host for document in found.values()} == {0, 1}
    assert {path.stat().st_mode & 0o777 for path in (folder / "keys").iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("words", "count", "told", "devices"),
    [
        ([], 8, {"rollout-0": "GPU 0", "trainer-0": "GPU 2"}, {"rollout-0": "cuda:0", "trainer-0": "cuda:2"}),
        (["--include", "a:5,6,7"], 8, {"rollout-1": "GPU 6"}, {"rollout-1": "cuda:6", "trainer-0": "cuda:7"}),
        ([*IN_TWO], 8, {"rollout-1": "GPUs 2-3", "trainer-0": "GPU 4"}, {"rollout-1": "cuda:2", "trainer-0": "cuda:4"}),
        ([], 2, {"trainer-0": "GPU 2"}, {"rollout-1": "cuda:1", "trainer-0": "cuda:0"}),
        ([], 0, {"trainer-0": "GPU 2"}, {"rollout-1": "cpu", "trainer-0": "cpu"}),
        (["layout.pools.trainer.device=cpu"], 8, {"trainer-0": ""}, {"rollout-1": "cuda:1", "trainer-0": "cpu"}),
    ],
)
def test_workers_by_hand_take_the_gpus_that_an_agent_would_give_them(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    count: int,
    told: dict[str, str],
    devices: dict[str, str],
) -> None:
    """`count`: GPUs that are found when they begin."""
    (tmp_path / "hosts").write_text("a slots=8 address=10.0.0.1\n")
    folder = tmp_path / "by-hand"
    assert run(["plan", "quickstart", *words, "--hosts", str(tmp_path / "hosts"), "--write", str(folder)]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "distflow worker" in line]
    said = {Path(line.split()[2]).stem: line.partition("  # ")[2] for line in commands}
    assert told.items() <= said.items()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for stem, device in devices.items():
        path = folder / f"{stem}.yaml"
        assert read_setting(read_worker_document(path), path).device == device


def test_a_host_that_others_cannot_connect_to_gets_no_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\nno-such-host.invalid\n")
    assert run(["plan", "quickstart", "--hosts", str(tmp_path / "hosts"), "--write", str(tmp_path / "to")]) == 2
    error = capsys.readouterr().err
    assert re.search(r"hosts:1: localhost — .* takes the name for (127.0.0.1|::1), which other", error)
    assert re.search(r"hosts:2: no-such-host.invalid — .* takes the name for no address.*address=10.0.0.3", error)


def test_a_recipe_with_code_of_its_own_takes_it_along_to_other_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.3 slots=2\n127.0.0.4 dir=/scratch\n")
    code = tmp_path / "steps" / "own.py"
    code.parent.mkdir()
    code.write_text("def longest(response_text: str) -> float:\n    return float(len(response_text))\n")
    words = [f"flow.steps.reward.with.function={code}:longest", "--hosts", str(tmp_path / "hosts")]
    assert run(["plan", "quickstart", *words, "--write", str(tmp_path / "by-hand")]) == 0
    for name, folder in (("rollout-0", tmp_path / "by-hand"), ("rollout-1", Path("/scratch/by-hand"))):
        document = read_worker_document(tmp_path / "by-hand" / f"{name}.yaml")
        named = document.recipe.flow.steps["reward"].with_["function"]
        assert named == f"{folder}/plugins/0/own.py:longest"
    assert (tmp_path / "by-hand" / "plugins" / "0" / "own.py").read_text() == code.read_text()


def test_config_shows_the_resolved_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "quickstart", "run.seed=5"]) == 0
    out = capsys.readouterr().out
    assert "  seed: 5\n" in out
    assert "  no_progress_s: 600.0\n" in out
    assert run(["config", "show", "quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["ledgers"] == 8


def test_config_prints_schema_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    assert "RunConfig" in json.loads(capsys.readouterr().out)["$defs"]
    assert run(["config", "explain", "batch.ledgers"]) == 0
    assert "default: 8" in capsys.readouterr().out
    assert run(["config", "explain", "batch.ledgrs"]) == 2


def test_a_plan_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # On Linux /dev/full takes nothing, as a full disk does.
    (tmp_path / "trainer-0.yaml").symlink_to("/dev/full")
    (tmp_path / "file").touch()
    for to, reason in ((tmp_path, "No space left on device"), (tmp_path / "file" / "x", "Not a directory")):
        assert run(["plan", "quickstart", "--write", str(to)]) == 2
        error = capsys.readouterr().err
        assert f"--write {to}: " in error
        assert f"cannot be written ({reason})" in error
        assert "Traceback" not in error
