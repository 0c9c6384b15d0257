"""Tiny tasks in digits, for models that learn from scratch within minutes. Imports no torch."""

from __future__ import annotations

from distflow.data.sources import PromptText
from distflow.errors import UserError

MAX_DIGITS = 9
CHARACTERS: dict[str, str] = {"copy_digits": "0123456789="}
"""Characters of prompts and answers, by source: read without an import and compared with the tokenizer's."""


class CopyDigits:
    """`407=` is to be answered by `407`, and not with another digit in it: all 10**digits numbers, each once."""

    def __init__(self, digits: int) -> None:
        self._digits = digits

    def __len__(self) -> int:
        return int(10**self._digits)

    def __getitem__(self, index: int) -> PromptText:
        answer = str(index).zfill(self._digits)
        # Which digit is wrong, and by how much, differs from number to number.
        place, by = index % self._digits, 1 + index // self._digits % 9
        wrong = answer[:place] + str((int(answer[place]) + by) % 10) + answer[place + 1 :]
        return PromptText(f"{answer}=", {"answer": answer, "rejected": wrong})


def copy_digits(*, digits: int = 3) -> CopyDigits:
    """Prompts of `digits` digits and `=`; raises UserError unless 1 ≤ digits ≤ 9."""
    if not 1 <= digits <= MAX_DIGITS:
        raise UserError(f"data.with.digits {digits}: expected 1 to {MAX_DIGITS}")
    return CopyDigits(digits)
