"""What the tests of data share."""

from __future__ import annotations

import pytest

from distflow.workers.tokenizers import PretrainedTokenizer
from tests.data.chat_templates import FAMILIES, THINKING, byte_tokenizer
from tests.data.conversations import Tokenizers


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    """Tokenizers with the templates of families, each made once."""
    made: dict[tuple[str, bool], PretrainedTokenizer] = {}

    def find(family: str, *, bos: bool = False) -> PretrainedTokenizer:
        key = family, bos
        if key not in made:
            made[key] = byte_tokenizer(tmp_path_factory.mktemp(family), (FAMILIES | THINKING).get(family), bos=bos)
        return made[key]

    return find
