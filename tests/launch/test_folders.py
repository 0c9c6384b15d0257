from __future__ import annotations

import json
import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from distflow.config.load import load_recipe
from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import run as distflow
from distflow.launch.commands import export as exporting
from distflow.launch.deploy.launcher import claim_folder
from distflow.launch.run import folder
from distflow.launch.run.folder import (
    claim,
    create_run_folder,
    existing_run_folder,
    find_run,
    mode_of,
    run_options,
    run_word,
)
from distflow.launch.run.record import RunRecord, read_record
from distflow.launch.run.resume import find_checkpoint, forget_abandoned
from distflow.runtime.checkpoint.format import share_of
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.types import Version
from tests.launch.checkpoints import leave_checkpoint


def make_run(runs_dir, name, started=1.0, **values):
    folder = create_run_folder(runs_dir, name, explicit=True)
    RunRecord(name, str(folder), 10, (), {}, drain_s=1.0, restarts=1, started=started, **values).write()
    return folder


def test_a_taken_name_gets_a_number(tmp_path):
    names = [create_run_folder(tmp_path, "quick", explicit=False).name for _ in range(3)]
    assert names == ["quick", "quick-2", "quick-3"]


def test_an_explicit_name_that_is_taken_is_refused(tmp_path):
    make_run(tmp_path, "mine")
    with pytest.raises(UserError, match=r"--run mine: .*/mine exists already — .*--resume"):
        create_run_folder(tmp_path, "mine", explicit=True)


def failed_run(runs_dir, name):
    """As a run whose workers were refused at their start leaves it."""
    run = make_run(runs_dir, name, state="failed")
    os.close(claim(run))
    (run / "logs" / "trainer-0.log").write_text("why it failed")
    return run


@pytest.mark.parametrize("explicit", [True, False])
def test_a_run_that_failed_before_its_first_step_does_not_block_its_name(tmp_path, explicit):
    for _ in range(2):
        failed_run(tmp_path, "mine")
        run = create_run_folder(tmp_path, "mine", explicit=explicit)
        assert run.name == "mine"
        assert not (run / "run.json").exists()
        assert (tmp_path / ".replaced" / "mine" / "logs" / "trainer-0.log").read_text() == "why it failed"
        shutil.rmtree(run)


def test_a_failed_run_keeps_its_name_if_it_trained_or_is_at_work(tmp_path):
    run = failed_run(tmp_path, "mine")
    lock = claim(run)
    assert create_run_folder(tmp_path, "mine", explicit=False).name == "mine-2"
    os.close(lock)
    (run / "metrics" / "trainer-0.jsonl").write_text('{"step": 1, "term": 0, "timing_s/step": 1.0}\n')
    with pytest.raises(UserError, match=r"--run mine: .*/mine exists already — .*--resume"):
        create_run_folder(tmp_path, "mine", explicit=True)
    leave_checkpoint(failed_run(tmp_path, "saved"), 1)
    assert create_run_folder(tmp_path, "saved", explicit=False).name == "saved-2"


def test_a_folder_in_which_no_run_has_begun_is_told_from_a_run(tmp_path):
    create_run_folder(tmp_path, "mine", explicit=True)
    cure = r"without run\.json: no run has started there — .* no other launch .* be removed \(rm -r .*/mine\)"
    with pytest.raises(UserError, match=cure):
        create_run_folder(tmp_path, "mine", explicit=True)
    with pytest.raises(UserError, match=f"--resume: .*{cure}"):
        existing_run_folder(tmp_path, "mine", explicit=True)


def test_a_folder_that_cannot_be_finished_is_removed(tmp_path, monkeypatch):
    """The second folder below the run's cannot be made: the name is too long."""
    monkeypatch.setattr(folder, "SUBFOLDERS", ("workers", "x" * 300))
    with pytest.raises(UserError, match="cannot create a run folder there"):
        create_run_folder(tmp_path / "runs", "mine", explicit=True)
    assert list(tmp_path.iterdir()) == []


def test_a_runs_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--runs-dir .*/file: is a file — give a folder"):
        create_run_folder(tmp_path / "file", "mine", explicit=True)
    with pytest.raises(
        UserError, match=r"cannot create a run folder there \(Not a directory: .*\) — give a folder you"
    ):
        create_run_folder(tmp_path / "file" / "runs", "mine", explicit=True)


def test_a_runs_dir_that_cannot_be_written_is_refused_with_exit_code_2(capsys):
    """Nobody, root included, may make a folder in /proc."""
    assert distflow(["launch", "quickstart", "--runs-dir", "/proc/runs"]) == 2
    error = capsys.readouterr().err
    assert "--runs-dir /proc/runs: cannot create a run folder there (" in error
    assert "give a folder you can write to" in error
    assert "Traceback" not in error


def test_a_run_folder_that_cannot_be_locked_is_refused(tmp_path):
    run = make_run(tmp_path, "mine")
    (run / ".lock").mkdir()
    with pytest.raises(UserError, match=r"mine: cannot start a run in this folder \(Is a directory: .*/\.lock\)"):
        claim(run)


