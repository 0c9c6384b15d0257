from pathlib import Path

import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.checkpoint import CheckpointReader, CheckpointWriter, read_commit
from distflow.types import Version


def save(run_dir: Path, number: int, keep: int = 2) -> Path:
    writer = CheckpointWriter(run_dir, "trainer-0", "digest", keep)
    tensors = {"weight": torch.full((3,), float(number)), "adam/step": torch.tensor(number)}
    return writer.save(Version(0, number), {"policy": tensors}, {"ledger": {"version": number}, "steps": {}})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, 7), "trainer-0")
    assert reader.version == Version(0, 7)
    assert torch.equal(reader.model("policy")["weight"], torch.full((3,), 7.0))
    assert reader.worker()["ledger"] == {"version": 7}


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
