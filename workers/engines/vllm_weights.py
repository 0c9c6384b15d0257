"""Weights into vLLM: what each of its workers, which hold parts of the model, does with those that are staged."""

from __future__ import annotations

from typing import Any

from distflow.workers.engines.staged import staged_tensors

EXTENSION = f"{__name__}.Extension"
"""vLLM finds it by this name."""
LOAD = "load_staged"


class Extension:
    """Joined by vLLM to the class of its workers."""

    model_runner: Any

    def load_staged(self, description: str) -> None:
        """Replace all weights.

        Tied ones are sent under each of their names: on a CPU the weights of the last layer are packed apart from those
        of the first, and would stay the old ones.
        """
        named = staged_tensors(description, all_names=True)
        self.model_runner.reload_weights(weights_iterator=named, is_checkpoint_format=True)
