"""What becomes of rewards before they are advantages: groups that teach nothing are replaced, penalties are added.

Shapes: B samples, T response tokens of the longest.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from distflow.algorithms.penalties import overlong
from distflow.data.batch import Batch, Ragged
from distflow.data.samples import by_sample, compared, to_rows
from distflow.errors import UserError
from distflow.flow.resolve import chosen
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS

STOP = FINISH_REASONS.index("stop")


@step(
    role="score",
    reads=["reward", "group", "response_ids", "response_mask"],
    reads_if_there=["left_out", "sequence"],
    writes=["drop_reason"],
    scope="group",
    choices={"keep_every": ">= 0"},
)
def dynamic_sampling(batch: Batch, ctx: StepContext, *, keep_every: int = 10) -> Batch:
    """Replace groups whose rewards are all equal, which give no gradient (DAPO, arXiv 2503.14476).

    Only samples that count are compared (`distflow.data.samples.compared`): not those left out, nor those without a
    token trained on, unless one of them is the baseline of the others, as in `flow=remax`. Every `keep_every`-th prompt
    of each ledger is kept even so: then no more than `keep_every` − 1 groups are generated in vain for one that is
    trained on, and a run whose prompts are all solved goes on. 0: none is kept, and the run stops after
    `batch.max_refills`. Which are kept depends on the prompt position alone. Metric
    `group/equal_rewards` has the share of such groups. Raises UserError where a group is a single sample.
    """
    samples, counted = by_sample(batch), compared(batch, baseline=ctx.has_baseline)
    rewards, positions = samples.dense("reward"), samples.dense("group")
    replaced = torch.zeros(samples.rows, dtype=torch.bool)  # what other steps drop stays dropped
    for first, end in pairwise(samples.group_bounds()):
        if end - first == 1:
            raise UserError("batch.samples_per_prompt is 1: one sample has nothing to differ from — 2 or more")
        given = rewards[first:end][counted[first:end]]
        equal = bool((given == given[:1]).all())
        ctx.metrics.mean("group/equal_rewards", float(equal))
        spared = keep_every > 0 and int(positions[first]) // ctx.ledgers % keep_every == 0
        replaced[first:end] = equal and not spared
    reasons = ["equal rewards" if one else "" for one in to_rows(batch, replaced).tolist()]
    return batch.with_columns(drop_reason=Ragged.from_texts(reasons))


@step(
    role="train",
    reads=["reward", "response_ids", "response_mask", "rollout_logprobs"],
    # With several updates the policy's log-probs at their beginning are there, and this step waits for them.
    reads_when={
        "kl_coef": ["ref_logprobs", "rollout_logprobs"],
        "several_updates": ["old_logprobs"],
        "overlong_share": ["finish_reason"],
    },
    writes=["token_rewards"],
    scope="sample",
    plugins={"kl": ["logprobs_BT", "ref_logprobs_BT"]},
    choices={
        "kl": ["distflow.algorithms.kl:k1", "distflow.algorithms.kl:k2", "distflow.algorithms.kl:k3"],
        "kl_coef": ">= 0",
        "overlong_share": ">= 0, <= 1",
        "overlong_factor": ">= 0",
        "max_new_tokens": ">= 1",
    },
    only_with={"kl": "kl_coef", "overlong_factor": "overlong_share", "max_new_tokens": "overlong_share"},
)
def token_rewards(
    batch: Batch,
    ctx: StepContext,
    *,
    kl_coef: float = 0.0,
    kl: str = "k1",
    overlong_share: float = 0.0,
    overlong_factor: float = 1.0,
    max_new_tokens: int | None = None,
) -> Batch:
    """Write `token_rewards`: the reward at the last token trained on, minus `kl_coef` times the KL at each of them.

    The reward of a sample of several sequences stands in the last of them alone.
    The divergence `kl` (k1, k2 or k3) is that of the policy from `ref_logprobs`, by `old_logprobs` if a step writes
    them, else by `rollout_logprobs`. A sample without a token trained on gets none. Metric `critic/kl` has its mean.

    With `overlong_share` > 0 the reward falls by up to `overlong_factor` over that last share of `max_new_tokens` (see
    `distflow.algorithms.penalties.overlong`); tokens trained on count, but for the one that ends a response. Metric
    `reward/overlong` has the mean. Raises UserError for `overlong_share` without `max_new_tokens`.
    """
    samples = by_sample(batch)
    mask_BT, rewards_B = samples.padded("response_mask"), samples.dense("reward")
    dtype = samples.ragged("rollout_logprobs").values.dtype
    found_BT = torch.zeros(mask_BT.shape, dtype=dtype)
    if kl_coef:
        policy = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
        divergence = chosen(token_rewards, "kl", kl)
        kl_BT = divergence(samples.padded(policy), samples.padded("ref_logprobs")).to(dtype) * mask_BT
        found_BT -= kl_coef * kl_BT
        tokens = float(mask_BT.sum())
        if tokens:
            ctx.metrics.mean("critic/kl", float(kl_BT[mask_BT].double().mean()), tokens)
    if overlong_share:
        penalties_B = overlong_factor * _overlong(samples, mask_BT, overlong_share, max_new_tokens)
        rewards_B = rewards_B + penalties_B
        if len(samples):
            ctx.metrics.mean("reward/overlong", float(penalties_B.mean()), len(samples))
    if mask_BT.numel():
        # The last True of each row: argmax finds the first of the row reversed.
        last_B = mask_BT.shape[1] - 1 - mask_BT.flip(1).int().argmax(1)
        trained_B = mask_BT.any(1)
        found_BT[trained_B, last_B[trained_B]] += rewards_B[trained_B].to(dtype)
    places_BT = samples.ragged("response_ids").mask()
    return batch.with_columns(token_rewards=batch.ragged("response_ids").like(found_BT[places_BT]))


def _overlong(samples: Batch, mask_BT: Tensor, share: float, limit: int | None) -> Tensor:
    if limit is None:
        raise UserError(
            "overlong_share needs max_new_tokens: that of the generate step, ${flow.steps.sample.with.max_new_tokens}"
        )
    lengths_B = mask_BT.sum(1) - (samples.dense("finish_reason") == STOP).long()
    return overlong(lengths_B, limit=limit, buffer=share * limit)
