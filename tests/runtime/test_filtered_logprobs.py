"""Log-probs of what filters leave, beside those over the whole vocabulary: in rows, partial samples and replays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from distflow.exchange.messages import Lease
from distflow.exchange.partials import Kept, cut
from distflow.flow.plan import StepPlan
from distflow.flow.step import FILTERED, GENERATED, ROLLOUT
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.protocols import EngineSpec
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.types import BegunSample, FinishedSample, RequestKey, SampleOutput, Span, Uid, Version, joined_filtered
from distflow.workers.engines.torch_engine import TorchEngine
from tests.runtime.kit import TOKENIZER, EndlessTokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = {
    "path": None,
    "init": {"model_type": "qwen2", "vocab_size": 12, "num_key_value_heads": 2, "initializer_range": 0.5, **SIZES},
    "tokenizer": None,
    "dtype": "float64",
}
SOURCE = """
from distflow import step
from distflow.types import SamplingParams


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def talk(episode, generate, ctx, *, first, second, max_new_tokens=3, max_tokens=40):
    prefix = episode.prompt_ids
    for filters in (first, second):
        completion = await generate(prefix, SamplingParams(0.7, **filters, max_new_tokens=max_new_tokens))
        prefix = (*prefix, *completion.response_ids, 10)
"""
TURN = 3
FILTER, NONE = {"top_p": 0.6}, {}


def trajectories(
    folder: Path, first: dict[str, float], second: dict[str, float], *, asked: bool = True
) -> Trajectories:
    (folder / "mine.py").write_text(SOURCE)
    writes = (*GENERATED, *([FILTERED] if asked else []), "sequence", "sequence_prompt")
    settings = {"first": first, "second": second}
    about = ("generate", "sample", None, settings, (), writes, (), ("replay", "repeatable"))
    plan = StepPlan("sample", f"{folder}/mine.py:talk", *about)
    runner = StepRunner("rollout/0", [plan], {"sample": StepContext("sample", tokenizer=EndlessTokenizer())})
    return Trajectories(runner.generate_step("sample"), {"train": SampleLimits(2, 40, 40)}, TOKENIZER, torch.float64)


def engine(*, asked: bool = True) -> TorchEngine:
    made = TorchEngine(EngineSpec(MODEL, "cpu", 8, 64, 0, {}, filtered_logprobs=asked))
    weights = {name: parameter.detach() for name, parameter in donor().named_parameters()}
    made.begin_update(Version(0, 0))
    made.update(weights.items())
    made.end_update()
    return made


def donor() -> torch.nn.Module:
    from distflow.workers.models import build_model

    model: torch.nn.Module = build_model(MODEL, device="cpu", seed=3, load_weights=True)
    return model


def lease(begun: tuple[BegunSample, ...] = ()) -> Lease:
    return Lease(Uid(0, 1, 5), 0, 5, 1, 7, (2, 3), "01", "{}", 0, 0, begun=begun)


def run(samples: Trajectories, made: TorchEngine, begun: tuple[BegunSample, ...] = (), polls: int = 100) -> list:
    """Poll so often; returns what finished."""
    samples.submit(made, samples.begin([lease(begun)]))
    finished: list[FinishedSample] = []
    for _ in range(polls):
        requests, done = samples.take(made.poll())
        finished += done
        samples.submit(made, requests)
        if not made.progress():
            break
    return finished


@pytest.mark.parametrize("turns", [(FILTER, FILTER), (FILTER, NONE), (NONE, {"top_k": 3}), (NONE, NONE)], ids=str)
def test_rows_have_both(tmp_path: Path, turns: tuple[dict[str, float], dict[str, float]]) -> None:
    """A filter lets through what it leaves with a higher probability; without one both are the same."""
    samples = trajectories(tmp_path, *turns)
    run(samples, engine())
    batch = samples.batch([5])
    for row in range(batch.rows):
        whole, filtered = (batch.ragged(field).row(row) for field in (ROLLOUT, FILTERED))
        mask = batch.ragged("response_mask").row(row)
        assert len(whole) == len(filtered) == len(mask) == 2 * TURN + 1
        assert not whole[~mask].any()
        assert not filtered[~mask].any()
        for turn, filters in enumerate(turns):
            part = slice(turn * (TURN + 1), turn * (TURN + 1) + TURN)
            if filters:
                assert bool((filtered[part] >= whole[part] - 1e-12).all())
                assert bool((filtered[part] > whole[part] + 1e-3).any())
            else:
                assert torch.equal(filtered[part], whole[part])


def test_nobody_pays_for_what_nobody_reads(tmp_path: Path) -> None:
    samples = trajectories(tmp_path, FILTER, FILTER, asked=False)
    outputs = run(samples, engine(asked=False))
    assert {call.filtered_logprobs for sample in outputs for call in sample.calls} == {()}
    assert FILTERED not in samples.batch([5])


@pytest.mark.parametrize("turns", [(FILTER, FILTER), (FILTER, NONE), (NONE, FILTER)], ids=str)
@pytest.mark.parametrize("polls", [1, 3, 4, 5])
def test_another_worker_goes_on_with_both(
    tmp_path: Path, turns: tuple[dict[str, float], dict[str, float]], polls: int
) -> None:
    """By way of an owner, which keeps what the first worker reports, one token at a time."""
    expected = trajectories(tmp_path, *turns)
    run(expected, engine())
    first, made, kept = trajectories(tmp_path, *turns), engine(), Kept()
    samples = first.begin([lease()])
    first.submit(made, samples)
    sent: Counter[RequestKey] = Counter()
    for _ in range(polls):
        requests, _ = first.take(made.poll())
        first.submit(made, requests)
        for output in first.partials(made.partials()):
            if len(output.token_ids) > sent[output.key]:
                assert kept.add(cut(output, sent[output.key], 1), ("rollout/0", 0), 1 << 20) == "kept"
                sent[output.key] += 1
    second = trajectories(tmp_path, *turns)
    run(second, engine(), kept.begun())
    one, two = expected.batch([5]), second.batch([5])
    for field in ("response_ids", ROLLOUT, FILTERED):
        torch.testing.assert_close(one.ragged(field).values, two.ragged(field).values, rtol=0, atol=1e-9)


def test_pieces_with_and_without_filtered_log_probs_make_one_prefix() -> None:
    def piece(start: int, filtered: tuple[float, ...] = ()) -> SampleOutput:
        return SampleOutput(0, 1, (7,) * 3, (-1.0, -2.0, -3.0), (Span(0, 0, 0, 3),), "abort", filtered)

    kept = Kept()
    kept.add(cut(piece(0), 0, 1), ("a", 0), 1000)
    plain = kept.nbytes
    assert kept.begun()[0].filtered_logprobs == ()
    kept.add(cut(piece(0, (-1.0, -1.5, -2.5)), 1, 1), ("a", 0), 1000)
    assert kept.begun()[0].filtered_logprobs == (-1.0, -1.5)
    assert kept.nbytes == 2 * plain - 32 + 2 * 8, "one span, and 8 bytes more a token"
    kept.add(cut(piece(0), 2, 1), ("a", 0), 1000)
    assert kept.begun()[0].filtered_logprobs == (-1.0, -1.5, -3.0)
    assert kept.begun()[0].logprobs == (-1.0, -2.0, -3.0)


def test_joining() -> None:
    assert joined_filtered([]) == joined_filtered([((-1.0,), ()), ((), ())]) == ()
    assert joined_filtered([((-1.0,), ()), ((-2.0, -3.0), (-0.5, -0.25))]) == (-1.0, -0.5, -0.25)
