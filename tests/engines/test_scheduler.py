"""The scheduler's bookkeeping under random groups, stops and aborts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.types import BegunSample, GroupRequest, SamplingParams, Span, Version
from distflow.workers.engines.scheduler import Scheduler

VERSION = Version(0, 0)


def request(position: int, samples: int, new: int = 3, prompt: int = 2) -> GroupRequest:
    return GroupRequest(position, (5,) * prompt, samples, 0, SamplingParams(max_new_tokens=new, stop_token_ids=(1,)))


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_sample_runs_once_in_a_dense_row_of_slots(slots, groups, random):
    schedule = Scheduler(slots, prefill_tokens=8)
    for position, (samples, new) in enumerate(groups):
        schedule.add(request(position, samples, new))
    where = {}
    done, aborted = [], set()
    while schedule.groups:
        before = len(schedule.running)
        started = schedule.start(schedule.admit(), VERSION)
        where.update(enumerate(started, before))
        assert len(schedule.running) <= slots
        assert schedule.running, "waiting groups, free slots, and nothing starts"
        tokens = [random.choice([1, 2, 3]) for _ in schedule.running]
        finished = schedule.record(tokens, [0.0] * len(tokens))
        done += [schedule.running[slot].output(reason) for slot, reason in finished.items()]
        released = list(finished)
        apply(schedule, where, released)
        if schedule.groups and random.random() < 0.2:
            position = random.choice(sorted(schedule.groups))
            aborted.add(position)
            apply(schedule, where, schedule.forget({position}))
        assert [where[slot] for slot in range(len(schedule.running))] == schedule.running
        assert sum(schedule.progress().values()) >= sum(len(s.tokens) for s in schedule.running)
    keys = [(output.position, output.sample) for output in done]
    assert len(set(keys)) == len(keys)
    expected = {(p, n) for p, (samples, _) in enumerate(groups) for n in range(samples)}
    assert set(keys) <= expected
    assert {p for p, _ in expected - set(keys)} <= aborted


def apply(schedule: Scheduler, where: dict, slots: list[int]) -> None:
    """Apply the moves to our own table, as the engine does to its tensors."""
    targets, sources = schedule.release(slots)
    assert not set(targets) & set(sources)
    for target, source in zip(targets, sources, strict=True):
        where[target] = where[source]


def test_first_come_first_served():
    schedule = Scheduler(4, prefill_tokens=100)
    for position, samples in enumerate([3, 2, 1]):
        schedule.add(request(position, samples))
    assert [part[0].group.request.position for part in schedule.admit()] == [0]


def test_prefill_budget_counts_padding():
    schedule = Scheduler(100, prefill_tokens=12)
    for position, prompt in enumerate([2, 2, 6, 1]):
        schedule.add(request(position, 1, prompt=prompt))
    assert [len(schedule.admit()) for _ in range(3)] == [2, 2, 0]


@pytest.mark.parametrize("samples, parts", [(4, [[0, 1, 2, 3]]), (9, [[0, 1, 2, 3], [4, 5, 6, 7], [8]])])
def test_only_groups_larger_than_all_slots_are_cut(samples, parts):
    schedule = Scheduler(4, prefill_tokens=100)
    schedule.add(request(0, samples))
    assert [[sample.before.sample for sample in part] for part in schedule.waiting] == parts


def test_begun_samples_start_by_themselves_and_the_others_together():
    schedule = Scheduler(8, prefill_tokens=100)
    spans = (Span(0, 0, 0, 2),)
    begun = (BegunSample(1, (7, 8), (0.0, 0.0), spans), BegunSample(4, (7, 1), (0.0, 0.0), spans, "stop"))
    group = request(3, 7)
    schedule.add(GroupRequest(3, group.prompt_ids, 7, 0, group.params, begun))
    found = [([sample.before.sample for sample in part], part[0].input_ids[2:]) for part in schedule.waiting]
    assert found == [([1], [7, 8]), ([0, 2, 3, 5, 6], [])]
    assert schedule.free_slots == 8 - 6
    assert schedule.progress() == {3: 4}
    assert [(out.sample, out.token_ids, out.finish_reason) for out in schedule.take_complete()] == [(4, (7, 1), "stop")]
    assert schedule.take_complete() == []
    started = schedule.start(schedule.admit(), Version(0, 1))
    assert [(sample.before.sample, sample.so_far().token_ids) for sample in started] == [
        (1, (7, 8)),
        (0, ()),
        (2, ()),
        (3, ()),
        (5, ()),
        (6, ()),
    ]
    assert list(schedule.lengths()) == [4, 2, 2, 2, 2, 2]
    assert schedule.record([9] * 6, [0.0] * 6) == {0: "length"}
    assert started[0].output("length").spans == (Span(0, 0, 0, 2), Span(0, 1, 2, 3))
    schedule.release([0])
    assert schedule.groups[3].unfinished == 5
