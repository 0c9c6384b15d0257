"""`distflow config`: the resolved recipe, its JSON Schema, and single keys explained."""

from __future__ import annotations

import click


@click.group()
def command() -> None:
    """Show the resolved recipe, its JSON Schema, or one key explained."""


@command.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print RECIPE with everything composed and resolved, defaults included."""
    import json

    from distflow.config.load import load_recipe
    from distflow.config.yamlfile import yaml_text

    resolved = load_recipe(recipe, overrides).resolved
    click.echo(json.dumps(resolved, indent=1) + "\n" if as_json else yaml_text(resolved), nl=False)
    return 0


@command.command()
@click.argument("kind", default="recipe", type=click.Choice(["recipe", "flow", "layout", "model", "data"]))
def schema(kind: str) -> int:
    """Print the JSON Schema of recipe files, or of one KIND of group: flow, layout, model, data."""
    import json

    from distflow.config.explain import json_schema

    click.echo(json.dumps(json_schema(kind), indent=1, ensure_ascii=False))
    return 0


@command.command()
@click.argument("key")
def explain(key: str) -> int:
    """Print what KEY means, its type, unit and default; for example batch.ledgers."""
    from distflow.config.explain import explain as explained

    click.echo(explained(key))
    return 0
