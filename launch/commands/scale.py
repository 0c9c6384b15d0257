"""`distflow scale`: add or remove workers while the run continues."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.launch.run.record import RunRecord

ANSWER_S = 10.0
"""The agent plans the new workers before it answers."""


@click.command()
@click.argument("run")
@click.argument("change", metavar="POOL=N")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="Place new workers on these hosts only.")
@click.option("--ssh-config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file for ssh.")
@click.option("--ssh-options", default="", metavar="WORDS", help="More arguments for the ssh command.")
@click.option(
    "--forward", multiple=True, metavar="NAMES", help="More environment variables to forward to new hosts: A,B_*."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a variable on new hosts.")
@click.option("--ship-code", is_flag=True, help="Copy this machine's distflow to new hosts.")
def command(run: str, change: str, runs_dir: Path, **given: Any) -> None:
    """Set the number of workers of POOL to N. New ones join; those with the highest numbers hand back their work and
    leave.

    Hosts of FILE that are not in the run yet join it first.
    """
    from distflow.launch.observe.run_client import answer_of_an_agent
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    pool, count = _parse(change)
    record = read_record(find_run(run, runs_dir))
    if record.over:
        raise UserError(f"scale: {record.name} is over ({record.state}) — only a running run can be scaled")
    slots = _add_hosts(record, pool, count, given)
    body = {"pool": pool, "count": count, "slots": {str(number): free for number, free in slots.items()}}
    answer = answer_of_an_agent(record, "scale", body, ANSWER_S, "scale")
    if answer["was"] == answer["now"]:
        click.echo(f"{pool} has {count} workers already")
        return
    does = "joining" if answer["now"] > answer["was"] else "leaving when they have handed back their work"
    names = [f"{name} on {host}" if host else name for name, host in answer["hosts"].items()]
    click.echo(f"{pool}: {answer['was']} → {answer['now']}; {does}: {', '.join(names)}")


def _add_hosts(record: RunRecord, pool: str, count: int, given: Mapping[str, Any]) -> Mapping[int, int]:
    """Slots for new workers by host number, after adding new hosts to the run; empty: any host will do."""
    if given["hosts"] is None:
        _refuse_without_hosts(given)
        return {}
    from distflow.launch.deploy.add_hosts import HostsToAdd, add_hosts
    from distflow.launch.deploy.hostfile import read_hosts
    from distflow.launch.deploy.job_environment import forwarded
    from distflow.launch.deploy.ssh import Transport

    environment = forwarded(os.environ, given["forward"], given["settings"])
    wanted = HostsToAdd(pool, count, read_hosts(given["hosts"]), environment, given["ship_code"])
    added = add_hosts(record, wanted, Transport(given["ssh_config"], tuple(shlex.split(given["ssh_options"]))))
    for note in added.notes:
        click.echo(f"note: {note}")
    if added.joined:
        click.echo(f"hosts joined: {', '.join(added.joined)}")
    return added.slots


def _refuse_without_hosts(given: Mapping[str, Any]) -> None:
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if useless:
        raise UserError(f"{', '.join(useless)}: only for hosts that join — name them with --hosts FILE")


def _parse(change: str) -> tuple[str, int]:
    pool, equals, count = change.partition("=")
    if not (pool and equals and count.lstrip("-").isdecimal()):
        raise UserError(f"{change!r}: expected POOL=N, for example rollout=3")
    return pool, int(count)
