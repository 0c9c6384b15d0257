"""Log-probs of response tokens from a transformers causal model, computed at the response positions only.

Where the model allows it, tokens are packed. Otherwise rows are laid out as prompt + response from the left, and padded
on the right: a causal model never looks there, so no attention mask is needed and no result depends on the padding.
Shapes: B rows, L tokens of the longest row, T response tokens of the longest row, N response tokens of all rows,
W width of the model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from distflow.algorithms.logprobs import token_scores
from distflow.data.batch import Batch, Ragged
from distflow.flow.estimate import LOGITS_CHUNK
from distflow.runtime.protocols import TokenScores
from distflow.workers.backends.packed_forward import can_pack, enable, pack
from distflow.workers.batch_invariant import enable_causal


class Scorer:
    """Knows how one model turns tokens into logits; `packed`: by `packed_forward.py`, where it can.

    `deterministic`: for a model that was built so, the scores of a row do not depend on the rows beside it.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, packed: bool, deterministic: bool = False
    ) -> None:
        self.device = device
        """Where the model computes; it may be moved after it was looked at."""
        self._model = model
        self._head: nn.Module = self._model.get_output_embeddings()
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._plain_head = self._probe()
        self._packed = packed and self._plain_head and can_pack(model)
        if self._packed:
            enable(model, invariant=deterministic)
        elif deterministic:
            enable_causal(model)

    def use_head(self, head: nn.Module) -> None:
        """Make logits by this module from now on; it computes what the model's own output layer does."""
        self._head = head

    def score(self, batch: Batch, *, temperature: float, entropy: bool) -> TokenScores:
        """Scores [B, T] of the response tokens; raises ValueError for a response without a prompt."""
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        mask_BT = responses.mask().to(self.device)
        states = self._packed_states if self._packed else self._padded_states
        states_NW, head = states(prompts, responses)
        logprobs_N, entropy_N = self._in_chunks(states_NW, head, responses.values.to(self.device), temperature, entropy)
        return TokenScores(
            logprobs_BT=_spread(logprobs_N, mask_BT),
            entropy_BT=None if entropy_N is None else _spread(entropy_N, mask_BT),
            mask_BT=mask_BT,
        )

    def _packed_states(self, prompts: Ragged, responses: Ragged) -> tuple[Tensor, nn.Module]:
        layout = pack(prompts, responses).to(self.device)
        hidden_1NW = self._model.base_model(
            input_ids=layout.ids_N[None], position_ids=layout.positions_N[None], use_cache=False, packed=layout
        ).last_hidden_state
        return hidden_1NW[0].index_select(0, layout.scored_M), self._head

    def _padded_states(self, prompts: Ragged, responses: Ragged) -> tuple[Tensor, nn.Module]:
        """What the model computed where a response token is predicted, and the module that makes logits of it."""
        ids_BL, response_BL = join(prompts, responses)
        # The token at place l is predicted at place l - 1, and nobody asks what follows the last one.
        chosen_N = response_BL[:, 1:].flatten().nonzero().flatten().to(self.device)
        input_BL = ids_BL[:, :-1].to(self.device)
        if self._plain_head:
            hidden_BLW = self._model.base_model(input_ids=input_BL, use_cache=False).last_hidden_state
            return hidden_BLW.flatten(0, 1).index_select(0, chosen_N), self._head
        logits_BLV = self._model(input_ids=input_BL, use_cache=False).logits
        return logits_BLV.flatten(0, 1).index_select(0, chosen_N), nn.Identity()

    def _in_chunks(
        self, states_NW: Tensor, head: nn.Module, targets_N: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        def scores(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            return token_scores(head(states), targets, temperature=temperature, entropy=entropy)

        rows = max(1, LOGITS_CHUNK // self._vocabulary)
        if len(targets_N) <= rows:
            return scores(states_NW, targets_N)
        pieces = zip(torch.split(states_NW, rows), torch.split(targets_N, rows), strict=True)
        parts = [checkpoint(scores, states, targets, use_reentrant=False) for states, targets in pieces]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]) if entropy else None

    @torch.no_grad()
    def _probe(self) -> bool:
        """Whether logits are just head(last hidden state): some models scale or cap them afterwards."""
        ids = torch.arange(4, device=self.device)[None] % self._vocabulary
        whole = self._model(input_ids=ids, use_cache=False).logits
        direct = self._head(self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return direct.shape == whole.shape and torch.allclose(direct, whole)


def join(prompts: Ragged, responses: Ragged) -> tuple[Tensor, Tensor]:
    """Rows prompt + response, [B, L] from the left (0 behind), and where they hold response tokens, [B, L] bool."""
    prompt_lengths, lengths = prompts.lengths, prompts.lengths + responses.lengths
    if len(prompts) and int(prompt_lengths.min()) == 0:
        row = int(prompt_lengths.argmin())
        raise ValueError(f"row {row} has an empty prompt: the first response token needs at least one token before it")
    place_L = torch.arange(int(lengths.max()) if len(prompts) else 1)
    prompt_BL = place_L < prompt_lengths[:, None]
    response_BL = (place_L < lengths[:, None]) & ~prompt_BL
    ids_BL = torch.zeros(prompt_BL.shape, dtype=torch.int64)
    ids_BL[prompt_BL] = prompts.values
    ids_BL[response_BL] = responses.values
    return ids_BL, response_BL


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Values of the True places of the mask, in order, on a [B, T] ground of zeros."""
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)
