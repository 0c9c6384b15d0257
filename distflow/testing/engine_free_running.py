"""The contract of engines that decode by themselves, in other processes: without tests that count polls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from distflow.runtime.protocols import Engine
from distflow.testing.engine_continuation import with_begun
from distflow.testing.engine_contract import SECOND, EngineContract
from distflow.testing.engine_harness import WholeGroup, by_sample, run_until_done, submit
from distflow.types import SampleOutput, Span, Version
from distflow.weights.canary import Scoring, canary_rows

WAIT_S = 60.0
LONG = 400
"""Tokens of a sample that must not finish before the test has acted on it."""
ENDLESS = 1500
"""Tokens of a sample that never finishes, however slow the test is."""


class FreeRunningContract(EngineContract):
    """The suite for engines that are not `stepwise`; slots must hold ENDLESS tokens and a prompt."""

    stepwise = False
    longest = LONG

    def long_request(self, position: int, samples: int = 4) -> WholeGroup:
        """A group that takes a while to generate."""
        return self.request(position, samples=samples, max_new_tokens=LONG)

    def poll_until(self, engine: Engine, ready: Callable[[], bool]) -> None:
        """Poll until `ready`; no sample may finish before."""
        deadline = time.monotonic() + WAIT_S
        while not ready():
            assert time.monotonic() < deadline, f"not ready within {WAIT_S} s: {dict(engine.progress())}"
            assert engine.poll() == [], "a long sample finished too early"

    def run_a_while(self, engine: Engine, tokens: int) -> dict[tuple[int, int], SampleOutput]:
        """Poll until each running sample has `tokens` tokens; returns the partial samples."""
        expected = max(1, len(engine.partials()))
        self.poll_until(
            engine,
            lambda: (
                len(out := engine.partials()) >= expected and min(len(sample.token_ids) for sample in out) >= tokens
            ),
        )
        return by_sample(engine.partials())

    def poll_until_drawn_by(self, engine: Engine, version: Version) -> None:
        """Poll until the newest token of each running sample is of `version`.

        Waiting for a number of tokens would not do: any number of them may be drawn while new weights are being loaded.
        """
        self.poll_until(
            engine,
            lambda: all((out.spans[-1].term, out.spans[-1].version) == version for out in engine.partials()),
        )

    def test_long_samples_follow_the_distribution(self) -> None:
        """Up to the last of many tokens, with many groups at once."""
        engine = self.ready(slots=64, max_tokens=LONG + 8)
        requests = {position: self.long_request(position, samples=2) for position in range(8)}
        submit(engine, list(requests.values()))
        outputs = run_until_done(engine)
        assert len(by_sample(outputs)) == 16
        for output in outputs:
            assert len(output.token_ids) == LONG
            self.check(requests[output.position], output)

    def test_weights_swapped_in_mid_sample(self) -> None:
        """Tokens up to the swap are as without it; exactly those after it carry the new version.

        The keys and values of the tokens before the swap stay those of the old weights, so log-probs after it are those
        of neither model alone; at a prompt's end they would be exact, which `test_new_weights_between_groups` checks.
        """
        engine = self.ready(max_tokens=LONG + 8)
        request = self.long_request(5)
        submit(engine, [request])
        before = self.run_a_while(engine, 20)
        self.load(engine, 1, Version(1, 2))
        outputs = by_sample(run_until_done(engine))
        assert len(outputs) == 4
        for key, output in outputs.items():
            first, second = output.spans
            assert (first.term, first.version, first.start) == (0, 0, 0)
            assert second == Span(1, 2, first.end, LONG)
            assert first.end >= len(before[key].token_ids), "a token that was returned before has changed its version"
            assert output.token_ids[: len(before[key].token_ids)] == before[key].token_ids
            expected = self.expected(0, request, output)
            old = [math.log(probs[token]) for probs, token in zip(expected, output.token_ids, strict=True)]
            np.testing.assert_allclose(output.logprobs[: first.end], old[: first.end], atol=self.tolerance)
            assert not np.allclose(output.logprobs[first.end :], old[first.end :], atol=10 * self.tolerance)

    def test_nothing_drawn_with_wrong_weights_is_handed_out(self) -> None:
        """Their version is replaced by itself: samples continue after the tokens they had, on the right weights."""
        # A version that no other test uses: engines key their prefix cache by it.
        version = Version(2, 4)
        engine = self.ready(max_tokens=LONG + 8)
        request = self.long_request(5)
        submit(engine, [request])
        before = self.run_a_while(engine, 20)
        self.load(engine, 1, version)
        if isinstance(engine, Scoring):
            engine.logprobs(canary_rows(self.vocabulary, 20))
        self.load(engine, 2, version)
        outputs = by_sample(run_until_done(engine))
        assert len(outputs) == 4
        for key, output in outputs.items():
            count = len(before[key].token_ids)
            assert output.spans == (Span(0, 0, 0, count), Span(2, 4, count, LONG))
            expected = self.expected(2, request, output)[count:]
            wanted = [math.log(probs[token]) for probs, token in zip(expected, output.token_ids[count:], strict=True)]
            np.testing.assert_allclose(output.logprobs[count:], wanted, atol=self.tolerance)

    def test_partials_tell_versions_too(self) -> None:
        """Those taken after a swap say where it happened."""
        engine = self.ready(max_tokens=ENDLESS + 8)
        submit(engine, [self.request(5, max_new_tokens=ENDLESS)])
        self.run_a_while(engine, 10)
        self.load(engine, 1, SECOND)
        self.poll_until_drawn_by(engine, SECOND)
        after = by_sample(engine.partials())
        outputs = by_sample(engine.abort([5]))
        assert outputs.keys() == after.keys()
        for key, partial in after.items():
            assert partial.finish_reason == "abort"
            assert [(span.term, span.version) for span in partial.spans] == [(0, 0), (0, 1)]
            assert partial.spans[0] == outputs[key].spans[0]
            assert partial.spans[1].end == len(partial.token_ids)

    def test_samples_queued_at_a_swap_begin_on_the_new_weights(self) -> None:
        """Nothing that older weights computed is used for them."""
        engine = self.ready(slots=4, max_tokens=LONG + 8)
        running, queued = self.long_request(5), self.request(11, max_new_tokens=20)
        submit(engine, [running, queued])
        self.run_a_while(engine, 5)
        self.load(engine, 1, SECOND)
        outputs = [output for output in run_until_done(engine) if output.position == 11]
        assert len(outputs) == 4
        for output in outputs:
            assert output.spans == (Span(0, 1, 0, 20),)
            self.check(queued, output, number=1)

    def test_aborted_groups_come_back_and_start_again(self) -> None:
        """Their partial samples are right, nothing of them appears later, and their slots are free at once."""
        engine = self.ready(slots=12, max_tokens=LONG + 8)
        requests = [self.long_request(position) for position in range(4)]
        submit(engine, requests)
        self.run_a_while(engine, 3)
        partials = by_sample(engine.abort([1, 3, 77]))
        assert sorted(partials) == [(1, sample) for sample in range(4)], "position 3 was still queued"
        for output in partials.values():
            assert output.finish_reason == "abort"
            assert output.spans == (Span(0, 0, 0, len(output.token_ids)),)
            self.check(requests[1], output)
        assert sorted(engine.progress()) == [0, 2]
        short = replace(requests[1], params=replace(requests[1].params, max_new_tokens=5))
        submit(engine, [short])
        outputs = by_sample(run_until_done(engine))
        assert sorted(outputs) == [(position, sample) for position in range(3) for sample in range(4)]
        for (position, _), output in outputs.items():
            self.check(short if position == 1 else requests[position], output)

    def test_partials_run_on(self) -> None:
        """They are what abort would return, and only grow."""
        engine = self.ready(max_tokens=LONG + 8)
        submit(engine, [self.long_request(position) for position in range(2)])
        before = self.run_a_while(engine, 5)
        assert by_sample(engine.partials()) == before
        outputs = by_sample(run_until_done(engine))
        for key, output in before.items():
            assert outputs[key].token_ids[: len(output.token_ids)] == output.token_ids
            assert outputs[key].logprobs[: len(output.token_ids)] == output.logprobs

    def test_begun_samples_are_continued(self) -> None:
        """Another engine continues after the first one's tokens, whose log-probs and spans are kept."""
        first = self.ready(max_tokens=LONG + 8)
        request = self.long_request(4)
        submit(first, [request])
        partials = self.run_a_while(first, 10)
        first.abort([4])
        second = self.make_engine(slots=16, max_tokens=LONG + 8)
        self.load(second, 1, SECOND)
        submit(second, [with_begun(request, partials.values())])
        assert second.progress() == {4: sum(len(output.token_ids) for output in partials.values())}
        outputs = by_sample(run_until_done(second))
        assert outputs.keys() == partials.keys()
        for key, output in outputs.items():
            had = partials[key]
            count = len(had.token_ids)
            assert output.spans == (Span(0, 0, 0, count), Span(0, 1, count, LONG))
            assert (output.token_ids[:count], output.logprobs[:count]) == (had.token_ids, had.logprobs)
            expected = self.expected(1, request, output)[count:]
            wanted = [math.log(probs[token]) for probs, token in zip(expected, output.token_ids[count:], strict=True)]
            np.testing.assert_allclose(output.logprobs[count:], wanted, atol=self.tolerance)

    def test_greedy_samples_go_on_as_if_they_had_never_stopped(self) -> None:
        """Without randomness, the uninterrupted and the continued sample are equal."""
        request = self.request(4, samples=1, max_new_tokens=LONG, temperature=0.0)
        engine = self.ready(max_tokens=LONG + 8)
        submit(engine, [request])
        self.run_a_while(engine, 10)
        part = engine.abort([4])
        submit(engine, [with_begun(request, part)])
        (continued,) = run_until_done(engine)
        submit(engine, [request])
        (whole,) = run_until_done(engine)
        assert continued == whole

    def test_an_aborted_group_takes_all_that_was_begun_with_it(self) -> None:
        """Its queued samples do not appear later; running ones are returned with all their tokens."""
        engine = self.ready(max_tokens=LONG + 8)
        request = self.long_request(4)
        submit(engine, [request])
        parts = self.run_a_while(engine, 5)
        engine.abort([4])
        part = parts[4, 0].begun
        submit(engine, [replace(request, begun=(part,))])
        assert engine.progress() == {4: len(parts[4, 0].token_ids)}
        assert engine.abort([4]) == []
        assert engine.progress() == {}
        assert engine.poll() == []
        submit(engine, [replace(request, begun=(part,))])
        self.poll_until(
            engine, lambda: any(len(out.token_ids) > len(part.token_ids) for out in engine.partials() if not out.sample)
        )
        back = by_sample(engine.abort([4]))
        assert back[4, 0].token_ids[: len(parts[4, 0].token_ids)] == parts[4, 0].token_ids

    @pytest.mark.parametrize("number", [1, 2])
    def test_swaps_in_a_row(self, number: int) -> None:
        """Each starts a span; later tokens never have an older version."""
        engine = self.ready(max_tokens=ENDLESS + 8)
        submit(engine, [self.request(5, max_new_tokens=ENDLESS)])
        self.run_a_while(engine, 5)
        for version in range(1, 4):
            self.load(engine, number, Version(0, version))
            self.poll_until_drawn_by(engine, Version(0, version))
        outputs = engine.abort([5])
        assert len(outputs) == 4
        for output in outputs:
            assert [span.version for span in output.spans] == sorted({span.version for span in output.spans})
            assert [span.start for span in output.spans] == [0, *(span.end for span in output.spans[:-1])]
            assert output.spans[-1] == Span(0, 3, output.spans[-1].start, len(output.token_ids))
