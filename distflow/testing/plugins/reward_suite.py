"""The contract of reward functions: a finite number for every response, whatever the model has written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from statistics import fmean
from typing import Any

import psutil

from distflow.data.formats import PROMPT
from distflow.data.gold import FORMS, as_written, gold_answers
from distflow.errors import UserError
from distflow.testing.plugins.findings import IMPORTING, SuiteReport, cut
from distflow.testing.plugins.subjects import Subject
from distflow.types import Completion, FinishReason
from distflow.workers.reward_judging import Rewards, Verdict, judge, judge_together, reward_function

ODD = (
    "",
    " ",
    "\n\n",
    "no answer at all",
    "-1e999",
    "nan",
    "((((((",
    "\\boxed{",
    "<answer>",
    "🙂 ü\u0000",
    "7 " * 4000,
)
SLOW_S = 0.1
ENDING_S = 2.0
"""How long what the function has started may take to end."""
MOST_TASKS = 8
DIFFERENT = ("2", "I think that it is 12", "no answer at all")
"""Responses to a prompt that are judged by one call, where a function takes lists."""


def run_reward_suite(
    subject: Subject, report: SuiteReport, tasks: Sequence[tuple[str, str]]
) -> list[dict[str, float]] | None:
    """Run the suite; returns what the function gave, None where it cannot be used at all."""
    report.begin(IMPORTING)
    try:
        function = reward_function(_spec(subject))
    except UserError as error:
        report.add("wrong", str(error))
        return None
    samples, before = list(_samples(tasks)), {child.pid for child in _children()}
    try:
        if not _judges_together(function, subject, report, tasks):
            return None
        verdicts = _judged(function, report, samples)
        _tell_failures(subject, report, samples, verdicts)
        _test_again(function, report, samples, verdicts)
    except UserError as error:
        report.add("wrong", str(error))
        return None
    _tell_gold(subject, report, samples, verdicts)
    _, left = psutil.wait_procs([child for child in _children() if child.pid not in before], timeout=ENDING_S)
    if left:
        report.add("wrong", f"leaves {len(left)} processes behind: it must end what it starts")
    return [dict(verdict.values) for verdict in verdicts]


def _children() -> list[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def works_on(subject: Subject, report: SuiteReport, tasks: Sequence[tuple[str, str]]) -> bool:
    """Whether the function works on such tasks at all, on a plain response."""
    prompt, text = tasks[0]
    try:
        function = reward_function(_spec(subject))
        report.begin("judging the response '2'")
        return judge(function, _completion(prompt, "2", json.loads(text), "stop")).failure is None
    except UserError:
        return False


def _spec(subject: Subject) -> str:
    """The function with its settings, as a recipe gives it to the reward step."""
    if not subject.settings:
        return subject.call
    return json.dumps({"mine": {"function": subject.call, **subject.settings}})


def _samples(tasks: Sequence[tuple[str, str]]) -> Iterator[Completion]:
    for prompt, text in tasks[:MOST_TASKS]:
        task = json.loads(text)
        for answer in gold_answers(task)[:1]:
            yield from (_completion(prompt, form.format(as_written(answer)), task, "stop") for form in FORMS)
        for number, response in enumerate(ODD):
            reasons: tuple[FinishReason, ...] = ("stop", "length")
            yield _completion(prompt, response, task, reasons[number % 2])


def _completion(prompt: str, response: str, task: Mapping[str, Any], reason: FinishReason) -> Completion:
    return Completion(prompt, response, deepcopy(task), reason, tuple(range(2, 2 + min(len(response), 64))))


def _judges_together(
    function: Rewards, subject: Subject, report: SuiteReport, tasks: Sequence[tuple[str, str]]
) -> bool:
    """Tell whether a function that takes lists judges several responses to two prompts by one call, as in a run.

    True of other functions, which get one response. Alone, a list of one, whatever the responses, would look right.
    """
    if not any(part.lists for part in function.parts):
        return True
    prompts = [(prompt, json.loads(text)) for prompt, text in tasks[:2]]
    samples = [_completion(prompt, response, task, "stop") for prompt, task in prompts for response in DIFFERENT]
    report.begin(f"judging {len(samples)} responses by one call")
    verdicts = judge_together(function, samples)
    failed = [verdict for verdict in verdicts if verdict.failure]
    to = f"to {len(prompts)} prompt{'s' * (len(prompts) > 1)}"
    if all(verdict.unjudged for verdict in verdicts):
        _tell_unjudged(subject, report, samples, to)
        return False
    if not failed:
        report.add("ok", f"judges {len(samples)} responses {to} by one call{_as_made_up(subject, samples[0])}")
        return True
    many = "all" if len(failed) == len(samples) else f"{len(failed)} of the"
    report.add(
        "wrong",
        f"fails on {many} {len(samples)} responses {to} that it gets by one call, as in a run:\n"
        f"{failed[0].message}{_made_up(subject, samples[0])}",
    )
    return False


def _as_made_up(subject: Subject, sample: Completion) -> str:
    """Say in which of the two forms made-up completions are, since those of a run may be in the other."""
    if subject.data is not None:
        return ""
    form = "lists of messages" if PROMPT in sample.task else "texts"
    return f", made up as {form}: --data FILE gives it those of the data"


def _tell_unjudged(subject: Subject, report: SuiteReport, samples: Sequence[Completion], to: str) -> None:
    report.add(
        "wrong",
        f"gives none of {len(samples)} responses {to} a reward, but None or NaN: samples that no function judges are "
        f"left out, so nothing would be trained on — return a number{_made_up(subject, samples[0])}",
    )


def _judged(function: Rewards, report: SuiteReport, samples: Sequence[Completion]) -> list[Verdict]:
    """A verdict for each sample; tells of tasks that were changed, and of slowness."""
    verdicts, changed, longest = [], "", 0.0
    for sample in samples:
        before = deepcopy(sample.task)
        report.begin(f"judging the response {cut(sample.response)}")
        began = time.monotonic()
        verdicts.append(judge(function, sample))
        longest = max(longest, time.monotonic() - began)
        if sample.task != before and not changed:
            changed = f"changes sample.task for the response {cut(sample.response)}"
    if changed:
        report.add("wrong", f"{changed}: all samples of a prompt share it — copy what you change")
    if longest > SLOW_S:
        report.add(
            "note",
            f"takes up to {longest:.1f} s for a response: with timeout_s beside `function` it runs in child processes, "
            "several at a time, and one that hangs is killed",
        )
    return verdicts


def _tell_failures(
    subject: Subject, report: SuiteReport, samples: Sequence[Completion], verdicts: Sequence[Verdict]
) -> None:
    failed = [(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True) if verdict.failure]
    if not failed:
        parts = sorted({name for verdict in verdicts for name in verdict.values} - {"reward", "score"})
        more = f", and {', '.join(parts)}" if parts else ""
        judged = sum(not verdict.unjudged for verdict in verdicts)
        of = f"{judged} of {len(samples)}" if judged < len(samples) else str(judged)
        report.add("ok", f"gives {of} responses, odd ones among them, a finite reward{more}")
        if judged < len(samples):
            report.add("note", f"gives the other {len(samples) - judged} None or NaN: such samples are left out")
        return
    sample, verdict = failed[0]
    report.add(
        "wrong",
        f"fails on {len(failed)} of {len(samples)} responses, first on {cut(sample.response)} "
        f"(finish_reason {sample.finish_reason}):\n{verdict.message}{_made_up(subject, sample)}",
    )


def _made_up(subject: Subject, sample: Completion) -> str:
    """Say which task was made up for the function, if one was."""
    if subject.data is not None:
        return ""
    return f"\nIts task was made up, {cut(dict(sample.task))}: --data FILE or --data ./file.py:name gives it real ones"


def _test_again(
    function: Rewards, report: SuiteReport, samples: Sequence[Completion], verdicts: Sequence[Verdict]
) -> None:
    for sample, verdict in reversed(list(zip(samples, verdicts, strict=True))):
        report.begin(f"judging the response {cut(sample.response)} again")
        again = judge(function, sample)
        if (again.values, again.failure) != (verdict.values, verdict.failure):
            report.add(
                "note",
                f"gives the response {cut(sample.response)} {dict(verdict.values)} at first and {dict(again.values)} "
                "later: a sample that is made again after a loss would get another reward",
            )
            return
    report.add("ok", "gives a response the same twice, in any order")


def _tell_gold(
    subject: Subject, report: SuiteReport, samples: Sequence[Completion], verdicts: Sequence[Verdict]
) -> None:
    """With real tasks that have an answer: whether gold answers get more than nonsense."""
    scores: dict[bool, list[float]] = {True: [], False: []}
    for sample, verdict in zip(samples, verdicts, strict=True):
        answers = gold_answers(sample.task)
        if answers and verdict.values:
            gold = {form.format(as_written(answers[0])) for form in FORMS}
            scores[sample.response in gold].append(verdict.values["score"])
    if subject.data is None or not (scores[True] and scores[False]):
        return
    if fmean(scores[True]) > fmean(scores[False]):
        report.add("ok", f"gold answers get a score of up to {max(scores[True]):g}, and more than nonsense on average")
    else:
        report.add("note", f"gold answers get a score of up to {max(scores[True]):g}, no more than nonsense on average")
