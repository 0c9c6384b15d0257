"""Which prompt a position has: mixtures, and prompts that are left out, are functions of seed and position alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.mixing import Mixture
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.sources import PromptText
from distflow.errors import UserError
from distflow.workers.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("chars:0123456789=")


def numbers(*lengths: int) -> list[PromptText]:
    return [PromptText("1" * length, {"n": index}) for index, length in enumerate(lengths)]


def make(*uses: SourceUse, **given: Any) -> PromptOrder:
    values = {"seed": 5, "shuffle": True, "chat": False, "max_prompt_tokens": 4, "overlong": "drop"} | given
    return PromptOrder(uses, TOKENIZER, PromptSettings(**values))


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=12).filter(lambda found: min(found) <= 4)


@given(LENGTHS, st.booleans(), st.lists(st.integers(0, 60), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_is_left_out_depends_on_no_earlier_question(lengths: list[int], shuffle: bool, asked: list[int]) -> None:
    prompts = numbers(*lengths)
    whole = make(SourceUse(prompts), shuffle=shuffle)
    in_order = [whole.uid(position) for position in range(61)]
    other = make(SourceUse(prompts), shuffle=shuffle)
    assert [other.uid(position) for position in asked] == [in_order[position] for position in asked]
    kept = [index for index, length in enumerate(lengths) if length <= 4]
    for epoch in range(60 // len(kept)):
        visited = in_order[epoch * len(kept) : (epoch + 1) * len(kept)]
        assert sorted(uid.prompt for uid in visited) == kept, "each pass visits each prompt that is kept, once"
        assert {uid.epoch for uid in visited} == {epoch}


def test_without_long_prompts_the_order_is_the_same() -> None:
    prompts = numbers(*[3] * 20)
    drop, error = make(SourceUse(prompts)), make(SourceUse(prompts), overlong="error")
    assert [drop.uid(n) for n in range(50)] == [error.uid(n) for n in range(50)]


def test_what_was_left_out_is_told_once_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    order = make(SourceUse(numbers(3, 5, 3, 6)), shuffle=False)
    assert order.uid(0).prompt == 0
    assert "left out" not in caplog.text
    assert [order.uid(n).prompt for n in (1, 2, 3)] == [2, 0, 2]
    assert caplog.text.count("2 of 4 prompts are longer than data.max_prompt_tokens=4 and left out") == 1


def test_the_prompts_that_are_not_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    sources = [SourceUse(["11", "22222222", "3"], "one"), SourceUse(["44", "5"], "two")]
    order = make(*sources)
    assert order.count() == order.count() == 4
    assert caplog.text.count("left out") == 1
    assert [order.uid(position) for position in range(40)] == [make(*sources).uid(position) for position in range(40)]
    assert make(*sources, overlong="error").count() == 5


def test_when_all_are_left_out() -> None:
    with pytest.raises(UserError, match="2 of 2 prompts of long are longer than .*; raise data.max_prompt_tokens"):
        make(SourceUse(numbers(5, 6), "long")).uid(0)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1, max_size=4),
    st.lists(st.integers(0, 5000), min_size=1, max_size=8),
)
@settings(max_examples=25, deadline=None)
def test_each_source_is_visited_in_its_own_order(weights: dict[str, float], asked: list[int]) -> None:
    mixture = Mixture(weights, seed=3)
    in_order = [mixture.at(position) for position in range(2001)]
    for number in range(len(weights)):
        assert [ordinal for source, ordinal in in_order if source == number] == list(
            range(sum(source == number for source, _ in in_order))
        )
    again = Mixture(weights, seed=3)
    assert [again.at(position) for position in asked] == [mixture.at(position) for position in asked]
    for number, weight in enumerate(weights.values()):
        share = sum(mixture.at(position)[0] == number for position in range(5040)) / 5040
        assert abs(share - weight / sum(weights.values())) <= 1 / 5040


def test_shares_are_met_soon_where_they_are_simple() -> None:
    mixture = Mixture({"a": 3, "b": 1}, seed=0)
    for block in range(50):
        assert sum(mixture.at(4 * block + place)[0] for place in range(4)) == 1
    with pytest.raises(UserError, match=r"data\.mix\.b\.weight 0\.1: less than 1/5040 of all prompts"):
        Mixture({"a": 5000, "b": 0.1}, seed=0)
    with pytest.raises(UserError, match=r"data\.mix\.a\.weight 1e\+308: the sum of all weights is infinite"):
        Mixture({"a": 1e308, "b": 1e308}, seed=0)


def test_a_mixture_of_sources() -> None:
    first, second = numbers(*[2] * 10), numbers(*[3] * 7)
    second[0] = PromptText("111", {"n": 0, "data_source": "own"})
    order = make(SourceUse(first, "first"), SourceUse(second, "second", weight=2))
    prompts = [order.prompt(position) for position in range(42)]
    uids = [order.uid(position) for position in range(42)]
    assert [prompt.index for prompt in prompts] == [uid.prompt for uid in uids]
    counts = Counter(uid.prompt for uid in uids)
    assert sum(counts[index] for index in range(10)) == 14
    assert all(counts[10 + index] == 4 for index in range(7))
    assert {uid.epoch for uid in uids if uid.prompt >= 10} == {0, 1, 2, 3}
    tasks = {prompt.index: prompt.task for prompt in prompts}
    assert '"data_source": "first"' in tasks[uids[0].prompt if uids[0].prompt < 10 else 0]
    assert '"data_source": "own"' in tasks[10]
    assert '"data_source": "second"' in tasks[11]
