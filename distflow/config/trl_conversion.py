"""What several of TRL's arguments decide together, and what TRL takes where a script says nothing (1.16)."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from distflow.config.foreign import Foreign, shown
from distflow.config.other_tools import WORDS
from distflow.config.schema import ATTENTION
from distflow.config.script import Expression
from distflow.config.together import Default, RowCount, Together, counts_of, mixture, uncounted, word
from distflow.config.trl_keys import AGGREGATES, shipped_reward, training_steps

_OPTIMIZER = "models.policy.optimizer"
_FUNCTIONS = "flow.steps.reward.with.function"
_SCORE = "score and val/avg@k are of the first that judges a sample: put correctness first"
_TRL_OFF = "TRL does not validate: eval_strategy is no"


def of_trl(foreign: Foreign, given: Mapping[str, Any], count: RowCount = uncounted) -> Together:
    """Find what follows from several arguments. `given`: those whose values are known; `count`: rows of a file."""
    found = Together()
    if foreign.parses:
        told = "convert the shell script that has it, or the YAML of --config, beside this script"
        found.assumed.append(f"{foreign.file.name} takes its configuration from the command line: {told}")
    each = _batch(found, given)
    _workers(found, given)
    _loss(found, given)
    _source(found, foreign, "train_dataset", "data")
    total = _total(found, foreign, given, count, each)
    _lengths(found, given, each, total)
    _betas_and_decay(found, given, each)
    _sampling(found, given)
    _correction(found, given)
    _model(found, foreign, given)
    _functions(found, foreign, given)
    _validation(found, foreign, given, each, total)
    _adapter(found, foreign)
    return found


def _batch(found: Together, given: Mapping[str, Any]) -> int:
    """Map the sizes of batches, and return how many of TRL's optimizer steps a training step has."""
    made = found.made
    accumulation = found.count(given, "gradient_accumulation_steps", 1)
    device = found.count(given, "per_device_train_batch_size", 8)
    processes = found.count(given, "num_processes", 1)
    whole = found.number(given, "generation_batch_size", 0)
    held = found.number(given, "steps_per_generation", (whole // (device * processes) or 1) if whole else accumulation)
    # Here a training step has an optimizer step at least: where TRL makes one of several generation batches, of all.
    held = max(held, accumulation)
    samples = found.count(given, "num_generations", 8)
    if "num_generations" in given:
        made["batch.samples_per_prompt"] = samples
    exact = max(whole, device * held * processes) / samples
    prompts = made["batch.prompts"] = int(max(1, exact))
    updates = held / accumulation
    if "num_processes" not in given and not whole:
        told = f"write {exact:g} × the number of processes of the TRL run"
        found.assumed.append(f"batch.prompts is that of one process: {told}")
    elif exact != prompts:
        found.assumed.append(f"batch.prompts is {prompts}, where TRL has {exact:g}, which are no whole groups")
    told = f"TRL makes {updates:g} optimizer steps of a generation batch of {prompts} prompts"
    found.minibatches(prompts, updates, told)
    return int(max(1, round(updates * found.number(given, "num_iterations", 1))))


def _workers(found: Together, given: Mapping[str, Any]) -> None:
    """Map the processes that train, and the GPUs of vLLM, which are theirs or are others."""
    option, uses = "vllm_tensor_parallel_size", bool(given.get("use_vllm"))
    processes, width = found.number(given, "num_processes", 0), found.number(given, option, 1)
    if not uses:
        idle = ("vllm_mode", option)
        found.says |= {key: "nothing is needed: use_vllm is not true" for key in idle if key not in found.lacks}
        width = 1
    found.engine = "vllm" if uses else "torch"
    apart = width if uses and given.get("vllm_mode") == "server" else 0
    if not processes and not apart and width > 1:
        found.assumed.append(f"{2 * width} GPUs are assumed: the script does not say how many processes it has")
    if processes or apart or width > 1:
        gpus = processes or (1 if apart else 2 * width)
        division = found.divide(found.engine, width, (1, gpus), apart)
        found.settled["num_processes"] = counts_of(division)
        if found.layout == "split" and width > 1 and not apart:
            # What one GPU cannot generate with, it cannot train.
            found.made["layout.pools.trainer.backend"] = "fsdp"
        width = division.width
    if uses and option not in found.lacks and option in given:
        own = f"layout.pools.rollout.engine_options.tensor_parallel_size={width}"
        told, text = (found.settled, own) if width > 1 else (found.says, "nothing is needed: an engine has one GPU")
        told[option] = text


def _total(found: Together, foreign: Foreign, given: Mapping[str, Any], count: RowCount, each: int) -> int:
    """Map the length of the run, and return TRL's optimizer steps; 0: not known.

    A pass has as many generation batches as are whole, which is what TRL's sampler yields.
    """
    key, made = "num_train_epochs", found.made
    sources = [one["source"] for one in made.get("data.mix", {}).values()] or [made.get("data.source", "")]
    found.rows = {source: rows for source in sources if (rows := count(source))}
    if (steps := int(found.number(given, "max_steps", -1))) > 0:
        made["run.training_steps"] = max(1, steps // each)
        found.says[key] = "nothing is needed: max_steps is given"
        return steps
    if any(isinstance(foreign.given.get(one), Expression) for one in ("max_steps", key)):
        return 0
    found.says["max_steps"] = f"nothing is needed: {steps} leaves the length to {key}"
    epochs, prompts = found.number(given, key, 3.0), made["batch.prompts"]
    if not (batches := found.whole_batches(sources, prompts)):
        told = f"write run.training_steps, {epochs:g} ({key}) × (rows of the data // {prompts}): {found.length}"
        found.lacks[key] = told
        found.assumed += [] if key in given else [told]
        return 0
    total: int = math.ceil(epochs * batches * each)
    made["run.training_steps"] = max(1, total // each)
    found.settled[key] = f"run.training_steps={made['run.training_steps']}"
    found.notes["run.training_steps"] = f"{key} {epochs:g} × ({sum(found.rows.values())} rows // {prompts})"
    if key not in given:
        found.defaults["run.training_steps"] = Default(key, epochs, found.notes.pop("run.training_steps"))
    return total


def _lengths(found: Together, given: Mapping[str, Any], each: int, total: int) -> None:
    """Map what TRL counts in optimizer steps, of which there are `total`."""
    made = found.made
    strategy = given.get("save_strategy", "steps")
    if strategy == "steps" and (every := found.number(given, "save_steps", 500)) > 0:
        steps = training_steps(every, each, total)
        if steps is None:
            found.lacks["save_steps"] = f"run.save_every = {every} × run.training_steps"
        elif "save_steps" in given:
            made["run.save_every"] = steps
        else:
            found.by_default("run.save_every", steps, Default("save_steps", 500))
    elif "save_steps" in given:
        found.says["save_steps"] = f"TRL does not count: save_strategy is {strategy}"
    if given.get("save_total_limit") is None:
        found.by_default("run.keep_checkpoints", None, Default("save_total_limit", None, "all are kept"))
        found.settled["save_total_limit"] = "run.keep_checkpoints=null"
    warmup = found.number(given, "warmup_steps", 0) or found.number(given, "warmup_ratio", 0)
    if warmup > 0:
        steps = training_steps(warmup, each, total, up=True)
        if steps is None:
            key = "warmup_steps" if given.get("warmup_steps") else "warmup_ratio"
            found.lacks[key] = f"write {_OPTIMIZER}.warmup_steps, {warmup} × run.training_steps"
            found.assumed.append(f"{found.lacks[key]} ({key})")
        else:
            made[f"{_OPTIMIZER}.warmup_steps"] = steps


def _betas_and_decay(found: Together, given: Mapping[str, Any], each: int) -> None:
    if {"adam_beta1", "adam_beta2"} & given.keys():
        betas = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
        found.made[f"{_OPTIMIZER}.betas"] = betas
    wanted = given.get("lr_scheduler_kwargs") or {}
    rest = dict(wanted) if isinstance(wanted, dict) else {str(wanted): None}
    if "min_lr" in rest:
        found.made[f"{_OPTIMIZER}.min_lr"] = rest.pop("min_lr")
    elif isinstance(rate := rest.get("min_lr_rate"), int | float):
        del rest["min_lr_rate"]
        found.made[f"{_OPTIMIZER}.min_lr"] = rate * found.number(given, "learning_rate", 1e-6)
    if isinstance(steps := rest.get("num_decay_steps"), int):
        del rest["num_decay_steps"]
        found.made[f"{_OPTIMIZER}.decay_steps"] = training_steps(steps, each, -1)
    if rest:
        found.lacks["lr_scheduler_kwargs"] = f"{', '.join(map(str, rest))}: no setting of a schedule here"


def _loss(found: Together, given: Mapping[str, Any]) -> None:
    loss = word(given, "loss_type", "dapo")
    if loss not in AGGREGATES:
        found.lacks["loss_type"] = f"{loss} is not built; there are {', '.join(AGGREGATES)}, and losses of your own"
    elif "loss_type" in given:
        found.made["flow.steps.update.with.aggregate"] = AGGREGATES[loss]
    else:
        found.by_default("flow.steps.update.with.aggregate", AGGREGATES[loss], Default("loss_type", loss))
    if loss == "cispo":
        found.choose("cispo", "loss_type")
    if given.get("importance_sampling_level") == "sequence":
        found.choose("gspo", "importance_sampling_level")
    _bounds(found, given)
    unbiased = given.get("use_bias_correction_kl", True)
    found.divergence(found.number(given, "beta", 0.0), "k2" if unbiased else "k3")
    if "use_bias_correction_kl" not in given and "flow.steps.update.with.kl" in found.made:
        why = "use_bias_correction_kl has this gradient"
        found.defaults["flow.steps.update.with.kl"] = Default("use_bias_correction_kl", True, why)


def _bounds(found: Together, given: Mapping[str, Any]) -> None:
    """Map the bounds of the ratio."""
    low = found.number(given, "epsilon", 0.2)
    high = found.number(given, "epsilon_high", low)
    most = found.number(given, "delta", None)
    if found.flow == "cispo":
        # There it bounds the ratio itself, and here by how much this may exceed 1.
        low, high = 1.0, round(high - 1, 6)
        if high < 0:
            told = "bounds the ratio of cispo itself, and flow=cispo takes no bound below 1"
            found.lacks["epsilon_high"] = told
            found.assumed.append(
                f"epsilon_high ({high + 1:g}) {told}: write flow.steps.update.with.clip, as [1.0, 4.0]"
            )
    if most is not None and (most <= 1 + high or found.flow == "cispo"):
        found.lacks["delta"] = f"{most} is built only above 1 + epsilon_high, where it bounds negative advantages"
        most = None
    named = bool({"epsilon", "epsilon_high"} & given.keys()) or most is not None
    # The bounds of flow=gspo are others.
    if high >= 0 and (named or found.flow == "gspo"):
        found.made["flow.steps.update.with.clip"] = [low, high] if most is None else [low, high, most]
        if not named:
            found.defaults["flow.steps.update.with.clip"] = Default("epsilon", 0.2)


def _sampling(found: Together, given: Mapping[str, Any]) -> None:
    """Map what TRL hands to `generate`, by the names of transformers or vLLM."""
    wanted = given.get("generation_kwargs", {})
    unknown = [] if isinstance(wanted, dict | None) else ["what it has"]
    for name, value in wanted.items() if isinstance(wanted, dict) else ():
        if name == "stop_strings":
            # transformers leaves them in the text, and vLLM's `stop` does not.
            found.made["flow.steps.sample.with.include_stop_str_in_output"] = True
        key = WORDS.get(str(name).lower(), "")
        if key.startswith("flow.steps.sample.with.") and " " not in key:
            found.made[key] = value
        else:
            unknown.append(str(name))
    if unknown:
        found.lacks["generation_kwargs"] = f"{', '.join(unknown)}: no setting of sampling here"


def _correction(found: Together, given: Mapping[str, Any]) -> None:
    """Map how samples of vLLM are weighted, which TRL does only for these."""
    vllm, update = "vllm_importance_sampling_", "flow.steps.update.with."
    named = [key for key in given if key.startswith(vllm)]
    if not given.get("use_vllm"):
        found.says |= dict.fromkeys(named, "TRL corrects samples of vLLM alone: use_vllm is not true")
        return
    if not given.get(f"{vllm}correction", True):
        found.made[f"{update}tis"] = None
        return
    mode = word(given, f"{vllm}mode", "sequence_mask")
    least = found.number(given, f"{vllm}clip_min", 0)
    most = given.get(f"{vllm}cap") or given.get(f"{vllm}clip_max", 3.0)
    names = {"token_truncate": "tis", "token_mask": "mis"}
    names |= {"sequence_truncate": "sequence_tis", "sequence_mask": "sequence_mis"}
    if mode not in names or not isinstance(most, int | float):
        found.lacks[f"{vllm}mode"] = (
            f"{mode}, {least} to {most}: {update}correction takes two bounds (docs/algorithms.md)"
        )
    elif mode == "token_truncate" and not least:
        found.made[f"{update}tis"] = float(most)
    elif mode == "token_truncate":
        found.lacks[f"{vllm}clip_min"] = f"not built: {update}tis bounds weights of tokens from above alone"
    else:
        correction = {names[mode]: [least, most]}
        if named:
            found.made[f"{update}correction"] = correction
        else:
            found.by_default(f"{update}correction", correction, Default(f"{vllm}mode", mode))


def _model(found: Together, foreign: Foreign, given: Mapping[str, Any]) -> None:
    """Map how the model is loaded, by the script itself or by TRL."""
    loaded, _ = _loading(foreign)
    words: dict[str, Any] = {}
    if isinstance(loaded, ast.Call) and ast.unparse(loaded.func).endswith(".from_pretrained"):
        words = {str(one.arg): _shown_value(one.value, foreign) for one in loaded.keywords}
        named = [words.pop(name) for name in ("pretrained_model_name_or_path", "model_name") if name in words]
        first = foreign.value(loaded.args[0]) if loaded.args else next(iter(named), None)
        if isinstance(first, str):
            found.made["models.policy.path"] = first
            found.told.add("model")
    elif isinstance(path := foreign.derived.get("model"), str):
        found.made["models.policy.path"] = path
    wanted = foreign.made_by(foreign.expression("model_init_kwargs"))
    words |= dict(_items(wanted, foreign))
    bits = foreign.expression("quantization_config")
    words |= {"quantization_config": _shown_value(bits, foreign)} if bits is not None else {}
    words |= {"quantization_config": Expression("load_in_4bit=True")} if given.get("load_in_4bit") else {}
    loads_whole = "float32" in str(words.get("dtype", words.get("torch_dtype")))
    dtype = str(words.pop("dtype", None) or words.pop("torch_dtype", None) or "float32").removeprefix("torch.")
    words.pop("torch_dtype", None)
    half = given.get("bf16", None if "bf16" in foreign.given else not given.get("fp16"))
    if dtype in ("bfloat16", "float64"):
        found.made["models.policy.dtype"] = dtype
        found.says["bf16"] = f"models.policy.dtype is {dtype}, by which the model is loaded"
    elif dtype == "float16":
        found.assumed.append("training in float16 is refused: models.policy.dtype=bfloat16, or float32")
    elif half and given.get("bf16") is None:
        why = "the optimizer's weights are float32, as the script loads them" if loads_whole else ""
        found.by_default("models.policy.dtype", "bfloat16", Default("bf16", True, why))
    left = [name for name, value in words.items() if not _loads(found, foreign, name, value)]
    if left:
        told = f"{', '.join(left)}: nothing stands for it in models.policy"
        found.lacks["model_init_kwargs" if wanted is not None else "model"] = told
        found.assumed.append(f"the model is loaded with {told}")
    found.told |= {"model_init_kwargs", "quantization_config"} - found.lacks.keys()


def _loading(foreign: Foreign) -> tuple[ast.expr | None, ast.Call | None]:
    """Return what loads the model that a script hands over, and the call that adds an adapter to it."""
    node, adapter = foreign.made_by(foreign.expression("model")), None
    for _ in range(8):
        match node:
            case ast.Subscript(value=several, slice=ast.Constant(value=0)):
                node = foreign.made_by(several)
            case ast.Call(args=[first, *_]) if ast.unparse(node.func).rpartition(".")[2] == "get_peft_model":
                adapter, node = node, foreign.made_by(first)
    return node, adapter


def _shown_value(node: ast.expr, foreign: Foreign) -> Any:
    """Return the literal that an expression is; else what it, or a name in its place, is made by."""
    value = foreign.value(node)
    made_by = foreign.made_by(node)
    return Expression(ast.unparse(made_by)) if isinstance(value, Expression) and made_by is not None else value


def _loads(found: Together, foreign: Foreign, name: str, value: Any) -> bool:
    """Map one of the words by which a model is loaded; false for one that nothing stands for."""
    if name == "attn_implementation" and (value in ATTENTION or value is None):
        found.made |= {"models.policy.attn_implementation": value} if value else {}
        return True
    if name == "load_in_4bit" and value is True:
        found.made["models.policy.quantize"] = "nf4"
        return True
    if name == "quantization_config" and re.search(r"load_in_4bit['\"]?[=:] ?True", str(value)):
        found.made["models.policy.quantize"] = "nf4"
        return True
    # Where a model lies is the affair of backends, and the rest changes nothing.
    return name in ("device_map", "use_cache", "low_cpu_mem_usage") or value in (None, False, "main")


def _items(node: ast.expr | None, foreign: Foreign) -> Iterator[tuple[str, Any]]:
    """Yield what a literal dictionary, or a call of `dict`, holds."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            yield str(foreign.value(key)) if key is not None else "**", _shown_value(value, foreign)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        yield from ((str(one.arg), _shown_value(one.value, foreign)) for one in node.keywords)
    elif node is not None and not (isinstance(node, ast.Constant) and node.value is None):
        yield ast.unparse(node), node


def _functions(found: Together, foreign: Foreign, given: Mapping[str, Any]) -> None:
    expression = foreign.expression("reward_funcs")
    functions = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression] if expression else []
    if expression is None or not functions:
        told = f"there are no reward_funcs: {_FUNCTIONS} is exact_match, which compares with the column answer"
        found.assumed.append(told)
        return
    found.told.add("reward_funcs")
    weights = given.get("reward_weights") or [1.0] * len(functions)
    if not isinstance(weights, list) or len(weights) != len(functions):
        found.lacks["reward_weights"] = f"{shown(weights)}: there are {len(functions)} functions, which count 1 each"
        weights = [1.0] * len(functions)
    only = foreign.made_by(functions[0])
    if len(functions) == 1 and isinstance(only, ast.Constant) and isinstance(only.value, str):
        found.made["models.score.path"] = only.value
        found.made["models.score.head"] = "score"
        step = {"call": "distflow.workers.reward_model:judge", "model": "score"}
        found.made |= {f"flow.steps.reward.{key}": value for key, value in step.items()}
        return
    parts: dict[str, Any] = {}
    for number, (function, weight) in enumerate(zip(functions, weights, strict=True), 1):
        name, call = _function(found, foreign, function, 0 if function is expression else number)
        while name in parts:
            name += f"_{number}"
        parts[name] = {"function": call, "weight": weight}
    found.made[_FUNCTIONS] = parts
    if len(parts) > 1:
        found.notes[_FUNCTIONS] = _SCORE


def _function(found: Together, foreign: Foreign, node: ast.expr, number: int) -> tuple[str, str]:
    """Return a name for a reward function, and what calls it; what has no name gets one, which is to be written.

    `number`: its place in the list, from 1; 0: it stands alone, and may be a list.
    """
    made_by = foreign.made_by(node)
    text = ast.unparse(node)
    if isinstance(made_by, ast.Constant) and isinstance(made_by.value, str):
        name = _fresh(foreign, made_by.value.rpartition("/")[2])
        found.assumed.append(
            f"reward_funcs has the reward model {made_by.value} beside functions: in {_beside(found, foreign)} write "
            f"{name}(prompts, completions, **kwargs), which asks it; alone, it is a step (docs/algorithms.md)"
        )
    elif (call := _imported(foreign, text)) is not None:
        package = call.partition(":")[0].partition(".")[0]
        shipped = shipped_reward(call)
        told = f"{package}, which has {call}, is not installed for the Python of this command: install it" + (
            f", or in its place take {shipped}" if shipped else ""
        )
        if package and find_spec(package) is None:
            found.assumed.append(told)
        return call.rpartition(":")[2].rpartition(".")[2], call
    elif isinstance(node, ast.Name):
        name = node.id
    elif _gives_several(node, alone=not number):
        name = _fresh(foreign, "rewards")
        told = f"write an entry of {_FUNCTIONS} for each function that it gives, in place of {name}"
        found.assumed.append(f"reward_funcs has {_short(text)}, which only the script can tell: {told}")
    else:
        partial = isinstance(node, ast.Call) and text.startswith(("partial(", "functools.partial("))
        inner = node.args[0] if isinstance(node, ast.Call) and partial else node
        named = isinstance(inner, ast.Call | ast.Name)
        of = ast.unparse(inner.func if isinstance(inner, ast.Call) else inner).rpartition(".")[2] if named else ""
        name = _fresh(foreign, of or f"reward_{number}")
        found.assumed.append(f"in {_beside(found, foreign)} write {name} = {' '.join(text.split())}")
    return name, f"./{_beside(found, foreign)}:{name}"


def _gives_several(node: ast.expr, *, alone: bool) -> bool:
    """Tell an expression that may give any number of functions, which within a list only `*…` does."""
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    one = isinstance(node, ast.Lambda) or called == "partial" or called[:1].isupper()
    return isinstance(node, ast.Starred) or (alone and not one)


def _imported(foreign: Foreign, text: str) -> str | None:
    """Return what a name stands for that the script imports, as `module:name`; a file beside the script by its path."""
    first, *rest = text.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return None
    known = next((one for one in (text.rpartition(".")[0], first) if one in foreign.imported), None)
    if known is None:
        return None
    source, last = foreign.imported[known], text.removeprefix(known).strip(".")
    module, _, name = source.partition(":")
    if name and last:
        module, name = f"{module}.{name}", last
    elif last:
        *inner, name = last.split(".")
        module = ".".join((module, *(inner if known == first else ())))
    if not name:
        return None
    path = f"{module.replace('.', '/')}.py"
    return f"./{path}:{name}" if (foreign.file.parent / path).is_file() else f"{module}:{name}"


def _fresh(foreign: Foreign, wanted: str) -> str:
    """Make a name that the script does not have."""
    name = re.sub(r"\W+", "_", wanted).strip("_").lower() or "reward"
    name = f"reward_{name}" if name[0].isdigit() else name
    taken = {*foreign.names, *foreign.imported, *foreign.defined}
    while name in taken:
        name += "_reward"
    return name


def _beside(found: Together, foreign: Foreign) -> str:
    """The file for the reward functions and the data set of a script: to import the script itself would train."""
    name = f"{foreign.file.stem}_parts.py"
    told = (
        f"write {name}: the reward functions and the data set of {foreign.file.name} as they are, without its trainer"
    )
    if told not in found.assumed:
        found.assumed.append(told)
    return name


def _validation(found: Together, foreign: Foreign, given: Mapping[str, Any], each: int, total: int) -> None:
    """Map the data of validation if TRL validates."""
    strategy = str(given.get("eval_strategy", "no")).rpartition(".")[2].lower()
    held_out = ("eval_dataset", "eval_steps", "eval_on_start", "num_generations_eval", "dataset_test_split")
    if strategy in ("no", "false"):
        found.says |= dict.fromkeys(held_out, _TRL_OFF)
        return
    if not _source(found, foreign, "eval_dataset", "val.data"):
        told = "there is no section val, since its prompts are not known (eval_dataset)"
        found.assumed.append(f"{told}: give val.data.source, and val.every")
        found.says |= {key: told for key in held_out if key not in found.lacks}
        return
    if strategy == "steps":
        every = found.number(given, "eval_steps", None) or found.number(given, "logging_steps", 10)
        steps = training_steps(every, each, total)
        if steps is None:
            found.lacks["eval_steps"] = f"val.every = {every} × run.training_steps"
        elif "eval_steps" in given:
            found.made["val.every"] = steps
        else:
            found.by_default("val.every", steps, Default("eval_steps", every, "logging_steps"))
    else:
        found.says["eval_steps"] = f"TRL does not count: eval_strategy is {strategy}"
    if "eval_on_start" in given:
        found.made["val.at_start"] = bool(given["eval_on_start"])
    else:
        found.by_default("val.at_start", False, Default("eval_on_start", False))
    if (samples := given.get("num_generations_eval")) is not None:
        found.made["val.samples_per_prompt"] = samples
    else:
        samples = found.number(given, "num_generations", 8)
        found.by_default("val.samples_per_prompt", samples, Default("num_generations_eval", samples, "num_generations"))


def _source(found: Together, foreign: Foreign, key: str, section: str) -> bool:
    """Map a data set; false where there is none, or several."""
    expression = foreign.expression(key)
    if expression is None:
        return False
    if isinstance(expression, ast.Dict):
        found.lacks[key] = f"{section}.source: {_short(ast.unparse(expression))}: one data set, or {section}.mix"
        return False
    found.told.add(key)
    inner, split = foreign.made_by(expression), None
    if isinstance(inner, ast.Subscript) and isinstance(one := foreign.value(inner.slice), str):
        loaded = foreign.made_by(inner.value)
        if isinstance(loaded, ast.Call) and ast.unparse(loaded.func).endswith("load_dataset"):
            inner, split = loaded, one
    if isinstance(inner, ast.Call) and _loads_dataset(found, foreign, inner, split, section):
        return True
    if isinstance(expression, ast.Name):
        found.made[f"{section}.source"] = f"./{_beside(found, foreign)}:{expression.id}"
    else:
        name = _fresh(foreign, key)
        beside = _beside(found, foreign)
        found.assumed.append(f"in {beside} write {name} = {' '.join(ast.unparse(expression).split())}")
        found.made[f"{section}.source"] = f"./{beside}:{name}"
    return True


_FORMATS = ("json", "csv", "parquet", "arrow", "text", "pandas", "webdataset")
"""Names by which `load_dataset` reads files."""


def _loads_dataset(found: Together, foreign: Foreign, call: ast.Call, split: str | None, section: str) -> bool:
    """Map a call of `load_dataset`; false where it is none, or what it loads is not known."""
    first = foreign.value(call.args[0]) if call.args else None
    if ast.unparse(call.func).rpartition(".")[2] != "load_dataset" or not isinstance(first, str):
        return False
    own = {one.arg: foreign.value(one.value) for one in call.keywords if one.arg is not None}
    own |= {"config": foreign.value(call.args[1])} if len(call.args) > 1 else {}
    split = split or (own["split"] if isinstance(own.get("split"), str) else None)
    files = own.get("data_files")
    files = files.get(split or "train") if isinstance(files, dict) else files
    if files is not None and "[" in str(split):
        return False
    if isinstance(files, list) and len(files) > 1:
        found.made[f"{section}.mix"] = mixture(files)
        return True
    one = files[0] if isinstance(files, list) and files else files
    if isinstance(one, str):
        found.made[f"{section}.source"] = one
        return True
    if first in _FORMATS or one is not None:
        return False
    found.made[f"{section}.source"] = first if first.startswith((".", "/")) else f"hub:{first}"
    if first.endswith((".json", ".jsonl", ".csv", ".parquet")):
        return True
    for setting, value in {"config": own.get("config", own.get("name")), "split": split}.items():
        found.made |= {f"{section}.with.{setting}": value} if isinstance(value, str) else {}
    return True


def _adapter(found: Together, foreign: Foreign) -> None:
    made, (_, added) = foreign.made_by(foreign.expression("peft_config")), _loading(foreign)
    if made is None and added is not None:
        of_unsloth = ("use_gradient_checkpointing", "random_state", "max_seq_length", "loftq_config")
        words = [one for one in added.keywords if one.arg not in of_unsloth]
        made = foreign.made_by(added.args[1]) if len(added.args) > 1 else ast.Call(ast.Name("LoraConfig"), [], words)
    if made is None or (isinstance(made, ast.Constant) and made.value is None):
        return
    if not (isinstance(made, ast.Call) and ast.unparse(made.func).rpartition(".")[2] == "LoraConfig"):
        told = f"models.policy.lora: {_short(ast.unparse(made))} is no LoraConfig(…) that can be read"
        found.lacks["peft_config"] = told
        found.assumed.append(f"{told}: write models.policy.lora, as {{rank: 16, alpha: 32}}, or leave it out")
        return
    found.told.add("peft_config")
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    given = {str(one.arg): foreign.value(one.value) for one in made.keywords}
    known = {names[key]: value for key, value in given.items() if key in names and not isinstance(value, Expression)}
    for key, value in {"rank": 8, "alpha": 8}.items():
        if key not in known:
            found.notes[f"models.policy.lora.{key}"] = "peft's default"
        known.setdefault(key, value)
    if known.get("targets") is None:
        known.pop("targets", None)
        told = "peft takes the layers that it knows of a family, often q_proj and v_proj, and here it is all of them"
        found.assumed.append(f"models.policy.lora.targets: {told}, unless you write their names")
    elif isinstance(known["targets"], str) and known["targets"] != "all-linear":
        known["targets"] = [known["targets"]]
    found.made["models.policy.lora"] = known
    for key, value in given.items():
        read = () if key in names and isinstance(value, Expression) else names
        idle = ("task_type", "bias", "inference_mode", *read)
        if key not in idle and value not in (None, False, 0, 0.0):
            why = WORDS.get(key, "nothing stands for it in models.policy.lora")
            found.assumed.append(f"{key}={shown(value)} of LoraConfig is left out, since {why}")


def _short(text: str) -> str:
    """The text in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
