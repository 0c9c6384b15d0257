"""The optimizer of a model: learning-rate schedule, gradient scaling and clipping, float32 masters, saved state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distflow.flow.schedule import learning_rate
from distflow.log import logger
from distflow.runtime.protocols import Reducer
from distflow.workers.backends.update_rules import PEAK, held_state, make_rules, saved_state, set_steps

STEPS = "optimizer.steps"
log = logger(__name__)
_WIDE = (torch.float32, torch.float64)


class ScheduledOptimizer(ABC):
    """Steps tensors that a subclass lays out, counts the steps and schedules their rate."""

    _rules: Sequence[torch.optim.Optimizer]
    """What steps the tensors, together."""

    def __init__(self, settings: Mapping[str, Any], training_steps: int, replicas: Reducer) -> None:
        self._settings = settings
        self._training_steps = training_steps
        self._replicas = replicas
        self.steps = 0
        self.scheduled: int | None = None
        """Optimizer steps that count as done for the schedule; None: those that were."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `apply`; groups of parameters may have others."""
        return self._rate(float(self._settings["lr"]))

    def _rate(self, peak: float) -> float:
        """The rate of a group with this peak: as far from its own as the whole from the whole's."""
        lr, least = float(self._settings["lr"]), float(self._settings["min_lr"])
        return learning_rate(
            peak,
            self._settings["schedule"],
            self.steps if self.scheduled is None else self.scheduled,
            warmup_steps=int(self._settings["warmup_steps"]),
            training_steps=self._training_steps,
            min_lr=least if peak == lr or not lr else least * peak / lr,
            decay_steps=self._settings["decay_steps"],
        )

    @abstractmethod
    def backward(self, loss_sum: Tensor) -> None:
        """Backward pass of a summed loss; gradients add up until `apply`."""

    @abstractmethod
    def apply(self, denominator: float) -> float:
        """Sum over the replicas, divide by `denominator`, clip, step, clear.

        Returns the gradient norm after the division, before clipping. If that is not finite or exactly 0, on all
        replicas alike, nothing is stepped: weights, moments and the number of steps stay, and all that was summed is
        cleared. A gradient of 0 tells nothing, but Adam would step on: along its momentum, and by ever larger steps,
        since its second moment decays. Steps without a signal, of which a solved task has many, would undo it.

        Raises ValueError for a denominator ≤ 0 or when nothing was accumulated.
        """

    def set_steps(self, steps: int) -> None:
        """Continue as after this many steps."""
        self.steps = steps
        set_steps(self._rules, steps)

    def _set_rate(self) -> None:
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = self._rate(group[PEAK])

    def _clip_factor(self, norm: float) -> float:
        """The factor that brings gradients of this norm down to `max_grad_norm`."""
        limit = self._settings["max_grad_norm"]
        return 1.0 if limit is None else min(1.0, float(limit) / (norm + 1e-6))

    @staticmethod
    def _check_apply(accumulated: int, denominator: float) -> None:
        if not accumulated or not denominator > 0:
            raise ValueError(
                f"apply(denominator={denominator}) with {accumulated} accumulated gradients: accumulate a loss "
                "sum first, and divide by the number of tokens or samples in it"
            )

    def _steps_on(self, norm: float, denominator: float, names: Iterable[str]) -> bool:
        """Return whether a gradient of this norm is stepped on; says why not, unless it is 0.

        `names`: parameters whose gradients are not finite.
        """
        if math.isfinite(norm):
            return norm > 0
        if self._replicas.rank:
            return False  # It is the same on all of them.
        bad = list(names)
        where = f"not finite in {', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}" if bad else "each entry is finite"
        log.warning(
            "gradient norm is %s at optimizer step %d (%s; denominator %s): the step is skipped, and weights and "
            "moments stay as they are",
            norm,
            self.steps + 1,
            where,
            denominator,
        )
        return False