def test_simultaneous_launches_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create_run_folder(tmp_path, "quick", explicit=False), range(24)))
    assert len(set(folders)) == 24


def test_a_name_must_be_a_name(tmp_path):
    with pytest.raises(UserError, match=r"run name '\.\./x': expected"):
        create_run_folder(tmp_path, "../x", explicit=True)


def test_commands_to_paste_name_runs_from_where_one_is(tmp_path, monkeypatch):
    """A run of the default folder by its name, any other by its path; both as shells read it."""
    usual, other = make_run(tmp_path / "runs", "mine"), make_run(tmp_path / "my runs", "mine")
    monkeypatch.chdir(tmp_path)
    assert (run_word(usual), run_options(usual)) == ("mine", "--run mine")
    for run, place in ((usual, tmp_path / "my runs"), (other, tmp_path)):
        monkeypatch.chdir(place)
        assert find_run(*shlex.split(run_word(run)), Path("runs")) == run
        name, runs_dir = shlex.split(run_options(run))[1::2]
        assert existing_run_folder(Path(runs_dir), name, explicit=True) == run


def test_a_claimed_folder_cannot_be_claimed_again(tmp_path):
    run = make_run(tmp_path, "mine")
    lock = claim(run)
    with pytest.raises(UserError, match=f"still running — watch it with `distflow status {run}`, end it with"):
        claim(run)
    os.close(lock)
    os.close(claim(run))


def test_resume_without_a_name_means_the_latest_of_the_family(tmp_path):
    for name in ("quick", "quick-2", "quick-10", "quickstep"):
        make_run(tmp_path, name)
    assert existing_run_folder(tmp_path, "quick", explicit=False).name == "quick-10"
    assert existing_run_folder(tmp_path, "quick", explicit=True).name == "quick"
    with pytest.raises(UserError, match="there is no run 'slow' in"):
        existing_run_folder(tmp_path, "slow", explicit=False)


def test_runs_are_found_by_name_by_path_and_by_age(tmp_path):
    old, new = make_run(tmp_path, "b", started=1.0), make_run(tmp_path, "a", started=2.0)
    assert find_run("b", tmp_path) == old
    assert find_run(str(old), tmp_path / "elsewhere") == old
    assert find_run(None, tmp_path) == new
    (tmp_path / "by_hand" / "metrics").mkdir(parents=True)
    assert find_run(str(tmp_path / "by_hand"), tmp_path) == tmp_path / "by_hand"


def test_a_record_that_cannot_be_read_does_not_hide_other_runs(tmp_path):
    make_run(tmp_path, "old", started=1.0)
    new, broken = make_run(tmp_path, "new", started=2.0), make_run(tmp_path, "broken", started=3.0)
    (broken / "run.json").write_text((broken / "run.json").read_text().replace('"drain_s": 1.0', '"drain_s": null'))
    with pytest.raises(UserError, match="broken/run.json: not a run record"):
        read_record(broken)
    assert find_run(None, tmp_path) == new


def test_an_unknown_run_is_refused_with_the_nearest(tmp_path):
    make_run(tmp_path, "quickstart")
    with pytest.raises(UserError, match=r"no run 'quikstart' in .* — did you mean 'quickstart'\?"):
        find_run("quikstart", tmp_path)
    with pytest.raises(UserError, match="no run in this folder — start one"):
        find_run(None, tmp_path / "empty")


def test_a_record_reads_back_as_it_was_written(tmp_path):
    folder = make_run(tmp_path, "mine", term=3, state="stopped", exit_code=130)
    record = read_record(folder)
    assert (record.term, record.state, record.exit_code, record.over) == (3, "stopped", 130, True)
    (folder / "run.json").write_text('{"name": 1')
    with pytest.raises(UserError, match=r"run\.json: not a run record"):
        read_record(folder)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"training_steps": "many"}, "Expected `int`, got `str` - at `$.training_steps`"),
        ({"workers": [{"name": "rollout/0", "trains": 1}]}, r"Expected `bool`, got `int` - at `$.workers\[0\].trains`"),
        ({"state": "asleep"}, "Invalid enum value 'asleep' - at `$.state`"),
        ({"colour": "red"}, "unknown field `colour`"),
    ],
)
def test_a_record_with_a_value_of_the_wrong_type_is_refused(tmp_path, wrong, said):
    folder = make_run(tmp_path, "mine")
    values = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**values, **wrong}))
    with pytest.raises(UserError, match=said.replace("$", r"\$")):
        read_record(folder)


