"""Tokenizers: from a model folder or the hub, or a character tokenizer defined here (`chars:0123456789=`)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distflow.config.hub import loading
from distflow.config.paths import CHARS_PREFIX
from distflow.errors import UserError
from distflow.log import logger

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
SHOWN, SHOWN_TEXT = 8, 200
"""Characters that are named, and of a text that are shown, where a tokenizer loses some."""
_ODD = "é字\n\x00"
"""Characters of several bytes, and some that are seldom in a vocabulary."""
log = logger(__name__)


def build_tokenizer(model: Mapping[str, Any]) -> CharTokenizer | PretrainedTokenizer:
    """The tokenizer of a recipe's `models.<name>` section: its `tokenizer`, or else the one in its `path`.

    Raises UserError if there is none, or it cannot be read.
    """
    name = model.get("tokenizer")
    if name is None:
        name = model.get("path")
    if name is None:
        raise UserError("models: a model with `init` needs a `tokenizer`: a path, a hub id, or chars:CHARACTERS")
    ends = generation_ends(model.get("path"))
    if str(name).startswith(CHARS_PREFIX):
        return CharTokenizer(str(name), ends)
    return PretrainedTokenizer(str(name), ends)


def generation_ends(path: object) -> tuple[int, ...]:
    """The end tokens in the generation configuration of a model's folder, or of the hub; of many models they are more
    than the tokenizer's. Empty where there is none. Raises UserError for a broken file."""
    if path is None:
        return ()
    try:
        if Path(str(path)).is_dir():
            found = json.loads((Path(str(path)) / "generation_config.json").read_text()).get("eos_token_id")
        else:
            from transformers import GenerationConfig

            found = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except OSError:  # not every model has one
        return ()
    except ValueError as error:
        raise UserError(f"models: {path}/generation_config.json is no JSON: {error}") from error
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ends):
        raise UserError(f"models: {path}/generation_config.json has eos_token_id {found!r}; expected token ids")
    return tuple(ends)


def _ends(own: int | None, further: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*([] if own is None else [own]), *further]))


def vocabulary(spec: str) -> list[str]:
    """Tokens of `chars:CHARACTERS` by id: padding, end of sequence, then the characters in order."""
    characters = spec.removeprefix(CHARS_PREFIX)
    if not characters:
        raise UserError(f"models: tokenizer {spec!r} lists no characters; write for example chars:0123456789+=")
    twice = sorted({char for char in characters if characters.count(char) > 1})
    if twice:
        raise UserError(f"models: tokenizer {spec!r} lists {', '.join(map(repr, twice))} more than once")
    return [PAD, EOS, *characters]


