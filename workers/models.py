"""Builds the model that a recipe's `models.<name>` section describes, for engines and backends alike.

torch and transformers are imported inside the functions: naming this module costs nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.errors import UserError
from distflow.workers.tokenizers import CHARS_PREFIX, EOS_ID, PAD_ID, vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = ("float32", "float64", "bfloat16", "float16")
_UNLISTED = ("head_dim",)
"""Settings that models read although not every configuration declares them."""


def build_model(
    model: Mapping[str, Any], *, device: str, seed: int, load_weights: bool, deterministic: bool = False
) -> PreTrainedModel:
    """A transformers causal language model in evaluation mode, on `device`, in the section's `dtype`.

    `init` models are drawn in float32 on the CPU under `seed` and then converted, so that every dtype and device
    starts from the same weights. With `load_weights=False` the parameters are left uninitialised (an engine gets its
    weights from the trainer). In float64, norms of Llama's kind are replaced by ones that compute in float64; those of
    transformers round every layer to float32. Attention is always torch's scaled dot product, which computes in the
    model's own dtype. `deterministic`: batch-invariant but for attention (see `batch_invariant`), with the same norms.
    Raises UserError for a path that holds no model, an unknown model type or dtype, settings it does not take, and a
    model that cannot be batch-invariant.
    """
    import torch

    from distflow.workers.batch_invariant import make_invariant

    dtype = torch_dtype(model)
    config = load_config(model)
    if not load_weights:
        built = _uninitialised(config, dtype)
    elif model.get("path") is not None:
        built = _load(str(model["path"]), config, torch.float32 if dtype == torch.float64 else dtype)
    else:
        built = _initialise(config, seed)
    built = built.to(device=device, dtype=dtype).eval()
    if dtype == torch.float64 or deterministic:
        _widen_norms(built)
    if dtype == torch.float64 and built._can_set_experts_implementation():
        # The grouped kernel has no float64.
        built.set_experts_implementation("eager")
    if deterministic:
        make_invariant(built)
    return built


def outline(model: Mapping[str, Any]) -> PreTrainedModel:
    """The section's model with all its parameters by name and shape, but without memory for them.

    Raises UserError as `build_model` does.
    """
    import torch

    with torch.device("meta"):
        built = _from_config(load_config(model), torch.float32)
    built.tie_weights()
    return built


def vocabulary_size(model: Mapping[str, Any]) -> int:
    """Token ids that the section's model knows; raises UserError as `build_model` does."""
    return int(load_config(model).get_text_config().vocab_size)


def torch_dtype(model: Mapping[str, Any]) -> torch.dtype:
    """The section's `dtype` (float32 where it is silent); raises UserError for one that is not offered."""
    import torch

    name = model.get("dtype")
    kinds = dict(zip(DTYPES, (torch.float32, torch.float64, torch.bfloat16, torch.float16), strict=True))
    if name is None:
        return torch.float32
    if name not in kinds:
        raise UserError(f"models: dtype {name!r} is not offered; choose one of {', '.join(DTYPES)}")
    return kinds[name]


def load_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers configuration of the section; raises UserError naming the path or the wrong setting."""
    path, init = model.get("path"), model.get("init")
    if (path is None) == (init is None):
        raise UserError(f"models: give exactly one of `path` and `init`; here path is {path!r} and init is {init!r}")
    if init is not None:
        return _config_from_init(init, model.get("tokenizer"))
    return _config_from_path(str(path))


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
            f"models: `init` with model_type {model_type!r} is refused by transformers: {_brief(error)}"
        ) from error
    plain = AutoConfig.for_model(model_type)
    unknown = sorted(set(settings) - {*plain.to_dict(), *plain.attribute_map, *_UNLISTED})
    if unknown:
        raise UserError(f"models: `init` of model_type {model_type!r} has no setting {', '.join(unknown)}")
    return config


def _tokenizer_settings(tokenizer: str | None) -> dict[str, int | None]:
    """What a character tokenizer fixes, so that a recipe need not repeat it."""
    if tokenizer is None or not tokenizer.startswith(CHARS_PREFIX):
        return {}
    size = len(vocabulary(tokenizer))
    return {"vocab_size": size, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}


def _config_from_path(path: str) -> PretrainedConfig:
    from transformers import AutoConfig

    _check_path(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"models: no model can be read from path {path!r}: {_brief(error)}") from error


def _check_path(path: str) -> None:
    """A path on this machine must exist; only what looks like `name` or `owner/name` is asked of the hub."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UserError(f"models: {path} holds no config.json; expected a folder in Hugging Face format")
    elif local.is_absolute() or path.startswith(".") or len(local.parts) > 2 or local.exists():
        raise UserError(f"models: path {path} is not a folder; expected a model in Hugging Face format, or a hub id")


def _load(path: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(f"models: no causal language model in {path!r}: {_brief(error)}") from error


def _initialise(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_config(config, torch.float32)


def _uninitialised(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers.initialization import no_init_weights

    # Made on the host, as trained models are: rotary tables computed on a device differ in the last bit.
    with no_init_weights():
        model = _from_config(config, dtype)
    # Tying is part of the initialisation that was left out.
    model.tie_weights()
    return model


def _from_config(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        raise UserError(f"models: model_type {config.model_type!r} cannot be built: {_brief(error)}") from error


def _widen_norms(model: PreTrainedModel) -> None:
    """Replace norms of Llama's kind, which round to float32 inside, by ones that compute in float64."""
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
