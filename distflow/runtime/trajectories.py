"""The samples under way at a generating worker: for each, one call of the generate step, and what it has so far.

A sample is one or several sequences of segments: tokens written by the model, and between them those of an
environment, by which the step has extended the model's before it asked for more. Nobody has to say which are which: a
call asks for what follows a prefix. If the prefix begins with all tokens that a sequence of the sample has, it goes on
with that one, and what comes behind them is the environment's. Else it is the prompt of a new sequence: an earlier turn
was stripped, a summary takes the place of the conversation, or another agent has its say. What is asked for aside (a
second opinion that is not to be trained on) is no part of the sample.

The life of a sample: begun (the step runs to its first `await`, which is a request to the engine) → its request is
answered (the step goes on to its next request) → … → the step returns: finished. The samples of a group become rows of
a batch together. Samples that another worker began are replayed: the recorded tokens of the model answer the step's
requests, as far as they go, and the engine continues the request in the middle of which they end.

Where the step fails on a sample, its settings say what becomes of it (`episode_errors.py`): it is begun anew, with
other random numbers and without what it had, or it is finished as it is. What other workers are told of one that was
begun anew are its versions alone: its tokens replace others, which an owner may have already.

Example: prompt 12= · model 1 2 ? · environment wrong= · model 1 2 → response "12?wrong=12", mask 1110000001 1.
Then prompt [12 or 12?]= · model 1 2 → a second row of the sample, with this prompt and the response "12".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from numbers import Real
from typing import NamedTuple

import torch

from distflow.data.batch import Batch
from distflow.errors import StepError
from distflow.exchange.messages import Lease
from distflow.exchange.partials import clipped
from distflow.runtime.engine_numbers import BAD_LOGPROBS, EngineNumbers, complaint, sound
from distflow.runtime.episode_errors import EpisodeFailed, Fate
from distflow.runtime.generate_step import (
    GenerateStep,
    Returned,
    SampleOrigin,
    Segment,
    TokenSequence,
    Trajectory,
    Wanted,
    assemble,
)
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Engine, Tokenizer
from distflow.types import (
    REWARD,
    REWARD_PARTS,
    BegunSample,
    Completion,
    Episode,
    FinishReason,
    LeaseKind,
    SampleKey,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    Uid,
    Version,
    lease_kind,
)

CUT_OFF = "cut off"
"""Why samples are left out under `batch.mask_truncated: all`."""


class SampleLimits(NamedTuple):
    """What there may be of a prompt's samples."""

    samples: int
    """Of one prompt."""
    tokens: int
    """That a sample may have behind the data's prompt, an environment's and the prompts of later sequences included: so
    much was reserved for it."""


