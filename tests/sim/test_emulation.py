"""Emulated devices: options, lengths that are alike wherever they are drawn, and waits of the right length."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.protocols import BackendSpec, EngineSpec
from distflow.sim.emulation import DrawnLengths, EmulatedBackendOptions, EmulatedEngineOptions
from distflow.testing.emulated import DeviceTime, EmulatedBackend, EmulatedEngine
from distflow.types import BegunSample, SampleOutput, SampleRequest, SamplingParams, Span, Version

DEVICE = """
device: none
model: none
sources: ["made up"]
decode: {floor_s: 0.01, sample_s: 0.005, context_s: 0.001, prefill_s: 0.1}
train: {token_s: 0.01, pair_s: 0.001, latency_s: 0.5, apply_s: 2.0}
weights: {bytes: 100, publish_s: 3.0, swap_s: 4.0, host_bytes_s: 10, link_bytes_s: 1}
"""
LIMIT = SamplingParams(max_new_tokens=1000)


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "device.yaml"
    path.write_text(DEVICE)
    return str(path)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What devices wait for, in seconds of the latency model; nobody really waits."""
    found: list[float] = []
    monkeypatch.setattr(DeviceTime, "wait", lambda _self, seconds: found.append(seconds))
    return found


def engine_of(slots: int = 8, **options: object) -> EmulatedEngine:
    engine = EmulatedEngine(EngineSpec(model={}, device="cpu", slots=slots, max_tokens=0, seed=0, options=options))
    engine.begin_update(Version(0, 0))
    engine.end_update()
    return engine


