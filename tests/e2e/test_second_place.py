"""A run whose checkpoints are copied to a second place, and that goes on from there on another machine."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.runs import SMALL, Launch, cli

KEYS = ("run.save_every=4", "run.hf_every=10", "run.keep_checkpoints=2")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_is_copied_and_fetched_back(launch: Launch, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run = launch("quickstart", *SMALL, *KEYS, "run.training_steps=20", f"run.copy_to={place}", "layout=colocated")
    assert run.wait() == 0, run.output
    assert run.leftovers() == []
    there = place / run.name
    # Those that are written while another one is being copied may be left out.
    copied = contents(there / "checkpoints" / "step_000020")
    assert copied == contents(run.folder / "checkpoints" / "step_000020")
    assert len(list((there / "checkpoints").glob("step_*"))) <= 2
    assert contents(there / "hf") == contents(run.folder / "hf")
    assert any("checkpoint/copied/count" in line for line in run.metrics())

    runs_dir = tmp_path / "elsewhere"
    fetched = cli("fetch", str(there), "--run", "again", "--runs-dir", str(runs_dir))
    assert fetched.returncode == 0, fetched.stderr
    assert "fetched training step 20" in fetched.stdout
    assert "goes on copying" not in fetched.stdout, "under another name it copies to a place of its own"
    *_, told, last = cli("fetch", str(there), "--runs-dir", str(tmp_path / "third")).stdout.splitlines()
    assert f"{run.name} goes on copying to {there} when it is resumed, and removes older checkpoints there" in told
    assert "fetched training step 20" in last
    assert contents(runs_dir / "again" / "checkpoints") == {
        name: text for name, text in contents(there / "checkpoints").items() if "step_000020" in name or "term" in name
    }
    again = cli(
        "launch", "--resume", "--run", "again", "--runs-dir", str(runs_dir), "run.training_steps=22", timeout_s=180.0
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming after training step 20" in again.stdout
    # The second place goes on too: it is that of the run's new name.
    assert (place / "again" / "checkpoints" / "step_000022" / "COMMIT").is_file()


def test_a_place_that_cannot_be_written_costs_no_training(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.save_every=2", "run.training_steps=12", "run.copy_to=/proc/none")
    assert run.wait() == 0, run.output
    log = (run.folder / "logs" / "trainer-0.log").read_text()
    assert log.count("could not copy") == 1
    assert "not copied to /proc/none" in log
    assert re.search(r"warning: run\.copy_to: not copied to /proc/none/\S+ when the run ended: step_000012", run.output)
    assert run.saved()[-1] == 12


def test_what_cannot_be_fetched(tmp_path: Path) -> None:
    (tmp_path / "place" / "mine" / "checkpoints" / "step_000004").mkdir(parents=True)
    runs = ("--runs-dir", str(tmp_path / "runs"))
    none = cli("fetch", str(tmp_path / "place"), *runs)
    assert none.returncode == 2
    assert "there is no run.json — give run.copy_to of the run and its name" in none.stderr
    (tmp_path / "place" / "mine" / "run.json").write_text("{}")
    half = cli("fetch", str(tmp_path / "place" / "mine"), *runs)
    assert half.returncode == 2
    assert "there is no whole checkpoint" in half.stderr
    assert "step_000004: it has no COMMIT, so its copy was not finished" in half.stdout
    (tmp_path / "runs" / "mine").mkdir(parents=True, exist_ok=True)
    taken = cli("fetch", str(tmp_path / "place" / "mine"), *runs)
    assert "exists already — give another name with --run" in taken.stderr
