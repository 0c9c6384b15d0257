"""The loss of tests in whose runs something is to happen: a training step takes longer, and hardly any processor."""

import time
from typing import Any

from distflow.algorithms import TokenTerms
from distflow.algorithms.losses import ppo

PACE_S = 0.05


def loss(terms: TokenTerms, *, clip: Any = (0.2, 0.2)) -> Any:
    """PPO's, after a while."""
    time.sleep(PACE_S)
    return ppo(terms, clip=clip)
