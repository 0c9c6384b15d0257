"""An owner whose samples clients can read, in this very process: a real endpoint and store, without a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import structs

from distflow.cluster.processes import HostEntry
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import Keys, NetworkListener, key_file, write_keys
from distflow.comm.message import Message
from distflow.data.batch import Batch
from distflow.errors import ProtocolError
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Lease, LeasePrompt
from distflow.exchange.own_samples import OwnSamples, samples_of
from distflow.exchange.owner import OwnerCore
from distflow.exchange.store_channel import KINDS, OWNERS, ClientStep, SampleStore, refusal
from distflow.launch.run.record import RunRecord, WorkerEntry
from distflow.types import GivenResponse, Uid
from distflow.workers.clients import by_client
from tests.polling import eventually

STEPS, GROUPS, SAMPLES = 20, 4, 2
FIELDS = ("uid", "prompt_text", "response_text")
READS = FIELDS[:2]
"""What step `labels` shows clients."""
TOKENS_A_GROUP = SAMPLES * 4


def settings(owners: int) -> LeaseSettings:
    return LeaseSettings(
        ledgers=owners,
        groups_per_ledger=GROUPS,
        samples_per_prompt=SAMPLES,
        max_staleness=0,
        training_steps=STEPS,
        memory_bytes=1 << 20,
        group_bytes=lambda tokens: 100,
        max_prompt_tokens=8,
    )


def make(leases: Sequence[Lease]) -> Batch:
    two = (GivenResponse((7, 1), "7"), GivenResponse((8, 1), "8"))
    return samples_of(leases, {lease.position: two for lease in leases})


class Shop:
    """Owner `index` of `owners`. It trains when told to; everything else happens by itself."""

    def __init__(
        self,
        folder: Path,
        index: int = 0,
        owners: int = 1,
        *,
        incarnation: int = 0,
        limit_bytes: int = 1 << 20,
        keys: Keys | None = None,
        writes: Mapping[str, str] | None = None,
    ) -> None:
        """`writes`: what clients are to write, as step `labels`."""
        self.name = f"trainer/{index}"
        self.names = [f"trainer/{number}" for number in range(owners)]
        self.lock = threading.Condition()
        self.core = OwnerCore(self.name, settings(owners), [index], self._prompt)
        roster = {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in self.names}
        listener = None if keys is None else NetworkListener("127.0.0.1", keys)
        self.endpoint = Endpoint(self.name, incarnation, roster, tick_s=0.02, listener=listener)
        self.samples = OwnSamples(self.core, self._refuse, make=make)  # type: ignore[arg-type]
        accept = partial(by_client, reads=READS, writes=writes or {})
        steps = [] if writes is None else [ClientStep("labels", READS, accept)]
        self.store = SampleStore(self.samples, limit_bytes, self._lacking, self.endpoint.reply, steps)
        self.store.writes_to(self._written)
        self.written: dict[int, Batch] = {}
        """What clients have written, by position."""
        self.refused: list[str] = []

    def open(self) -> Shop:
        """Listen."""
        self.endpoint.start(self._on_message, self._on_tick)
        return self

    def train(self, steps: int = 1) -> list[int]:
        """Train on so many steps as soon as the samples are there; their positions."""
        trained = []
        for _ in range(steps):
            with self.lock:
                assert self.lock.wait_for(self.core.set_complete, 10), f"held up by {self.core.held_up()!r}"
                positions = self.core.consumable()
                self.samples.send(self.core.take(positions, 0.0))
                self.samples.pop(positions)
                self.samples.send(self.core.advance(self.core.version + 1, 0.0))
                trained += positions
        return trained

    def begin(self) -> None:
        """Make the samples of the first step, once somebody reads."""
        eventually(lambda: self.store.consumers._consumers, "an ask for samples", every_s=0.005)
        with self.lock:
            self.samples.send(self.core.prompts_arrived(0.0))

    def close(self) -> None:
        """End, as a worker does."""
        with self.lock:
            self.store.close()
        self.endpoint.close()

    def _written(self, step: str, position: int, fields: Batch) -> None:
        assert step == "labels"
        assert position not in self.written, "once"
        self.written[position] = fields
        self.samples.answer(position, fields.columns)

    def _prompt(self, position: int) -> LeasePrompt:
        return LeasePrompt(Uid(0, position, position), (4, 2), f"{position}=", "{}")

    @staticmethod
    def _refuse(*message: object) -> None:
        raise AssertionError(f"there is nobody to tell: {message}")

    @staticmethod
    def _lacking(fields: Iterable[str]) -> str:
        lacking = [name for name in fields if name not in FIELDS]
        return f"samples have no field {lacking[0]!r}" if lacking else ""

    def _on_message(self, message: Message) -> None:
        with self.lock:
            try:
                if message.kind in KINDS:
                    self.store.on_message(message, time.monotonic())
                elif message.kind == OWNERS:
                    self.endpoint.reply(message, {"owners": self.names})
            except ProtocolError as error:
                # As a worker does (tests/runtime/test_node.py).
                self.endpoint.reply(message, refusal(message, str(error)))
                self.refused.append(str(error))
            self.lock.notify_all()

    def _on_tick(self) -> None:
        with self.lock:
            self.store.tick(time.monotonic())
            self.lock.notify_all()


def write_record(folder: Path, shops: Sequence[Shop], keys: Keys | None = None) -> RunRecord:
    """The run.json that clients find these owners by."""
    addresses = {shop.name: shop.endpoint.network_address or shop.endpoint.roster[shop.name] for shop in shops}
    record = RunRecord(
        name="shop",
        run_dir=str(folder),
        training_steps=STEPS,
        workers=tuple(WorkerEntry(shop.name, trains=True) for shop in shops),
        roster=addresses,
        drain_s=1.0,
        restarts=0,
        state="running",
    )
    if keys is not None:
        record = structs.replace(record, hosts=(HostEntry("here", "127.0.0.1"),))
        write_keys(key_file(folder), keys)
    record.write()
    return record
