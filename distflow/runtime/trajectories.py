"""The samples under way at a generating worker: for each, one call of the generate step, and what it has so far.

A sample is one or several sequences of segments: tokens written by the model, and between them those of an
environment, by which the step has extended the model's before it asked for more. Nobody has to say which are which: a
call asks for what follows a prefix. If the prefix begins with all tokens that a sequence of the sample has, it goes on
with that one, and what comes behind them is the environment's. Else it is the prompt of a new sequence: an earlier turn
was stripped, a summary takes the place of the conversation, or another agent has its say. What is asked for aside (a
second opinion that is not to be trained on) is no part of the sample.

The life of a sample: begun (the step runs to its first `await`) → it asks for tokens, once or several times → its
requests are answered (the step goes on) → … → the step returns: finished. Steps run on the worker's event loop
(`episode_loop.py`), beside the thread that calls what is here: whatever is posted there has had its effect when a call
returns, except where a step waits for something else, or computes. What comes of that is heard by the next `take`. The
samples of a group become rows of a batch together. Samples that another worker began are replayed: what the model has
written there answers the same calls, if they ask for the same, and the engine continues what was not answered. At the
first call that asks for something else the rest is thrown away: the model has not seen what it would follow.

Where the step fails on a sample, its settings say what becomes of it (`sample_errors.py`): it is begun anew, with
other random numbers and without what it had, or it is finished as it is. What other workers are told of one that was
begun anew are its versions alone: its tokens replace others, which an owner may have already.

Example: prompt 12= · model 1 2 ? · environment wrong= · model 1 2 → response "12?wrong=12", mask 1110000001 1.
Then prompt [12 or 12?]= · model 1 2 → a second row of the sample, with this prompt and the response "12".
"""

from __future__ import annotations

import json
import threading
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from distflow.data.batch import Batch
from distflow.data.stop_strings import StopWatch, cut_at
from distflow.errors import StepError
from distflow.exchange.messages import Lease
from distflow.log import logger
from distflow.runtime.attempt import (
    AskedTokens,
    AskedTool,
    Attempt,
    Event,
    Raised,
    RequestRefused,
    Returned,
    ToolAnswered,
    Withdrawn,
    in_order,
    is_full,
)
from distflow.runtime.generate_step import (
    AnsweredCall,
    GenerateStep,
    OpenCall,
    RandomStream,
    SampleLimits,
    SampleOrigin,
    Segment,
    TokenSequence,
    Trajectory,
    assemble,
    digest_of,
)
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Engine, Tokenizer
from distflow.runtime.sample_errors import BAD_LOGPROBS, EngineNumbers, EpisodeFailed, Fate, complaint, sound
from distflow.runtime.waits import ServingClock
from distflow.types import (
    BegunSample,
    CallNumber,
    Completion,
    Episode,
    FinishedSample,
    FinishReason,
    LeaseKind,
    RequestKey,
    SampleKey,
    SampleOutput,
    SampleRequest,
    Uid,
    Version,
    lease_kind,
)

