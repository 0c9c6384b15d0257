"""The command `distflow bench`: one subcommand a benchmark. What a benchmark needs is imported when it runs."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from distflow.bench.turns import Measurement

REPETITIONS = 5
OPTION_PEERS = click.option(
    "--peers",
    type=click.Path(exists=True, dir_okay=False),
    metavar="PYTHON",
    help="Python that has the other systems [.venv-peers/bin/python]",
)


@click.group(name="bench")
def bench() -> None:
    """Measure the data plane on this machine, beside its limits and beside other systems.

    All contestants of a benchmark take turns in one run; figures are medians over the repetitions. Other systems take
    part where they are installed: `make peers-venv` does that.
    """


def measuring(function: Callable[..., Measurement]) -> Callable[..., None]:
    """The options that every benchmark has; prints the outcome."""

    @functools.wraps(function)
    def shown(*, as_json: bool, **options: Any) -> None:
        # What a benchmark has started ends with it, however it is ended.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        click.echo(function(**options).show(as_json))

    for option in (
        click.option("--repetitions", type=click.IntRange(1), default=REPETITIONS, show_default=True),
        click.option("--json", "as_json", is_flag=True, help="one line of JSON"),
    ):
        shown = option(shown)
    return shown


@bench.command()
@measuring
@OPTION_PEERS
@click.option("--workers", type=click.IntRange(2), default=8, show_default=True, help="half generate, half train")
@click.option("--samples", type=click.IntRange(64), default=4096, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True, help="of each sample")
@click.option("--links", metavar="RATE", help="on hosts (network namespaces) whose links carry this, such as 200mbit")
@click.option("--hosts", type=click.IntRange(2), default=4, show_default=True, help="of --links; half generate")
def step(
    repetitions: int, peers: str | None, workers: int, samples: int, tokens: int, links: str | None, hosts: int
) -> Measurement:
    """Bring the samples of a training step to the workers that train on them.

    With --links the same with everything through one driver takes turns with it, instead of other systems.
    """
    from distflow.bench.step import measure, measure_links

    sizes = {"workers": workers, "samples": samples, "tokens": tokens}
    if links is not None:
        return measure_links(sizes, repetitions, hosts, links)
    return measure(sizes, repetitions, peers)


@bench.command()
@measuring
@OPTION_PEERS
@click.option("--rows", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--row-bytes", type=click.IntRange(8), default=64 << 10, show_default=True)
def exchange(repetitions: int, peers: str | None, rows: int, row_bytes: int) -> Measurement:
    """Bring many rows from one process to another."""
    from distflow.bench.rows import measure_exchange

    return measure_exchange(rows, row_bytes, repetitions, peers)


@bench.command()
@measuring
@OPTION_PEERS
@click.option("--row-bytes", type=click.IntRange(8), default=4 << 10, show_default=True)
@click.option("--count", type=click.IntRange(2), default=300, show_default=True, help="rows a repetition")
def latency(repetitions: int, peers: str | None, row_bytes: int, count: int) -> Measurement:
    """Bring one row at a time to a consumer that waits for it."""
    from distflow.bench.rows import measure_latency

    return measure_latency(row_bytes, count, repetitions, peers)


@bench.command()
@measuring
@click.option("--megabytes", type=click.IntRange(1), default=64, show_default=True, help="of the model")
def weights(repetitions: int, megabytes: int) -> Measurement:
    """Bring versions of a model to readers on this host and on others."""
    from distflow.bench.weights import measure

    return measure(megabytes, repetitions)
