"""The divergence to a teacher: against loops over the vocabulary, and what is said of its bound and its estimate."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from distflow.algorithms import TokenTerms
from distflow.algorithms.logprobs import candidate_scores, token_scores
from distflow.algorithms.losses import TokenLoss, reverse_kl

ROWS, TOKENS, VOCABULARY = 3, 4, 6
PLACES = list(product(range(ROWS), range(TOKENS)))
APART = (0.1, 3.0, 60.0)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def models(apart: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] of the student, with gradient, and the teacher's log-probs."""
    student, teacher = (apart * drawn(seed, ROWS, TOKENS, VOCABULARY) for seed in (1, 2))
    return student.to(dtype).requires_grad_(), teacher.log_softmax(-1).to(dtype)


def sampled() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))


def loss(logits: Tensor, teacher: Tensor, count: int, tokens: Tensor, old: Tensor | None = None) -> TokenLoss:
    """As the update computes it; `old`: log-probs of the tokens when they were sampled, by default the present ones."""
    likeliest = teacher.topk(count)
    flat = (logits.flatten(0, 1), tokens.flatten(), likeliest.indices.flatten(0, 1))
    logprobs, _, of_candidates = candidate_scores(*flat)
    assert of_candidates is not None
    further = {
        "teacher_logprobs": teacher.gather(-1, tokens[..., None])[..., 0],
        "teacher_candidate_logprobs": likeliest.values,
        "candidate_logprobs": of_candidates.view(ROWS, TOKENS, count),
    }
    logprobs = logprobs.view(ROWS, TOKENS)
    before = logprobs.detach() if old is None else old
    return reverse_kl(TokenTerms(torch.ones(ROWS, TOKENS, dtype=torch.bool), logprobs, before, further=further.get))


def total(found: TokenLoss) -> Tensor:
    return found.loss_BT if found.added_BT is None else found.loss_BT + found.added_BT


def whole(logits: Tensor, teacher: Tensor) -> Tensor:
    """[B, T]: the divergence over the whole vocabulary."""
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - teacher)).sum(-1)


def by_hand(logits: Tensor, teacher: Tensor, count: int, b: int, t: int) -> Tensor:
    """One place, token by token: the candidates, and all others as one outcome."""
    ours = [logits[b, t, v] - logits[b, t].logsumexp(0) for v in range(VOCABULARY)]
    order = sorted(range(VOCABULARY), key=lambda v: -float(teacher[b, t, v]))
    value, mass, their_mass = torch.tensor(0.0, dtype=torch.float64), 0.0, 0.0
    for v in order[:count]:
        value = value + ours[v].exp() * (ours[v] - teacher[b, t, v])
        mass, their_mass = mass + ours[v].exp(), their_mass + math.exp(teacher[b, t, v])
    least = torch.finfo(torch.float64).eps
    rest = 1 - mass if float(1 - mass) > least else torch.tensor(least, dtype=torch.float64)
    return value + rest * (rest.log() - math.log(max(1 - their_mass, least)))


@pytest.mark.parametrize("apart", APART)
@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_candidates_against_a_loop(count: int, apart: float) -> None:
    logits, teacher = models(apart)
    found = loss(logits, teacher, count, sampled())
    assert found.added_BT is not None, "corrections for the sampled token leave it alone"
    assert not found.loss_BT.any()
    expected = [by_hand(logits, teacher, count, b, t) for b, t in PLACES]
    assert found.added_BT.flatten().tolist() == pytest.approx([float(one.detach()) for one in expected], rel=1e-9)
    (ours,) = torch.autograd.grad(found.added_BT.sum(), logits)
    (theirs,) = torch.autograd.grad(torch.stack(expected).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("apart", [0.1, 3.0])
def test_more_candidates_come_closer_to_the_whole_divergence_from_below(apart: float) -> None:
    logits, teacher = models(apart)
    bounds = [total(loss(logits, teacher, count, sampled())) for count in range(1, VOCABULARY + 1)]
    rounding = rounding_of(logits, teacher)
    assert all(bool((less <= more + rounding).all()) for less, more in pairwise(bounds))
    torch.testing.assert_close(bounds[-1], whole(logits, teacher))
    assert bool((bounds[0] > -rounding).all())


def rounding_of(logits: Tensor, teacher: Tensor) -> Tensor:
    """[B, T]: how far rounding may move a divergence. What is left over, p of the student, q of the teacher, is 1 less
    a sum of up to V probabilities, so off by V ε; that moves p log(p/q) by up to V ε (|log(p/q)| + 1 + p/q).
    """
    log_ratio = logits.detach().log_softmax(-1) - teacher
    moved = log_ratio.abs().amax(-1) + 1 + log_ratio.amax(-1).exp()
    return VOCABULARY * torch.finfo(torch.float64).eps * moved


def test_a_sampled_token_estimates_divergence_and_gradient() -> None:
    """Their means over what the student may sample are those of the whole divergence, before and after an update."""
    logits, teacher = models(1.0)
    behaviour = (logits.detach() + 0.1 * drawn(7, ROWS, TOKENS, VOCABULARY)).log_softmax(-1)
    mean = torch.zeros(())
    for token in range(VOCABULARY):
        tokens = torch.full((ROWS, TOKENS), token)
        found = loss(logits, teacher, 0, tokens, behaviour[..., token])
        assert found.added_BT is None, "corrections weight it"
        mean = mean + (behaviour[..., token].exp() * found.loss_BT).sum()
    expected = whole(logits, teacher).sum()
    torch.testing.assert_close(mean, expected)
    (ours,), (theirs,) = (torch.autograd.grad(one, logits) for one in (mean, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_extreme_models_in_float32(count: int) -> None:
    logits, teacher = models(400.0, torch.float32)
    given = loss(logits, teacher.clamp(min=-300), count, sampled())
    (slope,) = torch.autograd.grad(total(given).sum(), logits)
    assert bool(total(given).isfinite().all())
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_candidates(temperature: float, entropy: bool) -> None:
    """By finite differences, also where a candidate is the token itself."""
    logits, tokens = drawn(4, 5, VOCABULARY).requires_grad_(), torch.tensor([0, 1, 2, 3, 4])
    candidates = torch.tensor([[0, 5], [2, 1], [3, 0], [4, 5], [1, 2]])

    def scores(logits: Tensor) -> tuple[Tensor, ...]:
        found = candidate_scores(logits, tokens, candidates, temperature=temperature, entropy=entropy)
        return tuple(one for one in found if one is not None)

    assert torch.autograd.gradcheck(scores, logits)
    plain = (logits / temperature).log_softmax(-1)
    torch.testing.assert_close(scores(logits)[-1], plain.gather(-1, candidates))
    torch.testing.assert_close(scores(logits)[0], token_scores(logits, tokens, temperature=temperature)[0])
