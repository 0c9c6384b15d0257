"""How every engine must continue samples that another engine began: the part of `engine_contract` about `begun`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from distflow.testing.engine_harness import EngineHarness, WholeGroup, by_sample, run_until_done, submit
from distflow.types import BegunSample, SampleOutput, SampleRequest, SamplingParams, Span, Version

NEWER = Version(0, 1)
Outputs = Mapping[tuple[int, int], SampleOutput]


def with_begun(request: WholeGroup, outputs: Iterable[SampleOutput]) -> WholeGroup:
    """The request for the rest of its group."""
    return replace(request, begun=tuple(output.begun for output in outputs if output.position == request.position))


class ContinuationContract(EngineHarness):
    """Mixed into `EngineContract`."""

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"temperature": 0.0},
            {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
            {"repetition_penalty": 1.5, "logit_bias": {3: 1.5}, "min_new_tokens": 3},
        ],
        ids=str,
    )
    def test_begun_samples_go_on_as_if_they_had_never_stopped(self, params: dict[str, Any]) -> None:
        """Some are half done, some finished, some still queued; the new engine has other slots and other samples."""
        self.count_polls()
        self.takes(params)
        requests = [self.request(p, max_new_tokens=4 + p, stop_token_ids=(1, 2), **params) for p in range(6)]
        whole = self._samples_of(requests)
        first = self.ready(slots=20)
        submit(first, requests)
        outputs = [output for _ in range(3) for output in first.poll()]
        outputs += first.partials()
        assert {output.finish_reason for output in outputs} >= {"abort"}
        second = self.ready(slots=5)
        submit(second, [with_begun(request, outputs) for request in requests[::-1]])
        finished = [output for output in outputs if output.finish_reason != "abort"]
        rest = by_sample([*finished, *run_until_done(second)])
        assert rest.keys() == whole.keys()
        for output in outputs:
            assert rest[output.position, output.sample].token_ids[: len(output.token_ids)] == output.token_ids
        for request in requests:
            self._compare(request, rest, whole)

    def test_only_what_is_missing_is_generated(self) -> None:
        """Samples need no more polls than they have tokens missing."""
        self.count_polls()
        request = self.request(4, max_new_tokens=8)
        whole = self._samples_of([request])
        parts = [self._cut(whole[4, 0], 6), self._cut(whole[4, 1], 7)]
        engine = self.ready()
        submit(engine, [replace(request, samples=2, begun=tuple(parts))])
        assert [output.sample for output in engine.poll()] == [1]
        assert engine.progress() == {4: 7}
        assert [output.sample for output in engine.poll()] == [0]
        assert engine.progress() == {}

    def test_spans_are_kept_across_engines_and_versions(self) -> None:
        """The tokens of each engine carry its version; adjacent tokens of one version form one span."""
        self.count_polls()
        request = self.request(5, max_new_tokens=7)
        first = self.ready()
        submit(first, [request])
        first.poll()
        first.poll()
        second = self.ready()
        submit(second, [with_begun(request, first.partials())])
        second.poll()
        third = self.make_engine()
        self.load(third, 1, NEWER)
        submit(third, [with_begun(request, second.partials())])
        outputs = run_until_done(third)
        assert len(outputs) == 4
        for output in outputs:
            assert output.spans == (Span(0, 0, 0, 3), Span(0, 1, 3, 7))
            assert len(output.token_ids) == len(output.logprobs) == 7

    def test_partials_disturb_nothing(self) -> None:
        """They are what abort would return; the samples run on."""
        self.count_polls()
        engine = self.ready()
        requests = [self.request(p, max_new_tokens=6) for p in range(3)]
        submit(engine, requests)
        assert engine.partials() == []
        engine.poll()
        engine.poll()
        partials = by_sample(engine.partials())
        assert {len(output.token_ids) for output in partials.values()} == {2}
        assert by_sample(engine.partials()) == partials
        assert by_sample(engine.abort([1])) == {key: output for key, output in partials.items() if key[0] == 1}
        rest = by_sample(run_until_done(engine))
        for request in (requests[0], requests[2]):
            self._compare(request, rest, self._samples_of([request]))

    def test_an_aborted_group_takes_what_was_begun_with_it(self) -> None:
        """Running samples are returned with the tokens of all engines; queued ones do not appear later."""
        self.count_polls()
        request = self.request(4, max_new_tokens=8)
        part = self._cut(self._samples_of([request])[4, 0], 3)
        engine = self.ready()
        submit(engine, [replace(request, begun=(part,))])
        assert engine.progress() == {4: 3}
        assert engine.abort([4]) == []
        assert engine.progress() == {}
        assert engine.poll() == []
        submit(engine, [replace(request, begun=(part,))])
        engine.poll()
        assert {o.sample: len(o.token_ids) for o in engine.abort([4])} == {0: 4, 1: 1, 2: 1, 3: 1}

    @pytest.mark.parametrize(
        "begun, message",
        [
            (BegunSample(1, (3,) * 5, (0.0,) * 5, (Span(0, 0, 0, 5),)), "5 tokens; expected at most 4"),
            (BegunSample(1, (3,), (), (Span(0, 0, 0, 1),)), "1 tokens, but 0 log-probs"),
            (BegunSample(1, (10_000_000,), (0.0,), (Span(0, 0, 0, 1),)), "token ids outside"),
            (BegunSample(1, (3, 3), (0.0, 0.0), (Span(0, 0, 0, 1),)), "its spans end at 1, its tokens at 2"),
            (BegunSample(1, (3,), (0.0,), (Span(0, 0, 0, 1),), "stop"), "it is finished"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refuses_impossible_beginnings(self, begun: BegunSample, message: str) -> None:
        """The message names the position, the sample and what does not fit."""
        engine = self.ready()
        request = SampleRequest(9, 1, (1, 2), 0, SamplingParams(max_new_tokens=5), begun)
        with pytest.raises(ValueError, match=f"sample 1 of position 9: begun elsewhere: .*{message}"):
            engine.submit([request])
        assert engine.progress() == {}

    def _samples_of(self, requests: list[WholeGroup]) -> Outputs:
        engine = self.ready(slots=64)
        submit(engine, requests)
        return by_sample(run_until_done(engine))

    def _compare(self, request: WholeGroup, outputs: Outputs, whole: Outputs) -> None:
        for number in range(request.samples):
            output, expected = outputs[request.position, number], whole[request.position, number]
            self.check(request, output)
            if self.exact or request.params.temperature == 0:
                assert output.token_ids == expected.token_ids
                assert output.finish_reason == expected.finish_reason
                assert output.spans == expected.spans
                assert output.logprobs == pytest.approx(expected.logprobs, abs=self.tolerance)
                assert output.filtered_logprobs == pytest.approx(expected.filtered_logprobs, abs=self.tolerance)

    def _cut(self, output: SampleOutput, tokens: int) -> BegunSample:
        spans = tuple(span._replace(end=min(span.end, tokens)) for span in output.spans)
        whole, filtered = output.logprobs[:tokens], output.filtered_logprobs[:tokens]
        return BegunSample(output.sample, output.token_ids[:tokens], whole, spans, filtered_logprobs=filtered)
