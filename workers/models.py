"""Builds the model that a recipe's `models.<name>` section describes, for engines and backends alike.

torch and transformers are imported inside the functions, so that importing this module is cheap.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.hub import loading
from distflow.config.paths import CHARS_PREFIX
from distflow.errors import UserError
from distflow.flow.families import usual_attention
from distflow.workers.heads import CLASSES, SCORE, TOKENS, has_value_head, head_of, output_layer
from distflow.workers.tokenizers import EOS_ID, PAD_ID, vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")
_SHOWN = 3
_UNLISTED = ("head_dim", "global_head_dim", "num_global_key_value_heads")
"""Settings that models read although some configurations do not declare them."""


def build_model(
    model: Mapping[str, Any],
    *,
    device: str,
    seed: int,
    load_weights: bool,
    deterministic: bool = False,
    adapters: bool = False,
    narrow: bool = False,
    new_head: bool = False,
) -> PreTrainedModel:
    """A transformers model in evaluation mode, on `device`, in the section's `dtype`.

    It is a causal language model, or, with `head: value`, one whose last layer gives one number for each token (a token
    classifier with one label); that layer is zero unless the folder at `path` has it. With `head: score` it is a
    sequence classifier with one label, whose last layer the folder must have, unless it is trained (`new_head`): then
    it begins at zero too.

    Buffers stay as transformers loads them beside parameters in half precision, most in float32: a rotary frequency in
    bfloat16 is off by up to 1 in 256, and its angle at position 8000 by several radians.

    `init` models are initialised in float32 on the CPU with `seed` and then converted, so that every dtype and device
    starts from the same weights. With `load_weights=False` the parameters are left uninitialised (an engine gets its
    weights from the trainer). In float64, RMS norms are replaced by ones that compute in float64; those of transformers
    round every layer to float32. Attention is torch's scaled dot product, which computes in the model's own dtype,
    unless the family has none (`distflow.flow.families`). `deterministic`: batch-invariant except for attention (see
    `batch_invariant`), with the same norms; a sequence classifier is not, and computes each text by itself. `adapters`:
    with those of the section's `lora`, if it has one. With `quantize` the weights are rounded as there; `narrow` keeps
    them in 4 bits, and only these are ever on another device than the CPU.
    Raises UserError for a path without a model, an unknown model type, dtype or setting, and a model that cannot be
    batch-invariant.
    """
    import torch

    from distflow.workers.adapters import add_adapters
    from distflow.workers.batch_invariant import make_invariant
    from distflow.workers.quantized import keep_narrow, round_weights

    dtype = torch_dtype(model)
    config = load_config(model)
    if not load_weights:
        built = _uninitialised(config, dtype)
    elif model.get("path") is not None:
        kept = torch.float32 if dtype == torch.float64 else dtype
        built = _load(str(model["path"]), config, kept, new_head=new_head)
    else:
        built = _initialise(config, seed, dtype)
        _clear_value_head(built)
    quantized = load_weights and model.get("quantize") is not None
    built = _placed(built, "cpu" if quantized and narrow else device, dtype).eval()
    if quantized:
        (keep_narrow if narrow else round_weights)(built)
        built = built.to(device=device)
    if dtype == torch.float64 or deterministic:
        _widen_norms(built)
    if dtype == torch.float64 and built._can_set_experts_implementation():
        # The grouped kernel has no float64.
        built.set_experts_implementation("eager")
    if adapters and model.get("lora") is not None:
        add_adapters(built, model["lora"], seed)
    if deterministic and head_of(model) != SCORE:
        make_invariant(built)
    return built


def outline(model: Mapping[str, Any]) -> PreTrainedModel:
    """The section's model on the meta device: all parameters with names and shapes in its dtype, but without memory.

    Raises UserError as `build_model` does.
    """
    import torch

    with torch.device("meta"):
        built = _with_wide_buffers(_from_config(load_config(model), torch_dtype(model)))
    built.tie_weights()
    return built


def vocabulary_size(model: Mapping[str, Any]) -> int:
    """Number of token ids of the section's model; raises UserError as `build_model` does."""
    return int(load_config(model).get_text_config().vocab_size)


