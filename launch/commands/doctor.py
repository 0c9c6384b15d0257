"""`distflow doctor`: whether this machine can do it, and what to do if not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from distflow.launch.deploy.machine_checks import Finding

COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option(
    "--python", "pythons", multiple=True, metavar="PATH", help="A Python for a pool: layout.pools.NAME.python."
)
def command(as_json: bool, runs_dir: Path, pythons: tuple[str, ...]) -> int:
    """Report on this machine: packages, torch, memory, sockets, leftovers of dead runs. Exit code 2: a failure."""
    found = _examine(runs_dir, pythons)
    failed = any(finding.level == "FAIL" for finding in found)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}))
    else:
        _print(found)
    return 2 if failed else 0


def _examine(runs_dir: Path, pythons: tuple[str, ...]) -> list[Finding]:
    from distflow.launch.deploy.interpreter_check import (
        TorchProbe,
        check_interpreter,
        check_packages,
        pinned_versions,
        requirements,
    )
    from distflow.launch.deploy.machine_checks import check_leftovers, check_machine

    torch = TorchProbe()
    machine = list(check_machine(runs_dir))
    packages = list(check_packages(requirements(), pinned_versions()))
    leftovers = check_leftovers()
    others = [finding for python in pythons for finding in check_interpreter(str(Path(python).expanduser().absolute()))]
    return [machine[0], *packages, torch.finding(), *others, *machine[1:], *leftovers]


def _print(found: list[Finding]) -> None:
    width = max(len(finding.name) for finding in found)
    for finding in found:
        level = click.style(f"{finding.level:<4}", fg=COLOURS[finding.level])
        click.echo(f"{level}  {finding.name:<{width}}  {finding.text}")
        if finding.cure:
            click.echo(f"{'':4}  {'':{width}}  → {finding.cure}")
    counts = [sum(finding.level == level for finding in found) for level in COLOURS]
    click.echo("{} fine, {} to look at, {} failing".format(*counts))
