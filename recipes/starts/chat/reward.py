"""The reward of this run. `distflow test-plugin recipe.yaml` tests it."""

import re

from distflow.types import Completion


def reward(sample: Completion) -> dict[str, float]:
    """`reward` is trained on, `score` is what counts, other keys are shown beside them."""
    numbers = re.findall(r"-?\d+", sample.response.replace(",", ""))
    right = float(bool(numbers) and numbers[-1] == str(sample.task["answer"]))
    brief = float(sample.finish_reason == "stop")
    return {"reward": right + 0.1 * brief, "score": right, "brief": brief}
