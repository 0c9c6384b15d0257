"""Hosts files of DeepSpeed and of MPI, and what is wrong with one, all at once."""

from __future__ import annotations

import pytest

from distflow.errors import UserError
from distflow.launch.deploy.hostfile import HostsError, parse_hosts, read_hosts, select

FILE = """
# the head first
gpu-1 slots=4              # DeepSpeed
alice@gpu-2:2              # MPI, with a user
gpu-3 slots=2 max-slots=8  # Open MPI
gpu-4 address=10.0.0.4 python=/opt/python dir=/scratch/runs site=frankfurt-1
"""


def test_the_syntaxes_of_deepspeed_and_mpi():
    hosts = parse_hosts(FILE, "hosts")
    assert [(host.name, len(host.slots)) for host in hosts] == [("gpu-1", 4), ("gpu-2", 2), ("gpu-3", 2), ("gpu-4", 1)]
    assert [host.login for host in hosts[:2]] == ["gpu-1", "alice@gpu-2"]
    assert (hosts[3].address, hosts[3].python, hosts[3].directory) == ("10.0.0.4", "/opt/python", "/scratch/runs")
    assert [host.site for host in hosts] == ["", "", "", "frankfurt-1"]
    assert [host.where for host in hosts] == ["hosts:3", "hosts:4", "hosts:5", "hosts:6"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("gpu-1:22:4", r"f:1: gpu-1 — slots=22:4 is not a valid slot count — write a whole number ≥ 1"),
        ("gpu_1!:4", r"f:1: gpu_1!:4 — not a host name — write NAME, user@NAME or NAME:SLOTS"),
        ("gpu[3-x]", r"f:1: gpu\[3-x\] — not a host name — .* of several hosts NAME\[1-4\]"),
        ("gpu[4-3]", r"f:1: gpu\[4-3\] — not a host name"),
        ("gpu[1-999999999]", r"f:1: gpu\[1-999999999\] — not a host name"),
        ("gpu-2\ngpu-[1-3]", r"f:2: gpu-2 — named twice, first in f:1"),
        ("-oProxyCommand=x", r"f:1: -oProxyCommand=x — not a host name"),
        ("gpu-1 slots=0", r"slots=0 is not a valid slot count"),
        ("gpu-1:4 slots=8", r"slots given twice: gpu-1:4 and slots=8 — give the slots once"),
        ("gpu-1 slots=4 slots=4", r"slots is given twice"),
        ("gpu-1 slots=4 max_slots=2", r"slots=4 is more than max_slots=2"),
        ("gpu-1 slot=4", r"unknown word 'slot=4' — did you mean 'slots'\? allowed: address, cost, dir, gpu_gib,"),
        ("gpu-1 4", r"unknown word '4'"),
        ("gpu-1 address=gpu-1.local", r"address=gpu-1.local is not an IP address"),
        ("gpu-1 cost=2,5", r"cost=2,5 is not a price — write that of a slot for an hour, such as cost=2.5"),
        ("gpu-1 cost=-1", r"cost=-1 is not a price"),
        ("gpu-1 cost=", r"'cost=' has no value — write cost=VALUE, or leave it out"),
        ("gpu-1 COST=3", r"unknown word 'COST=3' — write cost in small letters"),
        ("gpu-1 site=a/b", r"site=a/b is not a name — write letters, digits, .* such as site=frankfurt"),
        ("gpu-1\ngpu-1", r"f:2: gpu-1 — named twice, first in f:1"),
        ("a address=10.0.0.1\nb address=10.0.0.1", r"f:2: b — has the address 10.0.0.1, and so has a in f:1"),
        ("# nobody", r"f: hosts — no hosts in this file"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_cure(line, message):
    with pytest.raises(HostsError, match=message):
        parse_hosts(line, "f")


@pytest.mark.parametrize(
    "line, names",
    [("gpu[3-4] slots=8", ["gpu3", "gpu4"]), ("al@n-[08-10,2]:8 gpu_gib=80", ["n-08", "n-09", "n-10", "n-2"])],
)
def test_hosts_that_are_alike_stand_on_one_line_as_slurm_writes_them(line, names):
    hosts = parse_hosts(line, "f")
    assert [host.name for host in hosts] == names
    assert {len(host.slots) for host in hosts} == {8}


def test_all_problems_are_reported_at_once():
    with pytest.raises(HostsError) as caught:
        parse_hosts("a slots=x\nb:0\nb:2\nc d=1", "f")
    assert [problem.where for problem in caught.value.problems] == ["f:1", "f:2", "f:3", "f:4"]
    assert "named twice, first in f:2" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("wrong", ["slots=0", "cost=much", "gpu_gib=0", "site=a/b", "word", "slots=2 max_slots=1"])
def test_a_host_behind_a_bad_line_is_compared_with_it(wrong):
    with pytest.raises(HostsError) as caught:
        parse_hosts(f"a address=10.0.0.1 {wrong}\na address=10.0.0.2\nb address=10.0.0.1\nc address=10.0.0", "f")
    assert [problem.where for problem in caught.value.problems] == ["f:1", "f:2", "f:4", "f:3"]
    twice, alike = caught.value.problems[1], caught.value.problems[3]
    assert (twice.message, alike.message) == (
        "named twice, first in f:1",
        "has the address 10.0.0.1, and so has a in f:1",
    )


def chosen(include=None, exclude=None):
    return {host.name: host.slots for host in select(parse_hosts(FILE, "hosts"), include, exclude)}


def test_include_and_exclude_name_hosts_and_slots():
    assert chosen(include="gpu-4@gpu-1:0,2") == {"gpu-1": (0, 2), "gpu-4": (0,)}
    assert chosen(exclude="gpu-4@gpu-1:0,2@gpu-2:0,1") == {"gpu-1": (1, 3), "gpu-3": (0, 1)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"include": "gpu-1", "exclude": "gpu-2"}, "both are given — give only one of them"),
        ({"include": "gpu-11"}, "there is no host 'gpu-11' — did you mean 'gpu-1'"),
        ({"exclude": "gpu-1:4"}, "gpu-1 has the slots 0, 1, 2, 3"),
        ({"include": "gpu-1:"}, "gpu-1 has the slots"),
        ({"exclude": "gpu-1@gpu-2@gpu-3@gpu-4"}, "leaves no host"),
    ],
)
def test_selections_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        chosen(**arguments)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="--hosts .*/none: cannot be read"):
        read_hosts(tmp_path / "none")


def test_prices_may_begin_or_end_with_their_point() -> None:
    hosts = parse_hosts("gpu-1 cost=.5\ngpu-2 cost=2.\n", "hosts")
    assert [host.cost for host in hosts] == [0.5, 2.0]
