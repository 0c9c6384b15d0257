"""Workers that join a run get GPUs that nobody uses, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.agent.restart_policy import RestartLimit, RestartPolicy, StartWorker
from distflow.launch.agent.scaling import Scaling
from distflow.launch.cluster.gossip import Gossip
from distflow.launch.cluster.host_report import HostedWorker, HostReport
from distflow.launch.deploy.folder_contents import Beginning, CheckedHost, RunContents, fill
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.placement import place_workers
from distflow.launch.run.folder import create_run_folder
from distflow.launch.run.record import HostEntry, RunRecord, WorkerEntry, read_record

BOTH = ("layout.pools.rollout.count=2", "layout.pools.trainer.count=2")
SGLANG_IN_TWO = ("layout.pools.rollout.engine=sglang", "layout.pools.rollout.engine_options.tensor_parallel=2")


class OneAgent:
    """The scaling part of the first agent, with reports of all hosts as if their workers ran."""

    def __init__(self, record: RunRecord) -> None:
        self.record, own = record, [entry for entry in record.workers if entry.host == 0]
        self.core = RestartPolicy(own, RestartLimit(3, 60.0), 30.0, lambda name, how: None)
        self.scaling = Scaling(record, 0, self.core)
        entries = record.hosts or (HostEntry("", "", gpus=record.gpus),)
        self.mesh = Gossip(HostReport(0, entries[0]), range(1, len(entries)), 60.0)
        for host, entry in enumerate(entries):
            workers = {one.name: self._hosted(one) for one in record.workers if one.host == host}
            self.mesh.reports[host] = HostReport(host, entry, 1, workers=workers)

    def _hosted(self, entry: WorkerEntry) -> HostedWorker:
        return HostedWorker(entry.trains, entry.threads, "running", gpus=entry.gpus)

    def ask(self, pool: str, count: int) -> None:
        self.scaling.ask({"pool": pool, "count": count, "slots": {}}, self.mesh)

    def apply(self) -> dict[str, tuple[int, ...]]:
        """GPUs of the workers that are started, by name."""
        actions = self.scaling.apply(self.mesh, lambda name, address: None, 0.0)
        return {action.worker.name: action.worker.gpus for action in actions if isinstance(action, StartWorker)}

    def device(self, name: str) -> str:
        path = self.record.path / "workers" / f"{name.replace('/', '-')}.yaml"
        return str(yaml.safe_load(path.read_text())["settings"]["device"])


def here(folder: Path, gpus: int, *overrides: str) -> OneAgent:
    run_dir = create_run_folder(folder, "run", explicit=True)
    fill(RunContents(*plan_recipe("quickstart", list(overrides)), Beginning(), run_dir, gpus=gpus))
    return OneAgent(read_record(run_dir))


@pytest.mark.parametrize(
    "overrides, gpus, expected",
    [
        (BOTH, 8, {"rollout/2": (4,), "rollout/3": (5,)}),
        ((*BOTH, *SGLANG_IN_TWO), 12, {"rollout/2": (6, 7), "rollout/3": (8, 9)}),
        ((*BOTH, "layout.pools.trainer.device=cuda:3"), 6, {"rollout/2": (2,), "rollout/3": (4,)}),
    ],
)
def test_they_get_gpus_that_no_worker_of_the_run_uses(
    tmp_path: Path, overrides: tuple[str, ...], gpus: int, expected: dict[str, tuple[int, ...]]
) -> None:
    agent = here(tmp_path, gpus, *overrides)
    agent.ask("rollout", 4)
    assert agent.apply() == expected
    assert {name: agent.device(name) for name in expected} == {n: f"cuda:{used[0]}" for n, used in expected.items()}


def test_without_a_free_gpu_it_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    agent = here(tmp_path, 4, *BOTH)
    with pytest.raises(UserError, match=r"rollout/2 needs a GPU that no other worker uses, and of 4 GPUs this machine"):
        agent.ask("rollout", 3)
    assert agent.apply() == {}


def test_where_workers_share_gpus_from_the_start_others_may_share_them_too(tmp_path: Path) -> None:
    agent = here(tmp_path, 2, BOTH[1], "layout.pools.rollout.count=1")
    agent.ask("rollout", 3)
    assert agent.apply() == {"rollout/1": (1,), "rollout/2": (0,)}


def test_without_gpus_or_on_a_device_of_their_own_they_join_as_planned(tmp_path: Path) -> None:
    for number, (gpus, device) in enumerate([(0, "auto"), (4, "cpu"), (4, "cuda:1")]):
        agent = here(tmp_path / str(number), gpus, *BOTH, f"layout.pools.rollout.device={device}")
        agent.ask("rollout", 5)
        assert set(agent.apply()) == {"rollout/2", "rollout/3", "rollout/4"}
        assert agent.device("rollout/4") == device


def test_one_that_is_still_leaving_returns_to_its_gpus(tmp_path: Path) -> None:
    agent = here(tmp_path, 4, *BOTH)
    agent.ask("rollout", 1)
    agent.apply()
    with pytest.raises(UserError, match="needs a GPU"):
        agent.ask("rollout", 3)
    agent.ask("rollout", 2)
    assert agent.apply() == {}
    assert agent.device("rollout/1") == "cuda:1", "it returns to the GPU that it is still leaving"


def test_they_go_to_the_host_that_has_a_free_gpu(tmp_path: Path) -> None:
    loaded, plan = plan_recipe("quickstart", list(BOTH))
    hosts = parse_hosts("a slots=2\nb slots=2", "hosts")
    run_dir = create_run_folder(tmp_path, "run", explicit=True)
    checked = {n: CheckedHost(run_dir, f"10.0.0.{n}", True, (2, 3)[n], missing_plugins=False) for n in (0, 1)}
    contents = RunContents(loaded, plan, Beginning(), run_dir, place_workers(plan, hosts), checked)
    agent = OneAgent(contents.record())
    (run_dir / "recipe.yaml").write_bytes(contents.description()["recipe.yaml"])
    assert [entry.gpus for entry in agent.record.hosts] == [2, 3]
    agent.ask("rollout", 3)
    assert agent.scaling.wanted(agent.mesh)["rollout"].hosts["rollout/2"] == 1
    with pytest.raises(UserError, match=r"of 5 GPUs a, b have none to spare — scale another pool down, add a host"):
        agent.ask("rollout", 4)
