"""Workers that join a run get GPUs that nobody uses, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from msgspec import structs

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostedWorker, HostReport, Successor, Term
from distflow.cluster.processes import HostEntry
from distflow.errors import UserError
from distflow.flow.document import read_worker_document
from distflow.flow.planner import make_plan
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.agent.restart_policy import RestartLimit, RestartPolicy, StartWorker
from distflow.launch.agent.scaling import Scaling
from distflow.launch.deploy.folder_contents import Beginning, CheckedHost, RunContents, fill
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.placement import place_workers
from distflow.launch.run.folder import create_run_folder
from distflow.launch.run.record import RunRecord, WorkerEntry, read_record
from distflow.runtime.assembly import Setting
from distflow.types import WorkerName

BOTH = ("layout.pools.rollout.count=2", "layout.pools.trainer.count=2")
SGLANG_IN_TWO = ("layout.pools.rollout.engine=sglang", "layout.pools.rollout.engine_options.tensor_parallel=2")


class OneAgent:
    """The scaling part of the first agent, with reports of all hosts as if their workers ran."""

    def __init__(self, record: RunRecord) -> None:
        self.record, own = record, [entry for entry in record.workers if entry.host == 0]
        renews = record.on_failure != "stop"
        self.core = RestartPolicy(own, RestartLimit(3, 60.0), 30.0, lambda name, how: None, renews=renews)
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


def test_hosts_do_not_join_where_their_number_makes_the_limit_of_silence_too_short(tmp_path: Path) -> None:
    loaded, plan = plan_recipe("quickstart", [*BOTH, "limits.host_silence_s=5"])
    run_dir = create_run_folder(tmp_path, "run", explicit=True)
    checked = {n: CheckedHost(run_dir, f"10.0.0.{n}", True, 0, missing_plugins=False) for n in (0, 1)}
    placement = place_workers(plan, parse_hosts("a slots=2\nb slots=2", "hosts"))
    agent = OneAgent(RunContents(loaded, plan, Beginning(), run_dir, placement, checked).record())
    body = {"pool": "rollout", "count": 20, "hosts": 15}
    assert len(agent.scaling.reserve(body, agent.mesh, 0.0)["hosts"]) == 2
    agent.scaling.release()
    with pytest.raises(UserError, match=r"limits.host_silence_s of this run, 5 s, is too short for 18 hosts .* 9 s"):
        agent.scaling.reserve({**body, "hosts": 16}, agent.mesh, 0.0)


def begin(agent: OneAgent, number: int) -> dict[str, tuple[int, ...]]:
    """The term that takes up what was decided: who begins to train, and on which GPUs."""
    decided = agent.scaling.training(agent.mesh)
    (pool, decision), *_ = decided.items()
    scaled = ((pool, *decision.stamp),)
    about = (number, 0, 1, tuple(decision.hosts), 0, ((number, 0),), "distflow scale")
    term, before = Successor(*about, hosts=tuple(decision.hosts.values()), scaled=scaled), agent.mesh.own.term
    joining = agent.scaling.joining(term, before)
    agent.core.renew(number, term.members, joining)
    lives = agent.core.lives.items()
    entries = {
        name: structs.replace(agent._hosted(life.entry), state="left" if life.drained else "running")
        for name, life in lives
    }
    for _, life in lives:
        life.state = "ended" if life.drained else "running"
    agent.mesh.reports[0] = structs.replace(agent.mesh.own, term=Term(number, term), workers=entries)
    return {entry.name: entry.gpus for entry in joining}


def test_training_workers_get_gpus_when_their_term_begins(tmp_path: Path) -> None:
    agent = here(tmp_path, 5, *BOTH)
    agent.ask("trainer", 3)
    assert agent.apply() == {}, "they do not start before"
    with pytest.raises(UserError, match="rollout/2 needs a GPU"):
        agent.ask("rollout", 3)
    assert begin(agent, 1) == {"trainer/2": (4,)}
    assert agent.device("trainer/2") == "cuda:4"
    assert yaml.safe_load((agent.record.path / "recipe.yaml").read_text())["layout"]["pools"]["trainer"]["count"] == 3
    agent.ask("trainer", 1)
    agent.ask("rollout", 2)
    assert begin(agent, 2) == {}
    agent.ask("rollout", 4)
    assert agent.apply() == {"rollout/2": (3,), "rollout/3": (4,)}, "those of training workers that have left"


def test_a_worker_that_a_pool_had_before_on_another_host_keeps_its_name_for_there(tmp_path: Path) -> None:
    loaded, plan = plan_recipe("quickstart", [*BOTH, "batch.ledgers=2"])
    run_dir = create_run_folder(tmp_path, "run", explicit=True)
    checked = {n: CheckedHost(run_dir, f"10.0.0.{n}", True, 0, missing_plugins=False) for n in (0, 1)}
    placement = place_workers(plan, parse_hosts("a slots=2\nb slots=2", "hosts"))
    contents = RunContents(loaded, plan, Beginning(), run_dir, placement, checked)
    agent = OneAgent(contents.record())
    for name, text in {**contents.description(), **contents.documents(0)}.items():
        (run_dir / name).write_bytes(text)
    answer = agent.scaling.ask({"pool": "trainer", "count": 2, "slots": {}, "leaving": [1]}, agent.mesh)
    assert (answer["joining"], answer["leaving"]) == (["trainer/2"], ["trainer/1"])
    assert begin(agent, 1) == {"trainer/2": ()}
    document = yaml.safe_load((run_dir / "workers" / "trainer-2.yaml").read_text())
    assert (document["members"], document["placement"]) == (["trainer/0", "trainer/2"], {"rollout/1": 1})
    assert document["recipe"]["layout"]["pools"]["trainer"]["count"] == 3, "its plan has all of their names"
    found = read_worker_document(run_dir / "workers" / "trainer-2.yaml")
    made = make_plan(found.recipe, spanning=True)
    setting = Setting(found, made.recipe, made, made.worker(WorkerName("trainer", 2)), run_dir, None)
    assert setting.standing.ledgers == (1,), "although there are fewer ledgers than names"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.deterministic=true"], "run.deterministic promises the same bits for one number of training workers"),
        (["layout.on_failure=stop"], "layout.on_failure: stop allows no second term"),
        (["layout.on_failure=shrink"], "pool 'trainer' has only one"),
        (["batch.ledgers=2"], "2 ledgers are too few for 3 training workers"),
    ],
)
def test_a_pool_that_cannot_train_otherwise_is_not_scaled(tmp_path: Path, overrides: list[str], message: str) -> None:
    agent = here(tmp_path, 0, *BOTH, *overrides)
    with pytest.raises(UserError, match=message):
        agent.ask("trainer", 1 if "shrink" in message or "only one" in message else 3)
    assert agent.scaling.training(agent.mesh) == {}


def test_gradients_do_not_cross_hosts_where_all_is_to_be_encrypted(tmp_path: Path) -> None:
    loaded, plan = plan_recipe("quickstart", [BOTH[0], "security.encrypt=all"])
    run_dir = create_run_folder(tmp_path, "run", explicit=True)
    checked = {n: CheckedHost(run_dir, f"10.0.0.{n}", True, 0, missing_plugins=False) for n in (0, 1)}
    contents = RunContents(
        loaded, plan, Beginning(), run_dir, place_workers(plan, parse_hosts("a:2\nb:2", "hosts")), checked
    )
    agent = OneAgent(contents.record())
    (run_dir / "recipe.yaml").write_bytes(contents.description()["recipe.yaml"])
    with pytest.raises(UserError, match=r"does not encrypt gradients, which trainer/0, trainer/1 would exchange"):
        agent.ask("trainer", 2)
