"""Stop strings: found by the first token that completes one, however the text is cut into tokens and pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distflow.data.stop_strings import WINDOW, ResponseEnd, StopFinder, stop_complaint
from distflow.types import SamplingParams
from distflow.workers.tokenizers import CharTokenizer, PretrainedTokenizer

TEXT = "a b\n→é😀<>/n."


SPECIAL = ["<pad>", "</s>"]


@cache
def byte_level() -> PretrainedTokenizer:
    """Bytes are tokens, and so are longer pieces of text, some of which begin or end within characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    mixed = random.Random(3)
    core.train_from_iterator(
        ["".join(mixed.choices(TEXT, k=30)) for _ in range(40)],
        trainers.BpeTrainer(
            vocab_size=256 + len(SPECIAL) + 90,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    with TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
        return PretrainedTokenizer(folder)


def decode(tokens: Sequence[int]) -> str:
    (text,) = byte_level().decode_batch([tokens], skip_special=True)
    return text


def by_hand(tokens: Sequence[int], params: SamplingParams) -> ResponseEnd | None:
    """The same, by decoding all tokens so far again with each."""
    floor = len(decode(tokens[: params.min_new_tokens]).rstrip("�"))
    for count in range(params.min_new_tokens + 1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip("�")
        places = [(at, at + len(stop)) for stop in params.stop for at in range(len(text)) if text.startswith(stop, at)]
        counted = [place for place in places if place[1] > floor]
        if counted:
            start, end = min(counted)
            return ResponseEnd(count, text[: end if params.include_stop_str_in_output else start])
    return None


texts = st.text(st.sampled_from(TEXT), max_size=90).map(byte_level().encode)
any_tokens = st.lists(st.integers(0, 256 + len(SPECIAL) + 89), max_size=9)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(texts | any_tokens, max_size=4),
    stops=st.lists(st.text(st.sampled_from(TEXT), min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 2 * WINDOW), min_size=1, max_size=8),
    least=st.integers(0, 12),
    included=st.booleans(),
)
def test_the_first_token_that_completes_one(
    parts: list[list[int]], stops: list[str], cuts: list[int], least: int, included: bool
) -> None:
    """In any pieces, also where a piece ends within a character or a stop string."""
    tokens = [token for part in parts for token in part]
    params = SamplingParams(stop=tuple(stops), min_new_tokens=least, include_stop_str_in_output=included)
    finder, begin, number = StopFinder(params, decode), 0, 0
    while begin < len(tokens) and finder.found is None:
        finder.feed(tokens[begin : begin + cuts[number % len(cuts)]])
        begin, number = begin + cuts[number % len(cuts)], number + 1
    assert finder.found == by_hand(tokens, params)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("so 42.\n\nNext", "\n\n", "so 42."),
        ("a smile 😀 and", "😀", "a smile "),
        ("<answer>7</answer> more", "</answer>", "<answer>7"),
        ("é" * 200 + "→→", "→→", "é" * 200),
    ],
)
def test_what_is_shown(text: str, stop: str, shown: str) -> None:
    tokens = byte_level().encode(text)
    for included, end in ((False, shown), (True, shown + stop)):
        finder = StopFinder(SamplingParams(stop=stop, include_stop_str_in_output=included), decode)
        for token in tokens:
            finder.feed([token])
        assert finder.found is not None
        assert finder.found.text == end
        kept = tokens[: finder.found.tokens]
        assert stop in decode(kept)
        assert stop not in decode(kept[:-1])


@cache
def byte_fallback() -> PretrainedTokenizer:
    """Characters that are no tokens are written in bytes, as by the tokenizers of Llama 2 and Gemma."""
    words = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdé#"]
    core = Tokenizer(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    with TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
        return PretrainedTokenizer(folder)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "tokens"),
    [
        ("ab\n😀😀 cd", "\n", "ab", 3),
        ("abc\n\n→ d\n", "\n\n", "abc", 5),
        ("é\t\n日本\n", "\n", "é\t", 3),
        ("a " * 60 + "→#b日#", "#", "a " * 60 + "→", 124),
    ],
)
@pytest.mark.parametrize("least", [0, 2])
def test_it_makes_no_difference_how_many_tokens_come_at_once(
    text: str, stop: str, shown: str, tokens: int, least: int
) -> None:
    """Half a character takes the bytes before it out of the text, a newline among them."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text)
    for size in (1, 2, 3, 5, 7, 50, len(ids)):
        params = SamplingParams(stop=(stop,), min_new_tokens=least)
        finder = StopFinder(params, lambda row: tokenizer.decode_batch([row], skip_special=True)[0])
        for begin in range(0, len(ids), size):
            finder.feed(ids[begin : begin + size])
        assert finder.found == ResponseEnd(tokens, shown), size


def test_what_can_never_be_found_is_told() -> None:
    assert stop_complaint(byte_level(), "\n\n") == ""
    end = byte_level().decode_batch([[byte_level().end_tokens[0]]], skip_special=False)[0]
    assert stop_complaint(byte_level(), f"x{end}") == (
        f"stop {'x' + end!r} has special tokens, which texts leave out: "
        f"stop_token_ids={[byte_level().end_tokens[0]]} instead"
    )
    assert "stop 'x' can never come: character 'x'" in stop_complaint(CharTokenizer("chars:012="), "x")
    assert stop_complaint(CharTokenizer("chars:012="), "1=") == ""
