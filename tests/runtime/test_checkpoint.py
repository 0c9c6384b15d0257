import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from distflow.errors import UserError, WorkerFailed
from distflow.runtime.checkpoint.commit import LAST, Keeping, commits, drafts, read_commit
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.checkpoint.parts import CheckpointReader, CheckpointWriter
from distflow.types import Version


def save(
    run_dir: Path,
    number: int,
    keeping: Keeping = LAST,
    *,
    term: int = 0,
    score: float | None = None,
    validated: Mapping[int, float] | None = None,
) -> Path:
    """What two replicas do: each writes its share, the first one lists them all."""
    tensors = {"weight": torch.full((3,), float(number)), "adam/step": torch.tensor(number)}
    parts = {}
    for rank in range(2):
        writer = CheckpointWriter(run_dir, f"trainer-{rank}", "digest", keeping)
        worker = {"home": "trainer", "ledger": {"version": number}, "steps": {"rank": rank}}
        parts |= writer.write_parts(Version(term, number), {"policy": share_of(tensors, rank, 2)}, worker)
    writer = CheckpointWriter(run_dir, "trainer-0", "digest", keeping)
    return writer.commit(Version(term, number), parts, score, validated)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    reader = CheckpointReader(folder, "trainer-0")
    assert reader.version == Version(0, 7)
    assert torch.equal(reader.model("policy")["weight"], torch.full((3,), 7.0))
    assert reader.model("policy")["adam/step"] == 7
    assert [part["ledger"] for part in reader.workers()] == [{"version": 7}] * 2
    assert CheckpointReader(folder, "trainer-1").worker("trainer")["steps"] == {"rank": 1}
    assert CheckpointReader(folder, "trainer-5").worker("trainer")["steps"] == {"rank": 0}, (
        "a new replica begins as the first"
    )
    with pytest.raises(UserError, match="no part holds model 'critic'"):
        reader.model("critic")


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000002", "step_000003"]


def test_an_old_one_that_cannot_be_removed_takes_nothing_from_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        save(tmp_path, number)

    def busy(*_: object, **__: object) -> None:
        raise OSError("somebody reads it")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        assert CheckpointReader(save(tmp_path, 3), "trainer-0").version == Version(0, 3)
    save(tmp_path, 4)
    assert [path.name for path, _ in commits(tmp_path / "checkpoints")] == ["step_000003", "step_000004"]


def test_a_checkpoint_without_commit_is_none(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "COMMIT").unlink()
    with pytest.raises(UserError, match="not a whole checkpoint: it has no COMMIT"):
        read_commit(folder)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    part = folder / "model-policy-trainer-0.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(UserError, match="policy-trainer-0.safetensors does not hold the bytes that COMMIT lists"):
        CheckpointReader(folder, "trainer-0")


def test_a_missing_part_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "worker-trainer-0.json").unlink()
    with pytest.raises(UserError, match="its part worker-trainer-0.json is missing"):
        read_commit(folder)


def test_a_truncated_commit_and_another_format_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    text = (folder / "COMMIT").read_text()
    (folder / "COMMIT").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="its COMMIT cannot be read"):
        read_commit(folder)
    (folder / "COMMIT").write_bytes(text.encode().replace(b'"digest": "', b'"digest": "\xff'))
    with pytest.raises(UserError, match="its COMMIT cannot be read"):
        read_commit(folder)
    (folder / "COMMIT").write_text(text.replace('"format": 5', '"format": 99'))
    with pytest.raises(UserError, match="it has format 99, this version of distflow reads 5"):
        read_commit(folder)


@pytest.mark.parametrize(
    "key, value",
    [
        ("recipe", None),
        ("digest", 3),
        ("version", "x"),
        ("term", None),
        ("parts", []),
        ("parts", {"a": 1}),
        ("score", 1),
    ],
)
def test_a_commit_with_values_of_other_types_is_named(tmp_path: Path, key: str, value: object) -> None:
    folder = save(tmp_path, 1)
    commit = json.loads((folder / "COMMIT").read_text())
    (folder / "COMMIT").write_text(json.dumps({**commit, key: value}))
    with pytest.raises(UserError, match=rf"step_000001: not a whole checkpoint: its COMMIT is damaged: .*\$\.{key}"):
        read_commit(folder)


def test_a_folder_for_a_commit_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "COMMIT").unlink()
    (folder / "COMMIT").mkdir()
    with pytest.raises(UserError, match="its COMMIT cannot be read"):
        read_commit(folder)


def test_the_best_one_is_kept_beside_the_newest(tmp_path: Path) -> None:
    keeping = Keeping(2, "critic/score", "max")
    for number, score in enumerate((0.2, 0.9, None, 0.5, 0.9, 0.4, 0.3, 0.1)):
        save(tmp_path, number, keeping, score=score)
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["step_000004", "step_000006", "step_000007"], "of equal ones the newer"
    # Values of another metric do not count; and the smallest can be the best.
    save(tmp_path, 8, Keeping(1, "actor/loss", "min"), score=0.0)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000008"]


def test_all_are_kept_where_no_number_is_given(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path, number, Keeping(None))
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 5


