"""Compares an engine with a transformers model as reference: the base of `engine_contract`.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.data.randomness import sample_stream, uniform_rows
from distflow.runtime.protocols import Engine
from distflow.types import BegunSample, SampleOutput, SampleRequest, SamplingParams, Version
from distflow.workers.models import build_model
from distflow.workers.parameters import constants_of, stored_form

Probs = NDArray[np.float64]
FIRST = Version(0, 0)
KEPT = 64
"""Tokens of the longest sequence whose logits are kept for the next test."""
_computed: WeakKeyDictionary[Any, dict[tuple[int, ...], list[list[float]]]] = WeakKeyDictionary()
"""Logits by reference model and token sequence."""


def reference_model(model: Mapping[str, Any], number: int) -> torch.nn.Module:
    """A model to compare an engine with, by its section of a recipe; `number`: of its weights."""
    built: torch.nn.Module = build_model(model, device="cpu", seed=number, load_weights=True)
    # Norm weights and biases start at one and zero: move them, or a missing one would not be noticed.
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(number)
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return built


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """The requests for all samples of one prompt. `begun`: what some of them have; finished ones are not requested."""

    position: int
    prompt_ids: tuple[int, ...]
    samples: int
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    begun: tuple[BegunSample, ...] = ()

    def requests(self) -> list[SampleRequest]:
        """One for each sample."""
        had = {sample.sample: sample for sample in self.begun}
        left = [n for n in range(self.samples) if n not in had or not had[n].finish_reason]
        about = (self.position, self.prompt_ids, self.seed, self.params)
        return [SampleRequest(about[0], n, *about[1:], had.get(n)) for n in left]


def submit(engine: Engine, groups: Iterable[WholeGroup]) -> None:
    """Submit all samples of these groups at once."""
    engine.submit([request for group in groups for request in group.requests()])


def reference_probs(logits: Sequence[float], params: SamplingParams, *, joint: bool = False) -> Probs:
    """[V]: the distribution to sample from, written as plainly as possible: temperature, top-k, top-p, then min-p.

    `joint`: top-p is a fraction of the whole vocabulary's mass, not of the mass that top-k leaves.
    """
    if params.temperature == 0:
        greedy = np.zeros(len(logits))
        greedy[int(np.argmax(logits))] = 1.0
        return greedy
    largest = max(logits)
    weights = [math.exp((value - largest) / params.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: params.top_k] if params.top_k else order
    mass = sum(weights if joint else [weights[token] for token in kept])
    nucleus: list[int] = []
    inside = 0.0
    while not nucleus or inside < params.top_p * mass:
        if len(nucleus) == len(kept):
            break
        nucleus.append(kept[len(nucleus)])
        inside += weights[nucleus[-1]]
    probs = np.zeros(len(weights))
    # The likeliest token is always left, with weight 1.
    probs[nucleus] = [weights[token] if weights[token] >= params.min_p else 0.0 for token in nucleus]
    normalised: Probs = probs / probs.sum()
    return normalised


class Letters:
    """A tokenizer for stop strings: every token is a letter."""

    @staticmethod
    def letter(token: int) -> str:
        """Return the text of a token."""
        return chr(ord("a") + token % 26)

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Return the first tokens with these letters."""
        return [ord(letter) - ord("a") for letter in text]

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Return the texts, one per row."""
        return ["".join(map(self.letter, row)) for row in rows]


def shifted(
    logits: Sequence[float], params: SamplingParams, there: Collection[int], drawn: int, *, bias_first: bool
) -> list[float]:
    """Return logits as they are before the temperature where these tokens are there, `drawn` of them drawn."""
    found, biases = list(logits), dict(params.biases)
    for token in {*there, *biases}:
        found[token] += biases.get(token, 0.0) if bias_first else 0.0
        if token in there:
            penalty = params.repetition_penalty
            found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
        found[token] += 0.0 if bias_first else biases.get(token, 0.0)
    for token in params.stop_token_ids if drawn < params.min_new_tokens else ():
        found[token] = -math.inf
    return found


def run_until_done(engine: Engine, polls: int = 10_000) -> list[SampleOutput]:
    """Poll until nothing is queued or running; fails if that takes more than `polls`."""
    outputs: list[SampleOutput] = []
    for _ in range(polls):
        if not engine.progress():
            return outputs
        outputs += engine.poll()
    pytest.fail(f"not done after {polls} polls: {dict(engine.progress())}")


def by_sample(outputs: Iterable[SampleOutput]) -> dict[tuple[int, int], SampleOutput]:
    """Outputs by (position, sample); fails if one came twice."""
    listed = list(outputs)
    table = {(output.position, output.sample): output for output in listed}
    assert len(table) == len(listed), "a sample was returned twice"
    return table


class EngineHarness(ABC):
    """`exact`: tokens are the same in any batch, and drawn with `distflow.data.randomness`.

    That can only hold where rounding does not matter, that is in float64.

    `stepwise`: a poll draws one token for each running sample, and none are drawn between polls. Engines that decode by
    themselves, in processes of their own, cannot know when they are polled; they pass `FreeRunningContract` instead of
    the tests that count polls.

    `tells_unfiltered`: log-probs are those over the whole vocabulary, as the trainer computes them, where top-k and
    top-p leave a part of it too. `tells_filtered`: `make_engine` asks for those of the part as well
    (`EngineSpec.filtered_logprobs`).

    `tells_unshifted`: log-probs are those without `min_new_tokens`, `repetition_penalty` and `logit_bias`, too, as the
    trainer computes them. `bias_first`: `logit_bias` comes before `repetition_penalty`. `refuses`:
    settings that the engine does not take, which its options name (`refuses_sampling`).

    `joint_filters`: top-k and top-p both apply to the whole distribution, as in the fused samplers of SGLang and
    FlashInfer; otherwise top-p applies to what top-k leaves.
    """

    exact: bool
    stepwise: bool = True
    longest: int = 40
    """Tokens of a sample that is not finished by the next poll."""
    tells_unfiltered: bool = True
    tells_filtered: bool = False
    tells_unshifted: bool = True
    refuses: tuple[str, ...] = ()
    bias_first: bool = False
    joint_filters: bool = False
    tolerance: float
    """Largest difference of log-probs to a forward pass of the reference."""
    vocabulary: int

    @abstractmethod
    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        """A new engine without weights."""

    @abstractmethod
    def reference(self, number: int) -> Any:
        """A transformers model on the CPU, the weights of which depend on `number` only."""

    def ready(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        """An engine with the weights of reference 0, version (0, 0)."""
        engine = self.make_engine(slots=slots, max_tokens=max_tokens)
        self.load(engine, 0, FIRST)
        return engine

    def load(self, engine: Engine, number: int, version: Version) -> None:
        """Give the engine the weights of a reference."""
        engine.begin_update(version)
        engine.update(self.weights(number))
        engine.end_update()

    def weights(self, number: int) -> list[tuple[str, Tensor]]:
        """The weights of a reference, by their names in a checkpoint."""
        model = self.reference(number)
        stored = stored_form(model)
        named = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *constants_of(model).items())}
        return [item for name in stored.tensors for item in stored.cut(name, named[name])]

    def request(self, position: int, samples: int = 4, **params: Any) -> WholeGroup:
        """A group with a prompt of 1 to 6 tokens that depends on its position."""
        tokens = tuple((7 * position + 3 * i) % self.vocabulary for i in range(1 + position % 6))
        return WholeGroup(position, tokens, samples, seed=5, params=SamplingParams(**params))

    @torch.no_grad()
    def logits(self, number: int, tokens: Sequence[int]) -> list[list[float]]:
        """[T, V] reference logits of one sequence; computed once, however many engines drew those tokens."""
        model = self.reference(number)
        known = _computed.setdefault(model, {})
        key = tuple(tokens)
        if key in known:
            return known[key]
        rows: list[list[float]] = model(torch.tensor([list(tokens)])).logits[0].double().tolist()
        if len(tokens) <= KEPT:
            known[key] = rows
        return rows

    def expected(self, number: int, request: WholeGroup | SampleRequest, output: SampleOutput) -> list[Probs]:
        """The distribution that each token of an output should have been drawn from."""
        prompt, params, tokens = len(request.prompt_ids), request.params, request.prompt_ids + output.token_ids
        rows = self.logits(number, tokens)[prompt - 1 : -1]
        if params.shifts:
            rows = [
                shifted(row, params, tokens[: prompt + drawn], drawn, bias_first=self.bias_first)
                for drawn, row in enumerate(rows)
            ]
        return [reference_probs(row, params, joint=self.joint_filters) for row in rows]

    def takes(self, params: Mapping[str, Any]) -> None:
        """Skip a test whose settings this engine refuses: called first in it."""
        why = self.refused(params)
        if why:
            pytest.skip(why)

    def refused(self, params: Mapping[str, Any]) -> str:
        """Say why the engine does not take these settings; "" if it does."""
        found = ", ".join(name for name in params if name in self.refuses)
        return f"the engine refuses {found}, and so does the plan" if found else ""

    def count_polls(self) -> None:
        """Called first in a test that relies on the number of tokens per poll."""
        if not self.stepwise:
            pytest.skip("the engine decodes by itself, independently of polls (see FreeRunningContract)")

    def check(self, request: WholeGroup, output: SampleOutput, number: int = 0) -> None:
        """As `check_request`, by the group."""
        about = (request.prompt_ids, request.seed, request.params)
        self.check_request(SampleRequest(request.position, output.sample, *about), output, number)

    def _check_logprobs(self, found: Sequence[float], output: SampleOutput, expected: Sequence[Probs]) -> None:
        wanted = [math.log(probs[token]) for token, probs in zip(output.token_ids, expected, strict=True)]
        assert len(found) == len(wanted)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=self.tolerance)

    def check_request(self, request: SampleRequest, output: SampleOutput, number: int = 0) -> None:
        """Log-probs agree with the reference; if the engine is exact, the tokens do, too."""
        expected = self.expected(number, request, output)
        for token, probs in zip(output.token_ids, expected, strict=True):
            assert probs[token] > 0, f"token {token} has no probability under {request.params}"
        whole = replace(request, params=request.params.plain)
        if request.params.shifts and not self.tells_unshifted:
            unfiltered = replace(request.params, top_k=0, top_p=1.0, min_p=0.0)
            whole = replace(request, params=unfiltered)
        # All the mass of a greedy sample is on the token that it takes, whatever the model itself would take.
        departs = request.params.departs and self.tells_unfiltered
        scored = self.expected(number, whole, output) if departs else expected
        self._check_logprobs(output.logprobs, output, scored)
        if self.tells_filtered and request.params.departs:
            self._check_logprobs(output.filtered_logprobs, output, expected)
        elif not request.params.departs:
            assert output.filtered_logprobs == (), "nothing was cut off"
        if self.exact and request.params.temperature > 0:
            stream = sample_stream(request.seed, request.position, request.stream)
            (u,) = uniform_rows([stream], [request.sample], request.offset + len(expected))
            u = u[request.offset :]
            drawn = [int(np.searchsorted(p.cumsum(), u[t], "right")) for t, p in enumerate(expected)]
            assert list(output.token_ids) == drawn
