"""How a request's sampling is put to SGLang."""

from __future__ import annotations

from typing import Any

from distflow.types import GroupRequest
from distflow.workers.engines.engine_seed import sample_seed
from distflow.workers.engines.samples import Sample, is_greedy


def is_filtered(request: GroupRequest) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return not is_greedy(request) and (request.params.top_k > 0 or request.params.top_p < 1)


def sampling_params(sample: Sample, vocabulary: int, *, seeded: bool = False) -> dict[str, Any]:
    """SGLang's settings for what a sample lacks; `seeded`: with its own random numbers, if SGLang is deterministic."""
    request = sample.group.request
    params = request.params
    wanted: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens - len(sample.before.token_ids),
        "temperature": params.temperature,
        "stop_token_ids": list(params.stop_token_ids),
    }
    wanted |= {"sampling_seed": sample_seed(sample)} if seeded else {}
    if is_filtered(request):
        # SGLang tells log-probs of what is left of the vocabulary only where top_k bounds it.
        wanted |= {"top_p": params.top_p, "top_k": min(params.top_k or vocabulary, vocabulary)}
    elif params.top_k:
        wanted |= {"top_k": params.top_k}
    return wanted
