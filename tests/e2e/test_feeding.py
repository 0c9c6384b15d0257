"""Prompts that clients put into a real run: each row is trained on once, in its place, whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from distflow.client import Client
from distflow.errors import UserError
from tests.e2e.runs import PACED, PROMPTS, Launch, Run, check_trained_once, cli
from tests.test_docs import ROOT, files_in


def row(number: int) -> dict[str, str]:
    return {"prompt": f"{number:03d}=", "answer": f"{number:03d}"}


def status(run: Run, *more: str) -> str:
    return cli("status", run.name, "--runs-dir", str(run.folder.parent), *more).stdout


def prompts(run: Run) -> dict[int, str]:
    """The prompt of each position that was trained on."""
    return {line["uid"][2]: line["prompt"] for line in run.dumps()}


def in_order(numbers: list[int]) -> dict[int, str]:
    return {position: row(number)["prompt"] for position, number in enumerate(numbers)}


def test_the_feeder_that_is_shown(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch("fed", *PACED, "run.training_steps=10", "data.with.ahead=16")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir(exist_ok=True)
    Path("runs/fed").symlink_to(run.folder)
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    waits = "while the run waits for clients to put prompts (Client.put_prompts), row 1 of 4096, since"
    run.until(lambda: status(run).count(waits) == 3, "every worker that waits says for whom")
    run.until(lambda: json.loads(status(run, "--json"))["waits"][0]["since_s"] > 9, "the launching command to tell")
    exec(compile(files_in(ROOT / "docs" / "feeding.md")["feed.py"], "feed.py", "exec"), {})
    assert run.wait() == 0, run.output
    told = "the run waits for clients to put prompts (Client.put_prompts), row 1 of 4096: put some (a training step"
    assert run.output.count(told) == 1
    check_trained_once(run, 10)
    (log,) = (run.folder / "prompts").glob("*.jsonl")
    put = [json.loads(line)["row"]["prompt"] for line in log.read_text().splitlines()]
    assert prompts(run) == dict(enumerate(put[: 10 * PROMPTS]))


def test_every_row_is_trained_on_once_although_the_owner_that_takes_them_is_killed(launch: Launch) -> None:
    steps, ahead = 20, 16
    numbers = [7 * number % 1000 for number in range(steps * PROMPTS)]
    two = ["layout.pools.trainer.count=2", "run.save_every=4", f"run.training_steps={steps}"]
    run = launch("fed", *PACED, *two, f"data.with={{rows: {len(numbers)}, ahead: {ahead}}}")
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    killed, taken = False, 0
    with Client(run.folder) as client:
        with pytest.raises(UserError, match="prompt 1: there is no column 'prompt'"):
            client.put_prompts([row(999), {"text": "1="}])
        with pytest.raises(UserError, match=r"prompt 0 has \d+ tokens, expected 1 to"):
            client.put_prompts([{"prompt": "1" * 600, "answer": "1"}])
        while taken < len(numbers):
            taken += client.put_prompts([row(number) for number in numbers[taken : taken + 5]])
            if taken >= 80 and not killed:
                run.until(run.saved, "a checkpoint")
                os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
                killed = True
        with pytest.raises(UserError, match=f"1 rows are put, and 0 of data.with.rows={len(numbers)}"):
            client.put_prompts([row(1)])
        assert run.wait() == 0, run.output
    assert run.record()["term"] == 1
    check_trained_once(run, steps)
    assert prompts(run) == in_order(numbers)
    first, second = sorted((run.folder / "prompts").glob("*.jsonl"))
    assert first.read_bytes() == second.read_bytes()


def test_a_copy_of_a_run_goes_on_with_its_rows_and_then_over_them_again(launch: Launch, tmp_path: Path) -> None:
    name, steps, place = f"fed-{os.getpid()}", 8, tmp_path / "place"
    until_two = (f"run.training_steps={steps}", "run.stop_after=2", f"run.copy_to={place}")
    first = launch("fed", *PACED, *until_two, name=name)
    first.until(lambda: (first.folder / "run.json").exists(), "run.json")
    with Client(first.folder) as client:
        assert client.put_prompts(map(row, range(3 * PROMPTS))) == 3 * PROMPTS
        assert first.wait() == 0, first.output
    first.folder.rename(tmp_path / "lost")
    fetched = cli("fetch", str(place / name), "--runs-dir", str(first.folder.parent))
    assert fetched.returncode == 0, fetched.stderr
    # What was trained on before is looked at below, and no part of a copy.
    shutil.copytree(tmp_path / "lost" / "rollouts", first.folder / "rollouts", dirs_exist_ok=True)
    again = launch("--resume", "run.stop_after=null", name=name)
    again.until(lambda: again.record()["state"] == "running", "the run again")
    with Client(again.folder) as client:
        again.until(lambda: f"{3 * PROMPTS} of 4096, 0 yet to be begun" in status(again), "the wait for further rows")
        assert client.put_prompts(map(row, range(100, 100 + PROMPTS)), timeout=60) == PROMPTS
        client.end_prompts()
        with pytest.raises(UserError, match=f"were ended after {4 * PROMPTS} rows"):
            client.put_prompts([row(1)])
        assert again.wait() == 0, again.output
    check_trained_once(again, steps)
    whole = [*range(3 * PROMPTS), *range(100, 100 + PROMPTS)]
    assert prompts(again) == in_order(whole * 2), "two passes over all that is there"


def test_a_run_with_other_prompts_takes_none(launch: Launch) -> None:
    run = launch("quickstart", *PACED, "run.training_steps=12")
    run.until(lambda: (run.folder / "run.json").exists(), "run.json")
    with (
        Client(run.folder) as client,
        pytest.raises(UserError, match=r"come from .*, not from clients \(data.source=distflow.data.fed:by_clients\)"),
    ):
        client.put_prompts([row(1)])
