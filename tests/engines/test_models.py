import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.runtime.steps import StepContext
from distflow.workers.models import build_model
from distflow.workers.tokenizers import build_tokenizer
from tests.families import FAMILIES

INIT = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
TINY = {"path": None, "init": {**INIT, **HEADS}, "tokenizer": "chars:0123456789+=", "dtype": "float32"}
TOKENS = torch.tensor([[2, 3, 4, 13]])


def build(**changes):
    return build_model({**TINY, **changes}, device="cpu", seed=3, load_weights=True)


def test_same_seed_same_weights_in_every_dtype():
    single = build()
    for dtype in (torch.float64, torch.bfloat16):
        other = build(dtype=str(dtype).removeprefix("torch."))
        for (name, a), (_, b) in zip(single.named_parameters(), other.named_parameters(), strict=True):
            assert b.dtype == dtype
            assert torch.equal(a.to(dtype), b), name
    torch.manual_seed(99)
    again = build()
    assert all(torch.equal(a, b) for a, b in zip(single.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_what_transformers_loads_in_half_precision(tmp_path: Path, family: str):
    """In bfloat16 a rotary frequency is off by 1 in 256, and the angle at position 8000 by several radians."""
    built = build_model({"init": FAMILIES[family]}, device="cpu", seed=3, load_weights=True)
    built.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: buffer for name, buffer in loaded.named_buffers() if buffer.is_floating_point()}
    assert any(buffer.dtype == torch.float32 for buffer in expected.values())
    saved = loaded.state_dict()
    for section in ({"path": str(tmp_path)}, {"init": FAMILIES[family]}):
        for load in (True, False):
            made = build_model({**section, "dtype": "bfloat16"}, device="cpu", seed=3, load_weights=load)
            found = {name: buffer for name, buffer in made.named_buffers() if buffer.is_floating_point()}
            assert {n: b.dtype for n, b in found.items()} == {n: b.dtype for n, b in expected.items()}
            known = [name for name in expected if load or name not in saved]
            assert all(torch.equal(found[name], expected[name]) for name in known)
            assert all(parameter.dtype == torch.bfloat16 for parameter in made.parameters())


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    build()
    assert torch.equal(state, torch.get_rng_state())


def test_float64_is_float64_inside():
    """A change of 1e-12 in the embedding must reach the logits; norms that round to float32 would hide it."""
    model = build(dtype="float64")
    with torch.no_grad():
        before = model(TOKENS).logits
        model.model.embed_tokens.weight[2] *= 1 + 1e-9
        model.model.embed_tokens.weight[2, 0] += 1e-11
        moved = (model(TOKENS).logits - before).abs().max()
    assert 0 < moved < 1e-8
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in build().named_parameters()]


def test_character_tokenizer_settles_the_vocabulary():
    model = build()
    assert model.config.vocab_size == 14
    assert model.config.eos_token_id == 1
    assert model.config.pad_token_id == 0
    assert build(init={**TINY["init"], "vocab_size": 40}).config.vocab_size == 40


def test_without_weights_the_names_are_the_same_and_ties_hold():
    tied = {**TINY, "init": {**TINY["init"], "tie_word_embeddings": True}}
    full = build_model(tied, device="cpu", seed=0, load_weights=True)
    empty = build_model(tied, device="cpu", seed=0, load_weights=False)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    with torch.no_grad():
        for (name, a), (other, b) in zip(full.named_parameters(), empty.named_parameters(), strict=True):
            assert name == other
            b.copy_(a)
        assert torch.equal(full(TOKENS).logits, empty(TOKENS).logits)


def test_saved_model_and_tokenizer_come_back(tmp_path):
    model, tokenizer = build(), build_tokenizer(TINY)
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    section = {"path": str(tmp_path), "init": None, "tokenizer": None, "dtype": "float32"}
    again = build_model(section, device="cpu", seed=0, load_weights=True)
    wide = build_model({**section, "dtype": "float64"}, device="cpu", seed=0, load_weights=True)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
        assert torch.equal(build(dtype="float64")(TOKENS).logits, wide(TOKENS).logits)
    loaded = build_tokenizer(section)
    assert loaded.encode("12+3=") == tokenizer.encode("12+3=") == [3, 4, 12, 5, 13]
    assert loaded.eos_token_id == 1
    assert loaded.decode_batch([[3, 4, 1]], skip_special=True) == ["12"]
    assert loaded.decode_batch([], skip_special=True) == []
    for plain in (loaded, tokenizer):
        with pytest.raises(
            UserError,
            match=r"texts where data\.chat is true.*, but tokenizer '.*' has none — a model .*data\.chat=false",
        ):
            plain.chat_text([{"role": "user", "content": "12"}])