def until_done(engine: EmulatedEngine) -> list[SampleOutput]:
    done: list[SampleOutput] = []
    for _ in range(10_000):
        done += engine.poll()
        if not engine.progress():
            return done
    raise AssertionError("the engine does not finish")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"devise": "h100"}, r"engine_options.devise 'h100': .* did you mean 'device'"),
        ({"device": "h100-qwen2.5-7"}, r"latency model 'h100-qwen2.5-7'.*did you mean 'h100-qwen2.5-7b'"),
        ({"time_scale": 0}, r"engine_options of an emulated device: Expected `float` > 0.0 - at `\$.time_scale`"),
        ({"prompt_share": 1.5}, r"Expected `float` <= 1.0 - at `\$.prompt_share`"),
        ({"sigma": 200.0}, r"Expected `float` <= 10.0 - at `\$.sigma`"),
        ({"median": 1e300}, r"Expected `float` <= 1000000000.0 - at `\$.median`"),
        ({"link": "pigeon"}, r"Invalid enum value 'pigeon' - at `\$.link`"),
        ({"trace": "missing.txt"}, r"trace of lengths missing.txt: cannot be read"),
        ({"trace": "missing.txt", "median": 3}, r"median beside a trace"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        EmulatedEngineOptions.parse(options)


def test_lengths_do_not_depend_on_what_is_drawn_beside_them() -> None:
    lengths = DrawnLengths(EmulatedEngineOptions(median=300, sigma=1.0, prompt_share=0.5))
    together = lengths.draw(7, [3, 3, 4], [0, 1, 0], [1000, 1000, 10])
    alone = [lengths.draw(7, [position], [sample], [1000])[0] for position, sample in ((3, 0), (3, 1), (4, 0))]
    assert together == [alone[0], alone[1], min(10, alone[2])]
    assert len(set(alone)) == 3


def test_the_prompt_explains_as_much_as_it_is_said_to() -> None:
    lengths = DrawnLengths(EmulatedEngineOptions(median=300, sigma=1.0, prompt_share=1.0))
    drawn = lengths.draw(0, [5, 5, 6, 6], [0, 1, 0, 1], [10**6] * 4)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


def test_every_nth_prompt_is_longer() -> None:
    options = {"median": 300, "sigma": 0.5}
    plain, skewed = (
        EmulatedEngineOptions.parse({**options, **more}) for more in ({}, {"longer_every": 2, "longer": 3})
    )
    drawn = [DrawnLengths(each).draw(0, [0, 1], [0, 0], [10**6] * 2) for each in (plain, skewed)]
    assert drawn[1][0] == pytest.approx(3 * drawn[0][0], abs=2)
    assert drawn[1][1] == drawn[0][1]


def test_samples_of_a_trace_have_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("5 7\n\n100 90\n")
    lengths = DrawnLengths(EmulatedEngineOptions.parse({"trace": str(path)}))
    drawn = lengths.draw(0, list(range(50)), [0] * 50, [1000] * 50)
    assert set(drawn) == {5, 7, 90, 100}


def test_decoding_takes_what_the_model_says(device: str, waits: list[float]) -> None:
    engine = engine_of(device=device, median=5, sigma=0, poll_s=100.0)
    del waits[:]
    engine.submit([SampleRequest(0, sample, (1,) * 10, 0, LIMIT) for sample in range(4)])
    assert [len(output.token_ids) for output in until_done(engine)] == [5] * 4
    # The prompt once, and 5 steps of 4 samples with 10 to 14 tokens of context.
    assert waits == [pytest.approx(10 * 0.1 + sum(4 * 0.005 + 4 * (10 + step) * 0.001 for step in range(5)))]


def test_polls_are_short_and_end_with_a_sample(device: str, waits: list[float]) -> None:
    engine = engine_of(device=device, median=100, sigma=1.0, time_scale=0.1, poll_s=1.0)
    del waits[:]
    engine.submit([SampleRequest(0, sample, (1,) * 500, 0, LIMIT) for sample in range(2)])
    short, long = sorted(len(output.token_ids) for output in until_done(engine))
    waits[0] -= 500 * 0.1
    assert all(each <= 10.0 * 1.05 for each in waits)
    decoding = [2 * (500 + done) * 0.001 for done in range(short)] + [(500 + n) * 0.001 for n in range(short, long)]
    assert sum(waits) == pytest.approx(sum(decoding) + 0.01 * long)


def test_a_begun_sample_goes_on_where_it_was_with_the_same_length(device: str, waits: list[float]) -> None:
    whole, moved = (engine_of(device=device, median=50, sigma=1.0) for _ in range(2))
    whole.submit([SampleRequest(3, 1, (1, 2), 0, LIMIT)])
    length = len(until_done(whole)[0].token_ids)
    begun = BegunSample(1, (1,) * 4, (-1.0,) * 4, (Span(0, 0, 0, 4),))
    del waits[:]
    moved.submit([SampleRequest(3, 1, (1, 2), 0, LIMIT, begun)])
    assert len(until_done(moved)[0].token_ids) == length
    assert waits[0] > (2 + 4) * 0.1, "what it had is read again"


def test_what_is_cut_off_says_so(device: str, waits: list[float]) -> None:
    engine = engine_of(device=device, median=50, sigma=0)
    engine.submit([SampleRequest(0, 0, (1,), 0, SamplingParams(max_new_tokens=7)), SampleRequest(1, 0, (1,), 0, LIMIT)])
    assert [(len(out.token_ids), out.finish_reason) for out in until_done(engine)] == [(7, "length"), (50, "stop")]
    assert waits


@pytest.mark.parametrize(("link", "transfer"), [("host", 10.0), ("network", 110.0)])
def test_new_weights_take_their_way_unless_samples_run_meanwhile(
    device: str, waits: list[float], link: str, transfer: float
) -> None:
    engine = engine_of(device=device, median=50, sigma=0, link=link)
    assert waits == [4.0 + transfer]
    engine.submit([SampleRequest(0, 0, (1,), 0, LIMIT)])
    engine.poll()
    engine.begin_update(Version(0, 1))
    engine.end_update()
    assert waits[-1] == 4.0


def test_training_takes_what_the_model_says(device: str, waits: list[float]) -> None:
    options = EmulatedBackendOptions.parse({"device": device, "size": 4})
    backend = EmulatedBackend(
        BackendSpec(
            model={}, device="cpu", trainable=True, seed=0, training_steps=1, options={"device": device, "size": 4}
        )
    )
    rows = {"prompt_ids": [[1], [1, 1]], "response_ids": [[1], [1, 1, 1]]}
    batch = Batch({name: Ragged.from_rows(values, torch.int64) for name, values in rows.items()})
    backend.score(batch, temperature=1.0, grad=True, entropy=False)
    work = 0.5 + (2 + 5) * 0.01 + (4 + 25) * 0.001
    assert waits == [pytest.approx(work)]
    backend.score(batch, temperature=1.0, grad=False, entropy=False)
    assert waits[-1] == pytest.approx(work / 3)
    backend.apply(1.0)
    assert waits[-1] == 2.0
    assert [tuple(tensor.shape) for _, tensor in backend.named_shards()] == [(options.size,)]
    assert waits[-1] == 3.0


def test_waits_that_are_too_short_or_too_long_are_settled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.01

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    waits = DeviceTime(0.1)
    for seconds in (0.004, 0.004, 0.02, 0.5, 0.5):
        waits.wait(seconds)
    # The first two are put together with the third; each later one makes up for 10 ms of the one before.
    assert slept == pytest.approx([0.0028, 0.04, 0.04])