def test_the_best_one_by_validation_is_kept_once_it_is_known(tmp_path: Path) -> None:
    keeping = Keeping(1, "val/avg@1", "max", due=(0, 2, 4, 6, 8))

    def saved(number: int, keeping: Keeping = keeping, **validated: float) -> list[int]:
        save(tmp_path, number, keeping, validated={int(name[1:]): value for name, value in validated.items()})
        return sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").iterdir())

    assert saved(2, v0=0.9) == [2], "version 0 was never saved"
    assert saved(3) == [2, 3], "the value of 2 is still to come"
    assert saved(4) == [2, 4]
    assert saved(5, v2=0.5) == [2, 4, 5]
    assert saved(6, v2=0.5, v4=0.4) == [2, 6]
    # Another process knows only what it has measured itself, and what checkpoints say.
    assert saved(7) == [2, 6, 7]
    assert saved(8, v6=0.6) == [6, 8]
    assert saved(9, Keeping(1, "val/maj@1", "max", due=(8,)), v8=0.1) == [8, 9], "values of another metric do not count"


def test_a_later_life_replaces_what_it_did_not_resume_from(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (folder / "COMMIT").write_text("half")
    assert CheckpointReader(save(tmp_path, 4, term=1), "trainer-0").version == Version(1, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


def test_an_earlier_life_that_still_writes_changes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 4, term=2)
    with pytest.raises(WorkerFailed, match="written by term 2 of this run, and this is term 1"):
        save(tmp_path, 4, term=1)
    assert CheckpointReader(folder, "trainer-0").version == Version(2, 4)


def test_two_hosts_that_share_the_folder_commit_the_same(tmp_path: Path) -> None:
    writers = [CheckpointWriter(tmp_path, f"trainer-{rank}", "digest") for rank in range(2)]
    parts: dict = {}
    for writer in writers:
        parts |= writer.write_parts(Version(0, 3), {}, {"home": "trainer", "ledger": {}, "steps": {}})
    assert [writer.commit(Version(0, 3), parts).name for writer in writers] == ["step_000003"] * 2
    assert read_commit(tmp_path / "checkpoints" / "step_000003").parts.keys() == parts.keys()


def test_what_is_not_finished_is_a_draft_and_can_be_given_up(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    writer = CheckpointWriter(tmp_path, "trainer-0", "digest")
    writer.write_parts(Version(0, 5), {}, {"home": "trainer", "ledger": {}, "steps": {}})
    assert [path.name for path in drafts(tmp_path / "checkpoints")] == ["draft_000005_term_0"]
    assert writer.newest() == folder.name
    writer.abandon(Version(0, 5))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [folder.name]


def test_shards_of_a_tensor_come_back_as_one(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    parts: dict = {}
    for rank, (start, end) in enumerate([(0, 7), (7, 12)]):
        shards = [Shard("weight", (4, 3), start, whole.reshape(-1)[start:end])]
        writer = CheckpointWriter(tmp_path, f"trainer-{rank}", "digest")
        parts |= writer.write_parts(Version(0, 1), {"policy": shards}, {"home": "trainer", "ledger": {}, "steps": {}})
    folder = writer.commit(Version(0, 1), parts)
    state = CheckpointReader(folder, "trainer-0").model("policy")
    assert list(state) == ["weight"]
    assert torch.equal(state["weight"], whole)


def test_an_unread_checkpoint_is_compared_with_commit_when_that_is_asked_for(tmp_path: Path, monkeypatch) -> None:
    """Reading 100 GB takes minutes: whoever does it can tell others, and be told that nobody waits any more."""
    monkeypatch.setattr("distflow.runtime.checkpoint.commit.SMALL_BYTES", 1)
    folder = save(tmp_path, 1)
    part = folder / "model-policy-trainer-0.safetensors"
    reader = CheckpointReader(folder, "trainer-0", unread=True)
    assert reader.read == 0
    reader.verify(lambda: None)
    assert reader.read > part.stat().st_size
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    reader = CheckpointReader(folder, "trainer-0", unread=True)
    with pytest.raises(UserError, match="policy-trainer-0.safetensors does not hold the bytes that COMMIT lists"):
        reader.verify(lambda: None)
    part.write_bytes(data[:-1])
    with pytest.raises(UserError, match="bytes, COMMIT says"):
        CheckpointReader(folder, "trainer-0", unread=True)


def test_a_new_replica_begins_as_the_first_of_its_own_home(tmp_path: Path) -> None:
    """Names of further homes may come first in the alphabet; a step that has moved finds what it kept elsewhere."""
    parts = {}
    for stem, home, steps in (
        ("critic-0", "critic", {"values": {"seen": 1}, "both": {"of": "critic"}}),
        ("trainer-0", "trainer", {"advantage": {"seen": 2}, "both": {"of": "trainer"}}),
    ):
        worker = {"home": home, "steps": steps} | ({"ledger": {"version": 3}} if home == "trainer" else {})
        parts |= CheckpointWriter(tmp_path, stem, "digest").write_parts(Version(0, 3), {}, worker)
    folder = CheckpointWriter(tmp_path, "trainer-0", "digest").commit(Version(0, 3), parts)
    for stem in ("trainer-1", "critic-0", "critic-1", "worker-0"):
        home = stem.partition("-")[0]
        found = CheckpointReader(folder, stem).worker(home)["steps"]
        assert found["both"]["of"] == ("trainer" if home == "trainer" else "critic")
        assert (found["values"], found["advantage"]) == ({"seen": 1}, {"seen": 2})
    assert CheckpointReader(folder, "critic-0").ledgers() == [{"version": 3}], "critics own none"
