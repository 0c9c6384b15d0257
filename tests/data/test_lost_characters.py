"""Characters that a tokenizer loses in silence are told once, whoever encodes the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distflow.config.data_schema import SourceConfig
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer
from tests.data.chat_templates import byte_tokenizer

KNOWN = ("<pad>", "</s>", "1", "2", "=", "Ġ", "é", "Ã", "©")
Uses = Callable[[PretrainedTokenizer, str, Path], object]


def pairs(folder: Path, *, unknown: str | None = None, of_bytes: bool = False, composes: bool = False) -> Any:
    """Byte pairs with a token for a few characters."""
    vocabulary = {token: number for number, token in enumerate((*KNOWN, *([unknown] if unknown else [])))}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    if of_bytes:
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if composes:
        core.normalizer = normalizers.NFC()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return PretrainedTokenizer(str(folder))


def of_characters(folder: Path) -> Any:
    """What an export has of `chars:…`."""
    CharTokenizer("chars:12= é").save(folder)
    return PretrainedTokenizer(str(folder))


def as_prompt(tokenizer: PretrainedTokenizer, text: str, folder: Path) -> object:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": text}))
    source = open_source("", SourceConfig.model_validate({"source": str(folder / "rows.jsonl")}), str)
    return PromptOrder([source], tokenizer, PromptSettings(5, shuffle=False, chat=False, max_prompt_tokens=99)).prompt(
        0
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda tokenizer, text, _: tokenizer.encode(text),
        lambda tokenizer, text, _: tokenizer.encode(text, begins=True),
        lambda tokenizer, text, _: tokenizer.encode(text, behind=1),
        lambda tokenizer, text, _: tokenizer.encode_turns("1=", text),
        as_prompt,
    ],
    ids=["step", "begins", "behind", "reward model", "prompt"],
)
@pytest.mark.parametrize(
    "make", [pairs, lambda folder: pairs(folder, of_bytes=True), of_characters], ids=["characters", "bytes", "padding"]
)
def test_what_a_tokenizer_loses_is_told_with_the_text(
    make: Any, use: Uses, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make(tmp_path)
    use(tokenizer, "12=é</s>2" if make is not of_characters else "12=é<eos>2", tmp_path)
    assert not caplog.records
    use(tokenizer, "1x2\n=√1", tmp_path)
    (told,) = caplog.messages
    assert r"no token for 'x', '\n', '√', and" in told
    assert "1x2" in told
    use(tokenizer, "1y", tmp_path)
    assert len(caplog.records) == 1, "once"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: byte_tokenizer(folder, None),
        lambda folder: pairs(folder, unknown="<unk>"),
        lambda folder: pairs(folder, composes=True),
    ],
    ids=["bytes", "unknown", "composed"],
)
def test_what_is_kept_in_some_form_is_not_told(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make(tmp_path)
    tokenizer.encode("12=é")
    tokenizer.encode("12=e\u0301")
    assert not caplog.records
