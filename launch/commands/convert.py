"""`distflow convert`: a recipe made of the configuration of another tool."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> int:
    """Print a recipe made of FILE: a TRL script (.py, read and never run), or verl's overrides, listed or in a script.

    Comments say what became of each key: what it is here, or why it does not map.
    """
    from distflow.config.conversion import convert, read_foreign, written

    foreign = read_foreign(file.expanduser())
    click.echo(written(foreign, convert(foreign)), nl=False)
    return 0
