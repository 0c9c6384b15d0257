"""Reward models: one number for a whole text, by a sequence classifier with its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.data.batch import Ragged
from distflow.data.micro_batches import split_rows
from distflow.runtime.protocols import BackendSpec
from distflow.workers.tokenizers import build_tokenizer


class TextJudge:
    """Scores texts as transformers does one by one: a row's number does not depend on the rows computed with it.

    Decoders give it at the last token that is not padding, so rows are padded on the right: with the model's own
    padding token, or without one with a token that none of them ends with. Under `run.deterministic` each row is
    computed by itself.
    """

    def __init__(self, model: PreTrainedModel, spec: BackendSpec) -> None:
        self._model = model
        self._tokenizer = build_tokenizer(spec.model)
        self._apart = spec.deterministic
        self._config = model.config.get_text_config()
        self._padding: int | None = self._config.pad_token_id
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.longest: int | None = longest
        """Tokens; None: not known."""

    def encode(self, prompt: str, response: str) -> list[int]:
        """Token ids: a user's and an assistant's turn, or the two texts one behind the other without a template."""
        return self._tokenizer.encode_turns(prompt, response)

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]], device: torch.device, tokens: int) -> Tensor:
        """[B] float32, on the host; raises ValueError for an empty row."""
        ragged = _ragged(rows)
        found_B = torch.empty(len(ragged))
        for numbers in self._parts(ragged, tokens):
            found_B[numbers] = self._forward(ragged.select(numbers), device).float().cpu()
        return found_B

    def rate(self, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """[B], with a gradient, on the device; raises ValueError for an empty row."""
        ragged = _ragged(rows)
        found = [self._forward(ragged.select(numbers), device) for numbers in self._parts(ragged, 0)]
        return torch.cat(found)

    def _forward(self, part: Ragged, device: torch.device) -> Tensor:
        padding = self._padding
        if padding is None:
            last = {*part.values[part.offsets[1:] - 1].tolist()}
            padding = next(token for token in range(len(last) + 1) if token not in last)
        ids_BT, mask_BT = part.padded(padding), part.mask().long()
        self._config.pad_token_id = padding
        try:
            logits_B1: Tensor = self._model(
                input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), use_cache=False
            ).logits
        finally:
            self._config.pad_token_id = self._padding
        return logits_B1[:, 0]

    def _parts(self, ragged: Ragged, tokens: int) -> list[Tensor]:
        """Numbers of the rows that are computed together."""
        if self._apart:
            return list(torch.split(torch.arange(len(ragged)), 1))
        return split_rows(ragged.lengths, tokens)


def _ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    if not all(rows):
        row = next(number for number, one in enumerate(rows) if not one)
        raise ValueError(
            f"text {row} of {len(rows)} has no token, so it has no score: prompt and response are empty, and the "
            "model's tokenizer has no chat template"
        )
    return Ragged.from_rows([torch.tensor(row) for row in rows], torch.int64)
