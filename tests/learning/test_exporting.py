"""A checkpoint as a Hugging Face folder, for any sharding and dtype; and errors in it are found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from distflow.config.load import load_recipe
from distflow.errors import UserError, WorkerFailed
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.checkpoint.parts import CheckpointReader, CheckpointWriter
from distflow.types import Version
from distflow.workers import exporting
from distflow.workers.exporting import compare, export_model, write_model
from distflow.workers.models import build_model
from distflow.workers.tokenizers import build_tokenizer

TEXTS = [("407=", (6, 2, 9, 1)), ("123=", (3, 4))]


def section(dtype: str) -> dict[str, Any]:
    model = load_recipe("quickstart", [f"models.policy.dtype={dtype}"]).recipe.models["policy"].model_dump()
    return {**model, "init": {**model["init"], "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}}


def saved(folder: Path, model: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """The state saved by three replicas, each with a third of every tensor's elements, and its parameters."""
    built = build_model(model, device="cpu", seed=3, load_weights=True)
    weights = {name: parameter.detach() for name, parameter in built.named_parameters()}
    parts: dict = {}
    for rank in range(3):
        shards = [
            Shard(f"model.{name}", tuple(whole.shape), start, whole.reshape(-1)[start:end])
            for name, whole in weights.items()
            for start, end in [(rank * whole.numel() // 3, (rank + 1) * whole.numel() // 3)]
        ]
        writer = CheckpointWriter(folder, f"trainer-{rank}", "digest")
        parts |= writer.write_parts(Version(0, 1), {"policy": shards}, {"home": "trainer", "ledger": {}, "steps": {}})
    return CheckpointReader(writer.commit(Version(0, 1), parts), "").model("policy"), weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_transformers_loads_what_was_trained(tmp_path: Path, dtype: str) -> None:
    model = section(dtype)
    state, weights = saved(tmp_path, model)
    lines = export_model(state, model, TEXTS, tmp_path / "deep" / "hf")
    assert "12 log-probs of 2 texts differ by" in lines[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "hf")
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert loaded.dtype == getattr(torch, dtype)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["hf"]


def test_experts_are_exported_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names of the family's checkpoints, not fused as in transformers."""
    model = section("float32")
    model["init"] |= {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    model["init"] |= {"moe_intermediate_size": 16}
    monkeypatch.setattr(exporting, "SHARD_BYTES", 20_000)
    state, weights = saved(tmp_path, model)
    export_model(state, model, TEXTS, tmp_path / "hf")
    files = [load_file(path) for path in sorted((tmp_path / "hf").glob("*.safetensors"))]
    assert len(files) > 1
    fused = weights["model.layers.0.mlp.experts.gate_up_proj"]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert torch.equal(found["model.layers.0.mlp.experts.2.up_proj.weight"], fused[2, 16:])
    assert not any(name.endswith("gate_up_proj") for name in found)


def test_large_models_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", 10_000)
    model = section("float32")
    state, weights = saved(tmp_path, model)
    (first, second) = export_model(state, model, [], tmp_path / "hf")
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert f"in {len(files)} files" in first
    assert "31 log-probs" in second
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_the_tokenizer_gives_the_same_tokens(tmp_path: Path) -> None:
    model = section("float32")
    export_model(saved(tmp_path, model)[0], model, TEXTS, tmp_path / "hf")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), build_tokenizer(model)
    for text in ("0", "1234567890=", "=====", "00=98"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos_token_id


def test_nothing_is_written_over(tmp_path: Path) -> None:
    model = section("float32")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not empty — nothing is overwritten"):
        export_model({}, model, TEXTS, tmp_path / "hf")


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for to, message in {
        tmp_path / "file": "file: a file — give a new folder",
        tmp_path / "file" / "x": "file/x: .*/file is a file — give a new folder",
        tmp_path / "link": "link: a link to .*/nothing, which does not exist — give a new folder",
        # Nobody, root included, may make a folder in /proc.
        Path("/proc/foo"): r"--to /proc/foo: cannot create the folder \(",
    }.items():
        with pytest.raises(UserError, match=message):
            export_model({}, section("float32"), TEXTS, to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = section("float32")
    state, _ = saved(tmp_path / "run", model)
    full = "No space left on device (os error 28)"
    for error in (OSError(28, "No space left on device"), Exception(full)):

        def save(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(exporting, "_tokenizer", save)
        with pytest.raises(
            UserError, match=r"--to .*/out/hf: could not be written \(.*No space left.*\) — free some space"
        ):
            export_model(state, model, TEXTS, tmp_path / "out" / "hf")
        assert list((tmp_path / "out").iterdir()) == []


def test_a_link_to_an_empty_folder_is_written_through(tmp_path: Path) -> None:
    model = section("float32")
    state, _ = saved(tmp_path / "run", model)
    (tmp_path / "disk").mkdir()
    (tmp_path / "hf").symlink_to(tmp_path / "disk")
    export_model(state, model, TEXTS, tmp_path / "hf")
    assert (tmp_path / "disk" / "model.safetensors").is_file()


def test_another_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = section("float32")
    state, _ = saved(tmp_path, model)
    other = {**model, "init": {**model["init"], "num_hidden_layers": 2}}
    with pytest.raises(
        UserError, match=r"does not match the model in the recipe: only one of them has model.layers.1\."
    ):
        export_model(state, other, TEXTS, tmp_path / "out" / "hf")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wrong_weight_is_found(tmp_path: Path) -> None:
    model = section("float32")
    state, _ = saved(tmp_path, model)
    folder = tmp_path / "hf"
    folder.mkdir()
    write_model(state, model, folder)
    assert compare(state, model, TEXTS, folder)[1] == 0.0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkerFailed, match="log-probs of the exported model differ by"):
        compare(state, model, TEXTS, folder)
