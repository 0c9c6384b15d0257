"""Losses on responses that people, or a model, have compared or called good or bad: one value for each.

Log-ratios are log π(y|x) − log π_ref(y|x) of whole responses in nats, summed over their tokens, with a gradient through
π; β says how near to the reference the policy stays. All are finite for finite log-ratios, however large.

Shapes: P pairs, B responses.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """[P]: −(1 − ε) log σ(βh) − ε log σ(−βh), where h is how much larger the log-ratio of the chosen response is.

    Direct preference optimisation (arXiv 2305.18290, eq. 7); with ε, `label_smoothing`, labels are taken to be wrong
    that often (conservative DPO, of the same authors).
    """
    margin_P = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def ipo(chosen_P: Tensor, rejected_P: Tensor, *, beta: float = 0.1) -> Tensor:
    """[P]: (h − 1 / 2β)², h as in `dpo`: margins grow to 1 / 2β and no further (arXiv 2310.12036, eq. 17)."""
    return (chosen_P - rejected_P - 1 / (2 * beta)).square()


def kto(
    log_ratios_B: Tensor,
    desirable_B: Tensor,
    kl_point: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """[B]: λ_y − v, Kahneman–Tversky optimisation (arXiv 2402.01306, eq. 8).

    v is λ_D σ(β(r − z)) of a desirable response and λ_U σ(β(z − r)) of another, r its log-ratio. `kl_point`, z ≥ 0, is
    what gains and losses are measured from: KL(π || π_ref), without a gradient. `desirable_B`: bool.
    """
    signs_B = desirable_B.to(log_ratios_B.dtype) * 2 - 1
    weights_B = log_ratios_B.new_full(log_ratios_B.shape, undesirable_weight)
    weights_B = weights_B.masked_fill(desirable_B, desirable_weight)
    return weights_B * (-beta * signs_B * (log_ratios_B - kl_point)).sigmoid()


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """[P]: −log σ(r_chosen − r_rejected) of the scores that a reward model gives (arXiv 2203.02155, eq. 1)."""
    return -logsigmoid(chosen_P - rejected_P)
