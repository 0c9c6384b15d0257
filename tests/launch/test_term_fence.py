"""What counts of a run whose training workers restarted: terms are opened once, late checkpoints are void."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from distflow.errors import UserError, WorkerFailed
from distflow.launch.observe.file_client import saved_here
from distflow.launch.run.resume import find_checkpoint
from distflow.runtime.checkpoint.commit import begins, checkpoints_of, drafts, open_term
from distflow.types import Version
from tests.runtime.test_checkpoint import save


def test_a_version_survives_if_every_later_term_began_at_it_or_behind_it() -> None:
    begun = {1: 20, 3: 40}
    survivors = [(0, 20), (1, 40), (2, 40), (3, 999), (4, 999)]
    assert all(Version(*version).survives(begun) for version in survivors)
    assert not any(Version(*version).survives(begun) for version in [(0, 21), (1, 41), (2, 41)])


def test_a_term_is_opened_once(tmp_path: Path) -> None:
    open_term(tmp_path, 1, 20, ["trainer/0", "trainer/1"])
    open_term(tmp_path, 1, 20, ["trainer/1", "trainer/0"])
    with pytest.raises(
        WorkerFailed, match="term 1 of this run began elsewhere with .*trainer/1.*, here it would begin with"
    ):
        open_term(tmp_path, 1, 20, ["trainer/0"])
    assert begins(tmp_path) == {1: 20}
    assert [path.name for path in tmp_path.iterdir()] == ["term_000001.json"]


def test_who_was_left_behind_commits_nothing(tmp_path: Path) -> None:
    open_term(checkpoints_of(tmp_path), 1, 2, ["trainer/0"])
    with pytest.raises(
        WorkerFailed, match="term 1 of this run has begun, and this is term 0: its checkpoint no longer counts"
    ):
        save(tmp_path, 4, term=0)
    assert saved_here(tmp_path) == ()
    assert [path.name for path in drafts(checkpoints_of(tmp_path))] == ["draft_000004_term_0"]


def test_a_checkpoint_of_a_former_term_that_comes_late_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    open_term(checkpoints_of(tmp_path), 1, 2, ["trainer/0"])
    assert [(one.step, one.missing) for one in saved_here(tmp_path)] == [(2, ())]
    found = find_checkpoint(tmp_path)
    assert found.step == 2
    assert found.ignored == (
        "step_000004: it is of term 0, and a later term of the run began before its training step",
    )
    save(tmp_path, 4, term=1)
    assert find_checkpoint(tmp_path).step == 4


def test_what_a_folder_lacks_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path, 2)
    (folder / "model-policy-trainer-1.safetensors").unlink()
    (saved,) = saved_here(tmp_path)
    assert (saved.step, saved.term, saved.missing) == (2, 0, ("model-policy-trainer-1.safetensors",))


def test_a_part_that_is_cut_short_is_lacking(tmp_path: Path) -> None:
    part = save(tmp_path, 2) / "model-policy-trainer-1.safetensors"
    os.truncate(part, part.stat().st_size - 1)
    (saved,) = saved_here(tmp_path)
    assert saved.missing == (part.name,)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"number": "1", "step": 2}', "\udce4"])
def test_a_term_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "term_000001.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"term_000001.json: cannot be read .* restore what it said"):
        begins(tmp_path)
    with pytest.raises(WorkerFailed, match="term 1 of this run began elsewhere"):
        open_term(tmp_path, 1, 2, ["trainer/0"])


def test_a_folder_that_somebody_put_aside_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 4)
    shutil.copytree(checkpoints_of(tmp_path) / "step_000004", checkpoints_of(tmp_path) / "step_000004_backup")
    assert [saved.step for saved in saved_here(tmp_path)] == [4]
