from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from distflow.data.arithmetic import copy_digits
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.sources import PromptText, reasoning_gym
from distflow.errors import PluginError, UserError
from distflow.types import Uid
from distflow.workers.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("chars:0123456789=")


def _order(source: Any = None, **settings: Any) -> PromptOrder:
    values: dict[str, Any] = {"seed": 5, "shuffle": True, "chat": False, "max_prompt_tokens": 16} | settings
    return PromptOrder(
        [SourceUse(copy_digits(digits=1) if source is None else source)], TOKENIZER, PromptSettings(**values)
    )


class Fixed:
    def __init__(self, *prompts: Any) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Any:
        return self.prompts[index]


def test_each_pass_visits_every_prompt_once_in_an_order_of_its_own() -> None:
    order = _order()
    passes = [[order.uid(epoch * 10 + place).prompt for place in range(10)] for epoch in range(4)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    assert order.uid(23) == Uid(2, passes[2][3], 23)


def test_the_order_depends_on_the_seed_only() -> None:
    there, back = _order(), _order()
    positions = list(range(35))
    assert [there.uid(p) for p in positions] == [back.uid(p) for p in reversed(positions)][::-1]
    assert [there.uid(p) for p in positions] != [_order(seed=6).uid(p) for p in positions]


def test_unshuffled() -> None:
    assert [_order(shuffle=False).uid(p).prompt for p in range(12)] == [*range(10), 0, 1]


def test_prompts_have_tokens_text_and_task() -> None:
    order = _order(copy_digits(digits=3), shuffle=False)
    prompt = order.prompt(407)
    assert (prompt.index, prompt.text, json.loads(prompt.task)) == (407, "407=", {"answer": "407", "rejected": "408"})
    assert list(prompt.token_ids) == TOKENIZER.encode("407=")
    assert len(copy_digits(digits=3)) == 1000


def test_negative_positions() -> None:
    with pytest.raises(ValueError, match="position -1: positions count from 0"):
        _order().uid(-1)


@pytest.mark.parametrize(
    ("source", "settings", "error", "message"),
    [
        (Fixed(PromptText("12345", {})), {"max_prompt_tokens": 4}, UserError, "prompt 0 has 5 tokens, expected 1 to 4"),
        (Fixed(PromptText("", {})), {}, UserError, "prompt 0 has 0 tokens"),
        (Fixed(PromptText("x", {})), {}, UserError, "prompt 0 cannot be written in this model's tokens: .*'x'"),
        *(
            (
                Fixed(PromptText("1", {"b": 1, "a": value})),
                {},
                UserError,
                f"column 'a' of prompt 0 cannot be sent.*{why}",
            )
            for value, why in (
                ({1}, "set is not JSON serializable — make it text"),
                (b"x", "bytes is not JSON"),
                ("\ud83d", "surrogates"),
            )
        ),
        (
            Fixed(PromptText("1", {"a": "x" * (8 << 20)})),
            {},
            UserError,
            "its task take 8388618 characters, expected at",
        ),
        (Fixed(7), {}, PluginError, r"prompt 0 is a int; expected a PromptText"),
    ],
)
def test_bad_prompts(source: Any, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _order(source, **settings).prompt(0)


def test_token_ids_that_no_message_can_hold_are_refused() -> None:
    class Broken(CharTokenizer):
        def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
            return [3, 1 << 31]

    settings = PromptSettings(seed=5, shuffle=True, chat=False, max_prompt_tokens=16)
    order = PromptOrder([SourceUse(copy_digits(digits=1))], Broken("chars:0123456789="), settings)
    with pytest.raises(UserError, match=r"prompt \d+ has token ids from 3 to 2147483648, expected 0 to 2147483647"):
        order.prompt(0)


def test_bad_sources() -> None:
    with pytest.raises(PluginError, match="data source is a int; expected an object with __len__"):
        _order(7)
    with pytest.raises(UserError, match="data source Fixed is empty"):
        _order(Fixed())
    with pytest.raises(UserError, match="digits 0: expected 1 to 9"):
        copy_digits(digits=0)


def test_reasoning_gym_prompts() -> None:
    pytest.importorskip("reasoning_gym")
    source = reasoning_gym(dataset="chain_sum", size=5, seed=1, config={"min_terms": 2, "max_terms": 2})
    again = reasoning_gym(dataset="chain_sum", size=5, seed=1, config={"min_terms": 2, "max_terms": 2})
    assert len(source) == 5
    prompt = source[3]
    assert prompt == again[3]
    assert prompt.task["dataset"] == "chain_sum"
    assert json.loads(json.dumps(prompt.task)) == prompt.task
    with pytest.raises(UserError, match="reasoning-gym refuses data set 'chain_sums'"):
        reasoning_gym(dataset="chain_sums")
    with pytest.raises(UserError, match="reasoning-gym refuses .*min_trems"):
        reasoning_gym(dataset="chain_sum", config={"min_trems": 2})


def test_reasoning_gym_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs the package reasoning-gym.* pip install reasoning-gym"):
        reasoning_gym(dataset="chain_sum")


def test_sources_import_no_torch() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import distflow.data.sources, distflow.data.arithmetic; "
        "import distflow.workers.reward_process; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
