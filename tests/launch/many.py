"""Runs on several hosts, all of them this machine: an agent each, on addresses of the loopback network."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from distflow.cluster.processes import HostEntry, agent_name, nursery_name
from distflow.comm.addresses import worker_address
from distflow.comm.client import ask
from distflow.comm.keys import key_file, make_keys, read_keys, write_keys
from distflow.launch.run.folder import SUBFOLDERS
from distflow.launch.run.process_table import await_end, end, host_part, leftovers, processes_of, sweep
from distflow.launch.run.record import RunRecord, WorkerEntry, read_record
from distflow.types import WorkerName
from tests.launch.conftest import FAKE, WAIT_S, await_that, environment
from tests.warm_start import WarmProcess

Placed = Mapping[str, tuple[int, Mapping[str, Any]]]
"""Host and behaviour by name of worker."""


class Hosts:
    """A run whose workers are placed on several hosts, with one run folder for all or one for each."""

    def __init__(self, folder: Path, workers: Placed, *, shared: bool, **limits: Any) -> None:
        self.count = 1 + max(host for host, _ in workers.values())
        self.workers = workers
        self.folders = [folder / ("runs" if shared else f"runs-{host}") / "many" for host in range(self.count)]
        self.shared = shared
        self.agents: list[WarmProcess] = []
        self.addresses: dict[str, str] = {}
        self._fill(self.folders[0], {"drain_s": 5.0, "restarts": 3, "host_silence_s": 3.0, "connect_s": 20.0, **limits})
        for host, own in enumerate(self.folders):
            if host > 0 and not shared:
                shutil.copytree(self.folders[0], own)
                self._record(own).write()
        for name, (host, fake) in workers.items():
            self._document(name, host, fake)

    def _fill(self, folder: Path, limits: dict[str, Any]) -> None:
        for sub in SUBFOLDERS:
            (folder / sub).mkdir(parents=True)
        write_keys(key_file(folder), make_keys())
        self.limits = limits
        self._record(folder).write()

    def _record(self, folder: Path) -> RunRecord:
        names = [*self.workers, *map(agent_name, range(self.count))]
        entries = tuple(WorkerEntry(n, n.startswith("trainer"), host=host) for n, (host, _) in self.workers.items())
        hosts = tuple(HostEntry(f"node{host}", f"127.0.0.{host + 1}") for host in range(self.count))
        roster = dict.fromkeys(names, "")
        return RunRecord(
            folder.name, str(folder), 100, entries, roster, hosts=hosts, started=time.time(), **self.limits
        )

    def _document(self, name: str, host: int, fake: Mapping[str, Any]) -> None:
        folder = self.folders[host]
        own = [worker for worker, (where, _) in self.workers.items() if where == host]
        document = {
            "worker": name,
            "run_dir": str(folder),
            "term": 0,
            "host": host,
            "address": f"127.0.0.{host + 1}",
            "roster": {each: worker_address(folder, each, host) for each in [*own, agent_name(host)]},
            "settings": {"engine_options": {"fake": dict(fake)}},
        }
        (folder / "workers" / f"{WorkerName.parse(name).file_stem}.yaml").write_text(yaml.safe_dump(document))

    def start(self) -> None:
        """Start all agents and tell them to begin."""
        for host in range(self.count):
            self.start_agent(host)
        for host in range(self.count):
            assert self.ask(host, "mesh.begin", {"agents": self.addresses}) == {"begun": True, "agent": host}

    def start_agent(self, host: int, entry: str = FAKE) -> WarmProcess:
        arguments = [str(self.folders[host]), "--host", str(host), "--entry", entry]
        agent = WarmProcess("distflow.launch.agent.agent", arguments, environment=environment())
        self.agents.append(agent)
        assert agent.stdout is not None
        ready, _, _ = select.select([agent.stdout], [], [], WAIT_S)
        assert ready, f"agent/{host} did not say where it is within {WAIT_S:g} s"
        told = json.loads(agent.stdout.readline())
        assert told["agent"] == host
        self.addresses[str(host)] = told["address"]
        return agent

    def ask(self, host: int, kind: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        return ask(self.addresses[str(host)], kind, body, 5.0, read_keys(key_file(self.folders[0])))

    def record(self, host: int = 0) -> RunRecord:
        return read_record(self.folders[host])

    def log(self, name: str) -> str:
        host = int(name.split("/")[1]) if name.startswith("agent/") else self.workers[name][0]
        path = self.folders[host] / "logs" / f"{WorkerName.parse(name).file_stem}.log"
        return path.read_text() if path.exists() else ""

    def pid(self, name: str) -> int:
        return self.record().pids[name].pid

    def await_log(self, name: str, text: str) -> None:
        await_that(lambda: text in self.log(name), f"{text!r} in the log of {name}")

    def await_up(self) -> None:
        for name in self.workers:
            self.await_log(name, f"{name} incarnation 0 is up")
        for host in range(self.count):
            await_that(lambda host=host: self._all_known(self.record(host)), "marks and addresses of all workers")
        # A worker listens to the agents of other hosts once its own agent has told it their keys.
        for name, (own, _) in self.workers.items():
            for other in set(range(self.count)) - {own}:
                self.await_log(name, f"knows agent/{other} tcp")

    def _all_known(self, record: RunRecord) -> bool:
        """Only then can any agent reach any worker, also one whose own agent is killed right now."""
        return all(name in record.pids and record.roster.get(name) for name in self.workers)

    def exit_codes(self, *hosts: int) -> list[int]:
        return [self.agents[host].wait(timeout=WAIT_S) for host in hosts or range(self.count)]

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def kill_for_good(self, host: int) -> None:
        """The agent of a host, and what would start another one."""
        nursery = self.record().pids[nursery_name(host)].pid
        self.agents[host].kill()
        os.kill(nursery, signal.SIGKILL)

    def lose(self, host: int) -> None:
        """A host with all that runs on it. Its agent and what forks go first: nobody sees how its workers end."""
        part = host_part(self.record(), host)
        self.kill_for_good(host)
        end(processes_of(part), 0.0)

    def leftovers(self) -> list[str]:
        return [
            line for host, folder in enumerate(self.folders) for line in leftovers(host_part(read_record(folder), host))
        ]

    def end(self) -> None:
        """Whatever a test left running."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()
        for host, folder in enumerate(self.folders):
            part = host_part(read_record(folder), host)
            end(processes_of(part), 0.0)
            # A fork server may have been forking while it was ended.
            await_end(processes_of(part), 2.0)
            end(processes_of(part), 0.0)
            sweep(folder, host)