def test_resume_takes_the_newest_whole_checkpoint_and_says_what_it_left_out(tmp_path):
    whole = {step: leave_checkpoint(tmp_path, step) for step in (9, 10, 12, 13, 14, 15, 16)}
    worker = "worker-trainer-0.json"
    (whole[12] / worker).write_text("abc")
    (whole[13] / worker).unlink()
    (whole[14] / worker).write_bytes(bytes([b ^ 1 for b in (whole[14] / worker).read_bytes()]))
    (whole[15] / "COMMIT").write_text('{"format": 5, "par')
    (whole[16] / "COMMIT").write_text('{"format": 3, "parts": {}}')
    (tmp_path / "checkpoints" / "step_000017").mkdir()
    (tmp_path / "checkpoints" / "draft_000018_term_0").mkdir()
    found = find_checkpoint(tmp_path)
    assert (found.checkpoint, found.step) == (whole[10], 10)
    size = len((whole[10] / worker).read_bytes())
    assert [line.split(" (")[0] for line in found.ignored] == [
        "draft_000018_term_0: it has no COMMIT, so it was not finished",
        "step_000017: it has no COMMIT, so it was not finished",
        "step_000016: it has format 3, this version of distflow reads 5",
        "step_000015: its COMMIT cannot be read",
        f"step_000014: its part {worker} does not hold the bytes that COMMIT lists",
        f"step_000013: its part {worker} is missing",
        f"step_000012: its part {worker} has 3 bytes, COMMIT says {size}",
    ]
    (tmp_path / "hf" / "draft_000012").mkdir(parents=True)
    forget_abandoned(tmp_path, 10)
    assert not list(tmp_path.glob("*/draft_*"))


def test_without_a_whole_checkpoint_training_begins_again(tmp_path):
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    found = find_checkpoint(tmp_path)
    assert found.checkpoint is None
    assert "restarting at training step 1" in str(found)


def leave_model(run_dir, step):
    """A checkpoint that holds something of the model."""
    writer, version = CheckpointWriter(run_dir, "trainer-0", "digest"), Version(0, step)
    shards = share_of({"weight": torch.zeros(3)}, 0, 1)
    return writer.commit(
        version, writer.write_parts(version, {"policy": shards}, {"home": "trainer", "ledger": {}, "steps": {}})
    )


@pytest.fixture
def pruning(tmp_path, monkeypatch):
    """A run that goes on while it is exported: `pruning(n)` has it remove and write n checkpoints meanwhile."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(load_recipe("quickstart", []).resolved))
    left, folders = [0], [leave_model(tmp_path, 5)]

    def export(state, model, texts, to, **settings):
        if left[0] > 0:
            left[0] -= 1
            shutil.rmtree(folders[-1])
            folders.append(leave_model(tmp_path, 5 + len(folders)))
        float(state["weight"].sum())
        return [f"made {to.name}"]

    monkeypatch.setattr(exporting, "resolve", lambda _: export)
    return lambda times: left.__setitem__(0, times)


def test_export_takes_the_newest_again_when_the_run_has_removed_it(tmp_path, pruning):
    pruning(2)
    lines = list(exporting.export_checkpoint(tmp_path, None, tmp_path / "hf"))
    assert lines[-2].startswith(f"exporting training step 7 from {tmp_path}/checkpoints/step_000007, and loading")
    assert lines[-1] == "made hf"
    assert lines[1] == "step_000005: the run removed it meanwhile"
    pruning(99)
    with pytest.raises(UserError, match=r"the run removed it meanwhile — .*keep_checkpoints\) — 5 times in a row"):
        list(exporting.export_checkpoint(tmp_path, None, tmp_path / "hf"))


def test_export_of_a_step_says_that_the_run_has_removed_it(tmp_path, pruning):
    pruning(1)
    with pytest.raises(UserError, match="step_000005: the run removed it meanwhile — export again, or keep"):
        list(exporting.export_checkpoint(tmp_path, 5, tmp_path / "hf"))


def test_export_finds_it_removed_before_it_is_opened(tmp_path, pruning, monkeypatch):
    folder = tmp_path / "checkpoints" / "step_000005"
    monkeypatch.setattr(exporting, "_named", lambda *_: shutil.rmtree(folder) or folder)
    with pytest.raises(UserError, match="step_000005: the run removed it meanwhile"):
        list(exporting.export_checkpoint(tmp_path, 5, tmp_path / "hf"))


@pytest.mark.parametrize("text", [None, "", "a: [", "- 1", "run: 3", "\0"])
def test_export_without_a_readable_recipe_names_the_file(tmp_path, pruning, capsys, text):
    path = tmp_path / "recipe.yaml"
    path.unlink()
    if text is not None:
        path.write_text(text)
    RunRecord("mine", str(tmp_path), 10, (), {}, drain_s=1.0, restarts=1).write()
    assert distflow(["export", str(tmp_path), "--to", str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert "Traceback" not in error


@pytest.mark.parametrize("wanted, mode", [("private", 0o700), ("group", 0o750), ("public", 0o755)])
def test_others_read_a_run_folder_only_where_the_recipe_says_so(tmp_path, wanted, mode):
    plan = plan_recipe("quickstart", [f"security.run_folder={wanted}"])[1]
    made, lock = claim_folder(tmp_path, "mine", plan, resume=False)
    os.close(lock)
    assert mode_of(made) == mode
    made.chmod(0o777)
    RunRecord("mine", str(made), 10, (), {}, drain_s=1.0, restarts=1).write()
    os.close(claim_folder(tmp_path, "mine", plan, resume=True)[1])
    assert mode_of(made) == mode
