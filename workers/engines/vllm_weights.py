"""Weights into vLLM: what each of its workers, which hold parts of the model, does with those that are staged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from distflow.workers.engines.shared_staging import staged_tensors
from distflow.workers.engines.written import load_checked

EXTENSION = f"{__name__}.Extension"
"""vLLM finds it by this name."""
LOAD = "load_staged"
Load = Callable[[Iterable[tuple[str, Tensor]]], set[str] | None]


class Extension:
    """Joined by vLLM to the class of its workers."""

    model_runner: Any

    def load_staged(self, description: str) -> None:
        """Replace all weights; at first, raise WorkerFailed where a tensor is skipped, or a parameter not written.

        Tied ones are sent under each of their names: on a CPU the weights of the last layer are packed apart from those
        of the first, and would stay the old ones.
        """
        load_checked(self.model_runner.get_model(), staged_tensors(description, all_names=True), self._reload)

    def _reload(self, named: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        """Returns the parameters that vLLM's model says it has written, if it says so."""
        model = self.model_runner.get_model()
        plain: Load = model.load_weights
        written: set[str] | None = None

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
            nonlocal written
            written = plain(weights)
            return written

        _pack_anew(model)
        # What it returns is only written to vLLM's log.
        model.load_weights = load_weights
        try:
            self.model_runner.reload_weights(weights_iterator=iter(named), is_checkpoint_format=True)
        finally:
            del model.load_weights
        return written


def _pack_anew(model: Any) -> None:
    """On a CPU vLLM packs experts as it makes their kernel, and never again: later versions would be taken for packed.

    So each version gets kernels of its own there.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for layer in model.modules():
        if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "moe_kernel"):
            layer.quant_method.moe_kernel = None
