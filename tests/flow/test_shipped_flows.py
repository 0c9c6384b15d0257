"""What each shipped flow is: how it differs from grpo in its steps, its advantage and its loss."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.config.load import load_recipe
from distflow.flow.planner import make_plan

GRPO: dict[str, Any] = {
    "steps": ["sample", "reward", "advantage", "update"],
    "advantage": "advantage",
    "function": "grpo",
    "normalize": "group_std",
    "loss": "ppo",
    "clip": [0.2, 0.2],
    "cap": None,
    "aggregate": "token-mean",
    "kl_coef": 0.0,
}
FLOWS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_kl": {"steps": ["sample", "reward", "advantage", "reference", "update"], "kl_coef": 0.001},
    "dr_grpo": {"normalize": "none", "aggregate": "seq-mean-token-sum-norm/4"},
    "rloo": {"function": "rloo", "normalize": None, "aggregate": "seq-mean-token-sum"},
    "opo": {"function": "opo", "normalize": None},
    "remax": {
        "steps": ["sample", "reward", "baseline", "advantage", "update"],
        "function": "remax",
        "normalize": None,
    },
    "reinforce_plus_plus": {
        "steps": ["sample", "reward", "reference", "token_rewards", "advantage", "update"],
        "advantage": "batch_advantage",
        "function": "reinforce_plus_plus",
        "normalize": None,
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "batch_advantage",
        "function": "reinforce_plus_plus_baseline",
        "normalize": None,
    },
    "dapo": {
        "steps": ["sample", "reward", "filter", "token_rewards", "advantage", "update"],
        "clip": [0.2, 0.28],
    },
    "gspo": {"loss": "gspo", "clip": [3e-4, 4e-4], "aggregate": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip": [1.0, 0.28]},
    "aipo": {"loss": "aipo", "clip": None, "cap": 2.0},
    "decoupled_ppo": {"loss": "decoupled_ppo", "cap": 5.0},
    "ppo": {
        "steps": ["sample", "reward", "values", "token_rewards", "gae", "whiten", "update", "critic_update"],
        "advantage": None,
        "function": None,
        "normalize": None,
    },
}


@pytest.mark.parametrize("flow", FLOWS)
def test_it_is_what_its_name_says(flow: str) -> None:
    recipe = load_recipe("quickstart", [f"flow={flow}", "layout=colocated"]).recipe
    steps = {step.name: step for step in make_plan(recipe, lambda key: "quickstart", need_files=False).steps}
    update, advantage = steps["update"].settings, steps.get("advantage")
    own = {} if advantage is None else advantage.settings
    clip = update.get("clip")
    found = {
        "steps": sorted(steps),
        "advantage": None if advantage is None else advantage.call.rpartition(":")[2],
        **{name: own.get(name) for name in ("function", "normalize")},
        **{name: update.get(name) for name in ("loss", "cap", "aggregate", "kl_coef")},
        "clip": None if clip is None else list(clip),
    }
    expected = GRPO | FLOWS[flow]
    assert found == expected | {"steps": sorted(expected["steps"])}
