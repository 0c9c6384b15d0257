"""`distflow`: runs the subcommand, and turns errors into an exit code and a readable message.

Exit codes: 0 done, 1 internal error, 2 error in the recipe or arguments, 3 a worker failed for good, 130 interrupted.
The module of a subcommand is imported only when it is used, so `distflow plan` does not pay for `distflow launch`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from distflow import __version__
from distflow.errors import DistflowError
from distflow.launch.output import OutputLost, prepare_output

INTERRUPTED = 130
COMMANDS = {
    "launch": "Start a run and watch it.",
    "plan": "Show what each worker will do; write one recipe and script for each.",
    "validate": "Check a recipe and report all errors at once.",
    "config": "Show the resolved recipe, its JSON Schema, or one key explained.",
    "worker": "Run one worker from its own per-worker recipe.",
    "watch": "Show the live page of a running run until it ends.",
    "status": "Show what each worker is doing and what it waits for.",
    "logs": "Print or follow the workers' logs.",
    "metrics": "Show metrics per training step, merged over the workers.",
    "rollouts": "Show samples with text and rewards.",
    "stacks": "Show where each worker is in its code, even if it is stuck.",
    "trace": "Write a timeline of all workers as one file for Perfetto.",
    "scale": "Add or remove workers of a pool while the run continues.",
    "export": "Export a checkpoint as a Hugging Face folder, verified by loading it.",
    "stop": "Stop a run and verify that nothing is left of it.",
    "doctor": "Check this machine, and look for leftovers of dead runs.",
}


class LazyGroup(click.Group):
    """Lists commands without importing their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table above."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"distflow.launch.commands.{cmd_name}").command
        assert isinstance(found, click.Command), f"distflow.launch.commands.{cmd_name}.command is not a click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The command list of `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


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
        error.show()
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
