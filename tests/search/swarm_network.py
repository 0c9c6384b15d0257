"""A publisher of weights and the readers on other hosts, in one process and in virtual time, with seeded faults.

The cores that run in processes: what each reader fetches of whom (`FetchCore`), what holders answer (`ServeCore`).
Hosts may die, come back, join late and stand still; connections break, stand still and bring wrong bytes; the publisher
goes on with the next version in the middle of a fetch, or is started again in a later term. Announcements come by
another way, which is not simulated: each living reader hears them a little later.

    record = SwarmNetwork(WeightScenario(joins=(0.0, 0.0, 5.0))).run()

`run` raises StuckError when not every living reader has the newest version within `limit_s` after the last fault.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

from distflow.errors import ChecksumError
from distflow.weights.manifest import Manifest
from distflow.weights.swarm.fetch_core import STILL_S
from distflow.weights.swarm.sockets import CONNECT_S, HANDSHAKE_S
from distflow.weights.swarm_messages import Content, SwarmPlace
from tests.search.fault_queue import Fault, FaultQueue
from tests.search.swarm_hosts import PublisherHost, SwarmHost
from tests.search.swarm_readers import ReaderHost
from tests.search.swarm_wire import SwarmWire
from tests.search.weight_scenario import WeightRecord, WeightScenario

WAITS_S = 0.5
"""How often a trainer that waits for readers looks whether they have its version."""
PATIENT_S = 60.0
"""While the publisher can be reached, a fetch does not stand still for so long."""


class SwarmNetwork(FaultQueue):
    """One run of a scenario."""

    def __init__(self, scenario: WeightScenario, injected: Counter[Fault] | None = None) -> None:
        super().__init__(injected)
        self.scenario = scenario
        self.record = WeightRecord()
        self.announced: Manifest | None = None
        """What was announced last."""
        self.moved: dict[Content, float] = {}
        """When any reader has got bytes, by what it fetched."""
        self._rng = random.Random(scenario.seed)
        self._wires = count()
        self._to_publish = 0
        self.publisher = PublisherHost(self)
        self.readers = [ReaderHost(self, 1 + n) for n in range(len(scenario.joins))]

    def run(self) -> WeightRecord:
        """Simulate until everybody has the newest version. Raises StuckError if that does not happen."""
        self._schedule()
        self.run_until(self._over, self.scenario.calm_at + self.scenario.limit_s, self._describe)
        self.record.seconds = self.now
        return self.record

    # -- the network
    def delay(self) -> float:
        """How long a message takes."""
        return self._rng.random() * self.scenario.delay_s

    def chance(self, probability: float) -> bool:
        """Whether something happens."""
        return self._rng.random() < probability

    def any(self, several: int) -> int:
        """One of so many."""
        return self._rng.randrange(several)

    def healed_at(self, one: int, other: int) -> float:
        """When something gets through between two hosts again; 0: it does."""
        cuts = [cut for cut in self.scenario.cuts if set(cut.between) == {one, other}]
        return max((cut.at + cut.seconds for cut in cuts if cut.at <= self.now < cut.at + cut.seconds), default=0.0)

    def announce(self, manifest: Manifest) -> None:
        """Tell every reader of a version."""
        self.announced = manifest
        for reader in self.readers:
            reader.after(self.delay(), partial(reader.announce, manifest))

    def connect(
        self, reader: ReaderHost, place: SwarmPlace, address: str, answer: Callable[[SwarmWire | str, bool], None]
    ) -> None:
        """A reader connects; the answer comes a little later: the connection, or the address and whether it refused."""
        hosts: list[SwarmHost] = [self.publisher, *self.readers]
        holder = next(host for host in hosts if address.startswith(f"tcp://10.0.0.{host.number}:"))
        if self.healed_at(reader.number, holder.number) > self.now + CONNECT_S or not holder.up:
            reader.after(CONNECT_S, partial(answer, address, False))
        else:
            own = reader.address if reader.passes_on else ""
            wire = SwarmWire(next(self._wires), reader, holder, holder.serve(own, reader.site), address)
            who, until = (reader.incarnation, holder.incarnation), self.now + HANDSHAKE_S
            self.after(self.delay(), partial(self._shake_hands, wire, who, place.token, until, answer))

    def _shake_hands(
        self,
        wire: SwarmWire,
        who: tuple[int, int],
        token: bytes,
        until: float,
        answer: Callable[[SwarmWire | str, bool], None],
    ) -> None:
        """Wait for the other end, which may stand still. The kernel knows at once that nobody listens."""
        reader, holder = wire.reader, wire.holder
        if (reader.incarnation, reader.alive) != (who[0], True):
            return
        there = holder.alive and holder.incarnation == who[1] and holder.address == wire.address
        waits = holder.asleep_s > 0.0 or self.healed_at(reader.number, holder.number) > 0.0
        if not there or (waits and self.now > until):
            reader.after(0.0, partial(answer, wire.address, False))
        elif waits:
            self.after(0.1, partial(self._shake_hands, wire, who, token, until, answer))
        elif token not in holder.tokens:
            reader.after(0.0, partial(answer, wire.address, True))
        else:
            reader.links.append(wire)
            holder.welcome(wire)
            reader.after(0.0, partial(answer, wire, False))

    # -- faults
    def _schedule(self) -> None:
        scenario = self.scenario
        hosts: list[SwarmHost] = [self.publisher, *self.readers]
        self.publisher.begin()
        for reader, at in zip(self.readers, scenario.joins, strict=True):
            self.after(at, reader.begin)
            self.injected["joins"] += at > 0.0
        for at in scenario.publishes:
            self.after(at, self._publish)
        for crash in scenario.crashes:
            self.befall(crash.at, "crashes", hosts[crash.worker], partial(hosts[crash.worker].die, crash))
        for pause in scenario.pauses:
            self.befall(pause.at, "pauses", hosts[pause.worker], partial(hosts[pause.worker].pause, pause))
        for jump in scenario.jumps:
            self.befall(jump.at, "clock_jumps", hosts[jump.host], partial(hosts[jump.host].jump, jump.seconds))
        for damage in scenario.damages:
            self.after(damage.at, hosts[damage.host].damage)
        for cut in scenario.cuts:
            self.after(cut.at, partial(self.inject, "cuts"))
            if cut.reset:
                self.after(cut.at, partial(self._reset, set(cut.between)))
        self.after(scenario.calm_at, lambda: None)

    def _publish(self) -> None:
        newest = None if self.announced is None else self.announced.version
        late = newest is None or self.publisher.waits or any(one.alive and not one.has(newest) for one in self.readers)
        if self.scenario.in_step and late and not self.publisher.gone:
            self._to_publish += 1
            self.after(WAITS_S, self._publish_later)
        elif self.publisher.alive:
            self.publisher.when_awake(self.publisher.publish)

    def _publish_later(self) -> None:
        self._to_publish -= 1
        self._publish()

    def _reset(self, between: set[int]) -> None:
        for holder in (self.publisher, *self.readers):
            for wire in list(holder.wires):
                if {wire.reader.number, holder.number} == between:
                    wire.lose()

    # -- promises that can be seen on the way
    def check_failure(self, reader: ReaderHost, error: Exception, quiet_s: float) -> None:
        """A process has given up: was that right?"""
        if isinstance(error, ChecksumError):
            assert self.scenario.wrong, f"{reader.name}: {error}, and nothing changes bytes on the way"
        else:
            # It may take a short stop for silence, and jumps of its clock.
            most = self.scenario.no_progress_s - STILL_S * (1 + len(self.scenario.pauses) + len(self.scenario.jumps))
            assert quiet_s >= most, f"{reader.name}: {error}, after {quiet_s:.1f} s"
            reachable_s = self._reachable_s(reader)
            assert reachable_s < PATIENT_S, (
                f"{reader.name}: {error}, though it could be reached for {reachable_s:.0f} s"
            )

    def _reachable_s(self, reader: ReaderHost) -> float:
        """For how long a reader could have fetched from the publisher, or without it what others have."""
        manifest, publisher = reader.manifest, self.publisher
        assert manifest is not None, "it has fetched"
        hosts: list[SwarmHost] = [reader, publisher] if publisher.alive else [reader, *self.readers]
        there = publisher.serves(manifest.content, 0) if publisher.alive else self._in_reach(reader, manifest)
        if not there:
            return 0.0
        numbers = {host.number for host in hosts}
        cuts = [
            cut.at + cut.seconds for cut in self.scenario.cuts if set(cut.between) <= numbers and cut.at <= self.now
        ]
        since = [host.clear_since for host in hosts] + ([] if publisher.alive else [self.moved[manifest.content]])
        calm_at = self.scenario.calm_at if self.scenario.wrong else 0.0
        return self.now - max(reader.fetch_began, publisher.died_at, calm_at, *since, *cuts)

    def _in_reach(self, reader: ReaderHost, manifest: Manifest) -> bool:
        """Whether readers that this one knows of have, all together, what it fetches."""
        known = [one for one in self.readers if one.alive and one.address in reader.known()]
        return all(any(one.serves(manifest.content, n) for one in (reader, *known)) for n in range(manifest.chunks))

    # -- the end
    def _over(self) -> bool:
        if self.now < self.scenario.calm_at or self._to_publish:
            return False
        if self.announced is None:
            return self.publisher.gone
        newest = self.announced.version
        if self.publisher.gone:
            # Who does not get everything gives up.
            return all(one.has(newest) or one.gave_up_at > self.publisher.died_at for one in self.readers)
        return not self.publisher.waits and all(one.gone or one.has(newest) for one in self.readers)

    def _describe(self) -> str:
        newest = None if self.announced is None else self.announced.version
        lines = [f"not everybody has {newest} by {self.now:.0f} s"]
        lines += [f"{one.name}: alive {one.alive}, {one.doing()}" for one in self.readers]
        return "\n".join(lines)
