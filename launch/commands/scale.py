"""`distflow scale`: workers join or leave while the run goes on."""

from __future__ import annotations

from pathlib import Path

import click

from distflow.errors import DistflowError, UserError

ANSWER_S = 10.0
"""The agent plans the new workers before it answers."""


@click.command()
@click.argument("run")
@click.argument("change", metavar="POOL=N")
@click.option("--hosts", type=click.Path(path_type=Path), help="Start agents on these hosts too, for the new workers.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str, change: str, hosts: Path | None, runs_dir: Path) -> None:
    """Let POOL of RUN have N workers. New ones join; those with the highest numbers hand back their work and leave."""
    from distflow.launch.asking import ask_any_agent
    from distflow.launch.record import read_record
    from distflow.launch.runs import find_run

    pool, count = _parse(change)
    record = read_record(find_run(run, runs_dir))
    if record.over:
        raise UserError(f"scale: {record.name} is over ({record.state}) — scale a run that goes on")
    numbers = [] if hosts is None else begin_on(hosts)
    body = {"pool": pool, "count": count, "hosts": numbers}
    answer = ask_any_agent(record, "scale", body, ANSWER_S)
    if answer is None:
        raise DistflowError(f"scale: no host agent of {record.name} answers, and without one nobody can start workers")
    if "error" in answer:
        raise UserError(answer["error"])
    if answer["was"] == answer["now"]:
        click.echo(f"{pool} has {count} workers already")
        return
    does = "joining" if answer["now"] > answer["was"] else "leaving when they have handed back their work"
    names = [f"{name} on {record.hosts[host].name}" if record.hosts else name for name, host in answer["hosts"].items()]
    click.echo(f"{pool}: {answer['was']} → {answer['now']}; {does}: {', '.join(names)}")


def begin_on(hosts: Path) -> list[int]:
    """Start agents on the hosts of a file for a run that goes on; returns their numbers in it."""
    raise UserError(f"--hosts {hosts}: adding hosts to a run that goes on is not built yet — leave it out")


def _parse(change: str) -> tuple[str, int]:
    pool, equals, count = change.partition("=")
    if not (pool and equals and count.lstrip("-").isdecimal()):
        raise UserError(f"{change!r}: expected POOL=N, for example rollout=3")
    return pool, int(count)
