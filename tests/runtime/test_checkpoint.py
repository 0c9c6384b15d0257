from pathlib import Path

import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.checkpoint import CheckpointReader, CheckpointWriter, read_commit
from distflow.runtime.state import Shard, share_of
from distflow.types import Version


def save(run_dir: Path, number: int, keep: int = 2) -> Path:
    """What two replicas do: each writes its share, the first one lists them all."""
    tensors = {"weight": torch.full((3,), float(number)), "adam/step": torch.tensor(number)}
    parts = {}
    for rank in range(2):
        writer = CheckpointWriter(run_dir, f"trainer-{rank}", "digest", keep)
        worker = {"ledger": {"version": number}, "steps": {"rank": rank}}
        parts |= writer.write_parts(Version(0, number), {"policy": share_of(tensors, rank, 2)}, worker)
    return CheckpointWriter(run_dir, "trainer-0", "digest", keep).commit(Version(0, number), parts)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    reader = CheckpointReader(folder, "trainer-0")
    assert reader.version == Version(0, 7)
    assert torch.equal(reader.model("policy")["weight"], torch.full((3,), 7.0))
    assert reader.model("policy")["adam/step"] == 7
    assert [part["ledger"] for part in reader.workers()] == [{"version": 7}] * 2
    assert CheckpointReader(folder, "trainer-1").worker()["steps"] == {"rank": 1}
    assert CheckpointReader(folder, "trainer-5").worker()["steps"] == {"rank": 0}, "a new replica begins as the first"
    with pytest.raises(UserError, match="no part holds model 'critic'"):
        reader.model("critic")


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step_000002", "step_000003"]


def test_a_checkpoint_without_commit_is_none(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "COMMIT").unlink()
    with pytest.raises(UserError, match="no checkpoint, it has no COMMIT"):
        read_commit(folder)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    part = folder / "model-policy-trainer-0.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(UserError, match="policy-trainer-0.safetensors: not the bytes that COMMIT lists"):
        CheckpointReader(folder, "trainer-0")


def test_a_missing_part_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "worker-trainer-0.json").unlink()
    with pytest.raises(UserError, match="worker-trainer-0.json: listed in COMMIT but missing"):
        read_commit(folder)


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 4)
    assert CheckpointReader(save(tmp_path, 4), "trainer-0").version.number == 4


def test_what_another_run_left_in_the_folder_is_removed(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    stale = folder / "worker-trainer-9.json"
    stale.write_text("{}")
    save(tmp_path, 4)
    assert not stale.exists()


def test_parts_without_commit_are_no_checkpoint_even_over_an_older_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    CheckpointWriter(tmp_path, "trainer-0", "digest", 2).write_parts(Version(1, 4), {}, {"ledger": {}, "steps": {}})
    with pytest.raises(UserError, match="it has no COMMIT"):
        read_commit(folder)


def test_shards_of_a_tensor_come_back_as_one(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    parts: dict = {}
    for rank, (start, end) in enumerate([(0, 7), (7, 12)]):
        shards = [Shard("weight", (4, 3), start, whole.reshape(-1)[start:end])]
        writer = CheckpointWriter(tmp_path, f"trainer-{rank}", "digest", 2)
        parts |= writer.write_parts(Version(0, 1), {"policy": shards}, {"ledger": {}, "steps": {}})
    folder = writer.commit(Version(0, 1), parts)
    state = CheckpointReader(folder, "trainer-0").model("policy")
    assert list(state) == ["weight"]
    assert torch.equal(state["weight"], whole)
