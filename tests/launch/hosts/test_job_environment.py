"""What jobs tell a process about its place, and what is said when they tell too little."""

from __future__ import annotations

import pytest

from distflow.errors import UserError
from distflow.launch.deploy.job_environment import expand, read_node
from distflow.launch.deploy.job_rendezvous import job_keys

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "gpu-[01-02],big[7-8]-ib", "SLURM_JOB_ID": "70007"}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "NNODES": "4", "MASTER_ADDR": "job-0.svc"}


def test_torchrun_has_several_processes_a_node_and_a_store_at_its_port():
    node = read_node(TORCHRUN)
    assert (node.rank, node.nodes, node.local_rank, node.slots) == (1, 2, 1, 4)
    assert (node.master, node.port) == ("10.0.0.1", 29500)
    assert read_node({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).port == 29501


def test_slurm_names_its_nodes():
    node = read_node({**SLURM, "SLURM_GPUS_ON_NODE": "8"})
    assert (node.rank, node.nodes, node.master, node.port, node.slots) == (2, 4, "gpu-01", 30007, 8)
    assert node.name(2) == "node 2 (big7-ib)"


def test_a_step_of_slurm_may_have_fewer_nodes_than_its_job():
    step = {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "big[7-8]-ib", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
    node = read_node({**SLURM, **step})
    assert (node.rank, node.nodes, node.master, node.spare) == (0, 2, "big7-ib", "10.0.0.7")


def test_skypilot_and_kubernetes():
    sky = read_node(SKYPILOT)
    assert (sky.rank, sky.nodes, sky.master, sky.slots) == (1, 2, "10.0.0.1", 8)
    job = read_node(KUBERNETES)
    assert (job.rank, job.nodes, job.master, job.port, job.slots) == (3, 4, "job-0.svc", 29400, None)


def test_torchrun_inside_of_a_slurm_job_is_torchrun():
    assert read_node({**SLURM, **TORCHRUN}) == read_node(TORCHRUN)


@pytest.mark.parametrize(
    "text, names",
    [
        ("gpu-1", ["gpu-1"]),
        ("gpu-[01-03,7],login", ["gpu-01", "gpu-02", "gpu-03", "gpu-7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "environment, message",
    [
        ({}, r"is not part of a known kind of job — start it with torchrun \(which sets GROUP_RANK\)"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "torchrun job without MASTER_ADDR — set it"),
        ({**TORCHRUN, "WORLD_SIZE": "7"}, "7 processes, 4 on this node"),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu-[a]"}, r"'gpu-\[a\]' is not a node list"),
        ({**KUBERNETES, "NNODES": "four"}, "NNODES=four: expected a whole number"),
    ],
)
def test_what_is_missing_is_named(environment, message):
    with pytest.raises(UserError, match=message):
        read_node(environment)


def test_the_jobs_key_is_the_same_for_the_same_secret_only():
    secret = "0123456789abcdef" * 4
    assert job_keys({"DISTFLOW_RUN_KEY": secret}) == job_keys({"DISTFLOW_RUN_KEY": secret.upper()})
    assert job_keys({"DISTFLOW_RUN_KEY": secret}) != job_keys({"DISTFLOW_RUN_KEY": "1" + secret[1:]})


@pytest.mark.parametrize("environment", [{}, {"DISTFLOW_RUN_KEY": "abc"}, {"DISTFLOW_RUN_KEY": "x" * 64}])
def test_a_job_without_a_good_secret_is_refused_with_the_cure(environment):
    with pytest.raises(UserError, match=r"export DISTFLOW_RUN_KEY=\$\(openssl rand -hex 32\)"):
        job_keys(environment)