class Trajectories:
    """All samples of one worker that are not yet part of a batch, on its main thread. `limits`: by kind of lease;
    `leaves_out_truncated`: samples for training that are cut off are left out (`batch.mask_truncated: all`)."""

    def __init__(
        self,
        step: GenerateStep,
        limits: Mapping[LeaseKind, SampleLimits],
        tokenizer: Tokenizer,
        dtype: torch.dtype,
        numbers: EngineNumbers | None = None,
        *,
        leaves_out_truncated: bool = False,
    ) -> None:
        """`numbers`: judges what the engine gives."""
        self.step = step
        self._numbers = EngineNumbers("the engine", MetricStore()) if numbers is None else numbers
        self._leaves_out_truncated = leaves_out_truncated
        self._limits = limits
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._open: dict[SampleKey, Trajectory] = {}
        self._finished: dict[SampleKey, Trajectory] = {}
        self._whole: list[SampleOutput] = []
        """Finished without the engine, since the last `take`."""
        self._later = 0
        """How many of the open ones have been answered at least once."""
        self._version: Version | None = None
        """What the engine had loaded when it was last looked at."""

    def begin(self, leases: Iterable[Lease]) -> list[SampleRequest]:
        """Begin all samples of these leases; returns what the engine is to be asked for."""
        wanted: list[SampleRequest] = []
        for lease in leases:
            had = {sample.sample: sample for sample in lease.begun}
            origin = SampleOrigin(lease.uid, lease.prompt_ids, lease.prompt_text, lease.task, lease.seed)
            wanted += self._begin([origin] * self._limits_of(lease.position).samples, had)
        return wanted

    def begin_rows(self, rows: Batch, seed: int) -> list[SampleRequest]:
        """Begin all samples of one group, each from the prompt of its row; the same otherwise.

        `rows` have been checked (`prompts_complaint`).
        """
        uids = map(Uid._make, rows.dense("uid").tolist())
        ids = (tuple(row.tolist()) for row in rows.ragged("prompt_ids").rows())
        texts = zip(rows.texts("prompt_text"), rows.texts("task"), strict=True)
        origins = [SampleOrigin(uid, tokens, *about, seed) for uid, tokens, about in zip(uids, ids, texts, strict=True)]
        return self._begin(origins, {})

    def _begin(self, origins: Sequence[SampleOrigin], had: Mapping[int, BegunSample]) -> list[SampleRequest]:
        """Begin all samples of a group."""
        wanted: list[SampleRequest | None] = []
        tasks = {origin.task: json.loads(origin.task) for origin in origins}
        for number, origin in enumerate(origins):
            episode = Episode(origin.uid, number, origin.prompt_ids, origin.prompt_text, tasks[origin.task])
            wanted.append(self._go_on(self._begun(origin, episode, had.get(number)), None))
        return [request for request in wanted if request is not None]

    def _begun(self, origin: SampleOrigin, episode: Episode, had: BegunSample | None) -> Trajectory:
        """A sample that the step has been begun for."""
        key, sequences = (origin.uid.position, episode.sample), [TokenSequence(origin.prompt_ids)]
        self._open[key] = Trajectory(key, origin, episode, self.step.begin(episode), had, sequences)
        return self._open[key]

    def submit(self, engine: Engine, requests: Sequence[SampleRequest]) -> None:
        """Give requests to the engine. Where it cannot do what the step has asked for, the episode has failed."""
        try:
            engine.submit(requests)
        except ValueError as error:
            # None of them was taken, and the other samples are not to blame.
            if len(requests) > 1:
                for request in requests:
                    self.submit(engine, [request])
                return
            (request,) = requests
            sample = self._open[request.position, request.sample]
            failed = self.step.failure(sample.call, "asks for what the engine cannot do", f": {error}")
            again = self._again(sample, failed)
            if again is not None and (wanted := self._go_on(again, None)) is not None:
                self.submit(engine, [wanted])

    def judge(
        self, outputs: Sequence[SampleOutput], version: Version | None
    ) -> tuple[list[SampleOutput], dict[SampleKey, str]]:
        """Look at the log-probs of outputs, with this version in the engine; returns them, those that cannot be used
        as zeros, and what is wrong with these, by sample. Raises WorkerFailed as `EngineNumbers.judge` does.
        """
        judged, wrong = [], dict[SampleKey, str]()
        self._version = version
        for output in outputs:
            key = (output.position, output.sample)
            found, why = self._numbers.judge(output, self._open[key].origin.uid, version)
            judged.append(found)
            if why:
                wrong[key] = why
        return judged, wrong

    def leave_out(self, wrong: Mapping[SampleKey, str]) -> None:
        """Leave these samples out, whose log-probs cannot be used; those of validation stay, since it uses none."""
        for key in wrong:
            if lease_kind(key[0]) == "train":
                self._open[key].left_out = BAD_LOGPROBS

    def take(self, outputs: Sequence[SampleOutput]) -> tuple[list[SampleRequest], list[SampleOutput]]:
        """Go on with the samples whose requests are answered; returns what to ask for next, and finished samples.

        Of a finished sample, the output has all that the model has written in it.
        """
        wanted: list[SampleRequest | None] = []
        texts = self._tokenizer.decode_batch([output.token_ids for output in outputs], skip_special=True)
        for output, text in zip(outputs, texts, strict=True):
            sample = self._open[output.position, output.sample]
            wanted.append(self._go_on(sample, self._answered(sample, output, text)))
        finished, self._whole = self._whole, []
        return [request for request in wanted if request is not None], finished

    def partials(self, outputs: Sequence[SampleOutput], positions: Collection[int] | None = None) -> list[SampleOutput]:
        """What the model has written so far in the open samples of these groups (None: all), with finish_reason abort.

        `outputs`: the engine's, of their newest requests; those with log-probs that cannot be used are left out.
        """
        outputs = [sound(output) for output in outputs if not complaint(output.token_ids, output.logprobs)]
        if not self._later:
            return [self._told(self._open[output.position, output.sample], output) for output in outputs]
        running = {(output.position, output.sample): output for output in outputs}
        return [
            self._told(sample, sample.recorded(running.get(key), "abort"))
            for key, sample in self._open.items()
            if (positions is None or key[0] in positions) and (key in running or sample.written)
        ]

    def progress(self, running: Mapping[int, int]) -> Mapping[int, int]:
        """Tokens of the open samples by prompt position; `running`: those of their newest requests."""
        if not self._later:
            return running
        tokens = dict(running)
        for (position, _), sample in self._open.items():
            tokens[position] += sum(len(segment.token_ids) for segment in sample.written)
        return tokens

    def forget(self, positions: Collection[int]) -> None:
        """Drop these groups."""
        for table in (self._open, self._finished):
            for key in [key for key in table if key[0] in positions]:
                sample = table.pop(key)
                self._later -= table is self._open and bool(sample.written)
                self._close(sample)
        self._whole = [output for output in self._whole if output.position not in positions]

    def batch(self, positions: Iterable[int]) -> Batch:
        """The samples of groups that are whole, as rows in the given order; they are no longer kept here."""
        samples_of = {position: self._limits_of(position).samples for position in positions}
        keys = [(position, number) for position, samples in samples_of.items() for number in range(samples)]
        samples = [self._finished.pop(key) for key in keys]
        return assemble(samples, self._tokenizer, self._dtype, self.step.plan, self._version)

    def _limits_of(self, position: int) -> SampleLimits:
        return self._limits[lease_kind(position)]

    def _go_on(self, sample: Trajectory, sent: Completion | None) -> SampleRequest | None:
        """Let the step go on until its next request that the engine is to answer; None if it comes to its end.

        Where it fails, the sample is begun anew, or is at its end.
        """
        while True:
            try:
                return self._next(sample, sent)
            except EpisodeFailed as failed:
                again, sent = self._again(sample, failed), None
                if again is None:
                    return None
                sample = again

    def _next(self, sample: Trajectory, sent: Completion | None) -> SampleRequest | None:
        """What one attempt asks for next; raises EpisodeFailed."""
        while True:
            found = self.step.go_on(sample.call, sample.episode, sent)
            if isinstance(found, Returned):
                self._end(sample, found.value)
                return None
            request = self._request(sample, found)
            recorded = self._recorded(sample, request)
            if recorded is None:
                return request
            sample.replayed += len(recorded.token_ids)
            if not recorded.finish_reason:
                return replace(request, begun=recorded)
            reason: FinishReason = "stop" if recorded.finish_reason == "stop" else "length"
            tokens, logprobs, filtered = recorded.token_ids, recorded.logprobs, recorded.filtered_logprobs
            (text,) = self._tokenizer.decode_batch([tokens], skip_special=True)
            output = SampleOutput(*sample.key, tokens, logprobs, recorded.spans, reason, filtered)
            sent = self._answered(sample, output, text)

    def _again(self, sample: Trajectory, failed: EpisodeFailed) -> Trajectory | None:
        """Another attempt at a sample on which the step has failed; None if there is to be none."""
        fate = self.step.errors.judge(failed, sample.episode, sample.attempt)
        self._close(sample)
        self._later -= bool(sample.written)
        if fate != "again":
            self._give_up(sample, failed.reason, fate)
            return None
        origin = sample.origin
        # The task anew, too: the step may have changed it.
        episode = replace(sample.episode, task=json.loads(origin.task))
        anew = self._begun(origin, episode, None)
        anew.attempt, anew.drawn = sample.attempt + 1, sample.drawn + len(sample.asked)
        return anew

    def _close(self, sample: Trajectory) -> None:
        """End the call of a sample; that it fails even then is counted, and changes nothing."""
        try:
            self.step.end(sample.call, sample.episode)
        except EpisodeFailed as failed:
            self.step.errors.note(failed, sample.episode, sample.attempt)

    def _give_up(self, sample: Trajectory, reason: str, fate: Fate) -> None:
        """Finish a sample with what the model has written, and the environment before that: what it has put behind it
        may be what the engine cannot take."""
        newest = sample.sequences[-1].segments
        while newest and not newest[-1].spans:
            newest.pop()
        sample.finish_reason = "error"
        sample.fields = {name: nan if name.startswith(REWARD_PARTS) else 0.0 for name in self.step.further}
        if fate != "zero":
            sample.left_out = reason
        if fate == "drop":
            sample.dropped = reason
        self._finish(sample)

    def _finish(self, sample: Trajectory) -> None:
        self._finished[sample.key] = self._open.pop(sample.key)
        self._whole.append(self._told(sample, sample.recorded(None, sample.finish_reason)))

    def _told(self, sample: Trajectory, output: SampleOutput) -> SampleOutput:
        """What other workers are told of a sample: of one that was begun anew, or has failed, no tokens."""
        if sample.attempt == 1 and sample.finish_reason != "error":
            return output
        return SampleOutput(*sample.key, (), (), output.spans, "abort")

    def _recorded(self, sample: Trajectory, request: SampleRequest) -> BegunSample | None:
        if sample.begun is None:
            return None
        several = self.step.plan.environment is not None
        return _recorded(sample.begun, sample.replayed, request, several=several)

    def _answered(self, sample: Trajectory, output: SampleOutput, text: str) -> Completion:
        """Note what the model has written; returns it in the form for the step."""
        self._later += not sample.written
        about = (output.token_ids, output.logprobs, output.spans, sample.train, text, output.filtered_logprobs)
        sample.written.append(Segment(*about))
        if not sample.aside:
            sample.sequences[-1].segments.append(sample.written[-1])
            sample.finish_reason = output.finish_reason
        episode = sample.episode
        return Completion(episode.prompt, text, episode.task, output.finish_reason, output.token_ids)

    def _end(self, sample: Trajectory, value: object) -> None:
        """The step has returned."""
        if not sample.sequences[-1].segments:
            what = "returned before it awaited tokens of the sample"
            expected = "; expected completion = await generate(episode.prompt_ids, SamplingParams(…))"
            raise self.step.failure(sample.call, what, expected)
        sample.fields = self._fields(sample, value)
        cut_off = sample.finish_reason == "length" and lease_kind(sample.key[0]) == "train"
        # What trains nothing, such as the greedy sample that is a baseline, stays what it is.
        if self._leaves_out_truncated and cut_off and any(segment.trains for segment in sample.written):
            sample.left_out = sample.left_out or CUT_OFF
        self._later -= 1
        self._finish(sample)
        self.step.errors.succeeded()

    def _fields(self, sample: Trajectory, value: object) -> Mapping[str, float]:
        """What the step returned, if it is what it declares."""
        expected = self.step.further
        if value is None and not expected:
            return {}
        given = {} if value is None else value
        if not isinstance(given, Mapping) or set(given) != set(expected):
            shown = sorted(map(str, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
            wanted = f"a mapping with a number for each of {sorted(expected)}" if expected else "nothing"
            declared = "what its @step(writes=…) lists is what it returns for each sample"
            raise self.step.failure(sample.call, f"returned {shown}", f"; expected {wanted}: {declared}")
        wrong = {name: value for name, value in given.items() if not _is_number(name, value)}
        if wrong:
            what = f"returned {wrong}"
            raise self.step.failure(sample.call, what, f"; expected a number for each of {sorted(expected)}")
        return given

    def _request(self, sample: Trajectory, wanted: Wanted) -> SampleRequest:
        """What to ask the engine for; notes what the sample has before that."""
        origin, prefix = sample.origin, wanted.prompt_ids
        sample.train, sample.aside = wanted.train, wanted.aside
        behind, params = 0, wanted.params
        if sample.written or wanted.aside or prefix is not origin.prompt_ids:
            self._extend(sample, prefix)
            behind = max(0, len(prefix) - len(origin.prompt_ids)) if wanted.aside else sample.tokens
        most = self._limits_of(origin.uid.position).tokens
        room = most - behind
        if room < 1:
            what = f"asks for more after {behind} tokens behind the prompt"
            cure = f"let it return before, or raise max_tokens (flow.steps.{self.step.plan.name}.with)"
            raise self.step.failure(sample.call, what, f", and its longest sample has {most}: {cure}")
        if params.max_new_tokens > room:
            params = replace(params, max_new_tokens=room)
        again = sample.drawn + sample.asked.count(prefix)
        sample.asked.append(prefix)
        return SampleRequest(*sample.key, prefix, origin.seed, params, None, behind, again)

    def _extend(self, sample: Trajectory, prefix: tuple[int, ...]) -> None:
        """Note the tokens that the environment has put behind the model's, or the prompt of a new sequence."""
        newest = sample.sequences[-1]
        if not sample.aside and len(prefix) == len(newest) and newest.leads_to(prefix):
            return
        if self.step.plan.environment is None:
            raise StepError(
                f"{self.step.where} asks for more after its first turn, or after other tokens than the prompt, and it "
                "declares no environment: write @step(…, environment=[…]) with `replay` if the recorded turns of the "
                "model make it come to the same state again, `repeatable` if two workers may make the same sample"
            )
        if not sample.aside:
            sample.go_on_behind(prefix)


def _is_number(name: str, value: object) -> bool:
    """Whether a step may return this for a field. A part of the reward may be missing: NaN."""
    if not isinstance(value, Real):
        return False
    try:
        return isfinite(value) or name != REWARD
    except OverflowError:
        return False


def _recorded(begun: BegunSample, start: int, request: SampleRequest, *, several: bool) -> BegunSample | None:
    """Of what another worker had, the part that answers this request, or begins to; None if nothing is left.

    `start`: tokens that have answered earlier requests. `several`: others may follow; then this one ends where an
    engine would have ended it. What answers it whole has a finish reason.
    """
    left, reason = begun.token_ids[start:], ""
    if not left:
        return None
    if several:
        left, reason = _turn(left, request.params)
    end = start + len(left)
    spans = [span._replace(start=span.start - start, end=span.end - start) for span in clipped(begun.spans, start, end)]
    if not reason and end == len(begun.token_ids):
        reason = begun.finish_reason
    logprobs, filtered = begun.logprobs[start:end], begun.filtered_logprobs[start:end]
    return BegunSample(request.sample, left, logprobs, tuple(spans), reason, filtered)


def _turn(tokens: tuple[int, ...], params: SamplingParams) -> tuple[tuple[int, ...], str]:
    """The first turn of these tokens, and why it ended; "" if they are its beginning only."""
    most = params.max_new_tokens
    stop = next((number for number, token in enumerate(tokens[:most], 1) if token in params.stop_token_ids), None)
    if stop is not None:
        return tokens[:stop], "stop"
    return tokens[:most], "length" if len(tokens) >= most else ""
