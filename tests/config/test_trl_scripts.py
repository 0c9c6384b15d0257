"""Training scripts of TRL, followed statement by statement: what they certainly set is converted, the rest told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.test_trl_conversion import OPTIONS, grpo

PARSER = """
from dataclasses import dataclass
import trl
from beside import other
@dataclass
class Own(trl.ScriptArguments):
    system: str = "none"
def main(script_args, training_args, model_args):
    rows = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trl.GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=[other], args=training_args,
        peft_config=get_peft_config(model_args),
        train_dataset=rows[script_args.dataset_train_split],
        eval_dataset=rows[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None)
main(*trl.TrlParser((Own, trl.GRPOConfig, trl.ModelConfig)).parse_args_and_config())
"""
ACCELERATE = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "num_processes": 8}


@pytest.mark.parametrize(
    ("command", "count", "backend", "zero"),
    [
        ("accelerate launch --config_file z.yaml --num_processes 4 a.py", 4, "deepspeed", 3),
        ("CUDA_VISIBLE_DEVICES=0 accelerate launch --config_file=z.yaml a.py", 8, "deepspeed", 3),
        ("accelerate launch --use_fsdp --num_processes 2 a.py", 2, "fsdp", None),
        ("torchrun --nnodes 2 --nproc-per-node 4 a.py", 8, None, None),
        ("python3.11 a.py", None, None, None),
    ],
)
def test_a_command_gives_a_script_its_options(
    converted: Any, tmp_path: Path, command: str, count: int | None, backend: str | None, zero: int | None
) -> None:
    (tmp_path / "a.py").write_text(PARSER)
    (tmp_path / "z.yaml").write_text(yaml.safe_dump(ACCELERATE))
    (tmp_path / "x.yaml").write_text("lora_r: 4\nuse_peft: true\nlearning_rate: 5.0e-6\n")
    options = f"{OPTIONS} --eval_strategy steps --config x.yaml --system you"
    found, text = converted("run.sh", f"set -e\n{command} \\\n  {options} | tee log\n")
    recipe = yaml.safe_load(text)
    policy, pool = recipe["models"]["policy"], recipe.get("layout", {}).get("pools", {}).get("worker", {})
    assert (policy["path"], policy["optimizer"]["lr"], policy["lora"]) == ("org/m", 1e-5, {"rank": 4, "alpha": 32})
    assert (pool.get("count"), pool.get("backend"), pool.get("zero")) == (count, backend, zero)
    held_out = {"source": "hub:org/set", "with": {"config": "main", "split": "test"}}
    assert (recipe["data"]["with"]["split"], recipe["val"]["data"]) == ("train", held_out)
    own = [one.text for one in found.accounts if one.key == "--system"]
    assert own == ["an option of the script's own, whose value stands where the script uses it"]
    assert "lacks" not in {one.kind for one in found.accounts}


def test_a_script_that_is_not_there_is_told(converted: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.sh: gone/a\.py, which it runs, is neither here nor beside it"):
        converted("run.sh", f"accelerate launch gone/a.py {OPTIONS}\n")
    _, text = converted("a.py", PARSER)
    assert "# To do: a.py takes its configuration from the command line: convert the shell script that has it" in text


SHAPES = {
    "a dictionary": (
        "c = {'learning_rate': 1e-5}\nc['max_steps'] = 7\nc.update(seed=3)\nGRPOTrainer('m', f, GRPOConfig(**c))"
    ),
    "two dictionaries": (
        "base = dict(seed=3, max_steps=1)\nc = GRPOConfig(**{**base, 'max_steps': 7}, learning_rate=1e-5)\n"
        "GRPOTrainer(**dict(model='m', reward_funcs=f), args=c)"
    ),
    "attributes": "c = GRPOConfig(seed=1)\nc.max_steps, c.seed = 7, 3\nc.learning_rate = 1e-5\nGRPOTrainer('m', f, c)",
    "classes": (
        "from trl import GRPOConfig as C, GRPOTrainer as T\nclass Own(C):\n  learning_rate: float = 1e-5\n"
        "class Mine(T): pass\nclass Last(Mine): pass\nLast('m', f, args=Own(max_steps=7, seed=3))"
    ),
    "argparse": (
        "p = ArgumentParser()\np.add_argument('-l', '--lr', default=1e-5)\np.add_argument('--n-steps', default=5)\n"
        "args = p.parse_args()\n"
        "GRPOTrainer('m', f, GRPOConfig(learning_rate=args.lr, max_steps=args.n_steps + 2, seed=3))"
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_arguments_are_found_in_what_scripts_make_them_of(converted: Any, shape: str) -> None:
    found, text = converted("a.py", SHAPES[shape])
    recipe = yaml.safe_load(text)
    assert recipe["models"]["policy"]["path"] == "m"
    assert recipe["models"]["policy"]["optimizer"]["lr"] == 1e-5
    assert (recipe["run"]["training_steps"], recipe["run"]["seed"]) == (7, 3)
    assert {one.kind for one in found.accounts} == {"maps"}


def test_what_only_running_a_script_tells_is_told(converted: Any) -> None:
    script = "class Own(GRPOTrainer):\n  def compute_loss(self): ...\nOwn(model='m', args=GRPOConfig(**made()))\n"
    found, _ = converted("a.py", script)
    assert {one.key: one.text.partition(":")[0] for one in found.accounts if one.kind == "lacks"} == {
        "**made()": "which arguments these are only the script tells",
        "Own.compute_loss": "a method of the script's GRPOTrainer",
    }


@pytest.mark.parametrize(
    "added",
    [
        "model, tok = FastLanguageModel.from_pretrained(model_name='org/m', load_in_4bit=True)\n"
        "model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, target_modules=['q_proj'], random_state=1)",
        "bits = BitsAndBytesConfig(load_in_4bit=True)\n"
        "base = AutoModelForCausalLM.from_pretrained('org/m', quantization_config=bits)\n"
        "model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=['q_proj']))",
    ],
)
def test_adapters_that_a_script_adds_to_its_model(converted: Any, added: str) -> None:
    _, text = converted("a.py", f"{added}\nGRPOTrainer(model=model, reward_funcs=f)\n")
    policy = yaml.safe_load(text)["models"]["policy"]
    assert (policy["path"], policy["quantize"]) == ("org/m", "nf4")
    assert policy["lora"] == {"rank": 4, "alpha": 8, "targets": ["q_proj"]}


def test_lists_of_rewards_that_are_added_up(converted: Any) -> None:
    head = "rewards = [one]\nrewards += [two]\n"
    _, text = converted("a.py", head + grpo(rewards="rewards + [K(3)] + made()"))
    parts = yaml.safe_load(text)["flow"]["steps"]["reward"]["with"]["function"]
    assert [*parts] == ["one", "two", "k", "rewards_reward"]
    assert "# To do: reward_funcs has *made(), which only the script can tell: write an entry of" in text


ORDERED = {
    "a condition": (
        "lr = 1e-6\nif os.environ.get('DEBUG'):\n    lr = 1e-3\nc = GRPOConfig(learning_rate=lr)",
        {},
        {"lr": 3},
    ),
    "a constant condition": (
        "DEBUG = False\nlr = 1e-5\nif DEBUG:\n    lr = 1e-3\nc = GRPOConfig(learning_rate=lr)",
        {"lr": 1e-5},
        {},
    ),
    "a condition that ends": (
        "if len(argv) > 9:\n    lr = 1\n    raise SystemExit\nlr = 1e-5\nc = GRPOConfig(learning_rate=lr)",
        {"lr": 1e-5},
        {},
    ),
    "a condition around an edit": (
        "c = GRPOConfig(learning_rate=1e-6, beta=0.1)\nif argv:\n    c.learning_rate = 1e-2",
        {"beta": 0.1},
        {"learning_rate": 3},
    ),
    "a condition around an entry": (
        "kw = {'learning_rate': 1e-6, 'beta': 0.1}\nargv and kw.update(learning_rate=1)\nc = GRPOConfig(**kw)",
        {"beta": 0.1},
        {"learning_rate": 2},
    ),
    "match": ("match name:\n    case 1: lr = 1\n    case _: lr = 2\nc = GRPOConfig(learning_rate=lr)", {}, {"lr": 3}),
    "try": (
        "try:\n    lr = float(x)\nexcept KeyError:\n    lr = 1e-5\nc = GRPOConfig(learning_rate=lr)",
        {},
        {"lr": 4},
    ),
    "a loop": (
        "lr = 1e-6\nfor lr in [1e-5, 1e-4]:\n    c = GRPOConfig(learning_rate=lr, beta=0.1)",
        {"beta": 0.1},
        {"learning_rate": 3},
    ),
    "rounds": (
        "lr = 1e-6\nwhile more():\n    c = GRPOConfig(learning_rate=lr)\n    lr = lr * 2",
        {},
        {"learning_rate": 3},
    ),
    "sums": (
        "lr = 1e-6\nlr *= 10\nc = GRPOConfig(learning_rate=lr, beta=0.3)\nc.beta *= 2\nc.num_generations //= 2",
        {"lr": 1e-5, "beta": 0.6, "num_generations": 4},
        {},
    ),
    "dictionaries": (
        "kw = dict(learning_rate=1e-6, beta=0.3)\nkw |= {'learning_rate': 1e-5}\nkw.pop('beta')\n"
        "kw.setdefault('beta', 0.1)\nkw.setdefault('learning_rate', 7)\nc = GRPOConfig(**kw)",
        {"lr": 1e-5, "beta": 0.1},
        {},
    ),
    "del and another name": (
        "kw = {'beta': 0.3}\nother = kw\nother['learning_rate'] = 1e-5\ndel kw['beta']\nc = GRPOConfig(**kw)",
        {"lr": 1e-5},
        {},
    ),
    "parameters": (
        "def build(lr=1e-6, beta=0.1):\n    return GRPOConfig(learning_rate=lr, beta=beta)\n"
        "lr, beta = 1, 0.5\nc = build(lr=1e-5)",
        {"lr": 1e-5, "beta": 0.1},
        {},
    ),
    "globals": (
        "lr = 1\ndef set_it():\n    global lr\n    lr = 1e-5\ndef other():\n    lr = 3\n"
        "set_it()\nother()\nc = GRPOConfig(learning_rate=lr)",
        {"lr": 1e-5},
        {},
    ),
    "a function that edits": (
        "def edit(it, **more):\n    it.learning_rate = more['lr']\nc = GRPOConfig()\nedit(c, lr=1e-5)",
        {"lr": 1e-5},
        {},
    ),
    "one before": ("d = GRPOConfig(beta=0.3, learning_rate=1)\nc = GRPOConfig(learning_rate=1e-5)", {"lr": 1e-5}, {}),
    "one behind": ("c = GRPOConfig(learning_rate=1e-5)\nd = GRPOConfig(beta=0.3, learning_rate=1)", {"lr": 1e-5}, {}),
    "replace": (
        "c = GRPOConfig(learning_rate=1)\nc = dataclasses.replace(c, learning_rate=1e-5)\nsetattr(c, 'beta', 0.1)",
        {"lr": 1e-5, "beta": 0.1},
        {},
    ),
    "a copy": ("d = GRPOConfig(learning_rate=1e-5)\nc = copy.deepcopy(d)\nd.learning_rate = 1", {"lr": 1e-5}, {}),
    "a name bound anew": ("lr = 1e-5\nc = GRPOConfig(learning_rate=lr)\nlr = 1", {"lr": 1e-5}, {}),
    "a method": (
        "c = GRPOConfig(learning_rate=1e-5)\nc.set_training(seed=1)",
        {"lr": 1e-5},
        {"c.set_training(seed=1)": 2},
    ),
    "a call": ("from tuning import tune\nc = GRPOConfig(learning_rate=1e-5)\ntune(c)", {"lr": 1e-5}, {"tune(c)": 3}),
    "nothing calls it": (
        "def main(lr=1):\n    return run(GRPOConfig(learning_rate=lr))\ndef run(c):\n  pass\nc = 1",
        {},
        {"args=1": 6},
    ),
}


@pytest.mark.parametrize("case", ORDERED)
def test_a_script_is_read_in_its_order(converted: Any, case: str) -> None:
    script, known, unknown = ORDERED[case]
    found, text = converted("a.py", f"{script}\nGRPOTrainer(model='m', reward_funcs=f, args=c)\n")
    values = {one.key: one.value for one in found.accounts if one.kind == "maps"}
    expected = {"learning_rate" if key == "lr" else key: value for key, value in known.items()}
    wanted = ("learning_rate", "beta", "num_generations")
    assert {key: values[key] for key in wanted if key in values} == pytest.approx(expected)
    lines = [line for line in text.splitlines() if line.startswith("# To do: ") and "line " in line]
    for name, line in unknown.items():
        assert any(name in one and f"line {line}" in one for one in lines), lines
    assert len(lines) == len(unknown)


def test_what_a_script_sets_wins_over_its_options(converted: Any, tmp_path: Path) -> None:
    body = "c = TrlParser((GRPOConfig,)).parse_args_and_config()[0]\nc.learning_rate *= 2\nc.beta = 0.1\n"
    (tmp_path / "a.py").write_text(f"{body}GRPOTrainer('m', f, c)\n")
    _, text = converted("run.sh", "accelerate launch a.py --learning_rate 5e-6 --beta 0.5 --seed 3\n")
    recipe = yaml.safe_load(text)
    assert recipe["models"]["policy"]["optimizer"]["lr"] == pytest.approx(1e-5)
    assert (recipe["flow"]["steps"]["update"]["with"]["kl_coef"], recipe["run"]["seed"]) == (0.1, 3)


@pytest.mark.parametrize(
    "script",
    [
        "if x:\n    GRPOTrainer('m', f, GRPOConfig(beta=0.1))\nelse:\n    GRPOTrainer('m', f, GRPOConfig())\n",
        "def run(lr):\n    GRPOTrainer('m', f, GRPOConfig(learning_rate=lr))\n\nrun(1)\nrun(2)\n",
    ],
)
def test_several_trainers_are_refused_by_line(converted: Any, script: str) -> None:
    with pytest.raises(ValueError, match=r"a\.py: 2 trainers .*\(line 2, line [24]\) — leave one of them"):
        converted("a.py", script)
