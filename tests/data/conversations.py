"""Rows as a run reads them, and conversations to make them of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.config.data_schema import SourceConfig
from distflow.data.loading import open_source
from distflow.data.order import PromptOrder, PromptSettings, SourceUse
from distflow.data.responses import DataRow, Reading, RowResponse
from distflow.types import GivenResponse, Prompt
from distflow.workers.supervised import demonstration
from distflow.workers.tokenizers import PretrainedTokenizer

Tokenizers = Callable[..., PretrainedTokenizer]
Make = Callable[[DataRow], Sequence[RowResponse]]


def prompts(
    rows: Sequence[Any], tokenizer: PretrainedTokenizer, make: Make | None = None, *, turns: str = "all", **given: Any
) -> PromptOrder:
    """The prompts that rows give, read by `make` where the data give the responses."""
    fields = given.pop("fields", {})
    values = {"seed": 0, "shuffle": False, "chat": False, "max_prompt_tokens": 999} | given
    reading = None if make is None else Reading(make, "read", 2, 999, (), turns == "all")
    return PromptOrder([SourceUse(rows, fields=fields)], tokenizer, PromptSettings(**values), reading)


def saved(path: Path, *rows: Mapping[str, Any]) -> SourceUse:
    """Rows as a file that `data.source` names."""
    if path.suffix == ".parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source("", SourceConfig.model_validate({"source": str(path)}), lambda name: None)


def from_file(use: SourceUse, tokenizer: PretrainedTokenizer, make: Make | None = None) -> PromptOrder:
    reading = None if make is None else Reading(make, "read", 2, 999, (), True)
    return PromptOrder([use], tokenizer, PromptSettings(0, False, False, 999), reading)


def text(tokenizer: PretrainedTokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode_batch([ids], skip_special=False)[0]


def shown(tokenizer: PretrainedTokenizer, response: GivenResponse) -> str:
    """A response with brackets around each run of tokens that is trained on."""
    mask = response.mask or (response.trains,) * len(response.token_ids)
    out, inside = "", False
    for token, trained in zip(response.token_ids, mask, strict=True):
        if trained != inside:
            out, inside = out + ("[" if trained else "]"), trained
        out += text(tokenizer, [token])
    return out + "]" * inside


def read(row: Mapping[str, Any], tokenizer: PretrainedTokenizer, make: Make = demonstration, **given: Any) -> Prompt:
    return prompts([row], tokenizer, make, **given).prompt(0)


def user(content: Any, **further: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **further}


def said(content: Any, **further: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **further}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
