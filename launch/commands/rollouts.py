"""`distflow rollouts`: what was sampled and how it was rewarded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import click

from distflow.data.files import whole_lines
from distflow.errors import DistflowError, UserError
from distflow.runtime.disk import ROLLOUTS, VAL_ROLLOUTS
from distflow.types import SEQUENCE, lease_kind

SHOWN = 8
STANDARD = frozenset(
    [
        "uid",
        "sample",
        SEQUENCE,
        "step",
        "term",
        "worker",
        "prompt",
        "response",
        "response_ids",
        "reward",
        "score",
        "rewards",
        "policy_versions",
        "finish_reason",
    ]
)
"""Keys of every line; all others are the user's own fields."""


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=click.IntRange(min=0), help="Training step.  [default: the newest that was dumped]")
@click.option("--val", is_flag=True, help="The samples of validation after that step; 0: before the first.")
@click.option(
    "--limit", type=click.IntRange(min=1), help=f"Maximum number of samples.  [default: {SHOWN}, with --json all]"
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON list with one object per sequence; most samples have one."
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, step: int | None, val: bool, limit: int | None, as_json: bool, runs_dir: Path) -> None:
    """Show samples of one training step of RUN (default: the newest): text, reward and its parts, your own fields.

    Where an environment wrote a part of a response, what the model wrote stands in brackets.
    """
    from distflow.launch.deploy.multi_host import latest_record
    from distflow.launch.observe.file_sync import refresh
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    latest_record(run_dir)
    for line in refresh(run_dir, ("rollouts",), "samples"):
        click.echo(line, err=True)
    samples = [
        list(lines)
        for _, lines in groupby(read_lines(_step_folder(run_dir, step, VAL_ROLLOUTS if val else ROLLOUTS)), _identity)
    ]
    if as_json:
        click.echo(json.dumps(list(chain(*samples[:limit])), ensure_ascii=False))
        return
    count = SHOWN if limit is None else limit
    if samples:
        what = "validation after training step" if val else "training step"
        click.echo(f"{what} {samples[0][0]['step']}: {min(count, len(samples))} of {len(samples)} samples")
    _tell_apart(run_dir, [line for sample in samples[:count] for line in sample])
    for sample in samples[:count]:
        for text in _describe(sample):
            click.echo(text)


def _tell_apart(run_dir: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Put what the model wrote in brackets, in responses of which an environment wrote a part."""
    shared = [(line, by_model) for line in lines if not all(by_model := _by_model(line))]
    if not shared:
        return
    from distflow.config.plugins import TOKENIZER
    from distflow.flow.planner import make_plan
    from distflow.flow.resolve import resolve
    from distflow.launch.commands.data import with_brackets
    from distflow.launch.run.folder import recipe_in

    try:
        plan = make_plan(recipe_in(run_dir), lambda key: f"{run_dir}/recipe.yaml", need_files=False)
        tokenizer = resolve(TOKENIZER)(plan.recipe.models[plan.primary].model_dump())
    except (DistflowError, OSError) as error:
        click.echo(f"note: what the model wrote is not told apart from its environment's tokens: {error}", err=True)
        return
    click.echo("[in brackets]: what the model wrote; the rest of a response is its environment's")
    for line, by_model in shared:
        line["response"] = with_brackets(line["response_ids"], by_model, tokenizer)


def _by_model(line: dict[str, Any]) -> list[bool]:
    """For each token of a response, whether the model wrote it: then it has a version."""
    found = [False] * len(line.get("response_ids", ()))
    for _, _, first, end in line.get("policy_versions", [(0, 0, 0, len(found))]):
        found[first:end] = [True] * (end - first)
    return found


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The samples of one training step, of the newest term only, in order: a line each, or one for each sequence."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in whole_lines(path)[0]]
    newest = max((line["term"] for line in lines), default=0)
    kept = [line for line in lines if line["term"] == newest]
    return sorted(kept, key=lambda line: (_identity(line), line.get(SEQUENCE, 0)))


def _identity(line: dict[str, Any]) -> tuple[int, int]:
    """The prompt's position, and the sample's number in the group."""
    return line["uid"][2], line["sample"]


def _step_folder(run_dir: Path, step: int | None, kind: str) -> Path:
    folders = sorted((run_dir / kind).glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    if not folders:
        often = "run.dump_rollouts says how often samples are dumped"
        hint = often if kind == ROLLOUTS else f"val.every says how often there is validation, {often}"
        raise UserError(f"{run_dir}/{kind}: nothing was dumped yet — {hint}")
    if step is None:
        return folders[-1]
    wanted = [folder for folder in folders if int(folder.name.removeprefix("step_")) == step]
    if not wanted:
        near = min(folders, key=lambda folder: abs(int(folder.name.removeprefix("step_")) - step))
        raise UserError(f"--step {step}: {run_dir}/{kind} has no samples of this step; the nearest is {near.name}")
    return wanted[0]


def _describe(sample: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A sample, from the lines of its sequences."""
    last = sample[-1]
    figures = [f"{name} {last[name]:.3f}" for name in ("reward", "score") if name in last]
    _, prompt, position = last["uid"]
    # Positions of validation say which round it was; its prompts are the same in all of them.
    number = f"{prompt} of the validation data" if lease_kind(position) == "val" else position
    yield f"-- prompt {number}, sample {last['sample']}, {', '.join([*figures, last['finish_reason']])}"
    parts = [f"{name} {_short(value)}" for name, value in last.get("rewards", {}).items()]
    for line in sample:
        yield f"   prompt    {line['prompt']!r}"
        yield f"   response  {line['response']!r}"
        if line is last and parts:
            yield f"   rewards   {', '.join(parts)}"
        for name in sorted(line.keys() - STANDARD):
            yield f"   {name:<9} {_short(line[name])}"


def _short(value: Any) -> str:
    """A value of any field: numbers rounded, long lists from their beginning."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        more = f", … {len(value)} values" if len(value) > SHOWN else ""
        return f"[{', '.join(map(_short, value[:SHOWN]))}{more}]"
    return "-" if value is None else repr(value)