log = logger(__name__)
REPLAY_DIFFERS = "rollout/replay_differs"
"""Samples that another worker began, and in which the step has asked for something else here."""
LOOK_EVERY_S = 0.25
"""So often time-outs are looked at."""
CUT_OFF = "cut off"
"""Why samples are left out under `batch.mask_truncated: all`."""


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
        most: int | None = None,
    ) -> None:
        """`numbers`: judges what the engine gives; `most`: samples that may be under way, None: any number."""
        self.step = step
        self._heard = threading.Event()
        self.on_news: Callable[[], None] = self._heard.set
        """Called by any thread when an episode has come to something. Who sets it waits for that otherwise than by
        `wait`."""
        self._loop = step.loop
        self._numbers = EngineNumbers("the engine", MetricStore()) if numbers is None else numbers
        self._leaves_out_truncated = leaves_out_truncated
        self._limits = limits
        self._most = most
        self.clock = ServingClock()
        self._told_of: set[str] = set()
        """What was said of places where steps block, or do not end."""
        self._late: list[tuple[Attempt, str]] = []
        """Attempts that are to be ended, and why."""
        self._tokenizer = tokenizer
        self._stops = StopWatch(tokenizer)
        self._dtype = dtype
        self._open: dict[SampleKey, Trajectory] = {}
        self._finished: dict[SampleKey, Trajectory] = {}
        self._whole: list[FinishedSample] = []
        """Finished without the engine, since the last `take`."""
        self._news: deque[tuple[Attempt, Event]] = deque()
        """What episodes have done since they were last heard."""
        self._posts: list[Callable[[], None]] = []
        """What the loop is to run next."""
        self._moving: list[Attempt] = []
        self._wanted: list[SampleRequest] = []
        """What the engine is to be asked for."""
        self._given_up: set[RequestKey] = set()
        """What it has been asked for, perhaps, and nobody waits for."""
        self.untold = False
        """Tools have answered since `partials` were last asked for: if it is lost, they are asked again elsewhere."""
        self._version: Version | None = None
        """What the engine had loaded when it was last looked at."""

    def begin(self, leases: Iterable[Lease]) -> list[SampleRequest]:
        """Begin all samples of these leases; returns what the engine is to be asked for."""
        for lease in leases:
            had: dict[int, dict[CallNumber, BegunSample]] = {}
            for begun in lease.begun:
                had.setdefault(begun.sample, {})[begun.call] = begun
            origin = SampleOrigin(lease.uid, lease.prompt_ids, lease.prompt_text, lease.task, lease.seed)
            self._begin([origin] * self._limits_of(lease.position).samples, had)
        return self._go_on()

    def begin_rows(self, rows: Batch, seed: int) -> list[SampleRequest]:
        """Begin all samples of one group, each from the prompt of its row; the same otherwise.

        `rows` have been checked (`prompts_complaint`).
        """
        uids = map(Uid._make, rows.dense("uid").tolist())
        ids = (tuple(row.tolist()) for row in rows.ragged("prompt_ids").rows())
        texts = zip(rows.texts("prompt_text"), rows.texts("task"), strict=True)
        origins = [SampleOrigin(uid, tokens, *about, seed) for uid, tokens, about in zip(uids, ids, texts, strict=True)]
        self._begin(origins, {})
        return self._go_on()

    def _begin(self, origins: Sequence[SampleOrigin], had: Mapping[int, dict[CallNumber, BegunSample]]) -> None:
        """Begin all samples of a group."""
        tasks = {origin.task: json.loads(origin.task) for origin in origins}
        self._loop.count(len(origins))
        for number, origin in enumerate(origins):
            episode = Episode(origin.uid, number, origin.prompt_ids, origin.prompt_text, tasks[origin.task])
            self._begun(origin, episode, had.get(number, {}))

    def _begun(
        self, origin: SampleOrigin, episode: Episode, had: dict[CallNumber, BegunSample], after: Attempt | None = None
    ) -> Trajectory:
        """A sample that the step is begun for, again `after` an attempt that has failed."""
        number, first = (1, 0) if after is None else (after.number + 1, after.calls)
        attempt = self.step.attempt(episode, self._hear, number=number, first=first)
        sample = Trajectory(attempt.key, origin, episode, attempt, had, [TokenSequence(origin.prompt_ids)])
        if not first:
            sample.streams[()] = [RandomStream((), len(origin.prompt_ids), origin.prompt_ids)]
        sample.since = sample.waits_since = self.clock.now
        self._open[attempt.key] = sample
        self._post(attempt, attempt.begin)
        return sample

    def submit(self, engine: Engine, requests: Sequence[SampleRequest]) -> None:
        """Give requests to the engine, and take those back that nobody waits for any more. What it cannot do is raised
        in the step that has asked for it."""
        if self._given_up:
            engine.withdraw(self._given_up)
            self._given_up.clear()
        try:
            if requests:
                engine.submit(requests)
        except ValueError as error:
            # None of them was taken, and the other samples are not to blame.
            if len(requests) > 1:
                for request in requests:
                    self.submit(engine, [request])
                return
            (request,) = requests
            self._refuse(request, RequestRefused("asks for what the engine cannot do", f": {error}"))
            self.submit(engine, self._go_on())

    def poll(self, engine: Engine) -> list[SampleOutput]:
        """Have the engine decode; returns what it has finished, and the samples that have come to a stop string."""
        return self._stops.look(engine, engine.poll(), self._is_open)

    def room(self, free_slots: int) -> tuple[int, int | None]:
        """How many samples may begin by the slots that are free; and how many may where the engine has nothing to
        decode, however few slots there are, None where it has."""
        left = max(0, free_slots) if self._most is None else self._most - len(self._open)
        return min(free_slots, left), None if self.asks else left

    @property
    def asks(self) -> bool:
        """Tell whether a request is open."""
        return any(sample.open for sample in self._open.values())

    @property
    def environments(self) -> str:
        """Name what samples wait for without a request, and where one of them does, as any thread may ask."""
        waiting = [sample for sample in self._open.copy().values() if not sample.open]
        where = next((f", one of them at {place}" for sample in waiting if (place := sample.attempt.place)), "")
        return f"environments of {len(waiting)} episodes{where}"

    @property
    def left(self) -> int:
        """Samples that are not finished."""
        return len(self._open)

    @property
    def news(self) -> bool:
        """Tell whether there is something for `take` that needs no engine."""
        self._look()
        return bool(self._news or self._whole or self._wanted or self._late)

    def wait(self, limit_s: float) -> bool:
        """Wait until there are news, where no engine has anything to do meanwhile; returns whether there are any, or no
        sample is left."""
        until = time.monotonic() + limit_s
        while True:
            # Before it is looked: what was heard, and taken, must not end the next wait.
            self._heard.clear()
            if self.news or not self._open:
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._heard.wait(min(left, LOOK_EVERY_S))

    def judge(
        self, outputs: Sequence[SampleOutput], version: Version | None
    ) -> tuple[list[SampleOutput], dict[SampleKey, str]]:
        """Look at the log-probs of outputs, with this version in the engine; returns them, those that cannot be used
        as zeros, and what is wrong with these, by sample. Raises WorkerFailed as `EngineNumbers.judge` does.
        """
        judged, wrong = [], dict[SampleKey, str]()
        self._version = version
        for output in self._expected(outputs):
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

    def take(self, outputs: Sequence[SampleOutput]) -> tuple[list[SampleRequest], list[FinishedSample]]:
        """Go on with the samples whose requests are answered; returns what to ask for next, and finished samples.

        A finished sample has all that the model has written for it.
        """
        expected = self._expected(outputs)
        texts = self._tokenizer.decode_batch([output.token_ids for output in expected], skip_special=True)
        for output, text in zip(expected, texts, strict=True):
            self._answer(self._open[output.position, output.sample], output, text)
        self._end_late()
        wanted = self._go_on()
        finished, self._whole = self._whole, []
        return wanted, finished

    def partials(self, outputs: Sequence[SampleOutput], positions: Collection[int] | None = None) -> list[SampleOutput]:
        """What the model has written so far in the open samples of these groups (None: all), with finish_reason abort.

        `outputs`: the engine's, of open requests; those with log-probs that cannot be used are left out.
        """
        running: dict[SampleKey, list[SampleOutput]] = {}
        for output in self._expected(outputs):
            if not complaint(output.token_ids, output.logprobs):
                running.setdefault((output.position, output.sample), []).append(sound(output))
        self.untold = False
        return [
            output
            for key, sample in self._open.items()
            if (positions is None or key[0] in positions) and (key in running or sample.answered or sample.tools)
            for output in self._told(sample, running.get(key, ()))
        ]

    def progress(self, running: Mapping[int, int]) -> Mapping[int, int]:
        """Tokens of the open samples by prompt position; `running`: those of their open requests."""
        tokens = dict(running)
        for (position, _), sample in self._open.items():
            if sample.answered or not sample.open:
                tokens.setdefault(position, 0)
                tokens[position] += sum(len(segment.token_ids) for segment in sample.written)
        return tokens

    def forget(self, positions: Collection[int]) -> None:
        """Drop these groups."""
        for table in (self._open, self._finished):
            for key in [key for key in table if key[0] in positions]:
                sample = table.pop(key)
                self._loop.count(-1)
                self._posts.append(sample.attempt.close)
        self._given_up = {key for key in self._given_up if key[0] not in positions}
        self._whole = [sample for sample in self._whole if sample.position not in positions]
        # What others ask for meanwhile is left for `take`.
        self._wanted = self._go_on()

    def batch(self, positions: Iterable[int]) -> Batch:
        """The samples of groups that are whole, as rows in the given order; they are no longer kept here."""
        samples_of = {position: self._limits_of(position).samples for position in positions}
        keys = [(position, number) for position, samples in samples_of.items() for number in range(samples)]
        samples = [self._finished.pop(key) for key in keys]
        self._loop.count(-len(samples))
        return assemble(samples, self._tokenizer, self._dtype, self.step.plan, self._version)

    def _limits_of(self, position: int) -> SampleLimits:
        return self._limits[lease_kind(position)]

    def _look(self) -> None:
        """Let the clock go on, and find the attempts that have taken too long."""
        if not self.clock.tick(LOOK_EVERY_S, stands=self._loop.preparing):
            return
        place = self._loop.blocked() if self._open else ""
        self._tell([self.step.blocks(place)] if place else [])
        self._tell(map(self.step.lingers, self._loop.left_behind()))
        self._tell(map(self.step.leaves, self._loop.left_tasks()))
        for sample in self._open.values():
            waiting = 0.0 if sample.open else self.clock.now - sample.waits_since
            why = self.step.errors.late(sample.episode, self.clock.now - sample.since, waiting)
            if why and sample.attempt not in [attempt for attempt, _ in self._late]:
                self._late.append((sample.attempt, why))

    def _tell(self, texts: Iterable[str]) -> None:
        """Log what is to be said about places in a user's code, once for each."""
        for text in texts:
            if text not in self._told_of:
                self._told_of.add(text)
                log.warning("%s", text)

    def _end_late(self) -> None:
        self._look()
        late, self._late = self._late, []
        for attempt, why in late:
            sample = self._open.get(attempt.key)
            if sample is not None and sample.attempt is attempt:
                self._fail(sample, self.step.failure(why, "", attempt.place))

    # -- between the two threads
    def _hear(self, attempt: Attempt, event: Event) -> None:
        """Take down what an episode does; called by any thread."""
        self._news.append((attempt, event))
        self.on_news()

    def _post(self, attempt: Attempt, call: Callable[[], None]) -> None:
        self._posts.append(call)
        if attempt.blocking:
            self._moving.append(attempt)

    def _go_on(self) -> list[SampleRequest]:
        """Let the episodes go on, as far as they come without the engine; returns what it is to be asked for."""
        while self._posts or self._news:
            if self._posts:
                posts, self._posts, moving, self._moving = self._posts, [], self._moving, []
                self._loop.post(posts, moving)
                self._loop.settle()
            news = [self._news.popleft() for _ in range(len(self._news))]
            for attempt, event in sorted(news, key=in_order):
                self._take_down(attempt, event)
        # Some may have been given up since.
        wanted, self._wanted = self._wanted, []
        return sorted((request for request in wanted if self._is_open(request.key)), key=lambda request: request.key)

    def _is_open(self, key: RequestKey) -> bool:
        """Whether the answer to a request is still waited for."""
        sample = self._open.get(key[:2])
        return sample is not None and key[2] in sample.open

    def _expected(self, outputs: Iterable[SampleOutput]) -> list[SampleOutput]:
        """Those that are waited for: a step may have given up what it has asked for."""
        return [output for output in outputs if self._is_open(output.key)]

    def _take_down(self, attempt: Attempt, event: Event) -> None:
        """Note what an attempt has done. Where it has failed, the sample is begun anew, or is at its end."""
        sample = self._open.get(attempt.key)
        if sample is None or sample.attempt is not attempt:
            self._note_late(attempt, event)
            return
        try:
            if isinstance(event, AskedTokens):
                self._ask(sample, event)
            elif isinstance(event, Withdrawn):
                sample.branched = True
                if event.call in sample.open:
                    self._given_up.add((*sample.key, event.call))
                    sample.withdraw(event.call)
            elif isinstance(event, AskedTool):
                self._recall(sample, event)
            elif isinstance(event, ToolAnswered):
                sample.tools[event.call] = SampleOutput(
                    *sample.key, (), (), (), "stop", call=event.call, digest=event.digest, answer=event.answer
                )
                self.untold = True
            elif isinstance(event, Returned):
                self._end(sample, event.value)
            elif is_full(event.error) and not all(call.aside for call in sample.answered.values()):
                self._end(sample, None, full=True)
            else:
                raise self.step.failed(event.error, sample.episode) from event.error
        except EpisodeFailed as failed:
            self._fail(sample, failed)

    def _note_late(self, attempt: Attempt, event: Event) -> None:
        """What an attempt does that was closed changes nothing; that it fails even then is counted."""
        if isinstance(event, Raised) and not isinstance(event.error, CancelledError):
            failed = self.step.failed(event.error, attempt.episode)
            if not isinstance(failed, EpisodeFailed):
                raise failed from event.error
            self.step.errors.note(failed, attempt.episode, attempt.number)

    def _ask(self, sample: Trajectory, asked: AskedTokens) -> None:
        """Answer a request by what was recorded, or give it to the engine."""
        try:
            request = self._request(sample, asked)
        except RequestRefused as refused:
            self._post(sample.attempt, partial(sample.attempt.refuse, asked.call, refused))
            return
        recorded = self._recorded(sample, asked.call, digest_of(request))
        stop = self._stops.follow(request, () if recorded is None else recorded.token_ids)
        if recorded is None or not (recorded.finish_reason or stop):
            self._wanted.append(request if recorded is None else replace(request, begun=recorded))
            return
        reason: FinishReason = "stop" if recorded.finish_reason == "stop" else "length"
        tokens, logprobs, filtered = recorded.token_ids, recorded.logprobs, recorded.filtered_logprobs
        output = SampleOutput(*sample.key, tokens, logprobs, recorded.spans, reason, filtered, asked.call)
        output = output if stop is None else cut_at(output, stop.tokens)
        (text,) = self._tokenizer.decode_batch([output.token_ids], skip_special=True)
        self._answer(sample, output, text)

    def _recall(self, sample: Trajectory, asked: AskedTool) -> None:
        """Give a step what a tool answered at another worker, or let it ask."""
        recorded = self._recorded(sample, asked.call, asked.digest)
        answer = b"" if recorded is None else recorded.answer
        if answer:
            self._take_down(sample.attempt, ToolAnswered(asked.call, asked.digest, answer))
        self._post(sample.attempt, partial(sample.attempt.answer, asked.call, answer))

    def _refuse(self, request: SampleRequest, error: RequestRefused) -> None:
        sample = self._open[request.position, request.sample]
        sample.withdraw(request.call)
        self._post(sample.attempt, partial(sample.attempt.refuse, request.call, error))

    def _fail(self, sample: Trajectory, failed: EpisodeFailed) -> None:
        """Begin a sample anew on which the step has failed, or give it up."""
        self._give_back(sample)
        fate = self.step.errors.judge(failed, sample.episode, sample.attempt.number)
        self._posts.append(sample.attempt.close)  # a thread may be busy with whatever: it is not waited for
        if fate != "again":
            self._give_up(sample, failed.reason, fate)
            return
        origin = sample.origin
        # The task anew, too: the step may have changed it.
        episode = replace(sample.episode, task=json.loads(origin.task))
        self._begun(origin, episode, {}, after=sample.attempt)

    def _give_back(self, sample: Trajectory) -> None:
        """Nobody waits for what the sample has asked for."""
        self._given_up.update((*sample.key, call) for call in sample.open)

    def _give_up(self, sample: Trajectory, reason: str, fate: Fate) -> None:
        """Finish a sample with what the model has written, and the environment before that."""
        sample.end()
        sample.finish_reason = "error"
        sample.fields = self.step.nothing
        sample.left_out, sample.failed = ("", reason) if fate == "zero" else (reason, "")
        if fate == "drop":
            sample.dropped = reason
        self._finish(sample)

    def _finish(self, sample: Trajectory) -> None:
        self._finished[sample.key] = self._open.pop(sample.key)
        self._whole.append(FinishedSample(*sample.key, self._told(sample)))

    def _told(self, sample: Trajectory, more: Sequence[SampleOutput] = ()) -> tuple[SampleOutput, ...]:
        """What other workers are told of a sample: of one that was begun anew, or has failed, no tokens."""
        first = sample.attempt.number == 1 and sample.finish_reason != "error"
        return sample.recorded(more) if first else sample.versions(more)

    def _recorded(self, sample: Trajectory, call: CallNumber, digest: int) -> BegunSample | None:
        """What another worker had of this call, if it asked for the same; None: nothing."""
        found = sample.begun.pop(call, None)
        if found is None or found.digest == digest:
            return found
        sample.begun.clear()
        self.step.metrics.add(REPLAY_DIFFERS, 1)
        return None

    def _answer(self, sample: Trajectory, output: SampleOutput, text: str) -> None:
        """Note what the model has written, and let the step go on with it."""
        call = sample.open.pop(output.call)
        text, cut_off = self._stops.shown(output.key, text)
        about = (output.token_ids, output.logprobs, output.spans, call.train, text, output.filtered_logprobs, cut_off)
        aside = call.sequence is None
        answered = AnsweredCall(
            call.request.prompt_ids, Segment(*about), output.finish_reason, aside, digest_of(call.request)
        )
        sample.answered[output.call] = answered
        sample.waits_since = self.clock.now
        if call.sequence is not None:
            call.sequence.add(answered)
            call.stream.had = (*call.request.prompt_ids, *output.token_ids)
        episode = sample.episode
        found = Completion(episode.prompt, text, episode.task, output.finish_reason, output.token_ids)
        self._post(sample.attempt, partial(sample.attempt.answer, output.call, found))

    def _end(self, sample: Trajectory, value: object, *, full: bool = False) -> None:
        """The step has returned; `full`: it has not, and wanted more than there is room for."""
        self._give_back(sample)
        sample.end()
        if not sample.sequences[-1].segments:
            what = "returned before it awaited tokens of the sample"
            expected = "; expected completion = await generate(episode.prompt_ids, SamplingParams(…))"
            raise self.step.failure(what, expected)
        if full:
            sample.finish_reason = "length"
        sample.fields = self.step.nothing if full else self.step.returned(value)
        cut_off = sample.finish_reason == "length" and lease_kind(sample.key[0]) == "train"
        # What trains nothing, such as the greedy sample that is a baseline, stays what it is.
        if self._leaves_out_truncated and cut_off and any(segment.trains for segment in sample.written):
            sample.left_out = sample.left_out or CUT_OFF
        self._finish(sample)
        self.step.errors.succeeded()

    def _request(self, sample: Trajectory, asked: AskedTokens) -> SampleRequest:
        """What to ask the engine for; notes what the sample has before that. Raises RequestRefused."""
        origin, prefix = sample.origin, asked.prompt_ids
        params = self.step.sampling[lease_kind(origin.uid.position)].over(asked.params)
        if params.stop and (why := self._stops.complaint(tuple(params.stop))):
            raise RequestRefused("asks for what never ends a response", f": {why}")
        sequence, limits = self._continued(sample, asked), self._limits_of(origin.uid.position)
        longest = limits.tokens - max(0, len(prefix) - len(origin.prompt_ids))
        others = [call.request.params.max_new_tokens for call in sample.open.values() if call.sequence is not None]
        whole = longest if sequence is None else limits.sample_tokens - sample.tokens - sum(others)
        of_sequence, of_sample = (limits.tokens, "max_tokens"), (limits.sample_tokens, "max_sample_tokens")
        room, (most, setting) = min((longest, of_sequence), (whole, of_sample), key=lambda bound: bound[0])
        if room < 1:
            if sequence is not None:
                sample.leave(sequence)
            raise self.step.full(most - room, most, setting)
        if params.max_new_tokens > room:
            params = replace(params, max_new_tokens=room)
        sample.branched = sample.branched or bool(sample.open) or any(call > asked.call for call in sample.answered)
        stream = sample.stream_of(asked.call, prefix, aside=asked.aside)
        drawn_from = (stream.name, len(prefix) - stream.start)
        request = SampleRequest(*sample.key, prefix, origin.seed, params, None, asked.call, *drawn_from)
        sample.open[asked.call] = OpenCall(request, sequence, asked.train, stream)
        return request

    def _continued(self, sample: Trajectory, asked: AskedTokens) -> TokenSequence | None:
        """The sequence that a request goes on with: the tokens that the environment has put behind the model's are
        noted, or the prompt of a new one. None: it is asked for aside."""
        newest, prefix = sample.sequences[-1], asked.prompt_ids
        continues = newest in sample.free and len(prefix) == len(newest) and newest.leads_to(prefix)
        if (asked.aside or not continues) and self.step.plan.environment is None:
            raise StepError(
                f"{self.step.where} asks for more after its first turn, or after other tokens than the prompt, and it "
                "declares no environment: write @step(…, environment=[…]) with `replay` if the recorded turns of the "
                "model make it come to the same state again, `repeatable` if two workers may make the same sample"
            )
        if asked.aside:
            return None
        return newest if continues else sample.go_on_behind(prefix)
