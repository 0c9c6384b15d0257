"""Latency models and length distributions."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.sim import latency, lengths


@pytest.mark.parametrize("name", latency.names())
def test_shipped_models_name_their_sources_and_have_plausible_figures(name: str) -> None:
    model = latency.load(name)
    assert model.sources
    assert all(model.sources)
    assert 1e-4 < model.decode.floor_s < 1.0
    assert model.decode.seconds(1) == model.decode.floor_s
    if name == "h200-torch-qwen2.5-1.5b":
        assert model.decode.seconds(64, 1000.0) == model.decode.floor_s, "what context adds is yet to be measured"
    else:
        assert model.decode.seconds(4096, 1000.0) > model.decode.seconds(64, 1000.0) > model.decode.seconds(64)


@pytest.mark.parametrize("name", [name for name in latency.names() if name.startswith("h100-")])
def test_shipped_models_of_cards_that_compute_alike_train_alike(name: str) -> None:
    """The data sheets of both have 989 TFLOP/s, and the same host around them."""
    one, other = latency.load(name), latency.load(name.replace("h100", "h200"))
    assert (one.train.token_s, one.train.pair_s) == (other.train.token_s, other.train.pair_s)
    assert one.weights == other.weights
    assert other.train.apply_s <= one.train.apply_s <= 1.5 * other.train.apply_s


def test_training_adds_tokens_pairs_and_the_batch_itself() -> None:
    model = latency.TrainLatency(token_s=2.0, pair_s=0.5, latency_s=1.0)
    assert model.seconds([1, 2]) == 1.0 + (2.0 + 0.5) + (4.0 + 2.0)
    assert model.seconds([]) == 1.0


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"latency model 'h100-qwen2.5-7'.*did you mean 'h100-qwen2.5-7b'"):
        latency.load("h100-qwen2.5-7")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("decode: {floor_s: -1}", r"Expected `float` > 0.0 - at `\$.decode.floor_s`"),
        ("device: H100", "missing required field `model`"),
        ("- 1\n", "mapping"),
        ("device: [", "flow sequence|expected"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=why):
        latency.load(str(tmp_path / "mine.yaml"))


def test_a_prompt_explains_its_share_of_the_lengths() -> None:
    model = lengths.Lognormal(median=900.0, sigma=1.1, prompt_share=1.0)
    assert model.length(0.5, 0.1, 16_384) == model.length(0.5, 0.9, 16_384) == 900
    drawn = [lengths.Lognormal(900.0, 1.1).length(0.5, (i + 0.5) / 1000, 10**9) for i in range(1000)]
    assert statistics.median(drawn) == pytest.approx(900, rel=0.01)
    assert statistics.mean(drawn) == pytest.approx(900 * 2.718281828 ** (1.1**2 / 2), rel=0.03)
    assert lengths.Lognormal(900.0, 1.1).length(1.0, 1.0, 500) == 500


def test_a_trace_gives_the_lengths_of_one_prompt() -> None:
    trace = lengths.Trace([[1, 2, 3], [10, 20, 30]])
    assert {trace.length(0.2, sample, 100) for sample in (0.1, 0.5, 0.9)} == {1, 2, 3}
    assert trace.length(0.999, 0.999, 25) == 25


@pytest.mark.parametrize(
    ("text", "why"), [("12 x\n", r":1: expected lengths"), ("\n", "has no lines"), ("3 0\n", ":1:")]
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "trace.txt").write_text(text)
    with pytest.raises(UserError, match=why):
        lengths.read_trace(tmp_path / "trace.txt")
