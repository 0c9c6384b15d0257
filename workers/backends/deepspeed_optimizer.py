"""AdamW under ZeRO: DeepSpeed sums the gradients; scaling, clipping and the names of the saved state are ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distflow.errors import WorkerFailed
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import Reducer
from distflow.workers.backends.deepspeed_partition import Stretch, partition_of
from distflow.workers.backends.optimizer import STEPS, ScheduledOptimizer, check_same, not_finite, total_norm
from distflow.workers.backends.update_rules import MOMENTS, start_state


class ZeroOptimizer(ScheduledOptimizer):
    """Steps the model of a DeepSpeed engine, of which every replica owns a part; all replicas call `apply` together.

    `shapes`: shapes of the whole parameters, by name.
    """

    def __init__(
        self,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, torch.Size],
        settings: Mapping[str, Any],
        training_steps: int,
        replicas: Reducer,
    ) -> None:
        super().__init__(settings, training_steps, replicas)
        self._engine = engine
        self._parameters = parameters
        self._shapes = shapes
        self._stage = int(engine.zero_optimization_stage())
        self._adamw = engine.basic_optimizer
        self._rules = [self._adamw]
        self._partition = partition_of(engine.optimizer, parameters, self._stage)
        self._half = next(iter(parameters.values())).dtype == torch.bfloat16
        self._rounds = 0
        for group in self._adamw.param_groups:
            for flat in group["params"]:
                start_state(self._adamw, flat)
        for run in self._partition.runs:
            if run.flat not in self._adamw.state:
                start_state(self._adamw, run.flat)

    @property
    def untouched(self) -> bool:
        """Whether there was no backward pass since the last step."""
        return self._rounds == 0

    def backward(self, loss_sum: Tensor) -> None:
        """Backward pass of a summed loss; from stage 2 on, the replicas sum their gradients in it."""
        self._engine.backward(loss_sum, scale_wrt_gas=False)
        self._rounds += 1

    def apply(self, denominator: float) -> float:
        """See the base class. Raises WorkerFailed if DeepSpeed leaves out a step whose norm is finite."""
        self._check_apply(0 if self.untouched else len(self._parameters), denominator)
        self._finish_sums()
        gradients = list(self._partition.gradients())
        # DeepSpeed's sums; stage 3 has divided them by the number of replicas.
        scale = (self._replicas.size if self._stage == 3 else 1) / denominator
        squares = self._squares(gradients)
        norm = scale * total_norm(squares)
        if not self._steps_on(norm, denominator, not_finite(self._parameters, squares)):
            for _, gradient in gradients:
                gradient.zero_()
            self._skip()
            return norm
        torch._foreach_mul_([gradient for _, gradient in gradients], scale * self._clip_factor(norm))
        del gradients
        self._set_rate()
        self._engine_step()
        if not self._engine.was_step_applied():
            raise WorkerFailed(f"DeepSpeed skipped optimizer step {self.steps + 1}, with a gradient norm of {norm}")
        self.steps += 1
        return norm

    def _engine_step(self) -> None:
        """DeepSpeed's step, after which nothing is summed any more."""
        self._engine.step()
        self._engine.set_gradient_accumulation_boundary(False)
        self._rounds = 0

    def _skip(self) -> None:
        """Let DeepSpeed, whose sums are zeros now, go through a step in which its optimizer does nothing.

        What it has summed lies in buffers of its own, other ones in every stage: only its step clears them all.
        """
        zero = self._engine.optimizer
        # In stage 1 with bfloat16 each replica keeps sums of all elements, and looks at those of others too.
        for flat in getattr(zero, "fp32_groups_gradients_flat", ()):
            flat.zero_()
        if getattr(zero, "norm_for_param_grads", None):
            # With an offloaded optimizer it has looked at the sums as they came, and would end its step early.
            zero.norm_for_param_grads = {number: torch.zeros(()) for number in zero.norm_for_param_grads}
            zero.local_overflow = False
        self._adamw.step = lambda closure=None: None
        try:
            self._engine_step()
        finally:
            del self._adamw.step
        if not self._engine.was_step_applied():
            raise WorkerFailed("DeepSpeed may have kept sums of gradients that are not finite: it left out a step")

    def _finish_sums(self) -> None:
        """What DeepSpeed itself would do after the last backward of a step, if it knew beforehand which one is last."""
        self._engine.set_gradient_accumulation_boundary(True)
        if self._stage < 2:
            self._engine.allreduce_gradients()
        else:
            self._engine.optimizer.finalize_gradient_accumulation_boundary()
        if self._engine.device.type == "cuda":
            # With offload_optimizer, copies to the CPU's memory are still in flight, and nothing else waits for them.
            torch.cuda.synchronize(self._engine.device)

    def _squares(self, gradients: list[tuple[Stretch, Tensor]]) -> list[float]:
        """Squared norm of each parameter's gradient over all replicas, so that each can name those not finite."""
        number = {name: index for index, name in enumerate(self._parameters)}
        squares = torch.zeros(len(number), dtype=torch.float64, device=self._engine.device)
        places = torch.tensor([number[run.name] for run, _ in gradients], dtype=torch.int64, device=squares.device)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, gradient in gradients]
        if norms:
            squares[places] = torch.stack(norms).to(squares.device).square()
        if self._stage > 0:
            self._replicas.sum_([squares])
        found: list[float] = squares.tolist()
        return found

    def state_shards(self) -> Iterator[Shard]:
        """This replica's part of the weights, moments and masters; the first replica adds the step counter."""
        if self._stage == 0:
            yield from share_of(self._whole(), self._replicas.rank, self._replicas.size)
            return
        if self._replicas.rank == 0:
            yield Shard(STEPS, (), 0, torch.tensor(self.steps, dtype=torch.int64))
        for run in self._partition.runs:
            if run.length:
                for name, data in self._tensors(run):
                    yield Shard(name, tuple(self._shapes[run.name]), run.start, data)

    def _tensors(self, run: Stretch) -> Iterator[tuple[str, Tensor]]:
        """This replica's elements of everything that is saved for a parameter, as views."""
        yield f"model.{run.name}", self._partition.weights(run)
        for moment in MOMENTS:
            yield f"optimizer.{moment}.{run.name}", run.of(self._adamw.state[run.flat][moment])
        if self._half:
            yield f"optimizer.master.{run.name}", run.of(run.flat)

    def _whole(self) -> dict[str, Tensor]:
        tensors = {STEPS: torch.tensor(self.steps, dtype=torch.int64)}
        for run in self._partition.runs:
            tensors |= {name: data.view(self._shapes[run.name]) for name, data in self._tensors(run)}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a whole state, before the first backward; raises ValueError on a mismatch."""
        check_same(self._expected(), tensors)
        self.set_steps(int(tensors[STEPS]))
        if self._stage == 3:
            # Small parameters are kept whole between steps; they must be gathered again.
            self._engine.empty_partition_cache()
        for name in self._parameters:
            self._partition.load_weights(name, tensors[f"model.{name}"])
        for run in self._partition.runs:
            master = tensors[f"optimizer.master.{run.name}" if self._half else f"model.{run.name}"]
            run.of(run.flat).copy_(run.cut(master))
            for moment in MOMENTS:
                own = run.of(self._adamw.state[run.flat][moment])
                own.copy_(run.cut(tensors[f"optimizer.{moment}.{run.name}"]))

    def _expected(self) -> dict[str, Tensor]:
        """The names, shapes and types of a whole state."""
        expected = {STEPS: torch.empty((), dtype=torch.int64, device="meta")}
        for name, shape in self._shapes.items():
            wide = torch.empty(shape, dtype=torch.float32, device="meta")
            expected[f"model.{name}"] = wide.to(self._parameters[name].dtype)
            expected |= {f"optimizer.{moment}.{name}": wide for moment in MOMENTS}
            if self._half:
                expected[f"optimizer.master.{name}"] = wide
        return expected

    def weights(self) -> list[Tensor]:
        """The weights that the model computes with, as far as this replica holds them between steps."""
        if self._stage == 3:
            return [self._partition.weights(run) for run in self._partition.runs]
        return list(self._parameters.values())

    def held(self) -> list[Tensor]:
        """Masters and moments."""
        states = self._adamw.state.items()
        return [tensor for flat, state in states for tensor in (flat, *state.values())]

    def offload(self) -> None:
        """Move weights, masters and moments to the CPU's memory. Stage 1 in bfloat16 cannot."""
        if self._stage == 3:
            self._engine.offload_states(include=["lp_params"], pin_memory=False)
        elif self._stage > 0 and hasattr(self._engine.optimizer, "offload_states"):
            self._engine.offload_states(pin_memory=False)
        if self._stage in (0, 3):
            self._move("cpu")

    def onload(self) -> None:
        """Move them back."""
        if self._stage > 0 and hasattr(self._engine.optimizer, "reload_states"):
            self._engine.reload_states()
        if self._stage in (0, 3):
            self._move("cpu" if self._engine.zero_use_cpu_optimizer() else self._engine.device)

    def _move(self, device: str | torch.device) -> None:
        """Move the weights of stage 0, and the state that in stage 3 DeepSpeed moves for its own compiled Adam only."""
        if self._stage == 0:
            self._engine.module.to(device)
        for flat, state in self._adamw.state.items():
            flat.data = flat.data.to(device)
            for key, value in state.items():
                state[key] = value.to(device)
