"""A recipe in a folder of the test's own, with steps that need nothing but their declarations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TEACHER = (
    "models.teacher={init: {model_type: qwen2, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2}, tokenizer: 'chars:0123456789='}"
)
"""A fresh one for the quickstart."""
STEPS = """
from collections.abc import Sequence

from distflow import step

@step(role="generate", reads=[], writes=[], scope="group")
async def sample(episode, generate, ctx, *, temperature: float = 1.0, max_new_tokens: int = 4): ...

@step(role="score", reads=["response_ids"], writes=["reward", "rewards/*"])
def reward(batch, ctx, *, function: str = "plain", weight: float | None = None): ...

@step(role="forward", reads=["prompt_ids"], writes=["values"])
def values(batch, ctx): ...

@step(role="train", reads=["reward", "group"], writes=["advantage"], scope="group")
def advantage(batch, ctx, *, scale: float = 1.0, weights: Sequence[float] | None = None): ...

@step(role="train", reads=["advantage"], reads_when={"use_values": ["values"]}, writes=[])
def update(batch, ctx, *, use_values: bool = False): ...
"""

RECIPE = """
defaults: [quickstart, _self_]
flow:
  steps:
    sample: {call: "./steps.py:sample"}
    reward: {call: "./steps.py:reward"}
    advantage: {call: "./steps.py:advantage"}
    update: {call: "./steps.py:update"}
"""


class Folder:
    """Files of one test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("steps.py", STEPS)
        self.write("mine.yaml", RECIPE)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text)
        return path

    def step(self, text: str) -> str:
        """Add a step to steps.py."""
        steps = self.path / "steps.py"
        steps.write_text(steps.read_text() + "\n" + text)
        return str(steps)

    def change(self, before: str, after: str) -> None:
        """Change steps.py."""
        steps = self.path / "steps.py"
        assert before in steps.read_text()
        steps.write_text(steps.read_text().replace(before, after))

    @property
    def recipe(self) -> str:
        return str(self.path / "mine.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


@pytest.fixture
def refused(folder: Folder) -> Callable[..., str]:
    """Plan the folder's recipe, which must fail; returns the message."""
    from distflow.errors import RecipeError
    from distflow.flow.recipe_check import plan_recipe

    def run(*overrides: str) -> str:
        with pytest.raises(RecipeError) as caught:
            plan_recipe(folder.recipe, overrides)
        return str(caught.value)

    return run
