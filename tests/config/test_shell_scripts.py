"""Shell scripts that start a training, read as the shell would, as far as it is certain what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.errors import UserError

SHELL = """
A=$((1024 * 2)); HALF=$(( (A + 2) / 3 ))
BASE=${BASE_OF_NOBODY:-"${HOME}/verl"}
MODEL=${MODEL_OF_NOBODY:-"${BASE}/models/${NAME_OF_NOBODY:=Qwen}"}
TEMPERATURE=0.5; if [ -n "$FAST" ]; then TEMPERATURE=0.5; fi
more="data.train_batch_size=64
  actor_rollout_ref.rollout.n=4"
more+=" trainer.total_training_steps=$((2**5 - 1))"
ARGS=(
  data.train_files="/d/two words.parquet"  # not two
  actor_rollout_ref.actor.optim.lr=1e-6
)
ARGS+=(trainer.experiment_name=${NAME_OF_NOBODY##*w})
python3 -m verl.trainer.main_ppo data.max_prompt_length=$A data.max_response_length=$((1024*8)) 2>&1 \
    data.shuffle=False actor_rollout_ref.model.path="$MODEL"/it actor_rollout_ref.rollout.top_p='0.7' \
    actor_rollout_ref.rollout.max_model_len=${HALF} actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.temperature=$TEMPERATURE data.prompt_key="q#$((7 / 2))" $more "${ARGS[@]}" "$@"
"""


def test_the_shell_of_a_script_is_read_as_the_shell_would(converted: Any, tmp_path: Path) -> None:
    found, text = converted("run.sh", SHELL)
    recipe, sample = yaml.safe_load(text), yaml.safe_load(text)["flow"]["steps"]["sample"]["with"]
    data = {"source": "/d/two words.parquet", "max_prompt_tokens": 2048, "shuffle": False, "fields": {"prompt": "q#3"}}
    assert recipe["data"] == data
    assert sample == {"max_new_tokens": 8192, "temperature": 0.5, "top_p": 0.7}
    assert recipe["models"]["policy"]["path"] == f"{tmp_path}/verl/models/Qwen/it"
    assert (recipe["batch"]["prompts"], recipe["batch"]["samples_per_prompt"]) == (64, 4)
    assert (recipe["run"]["training_steps"], recipe["run"]["name"]) == (31, "en")
    assert recipe["layout"]["pools"]["rollout"]["engine_options"]["max_model_len"] == 683
    assert not [one for one in found.accounts if one.kind == "lacks"]


@pytest.mark.parametrize(
    ("script", "line", "unknown"),
    [
        ("\nverl data.max_prompt_length=$LONG_OF_NOBODY", 2, "LONG_OF_NOBODY"),
        ("A=${B_OF_NOBODY}k\nC=${A:-7}\nverl data.max_prompt_length=$C", 3, "B_OF_NOBODY"),
        ("verl data.max_prompt_length=$(wc -l < file)", 1, "$(wc -l < file)"),
        ("verl data.max_prompt_length=$((N_OF_NOBODY * 2))", 1, "$(N_OF_NOBODY * 2)"),
        ("A=1\nif [ $X ]; then\n  A=2\nfi\nverl \\\n data.max_prompt_length=$A", 6, "A, which line 2 may set,"),
        ("verl data.max_prompt_length=${HOME//a/b}", 1, "HOME"),
    ],
)
def test_what_the_shell_alone_would_know_is_to_do(converted: Any, script: str, line: int, unknown: str) -> None:
    found, text = converted("run.sh", script + " data.train_files=x.jsonl\n")
    recipe = text.partition("\n\n#")[0]
    assert "${" not in "".join(one for one in recipe.splitlines() if not one.startswith("#"))
    assert "max_prompt_tokens" not in yaml.safe_load(text)["data"]
    (account,) = [one for one in found.accounts if one.kind == "lacks"]
    assert account.text.startswith(f"line {line}: {unknown} has no value that the script tells: write what it is")


RUN = "python3 -m verl.trainer.main_ppo data.max_prompt_length="


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        *((f'L=1\ncat <<"END" > note\nL=2\nEND\n{RUN}$L', 1), (f": <<'C'\nL=2\nit's\nC\nL=1\n{RUN}$L", 1)),
        *((f"L=1\nnever() {{\n  L=2\n}}\n{RUN}$L", 1), (f"L=1\nfunction f {{ L=$1; }}\nf 3\n{RUN}$L", 3)),
        (f"run() {{ {RUN}${{2:-8}}; }}\nL=2 run 1 7", 7),
        (f"L=1\nrun() {{\n  local M=$L\n  {RUN}$M\n}}\nL=4\nrun", 4),
        (f"L=1\nf() {{ local L=2; }}\nf\n{RUN}$L", 1),
        *((f"export L=1\nL=2 {RUN}$L", 1), (f"L=1\nL=2 true\n{RUN}$L", 1), (f"L=1 M=$L\n{RUN}$M", 1)),
        (f"if [ $X ]; then\n  L=3\n  {RUN}$L\nfi", 3),
        (f"L=1\nif [ $X ]; then L=1; fi\n{RUN}$L", 1),
        (f"L=1\ncase $X in\n  a|b) echo ;;\nesac\nexit_if() {{ exit; }}\n{RUN}$L", 1),
        (f"{RUN}1\nexit 0\n{RUN}2", 1),
        (f"{RUN}1\necho done data.max_prompt_length=9\npython -m verl.trainer.main_eval data.max_prompt_length=8", 1),
        (f"A=(a b c)\n{RUN}${{#A[@]}}", 3),
        (f"{RUN}$'7'", 7),
        (f"cd /x && {RUN}5 | tee log", 5),
        (f"{RUN}5 > log data.max_prompt_length=5 2>&1 &\nwait", 5),
    ],
)
def test_what_certainly_runs_is_followed(converted: Any, script: str, expected: int) -> None:
    found, text = converted("run.sh", script + "\n")
    assert yaml.safe_load(text)["data"]["max_prompt_tokens"] == expected
    assert not [one for one in found.accounts if one.kind == "lacks"]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        *(('[ -n "$X" ] && L=2', 1), ("L=1\nfalse || L=2", 2), ("L=1\nif true; then :; else L=2; fi", 2)),
        *(("case $X in\na) L=2 ;;\nesac", 1), ("L=1\nfor L in 2; do :; done", 2), ("L=1\nwhile f; do L=2; done", 2)),
        *(("L=1\n((L*=2))", 2), ("L=1\nlet L=L+1", 2), ("L=1\nM=$((L++))", 2), ("L=1\nunset L", 2)),
        *(("L=1\nprintf -v L 3", 2), ("read L M", 1), ("L=1\neval $X", 2), ("L[0]=3", 1), ("mapfile -t L < x", 1)),
        *(("L=1\nsource gone.sh", 2), ("L=1\nf() { L=2; }\n[ $X ] && f", 3), ("L=1\n{ L=2; } | cat", 2)),
        *(("f() {\n[ $X ] && return\nL=2\n}\nf", 2), ("declare -i L=2", 1), ("L=1\n(L=2; true)", 2)),
        ("L=1\ntrue &&\n  L=2", 2),
    ],
)
def test_what_may_or_may_not_be_set_is_to_do(converted: Any, script: str, line: int) -> None:
    for value in ("$L", "${L:-5}", "x${L:+5}", "$((L + 1))"):
        _, text = converted("run.sh", f"{script}\n{RUN}{value}\n")
        assert "max_prompt_tokens" not in yaml.safe_load(text)["data"]
        (told,) = [one for one in text.splitlines() if one.startswith("# To do: data.max_prompt_length=")]
        assert f"L, which line {line} may set, has no value" in told or value.startswith("$((")


def test_of_an_array_what_is_known_is_kept(converted: Any) -> None:
    script = "A=(data.train_batch_size=32)\nif [ $X ]; then A+=(data.max_prompt_length=4); fi\n"
    _, text = converted(
        "run.sh", f"""{script}python -m verl.trainer.main_ppo "${{A[@]}}" trainer.nnodes=2 $EXTRA_X\n"""
    )
    assert yaml.safe_load(text)["batch"]["prompts"] == 32
    assert "line 3: A, which line 2 may set, has no value that the script tells: write what it is; overrides" in text
    assert "# To do: ${EXTRA_X}=…: line 3: EXTRA_X has no value" in text


@pytest.mark.parametrize(
    "script",
    [
        f"if [ $X ]; then\n{RUN}1\nelse\n\n{RUN}2\nfi",
        f"{RUN}1\n\n\n{RUN}2",
        "[ $X ] &&\ntrl grpo --beta 0.1\n\ntrl grpo --beta 0.2",
    ],
)
def test_several_commands_that_train_are_refused_by_line(converted: Any, script: str) -> None:
    with pytest.raises(UserError, match=r"run\.sh: 2 commands train \(line [12], line [45]\) — leave one of them"):
        converted("run.sh", script + "\n")


def test_configurations_that_verl_reads_are_read(converted: Any, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    given = {"defaults": ["ppo_trainer", "_self_", {"other": "x"}], "hydra": {"searchpath": ["y"]}}
    given |= {
        "data": {"train_batch_size": 64, "max_prompt_length": 9},
        "trainer": {"nnodes": "${data.train_batch_size}"},
    }
    (tmp_path / "config" / "mine.yaml").write_text(yaml.safe_dump(given))
    options = "--config-path=./config --config-name 'mine' data.max_prompt_length=7 seed=3"
    found, text = converted("run.sh", f"python3 -m verl.trainer.main_ppo {options} ~trainer.logger\n")
    recipe, values = yaml.safe_load(text), {one.key: one.value for one in found.accounts}
    assert (recipe["batch"]["prompts"], recipe["data"]["max_prompt_tokens"]) == (64, 7)
    assert values["trainer.nnodes"] == 64
    assert {"defaults: {other: x}", "~trainer.logger", "seed"} <= values.keys()
    _, text = converted("run.sh", "python3 -m verl.trainer.main_ppo --config-name=other data.max_prompt_length=7\n")
    assert "# To do: --config-name=other=…: verl's configuration other.yaml is neither here nor beside run.sh" in text


def test_options_of_trl_that_the_script_may_set_are_to_do(converted: Any) -> None:
    script = (
        "[ $X ] && LR=1e-4\ntrl grpo --learning_rate $LR --beta $(cat beta) --max_steps 7 $EXTRA_X --seed ${SEED_X}\n"
    )
    found, text = converted("run.sh", script)
    told = {one.key: one.text.partition(" has no")[0] for one in found.accounts if one.kind == "lacks"}
    assert told == {
        "learning_rate": "line 2: LR, which line 1 may set,",
        "beta": "line 2: $(cat beta)",
        "${EXTRA_X}": "line 2: EXTRA_X",
    }
    assert all(f"# To do: {key}=" in text for key in told)
    assert (yaml.safe_load(text)["run"]["training_steps"], yaml.safe_load(text)["run"]["seed"]) == (
        7,
        "${oc.env:SEED_X}",
    )


def test_variables_come_from_the_environment_and_files_too(
    converted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "9")
    (tmp_path / "env.sh").write_text("export SIZE=32\n")
    words = (
        "data.train_batch_size=$SIZE actor_rollout_ref.rollout.n=${OURS:-4} trainer.nnodes='${data.train_batch_size}'"
    )
    found, text = converted("run.sh", f'source ./env.sh\npython -m verl.trainer.main_ppo {words} "${{EXTRA_X[@]}}"\n')
    recipe = yaml.safe_load(text)
    assert (recipe["batch"]["prompts"], recipe["batch"]["samples_per_prompt"]) == (32, 9)
    assert {one.key: one.value for one in found.accounts}["trainer.nnodes"] == 32
    (account,) = [one for one in found.accounts if one.kind == "lacks"]
    assert account.text.startswith("line 2: EXTRA_X has no value")
    assert account.text.endswith("overrides may be among it")
