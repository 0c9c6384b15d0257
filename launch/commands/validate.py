"""`distflow validate`: all problems of a recipe at once."""

from __future__ import annotations

import click

from distflow.errors import RecipeError


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--deep", is_flag=True, help="Also import every plug-in and check its signature (loads torch).")
def command(recipe: str, overrides: tuple[str, ...], deep: bool) -> int:
    """Check RECIPE (a shipped name or a file): prints `ok`, or all problems with file, line and cure (exit code 2)."""
    from distflow.flow.check import check_imports, plan_recipe

    loaded, plan = plan_recipe(recipe, overrides)
    if deep:
        from distflow.launch.interpreter_check import problems_here

        problems = [*check_imports(plan, loaded.origin), *problems_here(plan, loaded.origin)]
        if problems:
            raise RecipeError(problems)
    imported = ", all plug-ins imported" if deep else ""
    click.echo(
        f"ok: {plan.run_name}, {len(plan.steps)} steps on {len(plan.workers)} worker(s), "
        f"{plan.batch.samples} samples a training step{imported}"
    )
    for note in plan.notes:
        click.echo(f"note: {note}")
    return 0
