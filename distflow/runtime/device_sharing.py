"""Who has the device of a worker that both generates and trains: with `offload: true`, one side at a time.

Whoever needs the device takes it, and finds the other side gone; nothing moves when it is at home already. In words,
around training step t:

- *Generating takes it.* The copy of a checkpoint that is still being made is waited for. Models, with gradients and
  optimizer, begin to leave, the engine comes back beside that. Then the engine takes version t straight from the
  device, where what was published lives until then, and only now the weights of the trainer are gone.
- *Training takes it.* The engine goes, open samples stay in it. What they have in the cache goes to the host's memory
  and comes back: keys and values were computed by older weights and cannot be computed again, so this alone keeps their
  tokens and log-probs what they would have been. The rest of the cache is let go. So are the engine's weights, if it
  takes each new version at once (`layout.refresh: eager`): an update of them begins here, and is made when it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from distflow.errors import UserError
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend, Engine, Measured
from distflow.types import Version
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink

log = logger(__name__)
OFFLOAD = "timing_s/offload"
MIB = 1 << 20


class Turns:
    """Both sides stay on the device: what every worker without `offload` has."""

    def generate(self) -> None:
        """The engine is about to be used."""

    def train(self) -> None:
        """Models are about to be used, published or saved."""

    def taken(self, number: int) -> None:
        """The engine has taken the weights of version `number`."""

    def settled_by(self, wait: Callable[[], None]) -> None:
        """`wait` returns when nobody reads the models' state on a thread of his own."""


class Aside:
    """Models that leave the GPU while an engine is made, which must find it as it will later.

    `back` fetches them, behind the engine's own `offload`.
    """

    def __init__(self, models: Mapping[str, Backend], *, wanted: bool) -> None:
        self._models: list[Backend] = []
        if wanted:
            self._models += [model for model in models.values() if _is_there(model)]
            for model in self._models:
                model.offload()
            torch.cuda.empty_cache()

    def back(self) -> None:
        """Where they were."""
        while self._models:
            self._models.pop().onload()


def _is_there(model: Backend) -> bool:
    # Some are put on the device later, divided.
    return isinstance(model, Measured) and any(size > 0 for size in model.device_bytes().values())


class OffloadTurns(Turns):
    """One side at a time; training has the device first. `renewed`: the engine takes each new version at once."""

    def __init__(
        self,
        engine: Engine,
        models: Mapping[str, Backend],
        link: InprocLink,
        inbox: WeightInbox,
        metrics: MetricStore,
        *,
        renewed: bool,
    ) -> None:
        self._engine = engine
        self._models = models
        self._link = link
        self._inbox = inbox
        self._metrics = metrics
        self._renewed = renewed
        self._settle: Callable[[], None] = lambda: None
        self._generating = False
        self._told: set[str] = set()
        engine.offload()

    def generate(self) -> None:
        """Models leave, the engine comes; raises UserError where there are no weights for it."""
        if self._generating:
            return
        if self._renewed and self._inbox.loaded is not None and not self._inbox.waiting:
            raise UserError(
                "offload: true, and the script generates again without w.publish: the engine's weights were let go "
                "when training began — publish after every training step, or set layout.refresh to when_idle"
            )
        with self._metrics.timed(OFFLOAD):
            self._settle()
            if not self._renewed:
                self._link.keep_on_host()
            for model in self._models.values():
                model.offload()
            self._engine.onload()
        self._generating = True

    def taken(self, number: int) -> None:
        """What was published need not live on."""
        self._link.let_go()
        self._tell("generating")

    def train(self) -> None:
        """The engine leaves, models come."""
        if not self._generating:
            return
        self._generating = False
        with self._metrics.timed(OFFLOAD):
            version = self._engine.version
            if self._renewed:
                self._link.let_go()
                if version is not None:
                    self._engine.begin_update(Version(version.term, version.number + 1))
            self._engine.offload()
            for model in self._models.values():
                model.onload()
        self._tell("training")

    def settled_by(self, wait: Callable[[], None]) -> None:
        """Called before models leave: what is copied on a thread would keep their memory."""
        self._settle = wait

    def held(self) -> dict[str, int]:
        """Bytes on the device by owner, of those that can say so: `engine/kv`, `policy/optimizer` and the like."""
        owners: dict[str, Engine | Backend] = {"engine": self._engine, **self._models}
        return {
            f"{owner}/{what}": size
            for owner, part in owners.items()
            if isinstance(part, Measured)
            for what, size in part.device_bytes().items()
        }

    def _tell(self, side: str) -> None:
        """The first time of each side: what is on the device then."""
        if side not in self._told:
            self._told.add(side)
            shown = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in self.held().items())
            log.info("%s with offload; on the device: %s", side, shown)
