"""Which requests an engine can ever serve."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distflow.errors import UserError
from distflow.types import BegunSample, GroupRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a slot holds, and the ids the model knows."""

    max_tokens: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, max_tokens: int) -> RequestLimits:
        """From the model's config and the slot length asked for (0: the model's limit, which it may not exceed)."""
        text = config.get_text_config()
        own = int(text.max_position_embeddings)
        if max_tokens > own:
            raise UserError(
                f"engine: slots of {max_tokens} tokens (prompt + response) are longer than the model's {own} "
                f"positions; lower data.max_prompt_tokens or max_new_tokens"
            )
        return cls(max_tokens or own, int(text.vocab_size))

    def check_all(self, requests: Iterable[GroupRequest], here: Iterable[int]) -> None:
        """`check` each, and raise ValueError for a second group of one position; those `here` are there already."""
        taken = set(here)
        for request in requests:
            self.check(request)
            if request.position in taken:
                raise ValueError(f"group at position {request.position} is already here; abort it before resubmitting")
            taken.add(request.position)

    def check(self, request: GroupRequest) -> None:
        """Raise ValueError, naming position and limit, if this request can never be served."""
        for problem in self._problems(request):
            raise ValueError(f"group at position {request.position}: {problem}")

    def _problems(self, request: GroupRequest) -> list[str]:
        params = request.params
        prompt, new = len(request.prompt_ids), params.max_new_tokens
        checks = [
            (request.samples < 1, f"{request.samples} samples asked for; expected at least 1"),
            (prompt < 1, "its prompt is empty; expected at least 1 token"),
            (new < 1, f"max_new_tokens is {new}; expected at least 1"),
            (
                prompt + new > self.max_tokens,
                f"a prompt of {prompt} and max_new_tokens {new} are {prompt + new} tokens; a slot holds "
                f"{self.max_tokens}",
            ),
            (
                not all(0 <= token < self.vocabulary for token in request.prompt_ids),
                f"its prompt has token ids outside 0 … {self.vocabulary - 1}",
            ),
            (not 0 <= params.temperature < float("inf"), f"temperature {params.temperature}; expected 0 or more"),
            (not 0 < params.top_p <= 1, f"top_p {params.top_p}; expected 0 < top_p ≤ 1"),
            (params.top_k < 0, f"top_k {params.top_k}; expected 0 (off) or more"),
        ]
        problems = [message for wrong, message in checks if wrong]
        return problems or [problem for sample in request.begun for problem in self._begun_problems(request, sample)]

    def _begun_problems(self, request: GroupRequest, begun: BegunSample) -> list[str]:
        tokens, new = begun.token_ids, request.params.max_new_tokens
        longest = new if begun.finish_reason else new - 1
        ends = [span.end for span in begun.spans]
        twice = sum(other.sample == begun.sample for other in request.begun) > 1
        checks = [
            (not 0 <= begun.sample < request.samples, f"there are samples 0 … {request.samples - 1}"),
            (twice, "it is there twice"),
            (len(tokens) > longest, f"{len(tokens)} tokens; expected at most {longest}"),
            (len(tokens) != len(begun.logprobs), f"{len(tokens)} tokens, but {len(begun.logprobs)} log-probs"),
            (not all(0 <= t < self.vocabulary for t in tokens), f"token ids outside 0 … {self.vocabulary - 1}"),
            ((ends or [0])[-1] != len(tokens), f"its spans end at {(ends or [0])[-1]}, its tokens at {len(tokens)}"),
            (begun.finish_reason not in ("", "stop", "length"), f"finish_reason {begun.finish_reason!r}"),
        ]
        return [f"begun sample {begun.sample}: {message}" for wrong, message in checks if wrong]
