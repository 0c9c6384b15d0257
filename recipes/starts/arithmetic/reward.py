"""The reward of this run. `distflow test-plugin recipe.yaml` tests it."""

from distflow.types import Completion


def reward(sample: Completion) -> dict[str, float]:
    """`reward` is trained on, `score` is what counts, other keys are shown beside them."""
    answer = str(sample.task["answer"])
    right = sum(given == wanted for given, wanted in zip(sample.response, answer, strict=False)) / len(answer)
    ended = sample.finish_reason == "stop" and len(sample.response) == len(answer)
    exact = float(ended and sample.response == answer)
    return {"reward": 0.7 * right + 0.3 * ended, "score": exact, "digits": right}
