"""Creates DeepSpeed's engine around a scoring model, without its launcher and without compiling anything.

The order of its collectives never depends on the samples that a replica has.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.protocols import TokenScores
from distflow.workers.backends.scoring import Scorer
from distflow.workers.heads import output_layer


def load_deepspeed(device: torch.device) -> ModuleType:
    """Import the package for this device. Raises UserError if it is not installed."""
    if device.type == "cpu":
        # Read at the first import; without a GPU DeepSpeed would otherwise look for other accelerators.
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise UserError(
            "backend deepspeed: the package deepspeed cannot be imported "
            f"({error}); install it with: pip install 'distflow-rl[deepspeed]'"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # It calls deprecated names of torch.distributed, each of which warns repeatedly.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    # Otherwise it would compile shared-memory collectives for CPUs, with a C++ compiler, at the start of the run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed  # type: ignore[no-any-return]


def ensure_group(device: torch.device) -> None:
    """Make a process group for a single replica, which otherwise has none: DeepSpeed needs one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


class ScoringModel(nn.Module):
    """The module that DeepSpeed wraps: turns samples into scores in one call, with one tensor as its result.

    ZeRO 3 gathers weights as modules are called, and records the order for prefetching. It must be the same on all
    replicas, so the output layer is not called as a module: how often it is needed depends on the number of tokens.
    With a single result the backward pass begins at one tensor, whatever the loss consists of.
    """

    def __init__(self, model: PreTrainedModel, scorer: Scorer) -> None:
        super().__init__()
        self.model = model
        self._score = scorer.score
        self._values = scorer.values

    def forward(self, *, batch: Batch, temperature: float | None, entropy: bool, candidates: int | Ragged) -> Tensor:
        """Scores, one behind the other in the last dimension (`taken_apart`); without a temperature, values [B, T]."""
        if temperature is None:
            return self._values(batch).values_BT
        scores = self._score(batch, temperature=temperature, entropy=entropy, candidates=candidates)
        parts = [scores.logprobs_BT[..., None]]
        parts += [] if scores.entropy_BT is None else [scores.entropy_BT[..., None]]
        parts += [] if scores.candidate_logprobs_BTK is None else [scores.candidate_logprobs_BTK]
        if not isinstance(candidates, Ragged) and scores.candidate_ids_BTK is not None:
            # Ids are far below 2**24, up to which float32 is exact.
            parts.append(scores.candidate_ids_BTK.to(parts[0].dtype))
        return torch.cat(parts, -1)


def taken_apart(joined: Tensor, mask_BT: Tensor, entropy: bool, candidates: int | Ragged) -> TokenScores:
    """The scores that a `ScoringModel` has joined."""
    logprobs_BT, joined = joined[..., 0], joined[..., 1:]
    entropy_BT = joined[..., 0] if entropy else None
    further = joined[..., 1:] if entropy else joined
    if isinstance(candidates, Ragged):
        return TokenScores(logprobs_BT, entropy_BT, mask_BT, candidates.padded().to(mask_BT.device), further)
    if not candidates:
        return TokenScores(logprobs_BT, entropy_BT, mask_BT)
    of_likeliest_BTK, likeliest_BTK = further.chunk(2, -1)
    return TokenScores(logprobs_BT, entropy_BT, mask_BT, likeliest_BTK.round().long(), of_likeliest_BTK)


class BorrowedLinear(nn.Module):
    """Computes with the weights of another layer, without DeepSpeed noticing a call of that layer."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        # In a tuple: as an attribute it would become a child module, and the weights would have two owners.
        self._lender = (lender,)

    def forward(self, states: Tensor) -> Tensor:
        """Logits [.., V] of states [.., W]."""
        return self._lender[0].forward(states)


def make_engine(
    deepspeed: ModuleType,
    module: ScoringModel,
    optimizer: torch.optim.Optimizer | None,
    config: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """The engine over the process group of all replicas; collective. In stage 3 the weights are sharded from now on.

    Raises UserError for a value that DeepSpeed itself refuses.
    """
    try:
        return _initialized(deepspeed, module, optimizer, config, device)
    except ValueError as error:
        raise UserError(f"backend deepspeed: DeepSpeed refuses backend_options.ds_config: {error}") from error


def _initialized(
    deepspeed: ModuleType,
    module: ScoringModel,
    optimizer: torch.optim.Optimizer | None,
    config: Mapping[str, Any],
    device: torch.device,
) -> Any:
    stage3 = config["zero_optimization"]["stage"] == 3
    if stage3:
        # Shard parameter by parameter, so that no device ever holds the whole model.
        deepspeed.comm.init_distributed(dist_init_required=False)
        dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
        deepspeed.zero.Init(module=module, config_dict_or_path=dict(config), dtype=dtype)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(config), dist_init_required=False)
    if stage3:
        _hold_head(deepspeed, module)
    engine.set_gradient_accumulation_boundary(False)
    return engine


def _hold_head(deepspeed: ModuleType, module: ScoringModel) -> None:
    """Keep the output layer's weights gathered for the whole of each forward and backward pass."""
    head = output_layer(module.model)
    for parameter in (head.weight, head.bias):
        if parameter is not None:
            deepspeed.zero.register_external_parameter(module, parameter)
