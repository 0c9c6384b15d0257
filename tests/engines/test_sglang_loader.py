"""SGLang's own model classes, as far as they run on a CPU: they load experts, and what they skip is reported."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed here; `make test-venv` or requirements/install_sglang_cpu.sh does it",
)
ROOT = Path(__file__).resolve().parents[2]
INIT = {
    **{"vocab_size": 23, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
    **{"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
}
FAMILIES: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "qwen2_moe": {"shared_expert_intermediate_size": 48}}


def check_experts(family: str) -> None:
    """In a process of its own, which SGLang may change."""
    import torch

    from distflow.errors import WorkerFailed
    from distflow.workers.engines import staged_weights
    from distflow.workers.engines.adapter import outline_model
    from distflow.workers.engines.staged_weights import StagedWeights, load_watched
    from distflow.workers.models import build_model
    from distflow.workers.parameters import stored_form

    section = {"init": {"model_type": family, **INIT, **FAMILIES[family]}, "dtype": "float32"}
    outline = outline_model(section, "float32")
    model = sglang_model(outline.text)
    ours = build_model(section, device="cpu", seed=3, load_weights=True)
    fused, stored = dict(ours.named_parameters()), stored_form(ours)
    staged = StagedWeights(outline.shapes, torch.float32, outline.tied)
    for parameter, tensor in fused.items():
        for name, part in stored.cut(parameter, tensor.detach()):
            staged.tensors[name].copy_(part)
    staged_weights.load_into_sglang(model, [(staged.described(os.getpid(), staged.descriptor), torch.empty(0))])
    theirs = dict(model.named_parameters())
    experts = "model.layers.0.mlp.experts"
    assert torch.equal(theirs[f"{experts}.w13_weight"], fused[f"{experts}.gate_up_proj"])
    assert torch.equal(theirs[f"{experts}.w2_weight"], fused[f"{experts}.down_proj"])
    with pytest.raises(WorkerFailed, match=r"ignores 2 of \d+ \(model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load_watched(model, ((name, tensor.detach()) for name, tensor in fused.items()), model.load_weights)


def sglang_model(config: str) -> Any:
    """Built as in one of SGLang's own processes, without weights."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.scheduler import SpawnRanks, initialize_moe_config, publish
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        plain = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
        args = ServerArgs(
            model_path=folder,
            device="cpu",
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_total_tokens=1024,
            max_running_requests=4,
            **plain,
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        initialize_moe_config()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
        bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(args))
        return TpModelWorker(server_args=args, gpu_id=0, nccl_port=port)._model_runner.model


def check_all(folder: str) -> None:
    """Each family in a child process, which writes errors into a file; what they share is imported once."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    from distflow.workers.engines.sglang_host import prepare

    prepare()
    import sglang.srt.managers.scheduler  # noqa: F401

    for family in FAMILIES:
        pid = os.fork()
        if pid == 0:
            said = "it ended without a word"
            try:
                check_experts(family)
                said = ""
            except BaseException:
                said = traceback.format_exc()
            finally:
                Path(folder, family).write_text(said)
                os._exit(0)
        os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    program = f"from tests.engines.test_sglang_loader import check_all; check_all({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_arrive_in_sglangs_own_model(checked: Path, family: str) -> None:
    """And the names of transformers' fused parameters, which its loader skips, are refused."""
    assert (checked / family).read_text() == ""
