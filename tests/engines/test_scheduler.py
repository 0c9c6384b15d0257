"""The scheduler's bookkeeping under random groups, stops and aborts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.testing.engine_harness import WholeGroup
from distflow.types import FIRST_CALL, BegunSample, SamplingParams, Span, Version
from distflow.workers.engines.scheduler import Scheduler

VERSION = Version(0, 0)


def request(position: int, samples: int, new: int = 3, prompt: int = 2) -> WholeGroup:
    return WholeGroup(position, (5,) * prompt, samples, 0, SamplingParams(max_new_tokens=new, stop_token_ids=(1,)))


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_sample_runs_once_in_a_dense_row_of_slots(slots, groups, random):
    schedule = Scheduler(slots, prefill_tokens=8)
    for position, (samples, new) in enumerate(groups):
        schedule.add(request(position, samples, new).requests())
    where = {}
    done, aborted, withdrawn = [], set(), set()
    while schedule.here:
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
        if schedule.here and random.random() < 0.2:
            position = random.choice(sorted(schedule.here))[0]
            aborted.add(position)
            apply(schedule, where, schedule.forget(schedule.of({position})))
        if schedule.here and random.random() < 0.2:
            key = random.choice(sorted(schedule.here))
            withdrawn.add(key[:2])
            apply(schedule, where, schedule.forget({key}))
        assert [where[slot] for slot in range(len(schedule.running))] == schedule.running
        assert sum(schedule.progress().values()) >= sum(len(s.tokens) for s in schedule.running)
    keys = [(output.position, output.sample) for output in done]
    assert len(set(keys)) == len(keys)
    expected = {(p, n) for p, (samples, _) in enumerate(groups) for n in range(samples)}
    assert set(keys) <= expected
    assert {p for p, _ in expected - set(keys) - withdrawn} <= aborted


def apply(schedule: Scheduler, where: dict, slots: list[int]) -> None:
    """Apply the moves to our own table, as the engine does to its tensors."""
    targets, sources = schedule.release(slots)
    assert not set(targets) & set(sources)
    for target, source in zip(targets, sources, strict=True):
        where[target] = where[source]


def test_first_come_first_served():
    schedule = Scheduler(4, prefill_tokens=100)
    for position, samples in enumerate([3, 2, 1]):
        schedule.add(request(position, samples).requests())
    assert [part[0].request.position for part in schedule.admit()] == [0]


def test_prefill_budget_counts_padding():
    schedule = Scheduler(100, prefill_tokens=12)
    for position, prompt in enumerate([2, 2, 6, 1]):
        schedule.add(request(position, 1, prompt=prompt).requests())
    assert [len(schedule.admit()) for _ in range(3)] == [2, 2, 0]


@pytest.mark.parametrize("samples, parts", [(4, [[0, 1, 2, 3]]), (9, [[0, 1, 2, 3], [4, 5, 6, 7], [8]])])
def test_only_groups_larger_than_all_slots_are_cut(samples, parts):
    schedule = Scheduler(4, prefill_tokens=100)
    schedule.add(request(0, samples).requests())
    assert [[sample.request.sample for sample in part] for part in schedule.waiting] == parts


def test_begun_samples_start_by_themselves_and_the_others_together():
    schedule = Scheduler(8, prefill_tokens=100)
    begun = (BegunSample(1, (7, 8), (0.0, 0.0), (Span(0, 0, 0, 2),)),)
    schedule.add(replace(request(3, 6), begun=begun).requests())
    found = [([sample.request.sample for sample in part], part[0].input_ids[2:]) for part in schedule.waiting]
    assert found == [([0, 2, 3, 4, 5], []), ([1], [7, 8])]
    assert schedule.free_slots == 8 - 6
    assert schedule.progress() == {3: 2}
    started = schedule.start(schedule.admit(), Version(0, 1))
    assert [len(sample.so_far().token_ids) for sample in started] == [0, 0, 0, 0, 0, 2]
    assert list(schedule.lengths()) == [2, 2, 2, 2, 2, 4]
    assert schedule.record([9] * 6, [0.0] * 6) == {5: "length"}
    assert started[5].output("length").spans == (Span(0, 0, 0, 2), Span(0, 1, 2, 3))
    schedule.release([5])
    assert schedule.here == {(3, sample, FIRST_CALL) for sample in (0, 2, 3, 4, 5)}


def test_samples_of_a_group_with_other_tokens_to_read_start_by_themselves():
    schedule = Scheduler(8, prefill_tokens=100)
    first, second = request(3, 3).requests(), request(3, 3, prompt=4).requests()
    schedule.add([*first[:2], second[2], *request(4, 1).requests()])
    waiting = [[sample.key[:2] for sample in part] for part in schedule.waiting]
    assert waiting == [[(3, 0), (3, 1)], [(3, 2)], [(4, 0)]]
