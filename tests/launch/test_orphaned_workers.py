"""What workers are told whose own agent is silent."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import Death, HostedWorker, HostReport, to_wire
from distflow.cluster.processes import Exit, Failure, HostEntry
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, make_keys
from distflow.launch.agent.peer_agents import OrphanedWorkers, orphan_addresses
from distflow.launch.agent.restart_policy import RestartPolicy, Tell
from distflow.launch.agent.start import RestartLimit
from distflow.launch.run.record import WorkerEntry

SILENCE_S = 10.0


def report(host: int, **workers: HostedWorker) -> HostReport:
    entry = HostEntry(f"node{host}", f"10.0.0.{host}", f"tcp://10.0.0.{host}:1")
    return HostReport(host, entry, workers={name.replace("_", "/"): one for name, one in workers.items()})


def hosted(address: str, **more: object) -> HostedWorker:
    return HostedWorker(trains=False, threads=1, state="running", address=address, **more)


def mesh(own: int, *, silent_s: float) -> Gossip:
    """Of three hosts, of which host 0 has been silent for so long."""
    found = Gossip(report(own, rollout_1=hosted("tcp://10.0.0.1:9")), {0, 1, 2} - {own}, SILENCE_S)
    found.reports[0] = report(0, trainer_0=hosted("tcp://10.0.0.0:9"), rollout_0=hosted(""))
    found.reports[3 - own] = report(3 - own, rollout_2=hosted("tcp://10.0.0.2:9", deaths=(Death(0, "signal 9"),)))
    for pulse in range(int(silent_s) + 1):
        found.tick(float(pulse))
        found.hear({"from": 3 - own, "seen": [[3 - own, 0, pulse + 1]], "reports": []})
    return found


def supervisor() -> RestartPolicy:
    def explain(worker: str, ending: Exit) -> Failure:
        return Failure(worker, 3, "WorkerFailed", str(ending))

    core = RestartPolicy([WorkerEntry("rollout/1", False)], RestartLimit(3, 60.0), 30.0, explain)
    core.start_unforked()
    core.started("rollout/1", 100)
    return core


def test_the_first_of_the_others_tells_each_thing_once():
    orphans, found, core = OrphanedWorkers(), mesh(1, silent_s=SILENCE_S), supervisor()
    lost, roster = orphans.tells(found, core)
    assert lost == Tell("lost", {"worker": "rollout/2", "incarnation": 0, "reason": "signal 9"}, "trainer/0")
    assert roster.to == "trainer/0"
    expected = {"rollout/1": "tcp://10.0.0.1:9", "rollout/2": "tcp://10.0.0.2:9"}
    assert roster.body["addresses"] == expected | {f"agent/{n}": f"tcp://10.0.0.{n}:1" for n in (1, 2)}
    assert list(orphans.tells(found, core)) == []
    moved = structs.replace(found.reports[2], serial=1, workers={"rollout/2": hosted("tcp://10.0.0.2:10")})
    found.hear({"from": 2, "seen": [[2, 1, 100]], "reports": [to_wire(moved)]})
    assert [tell.kind for tell in orphans.tells(found, core)] == ["roster"]
    assert orphan_addresses(found) == {"trainer/0": "tcp://10.0.0.0:9"}


def test_one_address_that_cannot_be_used_costs_nobody_else_anything(tmp_path: Path, caplog):
    """Two workers of a silent host with one key: what another host reports must not end an agent."""
    found, me, key = mesh(1, silent_s=SILENCE_S), "agent/1", "#" + "ab" * 32
    listener = NetworkListener("127.0.0.1", make_keys())
    endpoint = Endpoint(me, 0, {me: f"ipc://{tmp_path}/a", "rollout/2": f"tcp://10.0.0.2:9{key}"}, listener=listener)
    spare = hosted("tcp://10.0.0.0:10")
    found.reports[0] = report(0, rollout_0=hosted(f"tcp://10.0.0.0:9{key}"), trainer_0=spare)
    orphans = OrphanedWorkers()
    for _ in range(2):
        orphans.tell(found, supervisor(), endpoint)
    assert endpoint.roster["trainer/0"] == "tcp://10.0.0.0:10"
    assert "rollout/0" not in endpoint.roster
    assert caplog.text.count("ignored the address of rollout/0: rollout/0 announced the key of rollout/2") == 1
    endpoint.close()


def test_only_the_first_of_the_others_and_only_after_the_silence():
    assert list(OrphanedWorkers().tells(mesh(2, silent_s=SILENCE_S), supervisor())) == []
    assert list(OrphanedWorkers().tells(mesh(1, silent_s=SILENCE_S - 2), supervisor())) == []


def test_the_end_of_the_run_is_told_sooner_for_it_is_decided():
    core = supervisor()
    core.stop("wanted", 1.0)
    found = mesh(1, silent_s=6.0)
    assert list(OrphanedWorkers().tells(found, core)) == [Tell("stop", {"reason": "wanted"}, "trainer/0")]
    assert list(OrphanedWorkers().tells(mesh(1, silent_s=3.0), core)) == []
