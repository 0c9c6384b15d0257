"""`distflow`: runs the subcommand, and turns errors into an exit code and a readable message.

Exit codes: 0 done, 1 internal error, 2 error in the recipe or arguments, 3 a worker failed for good, 130 interrupted.
The module of a subcommand is imported only when it is used, so `distflow plan` does not pay for `distflow launch`.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from distflow import __version__
from distflow.config.other_tools import meant
from distflow.errors import DistflowError, did_you_mean

INTERRUPTED = 130
GROUPS = {
    "Prepare": {
        "init": "Write a folder with a recipe, code and data to start from.",
        "convert": "Print a recipe made of a TRL script or of verl's overrides.",
        "validate": "Check a recipe and report all errors at once.",
        "plan": "Show what each worker will do; write one recipe and script for each.",
        "config": "Show the resolved recipe, its JSON Schema, or one key explained.",
        "data": "Show prompts as the model sees them, and the reward of their gold answers.",
        "test-plugin": "Test steps, rewards, losses, data sources … of your own on synthetic batches.",
        "": "distflow validate quickstart flow=dapo",
    },
    "Run": {
        "launch": "Start a run and watch it.",
        "watch": "Show the live page of a running run until it ends.",
        "stop": "Stop a run and verify that nothing is left of it.",
        "scale": "Add or remove workers of a pool while the run continues.",
        "worker": "Run one worker from its own per-worker recipe.",
        "": "distflow launch quickstart run.training_steps=50",
    },
    "Look": {
        "status": "Show what each worker is doing and what it waits for.",
        "metrics": "Show metrics per training step, merged over the workers; compare runs.",
        "plot": "Draw the curves of runs.",
        "rollouts": "Show samples with text and rewards.",
        "logs": "Print or follow the workers' logs.",
        "stacks": "Show where each worker is in its code, even if it is stuck.",
        "trace": "Write a timeline of all workers as one file for Perfetto.",
        "": "distflow rollouts --limit 2",
    },
    "Take away": {
        "export": "Export a checkpoint as a Hugging Face folder, verified by loading it.",
        "evaluate": "Validate a checkpoint, or a Hugging Face folder, alone.",
        "fetch": "Bring a run back from the second place that its checkpoints were copied to.",
        "": "distflow export --to my-model",
    },
    "Measure": {
        "simulate": "Predict step time and idle time of a recipe on given devices.",
        "profile": "Measure a recipe's engine and backend, and write a latency model of them.",
        "doctor": "Check this machine, and look for leftovers of dead runs.",
        "": "distflow simulate quickstart",
    },
}
"""The commands as `--help` lists them; below "" stands an example of a group."""
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items() if name}

BESIDE = {
    "watch": ("status", "watch"),
    "stacks": ("status", "stacks"),
    "stop": ("launch", "stop"),
    "fetch": ("launch", "fetch"),
    "validate": ("config", "validate"),
    "test-plugin": ("config", "test_plugin"),
    "init": ("config", "init"),
    "convert": ("config", "convert"),
    "evaluate": ("export", "evaluate"),
    "logs": ("worker", "logs"),
    "profile": ("simulate", "profile"),
}
"""File and name of commands that stand in the file of another one."""


class LazyGroup(click.Group):
    """Lists commands without importing their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table above."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command; raises UsageError for an unknown name."""
        if cmd_name not in COMMANDS:
            raise click.UsageError(f"there is no command {cmd_name!r} — {did_you_mean(cmd_name, COMMANDS)}", ctx)
        file, name = BESIDE.get(cmd_name, (cmd_name, "command"))
        module = f"distflow.launch.commands.{file}"
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, click.Command), f"{module}.{name} is not a click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list of `--help`."""
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, about) for name, about in group.items() if name])
                formatter.write_text(f"for example: {group['']}")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="distflow")
def group() -> None:
    """Decentralised RL post-training of language models."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; messages go to standard error."""
    try:
        result = group.main(args=arguments, prog_name="distflow", standalone_mode=False)
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        shown = error
        if isinstance(error, click.NoSuchOption):
            told = _as_override(error.option_name, sys.argv[1:] if arguments is None else arguments)
            shown = click.UsageError(f"{error.format_message()}{told}", error.ctx)
        shown.show()
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except DistflowError as error:
        return _report(error)
    except OutputLost as lost:
        return _report_lost(lost)
    except Exception:
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0


def _as_override(option: str, arguments: Sequence[str]) -> str:
    """Say how a key of a recipe, or another tool's option, is written that was given as an option."""
    name = option.lstrip("-")
    given = next((one for one in arguments if one.lstrip("-").partition("=")[0] == name), name)
    if "." in name:
        _, equals, value = given.partition("=")
        following = list(arguments[list(arguments).index(given) + 1 :][:1]) if given in arguments else []
        return f" Keys of a recipe have no dashes: {name}={value if equals else (following or ['VALUE'])[0]}"
    told = meant(name.replace("-", "_"))
    return f" Keys of a recipe are given as KEY=VALUE, without dashes — {told}" if told else ""


def _report(error: DistflowError) -> int:
    if error.exit_code == 1:
        traceback.print_exception(error)
    else:
        click.echo(str(error), err=True)
    return error.exit_code


def _report_lost(lost: OutputLost) -> int:
    """A reader that has seen enough (`| head`) is no fault."""
    if lost.reader_left:
        return 0
    click.echo(str(lost), err=True)
    return 2


def main() -> NoReturn:
    """Entry point of the console script."""
    prepare_output(sys.argv[1:])
    code = run()
    try:
        sys.stdout.flush()
    except OutputLost as lost:
        code = _report_lost(lost)
    sys.exit(code)


ACTING = frozenset({"launch", "init", "worker", "scale", "export", "fetch", "stop"})
"""Commands that do their work even if nobody can read what they print. All others end."""


class OutputLost(Exception):
    """What is printed reaches nobody. No OSError: click would end the process for it."""

    def __init__(self, error: OSError) -> None:
        self.reader_left = error.errno == errno.EPIPE
        super().__init__(f"standard output cannot be written: {error.strerror}")


class Output(io.TextIOWrapper):
    """Standard output. When it cannot be written, the rest is discarded; raises OutputLost unless `acting`."""

    acting = False

    def write(self, text: str) -> int:
        """Write, or discard."""
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        discard(1)
        lost = OutputLost(error)
        if not self.acting:
            raise lost from error
        if not lost.reader_left:
            print(f"{lost}; going on without it", file=sys.stderr)


def discard(descriptor: int) -> None:
    """Let everything that is written to this descriptor vanish."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def prepare_output(arguments: list[str]) -> None:
    """Open closed standard streams, or a file of the run would get their numbers, and watch standard output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            discard(descriptor)
    given = _stream(1) if sys.stdout is None else sys.stdout
    assert isinstance(given, io.TextIOWrapper), "standard output is text over bytes"
    output = Output(given.detach(), encoding=given.encoding, errors=given.errors, line_buffering=given.line_buffering)
    output.acting = next((word for word in arguments if not word.startswith("-")), "") in ACTING
    sys.stdout = output
    if sys.stderr is None:
        sys.stderr = _stream(2)


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), "utf-8")
