from __future__ import annotations

import subprocess
import sys

import click
import pytest

import distflow.launch.cli as cli
from distflow.errors import DistflowError, Problem, RecipeError, StepError
from tests.launch.conftest import environment


def test_help_version_and_module_start_without_heavy_imports():
    code = """
import sys
from distflow.launch.cli import run
assert run(["--help"]) == 0 and run(["--version"]) == 0
import distflow.launch.agent.agent, distflow.launch.agent.fork_server
heavy = {"torch", "hydra", "rich", "pydantic", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Start a run and watch it" in done.stdout
    assert "distflow, version" in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    assert cli.run([name, "--help"]) == 0
    assert f"distflow {name}" in capsys.readouterr().out


@pytest.mark.parametrize("title", cli.GROUPS)
def test_the_example_of_a_group_is_one_of_its_commands_with_options_that_it_has(title):
    group = cli.GROUPS[title]
    program, name, *words = group[""].split()
    assert (program, name in group) == ("distflow", True)
    command = cli.group.get_command(click.Context(cli.group), name)
    command.make_context(name, words)


def test_an_unknown_command_is_the_users_mistake(capsys):
    assert cli.run(["lunch"]) == 2
    assert "there is no command 'lunch' — did you mean 'launch'?" in capsys.readouterr().err


PROBLEMS = [Problem("a.yaml:3", "run.sed", "unknown key", "did you mean seed?"), Problem("a.yaml:4", "b", "bad")]


@pytest.mark.parametrize(
    "error, code, text, traceback",
    [
        (RecipeError(PROBLEMS), 2, "a.yaml:3: run.sed — unknown key — did you mean seed?\na.yaml:4: b — bad", False),
        (StepError("step x raised"), 3, "step x raised", False),
        (DistflowError("our fault"), 1, "our fault", True),
        (ZeroDivisionError("ours too"), 1, "ours too", True),
        (KeyboardInterrupt(), 130, "", False),
    ],
)
def test_errors_become_exit_codes_and_messages(monkeypatch, capsys, error, code, text, traceback):
    def fail(**_):
        raise error

    monkeypatch.setattr(cli.group, "main", fail)
    assert cli.run([]) == code
    err = capsys.readouterr().err
    assert text in err
    assert ("Traceback" in err) == traceback


@pytest.mark.parametrize(
    "command, shell, code, told",
    [
        ("plan quickstart", 'exec "$@" >&-', 0, ""),
        ("plan quickstart", '"$@" | head -1; exit ${PIPESTATUS[0]}', 0, ""),
        ("config schema", '"$@" | head -1; exit ${PIPESTATUS[0]}', 0, ""),
        ("plan quickstart", 'exec "$@" >/dev/full', 2, "standard output cannot be written: No space left on device\n"),
    ],
)
def test_output_that_nobody_can_read(command, shell, code, told):
    whole = ["bash", "-c", shell, "bash", sys.executable, "-m", "distflow.launch", *command.split()]
    done = subprocess.run(whole, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, told)
