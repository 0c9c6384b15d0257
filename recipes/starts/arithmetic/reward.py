"""The reward of this run. `distflow test-plugin recipe.yaml` tests it."""

from distflow.types import Completion


def reward(sample: Completion) -> dict[str, float]:
    """`reward` is trained on, `score` is what counts, other keys are shown beside them."""
    answer = int(sample.task["answer"])
    exact = float(sample.finish_reason == "stop" and sample.response == str(answer))
    near = max(0.0, 1.0 - abs(int(sample.response) - answer) / 10) if sample.response.isdecimal() else 0.0
    return {"reward": 0.5 * near + 0.5 * exact, "score": exact, "near": near}