@pytest.mark.parametrize("given, ends", [(5, (1, 5)), ([5, 1, 4], (1, 5, 4)), (None, (1,))])
def test_what_the_generation_configuration_ends_responses_with(tmp_path, given, ends):
    build_tokenizer(TINY).save(tmp_path)
    assert build_tokenizer({"path": str(tmp_path)}).end_tokens == (1,), "many models have no such file"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    pretrained = build_tokenizer({"path": str(tmp_path)})
    characters = build_tokenizer({"path": str(tmp_path), "tokenizer": TINY["tokenizer"]})
    for tokenizer in (pretrained, characters):
        assert tokenizer.end_tokens == ends
        assert StepContext("sample", tokenizer=tokenizer).end_tokens == ends
        assert [tokenizer.closes(token) for token in (*ends, 2)] == [*[True] * len(ends), False]


@pytest.mark.parametrize("text, message", [("{", "is no JSON"), ('{"eos_token_id": "a"}', "'a'; expected token ids")])
def test_a_broken_generation_configuration(tmp_path, text, message):
    build_tokenizer(TINY).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        build_tokenizer({"path": str(tmp_path)})


def test_chat_template_is_used(tmp_path):
    tokenizer = build_tokenizer(TINY)
    tokenizer.pretrained.chat_template = "{% for m in messages %}+{{ m.content }}{% endfor %}="
    tokenizer.save(tmp_path)
    loaded = build_tokenizer({"path": str(tmp_path)})
    assert loaded.encode(loaded.chat_text([{"role": "user", "content": "12"}])) == [12, 3, 4, 13]


@pytest.mark.parametrize(
    "section, message",
    [
        ({}, "exactly one of `path` and `init`"),
        ({"path": "/x", "init": {}}, "exactly one of `path` and `init`"),
        ({"path": "/no/such/folder"}, "/no/such/folder is not a folder"),
        ({"path": "./models/x"}, "is not a folder"),
        ({"init": {"hidden_size": 3}}, "needs a model_type"),
        ({"init": {"model_type": "qwen99"}}, "qwen99"),
        ({"init": {"model_type": "qwen2", "hiden_size": 3}}, "no setting hiden_size"),
        ({"init": INIT, "dtype": "int8"}, "'int8' is not supported; choose one of float32"),
    ],
)
def test_wrong_sections(section, message):
    with pytest.raises(UserError, match=message):
        build_model(section, device="cpu", seed=0, load_weights=True)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UserError, match=r"contains no config\.json"):
        build_model({"path": str(tmp_path)}, device="cpu", seed=0, load_weights=True)


def test_naming_the_modules_is_cheap():
    code = "import sys, distflow.workers.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_character_tokenizer():
    tokenizer = build_tokenizer(TINY)
    assert tokenizer.decode_batch([tokenizer.encode("12+30=42"), [1, 0], []], skip_special=True) == ["12+30=42", "", ""]
    assert tokenizer.decode_batch([[2, 1, 0]], skip_special=False) == ["0<eos><pad>"]
    assert tokenizer.pretrained.encode("12+3=") == tokenizer.encode("12+3=")
    assert tokenizer.pretrained.decode([3, 4, 1]) == "12<eos>"
    with pytest.raises(ValueError, match=r"character 'x' of '1x' is not in the vocabulary"):
        tokenizer.encode("1x")


@pytest.mark.parametrize(
    "section, message",
    [
        ({"tokenizer": "chars:"}, "lists no characters"),
        ({"tokenizer": "chars:0120"}, "'0' more than once"),
        ({"init": INIT}, "needs a `tokenizer`"),
        ({"tokenizer": "/no/such/folder"}, "cannot read a tokenizer from '/no/such/folder'.*`make smollm2`"),
    ],
)
def test_wrong_tokenizers(section, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer(section)


def test_a_folder_with_a_model_and_no_tokenizer(tmp_path):
    """Of some families transformers makes an empty one."""
    build().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="there is no tokenizer in"):
        build_tokenizer({"path": str(tmp_path)})
