"""The check of the first load names what a loader skips; tested without SGLang and vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from distflow.errors import WorkerFailed
from distflow.workers.engines import staged_weights
from distflow.workers.engines.staged_weights import StagedWeights, load_checked, load_watched, watch


class Engine(nn.Module):
    """Has fused projections, as engines do, and a scale that no checkpoint has; skips unknown names silently."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 3))
        self.down = nn.Parameter(torch.zeros(3, 2))
        self.k_scale = nn.Parameter(torch.ones(()))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            assert tensor.ndim == 2, "looking at the shape is not reading"
            if name.endswith(("gate", "up")):
                start = 0 if name.endswith("gate") else 2
                self.gate_up.data.narrow(0, start, 2).copy_(tensor)
            elif name == "experts.down":
                self.down.data[:] = tensor.to(torch.float32)


WEIGHTS = {"experts.gate": torch.full((2, 3), 1.0), "experts.up": torch.full((2, 3), 2.0)}
WEIGHTS |= {"experts.down": torch.full((3, 2), 3.0)}


def test_what_is_written_everywhere_passes() -> None:
    """Also at a learning rate of 0: weights that do not change are no error."""
    model = Engine()
    load_watched(model, WEIGHTS.items(), model.load_weights)
    load_watched(model, WEIGHTS.items(), model.load_weights)
    assert model.gate_up.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert model.down.tolist() == [[3.0] * 2] * 3
    assert model.k_scale.item() == 1.0, "engines compute scales by themselves"


def test_a_model_is_watched_until_its_first_load_was_right() -> None:
    """Later loads are not checked: what a model class skips, it always skips."""
    model, skipped = Engine(), {**WEIGHTS, "experts.gate_up_proj": torch.zeros(4, 3)}
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="Engine ignores 1 of"):
            load_checked(model, skipped.items(), model.load_weights)
    load_checked(model, WEIGHTS.items(), model.load_weights)
    load_checked(model, skipped.items(), model.load_weights)
    with pytest.raises(WorkerFailed, match="Engine ignores 1 of"):
        load_checked(Engine(), skipped.items(), Engine().load_weights)


def test_a_name_that_is_skipped_is_refused() -> None:
    """For example the name that transformers gives fused experts."""
    model = Engine()
    named = {**WEIGHTS, "experts.gate_up_proj": torch.zeros(4, 3)}
    with pytest.raises(WorkerFailed, match=r"Engine ignores 1 of 4 \(experts\.gate_up_proj\) published tensors"):
        load_watched(model, named.items(), model.load_weights)


def test_a_parameter_that_nobody_names_is_refused() -> None:
    model = Engine()
    named = {name: tensor for name, tensor in WEIGHTS.items() if name != "experts.up"}
    with pytest.raises(
        WorkerFailed, match=r"no published values, or NaN, were written into 1 of 2 \(gate_up\) parameters"
    ):
        load_watched(model, named.items(), model.load_weights)


def test_a_parameter_that_the_engine_itself_does_not_count_as_written_is_refused() -> None:
    """When kernels keep the values elsewhere, the parameter itself shows nothing."""
    model = Engine()

    def load(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        model.load_weights(weights)
        return {"down"}

    with pytest.raises(WorkerFailed, match=r"written into 1 of 2 \(gate_up\)"):
        load_watched(model, WEIGHTS.items(), load)


def test_every_use_of_the_values_counts_as_reading() -> None:
    uses = [
        lambda t: torch.empty(2, 3).copy_(t),
        lambda t: t.narrow(0, 0, 1),
        lambda t: t[0],
        lambda t: t.to(torch.bfloat16),
        lambda t: t.data,
        lambda t: t.t(),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack(tensors=[t]),
    ]
    looks = [lambda t: t.shape, lambda t: t.dtype, lambda t: t.size(0), lambda t: t.numel(), lambda t: t.device]
    for use in uses:
        tensor = watch(torch.ones(2, 3))
        assert type(use(tensor)) is Tensor
        assert tensor.was_read
    for look in looks:
        tensor = watch(torch.ones(2, 3))
        look(tensor)
        assert not tensor.was_read


def test_sglang_is_watched_at_its_first_load_only() -> None:
    """A model that had weights gets later versions without a check."""
    staged = StagedWeights({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}, torch.float32, {})
    for name, tensor in WEIGHTS.items():
        staged.tensors[name].copy_(tensor)
    told = [(staged.described(os.getpid(), staged.descriptor), torch.empty(0))]
    model = Engine()
    staged_weights.load_into_sglang(model, told)
    model.k_scale.data.fill_(5.0)
    model.down.data.fill_(torch.nan)
    staged_weights.load_into_sglang(model, told)
    assert model.down.tolist() == [[3.0] * 2] * 3
    fresh = Engine()
    staged_weights.load_into_sglang(fresh, [(staged_weights.POISON, torch.empty(0))])
    assert fresh.down.isnan().all()
    with pytest.raises(WorkerFailed, match=r"written into 2 of 2 \(gate_up, down\) parameters of Engine"):
        staged_weights.load_into_sglang(fresh, [(staged_weights.CHECK, torch.empty(0))])
    staged.close()
