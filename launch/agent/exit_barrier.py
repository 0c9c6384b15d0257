"""How agents part at the end of a run on many hosts: nobody leaves before the others know, nobody waits for ever."""

from __future__ import annotations

import threading

from distflow.launch.agent.peer_agents import Neighbours
from distflow.launch.cluster.cluster_view import HEAD, awaited, unseen
from distflow.launch.observe.file_sync import COLLECTED, Mirror
from distflow.launch.run.exit_status import read_exits
from distflow.launch.run.record import RunRecord
from distflow.log import logger

END_S = 15.0
"""For all agents to clean up, say so, and leave."""
COLLECT_S = 60.0
"""On top, for the first host to fetch the last files where the hosts do not share a run folder."""
SILENT_S = 5.0
"""An agent that is not heard of for so long is not waited for: all that it could still say is that it leaves."""
log = logger(__name__)


class Farewell:
    """Of one agent, from `now` on; its own host is clean. `orderly`: the run was neither stopped nor did it fail."""

    def __init__(self, neighbours: Neighbours, record: RunRecord, host: int, now: float, *, orderly: bool) -> None:
        self._neighbours = neighbours
        self._apart = neighbours.apart() - neighbours.mesh.silent(SILENT_S)
        self._record = record
        self._orderly = orderly
        self._collector: threading.Thread | None = None
        fetching = self._apart if host == HEAD else self._apart & {HEAD}
        self._deadline = now + END_S + (COLLECT_S if fetching else 0.0)
        if host == HEAD and self._apart:
            mirror = Mirror(record, self._apart, COLLECT_S)
            self._collector = threading.Thread(target=mirror.fetch, args=(COLLECTED,), name="collector", daemon=True)
            self._collector.start()

    @property
    def collected(self) -> bool:
        """Whether this agent has what it keeps of the others' files."""
        return self._collector is None or not self._collector.is_alive()

    def waits_for(self, now: float, *, writes: bool) -> str | None:
        """What must still happen before this agent may leave; None when it may."""
        mesh = self._neighbours.mesh
        what = awaited(mesh, self._neighbours.apart(), mesh.silent(SILENT_S), writes=writes)
        if not self.collected:
            what = "the last files of the other hosts"
        if what is None and self._orderly:
            what = self._unseen()
        if what is not None and now >= self._deadline:
            log.warning("no longer waiting for: %s", what)
            return None
        return what

    def _unseen(self) -> str | None:
        """Workers of hosts whose agent is silent say themselves how they ended, where we share their run folder."""
        sharing = set(self._neighbours.mesh.others) - self._neighbours.apart()
        trainers = {
            worker.name: worker.host for worker in self._record.workers if worker.trains and worker.host in sharing
        }
        missing = unseen(self._neighbours.mesh, trainers, read_exits(self._record.path, trainers))
        return f"word of how {', '.join(missing)} ended" if missing else None
