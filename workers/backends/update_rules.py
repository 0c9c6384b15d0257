"""What one optimizer step does to each tensor: AdamW, AdamW in 8 bits, or Muon, with settings by parameter group.

A rule is a torch optimizer over some of the tensors; together they step all of them. The state that a rule saves of
each tensor is made before the first step, so that a checkpoint has the same names whenever it is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")
PEAK = "peak"
"""Key of a group of a torch optimizer: its learning rate at the peak of the schedule."""
_EIGHT_BIT = ("state1", "state2", "absmax1", "absmax2")
"""What bitsandbytes keeps of a tensor; of small tensors only the first two, in float32."""
_KEPT = ("step", "momentum_buffer", *MOMENTS, *_EIGHT_BIT)


def parameter_groups(names: Collection[str], settings: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Each parameter's `peak` (learning rate) and `weight_decay`, by the first group whose pattern is in its name.

    Raises UserError for a group that matches no parameter.
    """
    whole = {PEAK: float(settings["lr"]), "weight_decay": float(settings["weight_decay"])}
    found = dict.fromkeys(names, whole)
    left = list(names)
    for number, group in enumerate(settings["groups"]):
        matched = [name for name in left if re.search(group["match"], name)]
        if not matched:
            among = "those that no group before it takes" if number else "the trained ones"
            raise UserError(
                f"models.<name>.optimizer.groups[{number}].match {group['match']!r} is in the name of no parameter; "
                f"{among} are {', '.join(left[:3]) or 'none'}{' …' if len(left) > 3 else ''}"
            )
        own = {PEAK: group["lr"], "weight_decay": group["weight_decay"]}
        found |= dict.fromkeys(matched, whole | {key: float(value) for key, value in own.items() if value is not None})
        left = [name for name in left if name not in matched]
    return found


def adamw(parameters: Mapping[str, Tensor], settings: Mapping[str, Any]) -> torch.optim.AdamW:
    """torch's AdamW with the settings of a `models.<name>.optimizer` section."""
    return torch.optim.AdamW(
        _grouped(parameters, settings),
        # On a CPU and on a GPU the fused kernel is the fastest (2 layers of width 64: 0.25 ms, foreach 0.7 ms).
        fused=True,
        **_adam_settings(settings),
    )


def make_rules(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], matrices: Collection[str]
) -> list[torch.optim.Optimizer]:
    """The optimizers that together step all tensors, with the state of each tensor at its beginning.

    `matrices`: names of the weights within the layers, for which Muon is meant. Raises UserError for groups that match
    nothing, and if adamw_8bit lacks its package.
    """
    # Patterns are matched against all names, not against those of one rule.
    groups = parameter_groups(tensors, settings)
    if settings["name"] == "adamw_8bit":
        return [_eight_bit(tensors, settings)]
    hidden = {name: t for name, t in tensors.items() if name in matrices} if settings["name"] == "muon" else {}
    rest = {name: tensor for name, tensor in tensors.items() if name not in hidden}
    rules: list[torch.optim.Optimizer] = []
    if hidden:
        rules.append(_muon(hidden, groups, settings))
    if rest:
        rules.append(torch.optim.AdamW(_collected(rest, groups), fused=True, **_adam_settings(settings)))
    for rule in rules:
        for tensor in _tensors(rule):
            start_state(rule, tensor)
    return rules


def start_state(rule: torch.optim.Optimizer, tensor: Tensor) -> None:
    """What the rule keeps of a tensor before the first step."""
    if "momentum" in rule.defaults:
        rule.state[tensor] = {"momentum_buffer": torch.zeros_like(tensor)}
    else:
        moments = {name: torch.zeros_like(tensor) for name in MOMENTS}
        rule.state[tensor] = {"step": torch.zeros((), device=tensor.device), **moments}


def saved_state(rules: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What is saved of each tensor besides itself and the number of steps: views, by `optimizer.KIND.NAME`."""
    kept = {tensor: state for rule in rules for tensor, state in rule.state.items()}
    for name, tensor in tensors.items():
        for kind in _KEPT[1:]:
            if kind in kept[tensor]:
                yield f"optimizer.{kind}.{name}", kept[tensor][kind]


def held_state(rules: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Everything that is kept of the tensors, but for small tables that they share."""
    states = (state for rule in rules for state in rule.state.values())
    return [value for state in states for kind, value in state.items() if kind in _KEPT and isinstance(value, Tensor)]


@torch.no_grad()
def set_steps(rules: Sequence[torch.optim.Optimizer], steps: int) -> None:
    """Continue as after this many steps."""
    for rule in rules:
        for state in rule.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps


def _adam_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(settings["lr"]),
        "betas": (float(settings["betas"][0]), float(settings["betas"][1])),
        "eps": float(settings["eps"]),
        "weight_decay": float(settings["weight_decay"]),
    }


def _grouped(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _collected(tensors, parameter_groups(tensors, settings))


def _collected(tensors: Mapping[str, Tensor], groups: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The groups of a torch optimizer: tensors with the same settings together."""
    found: dict[tuple[float, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        own = groups[name]
        found.setdefault(tuple(own.values()), {"params": [], **own})["params"].append(tensor)
    return list(found.values())


def _muon(
    tensors: Mapping[str, Tensor], groups: Mapping[str, Mapping[str, float]], settings: Mapping[str, Any]
) -> torch.optim.Muon:
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"models.<name>.optimizer.name muon: torch {torch.__version__} has no Muon; install torch 2.9 or newer, or "
            "set name: adamw"
        )
    # Steps as large as AdamW's (arXiv 2502.16982), so that both have the same learning rate.
    return torch.optim.Muon(
        _collected(tensors, groups),
        lr=float(settings["lr"]),
        weight_decay=float(settings["weight_decay"]),
        momentum=float(settings["momentum"]),
        adjust_lr_fn="match_rms_adamw",
    )


def _eight_bit(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            f"models.<name>.optimizer.name adamw_8bit: the package bitsandbytes cannot be imported ({error}); install "
            "it with: pip install 'distflow-rl[bitsandbytes]', or set name: adamw"
        ) from error
    rule: torch.optim.Optimizer = AdamW8bit(_grouped(tensors, settings), **_adam_settings(settings))
    for number, group in enumerate(rule.param_groups):
        for place, tensor in enumerate(group["params"]):
            rule.init_state(group, tensor, number, place)  # type: ignore[attr-defined]
    return rule


def _tensors(rule: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in rule.param_groups:
        yield from group["params"]
