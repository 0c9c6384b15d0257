"""What the data, and all that reads its prompts, asks of a tokenizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that distflow uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The end token; None if there is none."""
        ...

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens of which each ends a response; the tokenizer's own end token is the first, if it has one."""
        ...

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Encode a text that goes on a sequence, as it would be encoded within it.

        `begins`: it begins one, and gets what the tokenizer puts there, such as a token for the beginning, once.
        `behind`: the token before it; behind some, tokenizers write a text in another way than behind other text.
        """
        ...

    def closes(self, token: int) -> bool:
        """Tell whether a turn may end with this token: it is a special one, or ends responses."""
        ...

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """The texts of rows of token ids."""
        ...

    def chat_text(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
        continues: bool = False,
    ) -> str:
        """Write the turns in the model's chat template.

        Raises UserError without one, ValueError where it fails.

        `arguments`: further ones of the template; `asks`: the generation prompt follows; `continues`: the last turn is
        left open, to be gone on with.
        """
        ...
