"""A reward function of a run in which an engine is killed while weights come to it in parts; once, and any of them."""

import os
import signal
from pathlib import Path
from typing import Any

from distflow.types import Completion
from distflow.weights.shards import transfer as shard_transfer

AFTER = 3
"""Messages that it still takes."""
MARK = Path(__file__).with_suffix(".killed")
_real = shard_transfer._unpack
_left = [AFTER]


def _unpack(*given: Any) -> None:
    _real(*given)
    _left[0] -= 1
    if _left[0] < 0:
        try:
            MARK.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


shard_transfer._unpack = _unpack


def even(completion: Completion) -> float:
    """Something to be learnt."""
    return float(len(completion.response_ids) % 2 == 0)