def torch_dtype(model: Mapping[str, Any]) -> torch.dtype:
    """The section's `dtype` (default float32); raises UserError for one that is not supported."""
    import torch

    name = model.get("dtype")
    kinds = dict(zip(DTYPES, (torch.float32, torch.float64, torch.bfloat16, torch.float16), strict=True))
    if name is None:
        return torch.float32
    if name not in kinds:
        raise UserError(f"models: dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return kinds[name]


def load_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers configuration of the section; raises UserError naming the path or the wrong setting."""
    path, init = model.get("path"), model.get("init")
    if (path is None) == (init is None):
        raise UserError(f"models: give exactly one of `path` and `init`; here path is {path!r} and init is {init!r}")
    config = _config_from_init(init, model.get("tokenizer")) if init is not None else _config_from_path(str(path))
    head = head_of(model)
    if head == SCORE and path is not None and _classifies(config) and config.num_labels != 1:
        raise UserError(f"models: the model in {path!r} gives {config.num_labels} numbers for a text; expected one")
    if head != TOKENS:
        config.num_labels = 1
        config.architectures = [CLASSES[head]]
    return config


def inner_matrices(model: PreTrainedModel) -> list[str]:
    """Names of the matrices between the embeddings and the output layer, which turn states into states."""
    import torch

    from distflow.workers.adapters import own_name

    ends = [output_layer(model), *(module for module in model.modules() if isinstance(module, torch.nn.Embedding))]
    others = {id(parameter) for module in ends for parameter in module.parameters()}
    return [own_name(name) for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in others]


def _config_from_init(init: Mapping[str, Any], tokenizer: str | None) -> PretrainedConfig:
    from transformers import AutoConfig

    settings = {**_tokenizer_settings(tokenizer), **init}
    if "model_type" not in settings:
        raise UserError("models: `init` needs a model_type of transformers, for example `model_type: qwen2`")
    model_type = settings.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"models: transformers refuses `init` with model_type {model_type!r}: {_brief(error)}"
        ) from error
    plain = AutoConfig.for_model(model_type)
    unknown = sorted(set(settings) - {*plain.to_dict(), *plain.attribute_map, *_UNLISTED})
    if unknown:
        raise UserError(f"models: `init` of model_type {model_type!r} has no setting {', '.join(unknown)}")
    return config


def _tokenizer_settings(tokenizer: str | None) -> dict[str, int | None]:
    """The model settings that follow from a character tokenizer, so that a recipe need not repeat them."""
    if tokenizer is None or not tokenizer.startswith(CHARS_PREFIX):
        return {}
    size = len(vocabulary(tokenizer))
    return {"vocab_size": size, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}


def _config_from_path(path: str) -> PretrainedConfig:
    from transformers import AutoConfig

    _check_path(path)
    with loading("models: cannot read a model from path", path, _brief):
        return AutoConfig.from_pretrained(path)


def _check_path(path: str) -> None:
    """A local path must exist; only names of the form `name` or `owner/name` are looked up on the hub."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UserError(f"models: {path} contains no config.json; expected a folder in Hugging Face format")
    elif local.is_absolute() or path.startswith(".") or len(local.parts) > 2 or local.exists():
        raise UserError(f"models: path {path} is not a folder; expected a model in Hugging Face format, or a hub id")


def _classifies(config: PretrainedConfig) -> bool:
    """Whether the folder of this configuration has a classifier of texts, and no model of another kind."""
    return not config.architectures or str(config.architectures[0]).endswith("ForSequenceClassification")


def _load(path: str, config: PretrainedConfig, dtype: torch.dtype, *, new_head: bool) -> PreTrainedModel:
    from transformers.utils.logging import disable_progress_bar

    kind = auto_class(config)
    disable_progress_bar()  # in a worker's log it is one long line
    try:
        built, found = kind.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=_attention(config), output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UserError(f"models: cannot load the model in {path!r}: {_brief(error)}") from error
    missing = found["missing_keys"]
    if config.architectures == [CLASSES[SCORE]] and missing:
        if not new_head or any(not name.startswith("score.") for name in missing):
            lacking = ", ".join(sorted(missing)[:_SHOWN])
            raise UserError(f"models: {path!r} lacks {lacking}; `head: score` needs a sequence classifier's folder")
        _clear(built)
    elif any(name.startswith("score.") for name in missing):
        _clear_value_head(built)
    return built


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that builds models of this configuration."""
    import transformers

    name = (config.architectures or [""])[0]
    return getattr(transformers, name if name in CLASSES.values() else CLASSES[TOKENS])


def _clear_value_head(model: PreTrainedModel) -> None:
    """Set a value head to zero: the first returns, not random numbers, then say what a state is worth."""
    if has_value_head(model):
        _clear(model)


def _clear(model: PreTrainedModel) -> None:
    import torch

    for parameter in output_layer(model).parameters():
        torch.nn.init.zeros_(parameter)


def _initialise(config: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = _from_config(config, torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        with torch.device("meta"):
            loaded = {name: buffer.dtype for name, buffer in _from_config(config, dtype).named_buffers()}
        for name, buffer in built.named_buffers():
            buffer.data = buffer.data.to(loaded[name])
    return built


def _placed(model: PreTrainedModel, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Move to `device`, with parameters in `dtype`; buffers follow to float64 only."""
    import torch

    if dtype == torch.float64:
        return model.to(device=device, dtype=dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(device=device, dtype=dtype)
    return _with_wide_buffers(model).to(device=device)


def _with_wide_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """Widen the buffers that the family wants in float32 whatever the parameters are in, such as a router's bias."""
    wide = model._keep_in_fp32_modules_strict or ()
    for name, buffer in model.named_buffers():
        if any(part in name for part in wide):
            buffer.data = buffer.data.float()
    return model


def _uninitialised(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers.initialization import no_init_weights

    # Built on the host, like models to be trained: rotary tables computed on a GPU differ in the last bit.
    with no_init_weights():
        model = _from_config(config, dtype)
    # Tying is part of the initialisation that was skipped.
    model.tie_weights()
    return model


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        built: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=_attention(config)
        )
        return built
    except ValueError as error:
        raise UserError(f"models: model_type {config.model_type!r} cannot be built: {_brief(error)}") from error


def _attention(config: PretrainedConfig) -> str:
    return usual_attention({"model_type": config.get_text_config().model_type})


def _widen_norms(model: PreTrainedModel) -> None:
    """Replace RMS norms, which round to float32 inside, by ones that compute in the dtype of their input."""
    import torch

    class WideRMSNorm(torch.nn.Module):
        """Root-mean-square norm in the dtype of its input (arXiv:1910.07467)."""

        def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
            super().__init__()
            self.weight = weight
            self.variance_epsilon = eps

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                setattr(parent, name, WideRMSNorm(child.weight, child.variance_epsilon))


def _brief(error: Exception) -> str:
    return textwrap.shorten(str(error), 200, placeholder=" …")
