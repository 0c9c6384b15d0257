"""Answers in text: where a response gives its own, and what that is without what is around it. Imports no torch.

response ─behind the thinking─▶ <answer>…</answer> ─▶ \\boxed{…}, #### … ─▶ tidied
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distflow.data.gold import GoldAnswer, as_written, gives

_THINKING = "(?:think|thinking|thought|reasoning)"
_THOUGHT_END = re.compile(rf"</{_THINKING}>|\[/THINK\]", re.IGNORECASE)
_THOUGHT_BEGIN = re.compile(rf"<{_THINKING}>|\[THINK\]", re.IGNORECASE)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_TAG_END = re.compile(r"^(.*)</answer>", re.DOTALL | re.IGNORECASE)
_TAG_BEGIN = re.compile(r"<answer>(?!.*<answer>)(.*)$", re.DOTALL | re.IGNORECASE)
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_WIDE = str.maketrans("".join(map(chr, range(0xFF01, 0xFF5F))) + "。、", "".join(map(chr, range(0x21, 0x7F))) + ".,")
_CHINESE_LEAD = re.compile(r"答案\s*(?:是|为|為|:|=)\s*:?")
_LEAD = re.compile(r"(?:final answer|answer|correct (?:option|choice))\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_HASHES = re.compile(r"^\s*####[ \t]*(\S.*)$", re.MULTILINE)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_GAP = r"(?:[\s$]|\\q?quad\b|\\[,; ])*"
_JOINT = re.compile(
    rf"{_GAP}(?:[,;&]|[,;]?{_GAP}(?:\\text\{{)?\s*(?:and|or)\b\s*\}}?){_GAP}(?:\\?[a-zA-Z]\w*\s*=\s*)?{_GAP}"
)
"""What may stand between boxes that are one answer together."""

MARKUP = re.compile(
    r"</?(?:b|i|u|em|strong|code|p|span|div|mark|kbd|tt|font|big|pre|li|ul|ol|h[1-6])(?:\s[^<>]*)?>", re.I
)
BREAK = re.compile(r"<br\s*/?>", re.I)
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
BOLD = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1", re.DOTALL)
_WRAPPERS = (
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$([^$]*)\$", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    TEXT,
    re.compile(r"[\"'“”‘’«»„]([^\"'“”‘’«»„]*)[\"'“”‘’«»„]"),
    re.compile(r"`+([^`]*)`+"),
    re.compile(r"\*([^*]+)\*"),
    re.compile(r"_([^_]+)_"),
    # One number, letter or word in brackets; (3, 4) is a point.
    re.compile(r"\(([^(),;\[\]]*)\)"),
    re.compile(r"\[([^(),;\[\]]*)\]"),
    re.compile(r"\{([^{},;]*)\}"),
)
_ESCAPED = re.compile(r"\\([%#&_$])")
_LEADS = re.compile(r"\b(?:is|are)\b|[=≈:]", re.IGNORECASE)
"""What leads to the result on a line."""
_SENTENCE_END = re.compile(r"[.!?。！？](?:[\"'”’*_`)\]}$\s]|\\[)\]])*\Z|```\s*\Z")
"""The end of a sentence, or of code, which a beginning has not."""
_LONGEST = 300
"""Characters of a text that is looked at as an answer."""


def is_whole_answer(turn: str, gold: Sequence[GoldAnswer]) -> bool:
    """Tell whether an assistant's turn is a whole answer, and not the beginning of one that a model is to go on with.

    It is if it has a box or answer tags with something in them, if its last line comes to a gold answer, or if it has
    thought, and gone on behind that to a gold answer or the end of a sentence. An empty thought, which asks a model not
    to think, says nothing.
    """
    text, thought = behind_thinking(turn), turn[: _end_of_thought(turn)]
    if _boxed(text) or any(found.strip() for found in _TAG.findall(text)):
        return True
    has_thought = bool(_THOUGHT_BEGIN.sub("", _THOUGHT_END.sub("", thought)).strip())
    if has_thought and (_SENTENCE_END.search(text) or any(_holds(text, as_written(one)) for one in gold)):
        return True
    last = text[text.rfind("\n") + 1 :][-_LONGEST:]
    found = text, last, find_answer(turn), *final_answers(turn), _LEADS.split(last.rstrip(":"))[-1]
    given = {tidied(one) for one in found if len(one) <= _LONGEST}
    for one in gold:
        for wanted in (one, tidied(final_answers(as_written(one))[0])):
            written = as_written(wanted).casefold()
            if any(mine and (gives(mine, wanted, ",$") or mine.casefold() == written) for mine in given):
                return True
    return False


def _holds(text: str, gold: str) -> bool:
    """Tell whether a gold answer stands in a text as a word of its own."""
    wanted = gold.strip()
    same_case = 0 if len(wanted) == 1 else re.IGNORECASE
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, same_case) is not None


def find_answer(response: str) -> str:
    """The final answer in a response, outside its thinking.

    In this order of preference: the last <answer>…</answer>, the last \\boxed{…}, what follows the last "answer is" or
    "answer:" on its line, the last non-empty line.
    """
    text = behind_thinking(response)
    tagged = _tagged(text)
    if tagged is not None:
        return tagged
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    led = _LEAD.findall(text)
    if led:
        return str(led[-1]).strip().rstrip(".").strip("*$ ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def behind_thinking(response: str) -> str:
    """A response without its thinking, which may have begun in the prompt, or not have ended."""
    text = response[_end_of_thought(response) :]
    begun = _THOUGHT_BEGIN.search(text)
    return (text if begun is None else text[: begun.start()]).strip()


def _end_of_thought(text: str) -> int:
    """Find where the last thought in a text ends; 0 if none does."""
    return max((found.end() for found in _THOUGHT_END.finditer(text)), default=0)


def _tagged(text: str, *, closed: bool = False) -> str | None:
    """Return what stands in the last answer tags; unless `closed`, where one is missing, up to the other one."""
    whole = _TAG.findall(text)
    if whole:
        return str(whole[-1]).strip()
    open_end = None if closed else _TAG_END.search(text) or _TAG_BEGIN.search(text)
    return None if open_end is None else open_end[1].strip()


def _boxed(text: str) -> str | None:
    """Return what is in the last box, or in the last ones that are one answer together; None if there is none."""
    found: list[tuple[int, int, str]] = []
    for begin in _BOX.finditer(text):
        depth = 1
        for place in range(begin.end(), len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                found.append((begin.start(), place + 1, text[begin.end() : place].strip()))
                break
    if not found:
        return None
    start, _, last = found.pop()
    together = [last]
    while found and _JOINT.fullmatch(text[found[-1][1] : start]):
        start, _, before = found.pop()
        together.insert(0, before)
    return ", ".join(dict.fromkeys(together))


def western(text: str) -> str:
    """A text with the digits and the punctuation of ASCII for those of other scripts."""
    text = _OTHER_DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(_WIDE))
    return _CHINESE_LEAD.sub("the answer is ", text)


def final_answers(text: str, *, cut_off: bool = False) -> list[str]:
    """The part of a text that is its final answer, or as much as is known to hold it; then what may be it as a text.

    `cut_off`: only what the text says to be its answer.
    """
    text = behind_thinking(text)
    tagged = _tagged(text, closed=cut_off)
    text = text if tagged is None else tagged
    boxed = _boxed(text)
    if boxed is not None:
        return [boxed]
    hashes = _HASHES.findall(text)
    if hashes:
        return [str(hashes[-1])]
    led = _LEAD.findall(text)
    if cut_off and tagged is None and not led:
        return []
    return [text, *(led or text.split("\n"))[-1:]]


def tidied(text: str) -> str:
    """An answer without what is around it: markup, quotes, brackets about one value, escapes, a full stop."""
    before = None
    while text != before:
        before = text
        text = BREAK.sub("\n", MARKUP.sub("", text))
        text = BOLD.sub(r"\2", text).strip()
        text = text.rstrip(".,;:").rstrip() if not text.endswith("...") else text
        text = next((found[1] for wrapper in _WRAPPERS if (found := wrapper.fullmatch(text))), text)
    if r"\begin" not in text:
        text = _ESCAPED.sub(r"\1", text)
    return " ".join(text.split())