class CharTokenizer:
    """One token per character. `pretrained` is the same tokenizer for transformers, to be saved with a model."""

    def __init__(self, spec: str, further_ends: Sequence[int] = ()) -> None:
        self.spec = spec
        self._further_ends = further_ends
        self.tokens = vocabulary(spec)
        self.eos_token_id: int | None = EOS_ID
        self._ids = {token: index for index, token in enumerate(self.tokens) if index > EOS_ID}
        self._plain = ["", "", *self.tokens[2:]]
        self.pretrained = _pretrained_chars(self.tokens)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The end token, and those of the model's generation configuration: each ends a response."""
        return _ends(self.eos_token_id, self._further_ends)

    def closes(self, token: int) -> bool:
        """Whether a turn may end with this token."""
        return token <= EOS_ID or token in self.end_tokens

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Encode a text, the same where it begins a sequence; raises ValueError naming an unknown character."""
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            raise ValueError(f"character {error} of {text!r} is not in the vocabulary of {self.spec!r}") from None

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Texts, one per row; padding and end of sequence are left out or written as <pad> and <eos>."""
        table = self._plain if skip_special else self.tokens
        return ["".join([table[token] for token in row]) for row in rows]

    def encode_turns(self, prompt: str, response: str) -> list[int]:
        """The two texts, one behind the other."""
        return self.encode(prompt + response)

    def chat_text(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
        continues: bool = False,
    ) -> str:
        """Raises UserError: there is no chat template."""
        raise UserError(_no_template(self.spec))

    def save(self, folder: Path) -> None:
        """Write it in Hugging Face format."""
        self.pretrained.save_pretrained(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class PretrainedTokenizer:
    """A Hugging Face tokenizer from a folder or the hub. Any thread may use it: those of episodes do, beside the one
    that decodes, and a fast tokenizer changes its own settings when it encodes."""

    def __init__(self, name: str, further_ends: Sequence[int] = ()) -> None:
        from transformers import AutoTokenizer

        with loading("models: cannot read a tokenizer from", name, _first_line):
            self.pretrained = AutoTokenizer.from_pretrained(name)
        # For a folder without one, transformers makes an empty one of the model's family.
        if len(self.pretrained) <= len(self.pretrained.get_added_vocab()):
            raise UserError(
                f"models: there is no tokenizer in {name!r}; set models.<name>.tokenizer to a folder that has one"
            )
        self.name = name
        self.eos_token_id: int | None = self.pretrained.eos_token_id
        self._further_ends = further_ends
        added = self.pretrained.added_tokens_decoder
        self._special = {*self.pretrained.all_special_ids, *(n for n, token in added.items() if token.special)}
        self._begin = _begin_tokens(self.pretrained)
        # Any character may become the unknown token.
        unknown = self.pretrained.unk_token_id
        self._added = {number: str(token.content) for number, token in added.items() if number != unknown}
        self._inner = _inner_encoder(self.pretrained, self._added)
        self._lost = _lost_characters(self.pretrained, self._added)
        """Says what leaves no token; None: nothing does, or it has been told."""
        self._one_at_a_time = threading.RLock()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The end token, and those of the model's generation configuration: each ends a response."""
        return _ends(self.eos_token_id, self._further_ends)

    def closes(self, token: int) -> bool:
        """Whether a turn may end with this token: a special one, or one that ends responses."""
        return token in self._special or token in self.end_tokens

    def encode(self, text: str, *, begins: bool = False, behind: int | None = None) -> list[int]:
        """Encode a text that goes on a sequence: no special tokens, and no space that is not there.

        With `begins` it is the beginning of a sequence: what the tokenizer puts there comes before it, once, also where
        the text, as of some chat templates, has it already. `behind`: the token before it. Behind an added token a text
        is written as the tokenizer does within a text that has both: some put a space there, and some take one away.

        Warns once of characters that leave no token.
        """
        with self._one_at_a_time:
            self._tell_lost(text)
            if begins:
                ids = list(self.pretrained.encode(text, add_special_tokens=False))
                return ids if not ids or ids[: len(self._begin)] == self._begin else [*self._begin, *ids]
            if behind is not None and behind in self._added:
                whole = list(self.pretrained.encode(self._added[behind] + text, add_special_tokens=False))
                if whole[:1] == [behind]:
                    return whole[1:]
            return self._inner(text)

    def _tell_lost(self, text: str) -> None:
        lost = [] if self._lost is None else self._lost(text)
        if not lost:
            return
        self._lost = None
        log.warning(
            "tokenizer %r has no token for %s, and neither bytes nor an unknown token instead: they are lost, first in "
            "%s — take them out of the texts, or take another tokenizer; further ones are not told",
            self.name,
            ", ".join(map(repr, lost[:SHOWN])) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""),
            repr(text) if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]!r}…",
        )

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Texts, one per row."""
        if not rows:
            return []
        with self._one_at_a_time:
            return list(self.pretrained.batch_decode([list(row) for row in rows], skip_special_tokens=skip_special))

    def encode_turns(self, prompt: str, response: str) -> list[int]:
        """A user's and an assistant's turn in the chat template; without one, the two texts one behind the other."""
        if self.pretrained.chat_template is None:
            return self.encode(prompt + response, begins=True)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return self.encode(self.chat_text(turns, asks=False), begins=True)

    def chat_text(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
        continues: bool = False,
    ) -> str:
        """Write the turns; `asks`: the generation prompt follows; `continues`: the last
        turn is left open, to be gone on with; `arguments`: of the template.

        Raises UserError without a chat template, ValueError with the template's own error if it fails.
        """
        if self.pretrained.chat_template is None:
            raise UserError(_no_template(self.name))
        messages = [dict(turn) for turn in turns]
        further = {"add_generation_prompt": True, **(arguments or {})}
        further["add_generation_prompt"] &= asks and not continues
        try:
            written: str = self.pretrained.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, continue_final_message=continues, **further
            )
        except Exception as error:  # of the template, which is code of the model's authors
            raise ValueError(
                f"the chat template of {self.name!r} fails: {type(error).__name__}: {error} — it got the roles "
                f"{', '.join(str(message.get('role')) for message in messages)}"
            ) from error
        return written

    def save(self, folder: Path) -> None:
        """Write it in Hugging Face format."""
        self.pretrained.save_pretrained(folder)


def _lost_characters(pretrained: Any, added: Mapping[int, str]) -> Callable[[str], list[str]] | None:
    """Find the characters of a text that are lost: byte pairs without bytes and without an unknown token pass over them
    in silence, and some tokenizers have padding for them. None for tokenizers that lose none; other kinds fail by
    themselves.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    core: Any = getattr(pretrained, "backend_tokenizer", None)
    model = {"type": ""} if core is None else json.loads(core.to_str())["model"]
    if model["type"] not in ("BPE", "WordLevel") or model.get("unk_token") not in (None, pretrained.pad_token):
        return None
    vocabulary, by_words = model["vocab"], model["type"] == "WordLevel"
    before, behind = (model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    bare = {token.removeprefix(before).removesuffix(behind) for token in vocabulary}
    known = bare if by_words else {token for token in bare if len(token) == 1}
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    parts = re.compile("|".join(map(re.escape, sorted(added.values(), key=len, reverse=True))) or r"(?!)")

    def symbols(text: str) -> set[str]:
        plain = text if core.normalizer is None else core.normalizer.normalize_str(text)
        pieces = [(plain, ())] if core.pre_tokenizer is None else core.pre_tokenizer.pre_tokenize_str(plain)
        return {symbol for piece, _ in pieces for symbol in ([piece] if by_words else piece)}

    of_bytes = set(ByteLevel.alphabet())
    if of_bytes <= known and symbols(_ODD) <= of_bytes:
        return None
    harmless = set[str]()

    def lost(text: str) -> list[str]:
        if harmless.issuperset(text):
            return []
        lacking = [part for part in parts.split(text) if part and not symbols(part) <= known]
        if not lacking:
            harmless.update(text)
            return []
        # A character alone may be another one than within the text, which puts accents upon letters.
        alone = [char for char in dict.fromkeys("".join(lacking)) if not symbols(char) <= known]
        return alone or sorted(set().union(*map(symbols, lacking)) - known)

    return lost


def _begin_tokens(pretrained: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text by itself."""
    plain, whole = (list(pretrained.encode("0", add_special_tokens=special)) for special in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _inner_encoder(pretrained: Any, added: Mapping[int, str]) -> Callable[[str], list[int]]:
    """Tell how a text is encoded that goes on another one: without the space that some tokenizers put before every
    text, up to the first added token in it, from which on it is as in any text."""
    core = getattr(pretrained, "backend_tokenizer", None)
    if core is None:
        return partial(_encoded_behind, pretrained)
    described = json.loads(core.to_str())
    plain = {
        **described,
        "normalizer": _without_prefix(described["normalizer"]),
        "pre_tokenizer": _without_prefix(described["pre_tokenizer"]),
    }
    if plain == described:
        return lambda text: list(pretrained.encode(text, add_special_tokens=False))
    inner = type(core).from_str(json.dumps(plain))
    # Others are found in what a text has become already: nothing is put behind them.
    part = {token for token, text in added.items() if pretrained.encode(text, add_special_tokens=False) == [token]}

    def encode(text: str) -> list[int]:
        found = inner.encode(text, add_special_tokens=False)
        first = next((place for place, token in enumerate(found.ids) if token in part), None)
        if first is None:
            return list(found.ids)
        rest = text[found.offsets[first][0] :]
        return [*found.ids[:first], *pretrained.encode(rest, add_special_tokens=False)]

    return encode


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer of the package tokenizers, as JSON, less what puts a space before texts."""
    if not isinstance(part, dict):
        return part
    steps = next((key for key in ("normalizers", "pretokenizers") if key in part), None)
    if steps is not None:
        return {**part, steps: [_without_prefix(one) for one in part[steps] if one["type"] != "Prepend"]}
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if "add_prefix_space" in part else part


def _encoded_behind(pretrained: Any, text: str) -> list[int]:
    """A text as it is encoded behind another one that it does not merge with."""
    for before in ("\n", "0", "."):
        head, whole = (list(pretrained.encode(one, add_special_tokens=False)) for one in (before, before + text))
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return list(pretrained.encode(text, add_special_tokens=False))


def _no_template(name: str) -> str:
    return (
        f"chat messages, and texts where data.chat is true, are written by a chat template, but tokenizer {name!r} has "
        "none — a model with one, a chat_template.jinja in the tokenizer's folder, or texts with data.chat=false"
    )


def _pretrained_chars(tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    core = Core(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