class PolicyOptimizer(ScheduledOptimizer):
    """Over whole parameters, with gradients that add up in at least float32 until `apply`.

    Parameters of half precision keep a float32 master: a step of 1e-6 would vanish in bfloat16.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Any],
        training_steps: int,
        replicas: Reducer,
        matrices: Collection[str] = (),
    ) -> None:
        """`matrices`: the names of those that optimizer muon is meant for."""
        super().__init__(settings, training_steps, replicas)
        self._parameters = dict(parameters)
        self.masters = {
            name: p if p.dtype in _WIDE else nn.Parameter(p.detach().float()) for name, p in self._parameters.items()
        }
        self._narrow = [name for name, p in self._parameters.items() if self.masters[name] is not p]
        self._under_way: Literal["", "backward", "moving"] = ""
        """What a backward pass is at, or was at when it raised."""
        self._first = True
        """Whether nothing had been summed before it."""
        self._rules = make_rules(self.masters, settings, matrices)

    def backward(self, loss_sum: Tensor) -> None:
        """Backward pass; half-precision gradients then move into the masters, where they add up without loss."""
        self._first = not self.gradients()
        self._under_way = "backward"
        torch.autograd.backward(loss_sum)
        self._under_way = "moving"
        for name in self._narrow:
            parameter, master = self._parameters[name], self.masters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None
        self._under_way = ""

    def forget_failed(self) -> bool:
        """Drop what a backward pass that raised has left; False if earlier sums have some of it."""
        if self._first and self._under_way:
            self.clear()
        apart = self._under_way == "backward" and len(self._narrow) == len(self._parameters)
        for name in self._narrow if apart else ():
            self._parameters[name].grad = None
        right = apart or not self._under_way
        self._under_way = "" if right else self._under_way
        return right

    def apply(self, denominator: float) -> float:
        """See the base class."""
        if self._replicas.size > 1:
            self._sum_over_replicas()
        graded = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        self._check_apply(len(graded), denominator)
        grads = list(graded.values())
        norm = float(torch.nn.utils.get_total_norm(grads)) / denominator
        if not self._steps_on(
            norm, denominator, (name for name, grad in graded.items() if not bool(grad.isfinite().all()))
        ):
            self.clear()
            return norm
        self._step(grads, norm, denominator)
        return norm

    def _step(self, grads: list[Tensor], norm: float, denominator: float) -> None:
        """Divide, clip by the norm of the divided gradients, step, clear."""
        torch._foreach_mul_(grads, self._clip_factor(norm) / denominator)
        self._set_rate()
        for rule in self._rules:
            rule.step()
        self.steps += 1
        self.clear()
        self._round_to_narrow()

    def _sum_over_replicas(self) -> None:
        """A replica without a gradient for some parameter adds zeros."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        self._replicas.sum_(self.gradients())

    def clear(self) -> None:
        """Drop the accumulated gradients."""
        self._under_way = ""
        for name, master in self.masters.items():
            master.grad = None
            self._parameters[name].grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments, masters and the step counter by name; views, which the next `apply` changes."""
        out = {STEPS: torch.tensor(self.steps, dtype=torch.int64)}
        out |= saved_state(self._rules, self.masters)
        for name in self._narrow:
            out[f"optimizer.master.{name}"] = self.masters[name].detach()
        return out

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; names and shapes were checked by the caller."""
        self.set_steps(int(tensors[STEPS]))
        for name, tensor in self.state_tensors().items():
            if name != STEPS:
                tensor.copy_(tensors[name])

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients."""
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def held(self) -> list[Tensor]:
        """Moments, step counters, and the masters that are not the parameters themselves."""
        masters = [self.masters[name] for name in self._narrow]
        return masters + held_state(self._rules)

    @torch.no_grad()
    def _round_to_narrow(self) -> None:
        for name in self._narrow:
            self._parameters[name].copy_(self.masters[name])


class ShardedOptimizer(PolicyOptimizer):
    """Over this replica's elements of each parameter, in float32 at least; gradients are sums over all replicas."""

    accumulated = 0
    """Losses accumulated here since the last step: other replicas may have had some where this one had none."""

    def backward(self, loss_sum: Tensor) -> None:
        """Backward pass; each replica gets the sums over all of them for its elements."""
        torch.autograd.backward(loss_sum)
        self.accumulated += 1

    def apply(self, denominator: float) -> float:
        """See the base class; the norm is that over all replicas."""
        grads = {name: master.grad for name, master in self.masters.items()}
        # Per parameter, so that every replica can name those that are not finite anywhere.
        squares, accumulated = self._over_all_replicas(list(grads.values()))
        self._check_apply(accumulated, denominator)
        norm = total_norm(squares) / denominator
        self.accumulated = 0
        if not self._steps_on(norm, denominator, not_finite(grads, squares)):
            self.clear()
            return norm
        self._step([grad for grad in grads.values() if grad is not None], norm, denominator)
        return norm

    def _over_all_replicas(self, grads: Sequence[Tensor | None]) -> tuple[list[float], int]:
        """The squared norm of each gradient (0 where there is none), and the number of losses accumulated."""
        device = next(iter(self.masters.values())).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        norms = [zero if grad is None else torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        sums = torch.stack([norm * norm for norm in norms] + [zero + self.accumulated])
        self._replicas.sum_([sums])
        *squares, accumulated = sums.tolist()
        return squares, round(accumulated)


def total_norm(squares: Sequence[float]) -> float:
    """Square root of the sum of squared norms; not finite if one of them is not."""
    return math.sqrt(math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares))


def not_finite(names: Iterable[str], squares: Sequence[float]) -> Iterator[str]:
    """Yield the names whose squared norms are not finite."""
    return (name for name, square in zip(names, squares, strict=True) if not math.isfinite(square))


def check_same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless a saved state has the tensors of `own`, with their shapes and types."""
    check_names(own, given)
    for name, tensor in own.items():
        check_tensor(name, given[name], tuple(tensor.shape), tensor.dtype)


def check_names(own: Collection[str], given: Collection[str]) -> None:
    """Raises ValueError unless the names are the same."""
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        raise ValueError(
            f"checkpoint of another model: it lacks {missing[:3] or 'nothing'} and has unknown "
            f"{unknown[:3] or 'nothing'} ({len(missing)} missing, {len(unknown)} unknown)"
        )


def check_tensor(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless a tensor has this shape and type."""
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise ValueError(
            f"checkpoint of another model: {name} is {given.dtype} {list(given.shape)}, "
            f"here it is {dtype} {list(shape)}"
        )
