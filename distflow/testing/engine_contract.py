"""The contract of every engine. Subclass `EngineContract` as a pytest class and define how to make the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from distflow.algorithms import corrections
from distflow.algorithms.logprobs import token_scores
from distflow.data.stop_strings import StopWatch, TellsTokens
from distflow.testing.engine_harness import FIRST, Letters, by_sample, reference_probs, run_until_done, submit
from distflow.testing.engine_offload import OffloadContract
from distflow.types import SampleOutput, SampleRequest, SamplingParams, Span, Version
from distflow.weights.canary import TOLERANCE, Scoring, ScoringLater, canary_rows

SECOND = Version(0, 1)


class EngineContract(OffloadContract):
    """The suite; see `EngineHarness` for what a subclass must define."""

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"temperature": 0.5},
            {"temperature": 1.7},
            {"temperature": 0.0},
            {"top_k": 3},
            {"top_k": 1},
            {"top_p": 0.6},
            {"top_p": 0.01},
            {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
            {"min_p": 0.2},
            {"min_p": 0.1, "top_k": 8, "temperature": 1.5},
            {"repetition_penalty": 1.8},
            {"repetition_penalty": 0.6, "min_p": 0.1, "temperature": 0.7},
            {"logit_bias": {3: 2.5, 7: -100.0}},
            {"logit_bias": {5: 3.0}, "temperature": 0.0},
            {"repetition_penalty": 1.5, "logit_bias": {2: 1.0, 4: -4.0}, "temperature": 1.4},
        ],
        ids=str,
    )
    def test_samples_from_the_distribution_asked_for(self, params: dict[str, Any]) -> None:
        """Every token has some probability, and its log-prob is right, under plain, filtered and shifted sampling."""
        self.takes(params)
        engine = self.ready()
        requests = {position: self.request(position, max_new_tokens=6, **params) for position in range(5)}
        submit(engine, list(requests.values()))
        outputs = run_until_done(engine)
        assert len(by_sample(outputs)) == 20
        for output in outputs:
            assert output.finish_reason == "length"
            assert len(output.token_ids) == 6
            self.check(requests[output.position], output)

    @pytest.mark.parametrize(
        "params",
        [
            {"top_p": 0.8, "temperature": 0.7},
            {"top_k": 4},
            {"top_k": 1, "temperature": 1.3},
            {"top_k": 5, "top_p": 0.7, "temperature": 0.6},
            {"min_p": 0.1},
            {"repetition_penalty": 1.3, "logit_bias": {3: 2.0}, "temperature": 0.8},
            {"min_new_tokens": 6, "stop_token_ids": (1, 2, 3, 4)},
        ],
        ids=str,
    )
    def test_the_trainer_finds_the_same_log_probs_under_filters(self, params: dict[str, Any]) -> None:
        """π_old/π_b is 1 while both have the same weights, whatever is cut off or shifted: no correction acts."""
        self.takes(params)
        if not self.tells_unfiltered or (SamplingParams(**params).shifts and not self.tells_unshifted):
            pytest.skip("the engine tells log-probs of what it draws from, and the plan refuses to weight by these")
        engine = self.ready()
        submit(engine, [self.request(position, max_new_tokens=8, **params) for position in range(5)])
        outputs = run_until_done(engine)
        old_BT, rollout_BT = (
            pad_sequence(rows, batch_first=True)
            for rows in (
                [self._trained(output, params.get("temperature", 1.0)) for output in outputs],
                [torch.tensor(output.logprobs, dtype=torch.float64) for output in outputs],
            )
        )
        mask_BT = pad_sequence([torch.ones(len(output.token_ids)) for output in outputs], batch_first=True).bool()
        bound = math.expm1(2 * self.tolerance)
        torch.testing.assert_close(
            corrections.behaviour_ratio(old_BT, rollout_BT)[mask_BT],
            torch.ones(int(mask_BT.sum()), dtype=torch.float64),
            rtol=0,
            atol=bound,
        )
        for correct in (corrections.icepop, corrections.mis, corrections.sequence_mis, corrections.geometric_mask):
            weights_BT = correct(old_BT, rollout_BT, mask_BT, lo=0.99, hi=1.01)
            torch.testing.assert_close(weights_BT * mask_BT, mask_BT.double(), rtol=0, atol=8 * bound)

    def _trained(self, output: SampleOutput, temperature: float) -> torch.Tensor:
        """[T]: log-probs of a sample's tokens by the reference, with the arithmetic of training."""
        prompt_ids = self.request(output.position).prompt_ids
        rows = self.logits(0, prompt_ids + output.token_ids)[len(prompt_ids) - 1 : -1]
        logits_TV = torch.tensor(rows, dtype=torch.float64)
        return token_scores(logits_TV, torch.tensor(output.token_ids), temperature=temperature)[0]

    def test_settings_of_different_requests_do_not_mix(self) -> None:
        """Greedy, filtered and plain samples in one batch."""
        engine = self.ready(slots=12)
        settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "temperature": 2.0}, {}]
        shifting: list[dict[str, Any]] = [{"repetition_penalty": 1.6}, {}, {"logit_bias": {3: 2.0}}, {"min_p": 0.3}, {}]
        settings += [given for given in shifting if not self.refused(given)]
        requests = [self.request(p, max_new_tokens=2 + p % 5, **settings[p % len(settings)]) for p in range(18)]
        submit(engine, requests)
        outputs = run_until_done(engine)
        assert len(by_sample(outputs)) == 72
        for output in outputs:
            self.check(requests[output.position], output)

    def test_frequencies(self) -> None:
        """Pearson's chi-squared test over many samples of one token."""
        engine = self.ready(slots=64)
        request = self.request(3, samples=2048, max_new_tokens=1)
        submit(engine, [request])
        outputs = run_until_done(engine)
        counts = np.bincount([o.token_ids[0] for o in outputs], minlength=self.vocabulary)
        expected = 2048 * reference_probs(self.logits(0, request.prompt_ids)[-1], request.params)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < self.vocabulary + 6 * math.sqrt(2 * self.vocabulary)

    def test_samples_of_a_group_differ(self) -> None:
        """Each sample has randomness of its own."""
        engine = self.ready()
        submit(engine, [self.request(4, samples=8, max_new_tokens=12)])
        assert len({output.token_ids for output in run_until_done(engine)}) > 4

    def test_same_tokens_in_any_batch(self) -> None:
        """With any number of slots, in any order, alone or in a batch: a sample is a function of its request."""
        requests = [self.request(p, max_new_tokens=3 + p % 7, stop_token_ids=(1,)) for p in range(10)]
        runs = []
        for slots, order in ((40, requests), (4, requests), (7, requests[::-1]), (13, requests[5:] + requests[:5])):
            engine = self.ready(slots=slots)
            submit(engine, order[:3])
            first = engine.poll() + engine.poll()
            submit(engine, order[3:])
            runs.append(by_sample(first + run_until_done(engine)))
        alone = self.ready()
        submit(alone, [requests[6]])
        small = by_sample(run_until_done(alone))
        for run in runs[1:]:
            assert run.keys() == runs[0].keys()
        for outputs in (*runs, small):
            for key, output in outputs.items():
                self.check(requests[key[0]], output)
                if self.exact:
                    assert output.token_ids == runs[0][key].token_ids
                    assert output.finish_reason == runs[0][key].finish_reason

    def test_stop_tokens_and_length(self) -> None:
        """A sample ends at the first stop token, which it includes, or at its limit."""
        engine = self.ready()
        stops = (1, 2, 3)
        submit(engine, [self.request(p, max_new_tokens=9, stop_token_ids=stops) for p in range(6)])
        reasons = set()
        for output in run_until_done(engine):
            reasons.add(output.finish_reason)
            assert not set(output.token_ids[:-1]) & set(stops), "went on after a stop token"
            if output.token_ids[-1] in stops:
                assert output.finish_reason == "stop"
            else:
                assert output.finish_reason == "length"
                assert len(output.token_ids) == 9
        assert reasons == {"stop", "length"}

    def test_tells_the_newest_tokens_alone(self) -> None:
        """If it can: as `partials` have them, of those of the requests asked for that have more."""
        engine = self.ready(max_tokens=self.longest + 8)
        if not isinstance(engine, TellsTokens):
            pytest.skip("all partial samples are asked for instead")
        requests = [request for p in range(3) for request in self.request(p, max_new_tokens=self.longest).requests()]
        engine.submit(requests)
        for _ in range(10_000):
            engine.poll()
            partials = {output.key: output.token_ids for output in engine.partials()}
            if len(partials) == 12 and min(map(len, partials.values())) > 4:
                break
        had = {key: number % 5 for number, key in enumerate(partials)}
        assert {key: tuple(new) for key, new in engine.tokens_after(had).items()} == {
            key: partials[key][number:] for key, number in had.items()
        }
        assert engine.tokens_after({key: len(tokens) for key, tokens in partials.items()} | {(77, 0, (0,)): 0}) == {}

    @pytest.mark.parametrize("stops", [("a",), ("bc", "d")], ids=str)
    def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(self, stops: tuple[str, ...]) -> None:
        """As the runtime sees to it: what is drawn behind that token is thrown away, and its slot is free."""
        engine, watch = self.ready(slots=8), StopWatch(Letters())
        groups = [self.request(p, max_new_tokens=20, stop=stops, stop_token_ids=(1,)) for p in range(6)]
        requests = {request.key: request for group in groups for request in group.requests()}
        for request in requests.values():
            assert watch.follow(request, ()) is None
        engine.submit(list(requests.values()))
        outputs: list[SampleOutput] = []
        for _ in range(10_000):
            if not engine.progress():
                break
            outputs += watch.look(engine, engine.poll(), lambda key: key in requests)
        assert sorted(output.key for output in outputs) == sorted(requests)
        for output in outputs:
            text = "".join(map(Letters.letter, output.token_ids))
            ends = any(text.endswith(stop) for stop in stops)
            assert not any(stop in text[:-1] for stop in stops), "went on behind a stop string"
            assert (output.finish_reason == "stop") == (ends or output.token_ids[-1] == 1)
            assert output.spans[-1].end == len(output.token_ids)
            self.check_request(requests[output.key], output)

    @pytest.mark.parametrize("least", [1, 4, 20])
    def test_no_stop_token_among_the_first_ones(self, least: int) -> None:
        """`min_new_tokens` rules them out, and nothing else: from there on a sample ends at the first one."""
        self.takes({"min_new_tokens": least})
        engine, stops = self.ready(), tuple(range(self.vocabulary // 2))
        params: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": stops, "min_new_tokens": least}
        requests = [self.request(p, **params) for p in range(6)]
        submit(engine, [*requests, self.request(6, samples=2, max_new_tokens=3)])
        reasons = set()
        for output in run_until_done(engine):
            if output.position == 6:
                self.check(self.request(6, samples=2, max_new_tokens=3), output)
                continue
            ends = [place for place, token in enumerate(output.token_ids) if token in stops]
            assert ends == ([len(output.token_ids) - 1] if output.finish_reason == "stop" else [])
            assert len(output.token_ids) > least or output.finish_reason == "length"
            self.check(requests[output.position], output)
            reasons.add(output.finish_reason)
        assert ("stop" in reasons) == (least < 9)

    def test_serves_nothing_without_whole_weights(self) -> None:
        """Before the first complete update a poll starts nothing; an incomplete one names what is missing."""
        engine = self.make_engine()
        assert engine.version is None
        submit(engine, [self.request(2)])
        assert engine.poll() == []
        assert engine.progress() == {2: 0}
        engine.begin_update(FIRST)
        parameters = self.weights(0)
        engine.update(parameters[:-1])
        assert engine.version is None
        assert engine.poll() == []
        with pytest.raises(ValueError, match=parameters[-1][0].replace(".", r"\.")):
            engine.end_update()
        assert engine.version is None
        assert engine.poll() == []
        engine.update(parameters[-1:])
        engine.end_update()
        # In a list: the type checker believes that the property is still None.
        assert [engine.version] == [FIRST]
        assert len(run_until_done(engine)) == 4

    def test_torn_engine_stands_still(self) -> None:
        """Between begin_update and end_update no token is produced."""
        engine = self.ready()
        submit(engine, [self.request(2, max_new_tokens=8)])
        engine.poll()
        before = dict(engine.progress())
        engine.begin_update(SECOND)
        assert engine.version is None
        assert engine.poll() == []
        assert engine.progress() == before

    def test_refuses_wrong_weights(self) -> None:
        """Unknown names and wrong shapes."""
        engine = self.ready()
        engine.begin_update(SECOND)
        name, parameter = self.weights(0)[0]
        with pytest.raises(KeyError, match="no_such_parameter"):
            engine.update([("no_such_parameter", parameter)])
        with pytest.raises(ValueError, match=r"shape .* expected"):
            engine.update([(name, parameter[:-1])])

    def test_new_weights_between_groups(self) -> None:
        """Samples started after an update follow the new weights and carry the new version."""
        engine = self.ready()
        request = self.request(5, max_new_tokens=5)
        submit(engine, [request])
        old = by_sample(run_until_done(engine))
        self.load(engine, 1, SECOND)
        assert engine.version == SECOND
        submit(engine, [request])
        new = by_sample(run_until_done(engine))
        for key, output in new.items():
            self.check(request, output, number=1)
            assert output.spans == (Span(0, 1, 0, 5),)
            assert old[key].spans == (Span(0, 0, 0, 5),)
            assert output.logprobs != old[key].logprobs

    def test_new_weights_in_mid_sample(self) -> None:
        """Each token carries the version that produced it; those before the swap are as without a swap."""
        self.count_polls()
        engine = self.ready()
        request = self.request(5, max_new_tokens=7)
        submit(engine, [request])
        engine.poll()
        engine.poll()
        self.load(engine, 1, SECOND)
        self.load(engine, 2, Version(1, 2))
        outputs = run_until_done(engine)
        assert len(outputs) == 4
        for output in outputs:
            assert output.spans == (Span(0, 0, 0, 2), Span(1, 2, 2, 7))
            expected = self.expected(0, request, output)
            old = [math.log(probs[token]) for probs, token in zip(expected, output.token_ids, strict=True)]
            np.testing.assert_allclose(output.logprobs[:2], old[:2], atol=self.tolerance)
            assert not np.allclose(output.logprobs[2:], old[2:], atol=10 * self.tolerance)

    def test_says_how_likely_given_tokens_are(self) -> None:
        """If the engine can: under the newest weights, while samples run in all slots, of which none is lost."""
        engine = self.ready(slots=4)
        if not isinstance(engine, Scoring):
            pytest.skip("the engine cannot compute log-probs of given tokens: versions are not checked with it")
        assert engine.precision in TOLERANCE
        submit(engine, [self.request(5, max_new_tokens=30)])
        early = engine.poll()
        self.load(engine, 1, SECOND)
        rows = canary_rows(self.vocabulary, 20)
        found = engine.logprobs(rows)
        late: list[SampleOutput] = []
        if found is None and isinstance(engine, ScoringLater):
            for _ in range(10_000):
                if engine.scoring:
                    late += engine.poll()
            found = engine.late_logprobs()
        assert found is not None
        for row, logprobs in zip(rows, found, strict=True):
            probs = [reference_probs(line, SamplingParams()) for line in self.logits(1, row)[:-1]]
            expected = [math.log(at[token]) for at, token in zip(probs, row[1:], strict=True)]
            np.testing.assert_allclose(logprobs, expected, atol=self.tolerance)
        outputs = [*early, *late, *run_until_done(engine)]
        assert [len(output.token_ids) for output in outputs] == [30] * 4

    def test_abort_returns_partials_and_the_rest_goes_on(self) -> None:
        """An aborted group can be submitted again, and then samples the same tokens."""
        self.count_polls()
        engine = self.ready(slots=12)
        requests = [self.request(p, max_new_tokens=8) for p in range(5)]
        submit(engine, requests)
        for _ in range(3):
            assert engine.poll() == []
        partials = by_sample(engine.abort([1, 4, 77]))
        # Position 4 was still queued: nothing of it had been produced.
        assert sorted(partials) == [(1, sample) for sample in range(4)]
        for output in partials.values():
            assert output.finish_reason == "abort"
            assert len(output.token_ids) == 3
            assert output.spans == (Span(0, 0, 0, 3),)
            self.check(requests[1], output)
        assert sorted(engine.progress()) == [0, 2, 3]
        submit(engine, [requests[1], requests[4]])
        outputs = by_sample(run_until_done(engine))
        assert len(outputs) == 20
        for key, output in outputs.items():
            self.check(requests[key[0]], output)
            if self.exact and key in partials:
                assert output.token_ids[:3] == partials[key].token_ids

    def test_many_groups_through_few_slots(self) -> None:
        """Slots are reused."""
        engine = self.ready(slots=6)
        requests = [self.request(p, samples=1 + p % 4, max_new_tokens=1 + p % 5) for p in range(64)]
        submit(engine, requests)
        assert engine.free_slots == 0
        outputs = by_sample(run_until_done(engine))
        assert sorted(outputs) == [(r.position, sample) for r in requests for sample in range(r.samples)]
        assert engine.free_slots == 6
        for key, output in outputs.items():
            self.check(requests[key[0]], output)

    def test_group_larger_than_all_slots(self) -> None:
        """It runs nevertheless."""
        engine = self.ready(slots=3)
        request = self.request(8, samples=8, max_new_tokens=3)
        submit(engine, [request])
        outputs = by_sample(run_until_done(engine))
        assert sorted(outputs) == [(8, sample) for sample in range(8)]
        for output in outputs.values():
            self.check(request, output)

    def test_progress_counts_the_samples_that_are_here(self) -> None:
        """By position, until the last sample of a position has finished; finished ones are no longer counted."""
        engine = self.ready(slots=8)
        submit(engine, [self.request(p, max_new_tokens=9, stop_token_ids=(1, 2)) for p in range(4)])
        assert dict(engine.progress()) == dict.fromkeys(range(4), 0)
        left = dict.fromkeys(range(4), 4)
        while engine.progress():
            for output in engine.poll():
                left[output.position] -= 1
            progress = engine.progress()
            assert sorted(progress) == [position for position, samples in left.items() if samples]
            assert all(tokens <= 8 * left[position] for position, tokens in progress.items())

    def test_each_sample_has_its_own_settings(self) -> None:
        """Those of a group, too: a greedy one beside others."""
        engine = self.ready()
        plain, greedy = self.request(4, samples=4, max_new_tokens=6), self.request(4, max_new_tokens=9, temperature=0.0)
        engine.submit([*plain.requests()[1:], greedy.requests()[0]])
        outputs = by_sample(run_until_done(engine))
        self.check(greedy, outputs[4, 0])
        assert len(outputs[4, 0].token_ids) == 9
        for number in range(1, 4):
            self.check(plain, outputs[4, number])
            assert len(outputs[4, number].token_ids) == 6

    def test_a_later_request_of_a_sample_reads_what_it_had(self) -> None:
        """As a turn behind an environment's tokens: random numbers are those of its stream, from its offset on."""
        engine = self.ready()
        first = self.request(5, samples=2, max_new_tokens=4)
        submit(engine, [first])
        had = by_sample(run_until_done(engine))[5, 1]
        prefix = (*first.prompt_ids, *had.token_ids, 3, 4, 5)
        later = SampleRequest(5, 1, prefix, first.seed, SamplingParams(max_new_tokens=24), call=(1,), offset=4 + 3)
        drawn = []
        for request in (later, replace(later, call=(2,)), replace(later, stream=(1,)), replace(later, offset=0)):
            engine.submit([request])
            (output,) = run_until_done(engine)
            self.check_request(request, output)
            drawn.append(output.token_ids)
        if self.exact:
            assert drawn[0] == drawn[1]
            assert len(set(drawn)) == 3

    def test_a_sample_may_have_several_calls_at_a_time(self) -> None:
        """As branches of an episode: each has an output of its own, and the group is aborted as one."""
        engine = self.ready()
        (first,) = self.request(7, samples=1, max_new_tokens=6).requests()
        later = replace(first, call=(1, 0), stream=(1, 0))
        engine.submit([first, later])
        outputs = {output.call: output for output in run_until_done(engine)}
        assert {call: output.key for call, output in outputs.items()} == {(0,): first.key, (1, 0): later.key}
        for request in (first, later):
            self.check_request(request, outputs[request.call])
        if self.exact:
            assert outputs[first.call].token_ids != outputs[later.call].token_ids
        engine.submit([first, later])
        engine.poll()
        assert {partial.key for partial in engine.partials()} <= {first.key, later.key}
        engine.abort([7])
        assert engine.progress() == {}

    def test_a_withdrawn_request_makes_room_and_the_others_go_on(self) -> None:
        """Whether it runs or waits; what is not here is ignored."""
        engine = self.ready(slots=2)
        requests = self.request(7, samples=4, max_new_tokens=6).requests()
        calls = [replace(request, call=(1, 0), stream=(1, 0)) for request in requests[:1]]
        engine.submit([*requests, *calls])
        # An engine that decodes by itself may have finished some.
        early = {output.key: output for output in engine.poll()}
        engine.withdraw([requests[0].key, requests[3].key, (8, 0, (0,))])
        late = {output.key: output for output in run_until_done(engine)}
        left = [*requests[1:3], *calls]
        assert sorted({*early, *late} - (early.keys() - {request.key for request in left})) == sorted(
            request.key for request in left
        )
        outputs = early | late
        for request in left:
            self.check_request(request, outputs[request.key])
        engine.withdraw([request.key for request in requests])
        assert engine.progress() == {}
        engine.submit(requests[:1])
        assert [output.key for output in run_until_done(engine)] == [requests[0].key]

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"prompt_ids": ()}, "prompt is empty"),
            ({"prompt_ids": (1,) * 60}, "a slot holds 64"),
            ({"prompt_ids": (1, 10_000_000)}, r"token ids outside 0 … \d+: 10000000"),
            ({"params": SamplingParams(max_new_tokens=0)}, "max_new_tokens is 0"),
            ({"params": SamplingParams(max_new_tokens=100)}, "a slot holds 64"),
            ({"params": SamplingParams(temperature=-1.0)}, "temperature"),
            ({"params": SamplingParams(top_p=0.0)}, "top_p"),
            ({"params": SamplingParams(top_k=-1)}, "top_k"),
            ({"params": SamplingParams(min_p=1.5)}, "min_p 1.5"),
            ({"params": SamplingParams(min_new_tokens=-1)}, "min_new_tokens -1"),
            ({"params": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty 0.0"),
            ({"params": SamplingParams(logit_bias={10_000_000: 1.0})}, "logit_bias of token 10000000"),
            ({"params": SamplingParams(logit_bias={1: math.inf})}, "logit_bias inf; expected finite numbers"),
        ],
        ids=str,
    )
    def test_refuses_impossible_requests(self, change: dict[str, Any], message: str) -> None:
        """The message names sample, position and limit."""
        engine = self.ready(max_tokens=64)
        fields: dict[str, Any] = {"position": 9, "sample": 1, "prompt_ids": (1, 2), "seed": 0}
        with pytest.raises(ValueError, match=rf"sample 1 of position 9.*{message}"):
            engine.submit([*self.request(1).requests(), SampleRequest(**{**fields, **change})])
        assert engine.progress() == {}, "a refused submission must queue nothing"

    def test_refuses_a_sample_twice(self) -> None:
        """Others of its group may follow."""
        engine = self.ready()
        samples = self.request(1).requests()
        engine.submit(samples[:3])
        with pytest.raises(ValueError, match="sample 2 of position 1 is already here"):
            engine.submit(samples[2:])
        engine.submit(samples[3:])
        assert sorted(by_sample(run_until_done(engine))) == [(1, sample) for sample in range(4)]

    def test_free_slots_counts_what_waits(self) -> None:
        """Queued samples claim their slots."""
        engine = self.ready(slots=10, max_tokens=self.longest + 8)
        assert engine.free_slots == 10
        submit(engine, [self.request(1, samples=4, max_new_tokens=self.longest)])
        assert engine.free_slots == 6
        engine.poll()
        assert engine.free_slots == 6
        engine.abort([1])
        assert engine.free_slots == 10
        engine.close()
