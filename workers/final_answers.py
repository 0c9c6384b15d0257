"""Final answers in mathematics: where a response has its own, and whether it is the gold one. Imports no torch.

    response ─behind the thinking─▶ <answer>…</answer> ─▶ \\boxed{…}, #### … ─▶ tidied ─▶ the same text, or math-verify

Both sides go this way. What is around an answer is taken away (bold, code, quotes, brackets, a full stop, the signs of
a currency), what LaTeX would take for a command is escaped, and a text that is no mathematics, such as Tuesday, is only
ever compared as text: as mathematics it would be a product of letters, and any anagram would be equal. An option of
several, (B) 12, is given by its letter, by its value, or by both, of which then none may be wrong.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from types import ModuleType
from typing import Any

_THINKING = "(?:think|thinking|thought|reasoning)"
_THOUGHT = re.compile(rf".*(?:</{_THINKING}>|\[/THINK\])", re.DOTALL | re.IGNORECASE)
_STILL_THINKING = re.compile(rf"(?:<{_THINKING}>|\[THINK\]).*", re.DOTALL | re.IGNORECASE)
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

_MARKUP = re.compile(
    r"</?(?:b|i|u|em|strong|code|p|span|div|mark|kbd|tt|font|big|pre|li|ul|ol|h[1-6])(?:\s[^<>]*)?>", re.I
)
_BREAK = re.compile(r"<br\s*/?>", re.I)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_BOLD = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1", re.DOTALL)
_WRAPPERS = (
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$([^$]*)\$", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    _TEXT,
    re.compile(r"[\"'“”‘’«»„]([^\"'“”‘’«»„]*)[\"'“”‘’«»„]"),
    re.compile(r"`+([^`]*)`+"),
    re.compile(r"\*([^*]+)\*"),
    re.compile(r"_([^_]+)_"),
    # One number, letter or word in brackets; (3, 4) is a point.
    re.compile(r"\(([^(),;\[\]]*)\)"),
    re.compile(r"\[([^(),;\[\]]*)\]"),
    re.compile(r"\{([^{},;]*)\}"),
)
_SPACE = re.compile(r"~|\\q?quad\b|\\[ ,;:!]")
_ESCAPED = re.compile(r"\\([%#&_$])")
_SIGNS = str.maketrans(
    {
        **{"−": "-", "–": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "×": r"\times ", "·": r"\cdot ", "÷": "/"},
        **{"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "°": r"^\circ ", "²": "^2", "³": "^3"},
    }
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\w+))")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_GROUPED = re.compile(r"(?<=\d)(?:_|\\[,!;:]|\{,\})(?=\d{3}(?!\d))")
_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}")
"""Compared as text: 2024-01-02 is no 2021."""
_POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_PERCENT = re.compile(r"(.*?\S)\s*(?:%|\bper ?cent\b|\bpct\b)", re.DOTALL | re.IGNORECASE)
_CURRENCY = "[$€£¥₹₽₩]"
_MONEY = re.compile(rf"(?:{_CURRENCY}\s*(-?[\d.,]+)|(-?)\s*{_CURRENCY}\s*([\d.,]+)|(-?[\d.,]+)\s*{_CURRENCY})")
_PRICE = re.compile(rf"(?<![\d\\$]){_CURRENCY}(?=\d[\d,.]*(?:[^\d$]|$)(?![^\n]*\$))")
"""The sign before a price in a text, which is not the beginning of a formula: no other one follows on the line."""
_ALONE = re.compile(r"(?:(?<=\bis)|(?<=\bare)|(?<=[:=]))\s*[(\[{]+\s*(-?\d[\d.,]*)\s*[)\]}]+")
_CONTRAST = re.compile(r"(?:,\s+(?:and\s+)?not|\s+and\s+not|,?\s+(?:rather than|instead of))\s+\S+", re.I)
"""What an answer is not: it would be the last number of the sentence."""
_QUOTED = re.compile(r"[\"“”«»`]|(?<!\w)['‘’]|['‘’](?!\w)")

_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_OPTION = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])\s+(?![-+*/=^<>](?!\d))(.{1,80})")
"""(B) 12, B. Paris: a letter and its value; no sum, and no sentence that begins like this."""
_NO_OPTION = re.compile(r"[.!?;]\s|(?:^|[\s(])[A-J](?:[).:]|$)")
_BASE = re.compile(r"\d[A-F]*\s*_[\s{]*(\w+)")
"""The base of a numeral, which math-verify drops."""
_OPEN_BEGIN = re.compile(r"^(?:\\left\s*)?\](?=.*[,;])")
_OPEN_END = re.compile(r"(?<=.)(?:\\right\s*)?\[$")
"""]2, 5[ is (2, 5)."""
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln"),
        *("exp", "sqrt", "pi", "inf", "infinity", "mod", "gcd", "lcm", "max", "min", "and", "or", "det", "lim"),
    )
)

_UNITS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "inch inches",
    "ft": "ft foot feet",
    "mi": "mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram",
    "lb": "lb pound",
    "ms": "ms millisecond",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "d": "day",
    "w": "week",
    "month": "month",
    "y": "yr year",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "$": "$ dollar usd",
    "ct": "cent",
    "€": "€ euro eur",
    "£": "£ gbp",
    "¥": "¥ yen jpy yuan cny",
    "₹": "₹ rupee inr",
    "km/h": "km/h kmh kph",
    "mph": "mph",
    "m/s": "m/s",
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}
_MEASURED = re.compile(
    rf"(?P<sign>{_CURRENCY})?\s*(?P<number>\d[\d.,]*)\s*"
    rf"(?P<unit>{_CURRENCY}|[a-zA-Z]+(?:/[a-z]+)?)?(?P<power>\^\{{?[23]\}}?)?"
)


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


def is_answer(response: str, gold: str, package: ModuleType, *, cut_off: bool = False) -> bool:
    """Tell whether the final answer of a response is the gold one. `package`: math_verify. It may take forever.

    `cut_off`: the response was not ended by the model, so that only what it says to be its answer is one.
    """
    wanted = _gold(gold)
    finals = _finals(_western(response), cut_off=cut_off)
    # What math-verify would find in the rest of a line is not always its answer.
    found = [(tidied(text), text, package if place == 0 else None) for place, text in enumerate(finals)]
    return any(_agrees(wanted, given, text, how) for given, text, how in found if given)


def _agrees(wanted: str, given: str, final: str, package: ModuleType | None) -> bool:
    """Compare two tidied answers, of which each may be an option. `final`, `package`: see `_same`."""
    options, others = _option(wanted), _option(given)
    if len(options) == len(others) == 2:
        return all(_same(one, other, other, package) for one, other in zip(options, others, strict=True))
    text = final if len(others) == 1 else None
    return any(_same(one, other, text or other, package) for one in options for other in others)


def _same(wanted: str, given: str, final: str, package: ModuleType | None) -> bool:
    """Tell whether two tidied answers are the same. `final`: the given one untidied; no package: as texts alone."""
    if _plain(wanted) == _plain(given):
        return True
    if _is_words(wanted):
        return _plain(wanted).casefold() == _plain(given).casefold()
    measures, others = _measures(wanted), _measures(given)
    if len(measures) > 1 and measures[0][1] and not re.search(r"[-+*/^=<>]", wanted):
        pairs = zip(measures, others[-len(measures) :], strict=False)
        return len(others) >= len(measures) and all(n == m and (u == v or "" in (u, v)) for (n, u), (m, v) in pairs)
    bases = [found[-1] for text in (wanted, given) if (found := _BASE.findall(_TEXT.sub(r"\1", text)))]
    if package is None or (len(bases) == 2 and bases[0] != bases[1]):
        return False
    if measures and others and "" != measures[-1][1] != others[-1][1] != "":
        return False
    # Its own time limit is an alarm signal, which works in main threads alone.
    found = _parsed(final, given, package)
    return bool(package.verify(_value(wanted, package), found, allow_set_relation_comp=True, timeout_seconds=None))


def behind_thinking(response: str) -> str:
    """A response without its thinking, which may have begun in the prompt, or not have ended."""
    return _STILL_THINKING.sub("", _THOUGHT.sub("", response)).strip()


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


def _western(text: str) -> str:
    """A text with the digits and the punctuation of ASCII for those of other scripts."""
    text = _OTHER_DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(_WIDE))
    return _CHINESE_LEAD.sub("the answer is ", text)


def _finals(text: str, *, cut_off: bool = False) -> list[str]:
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
        text = _BREAK.sub("\n", _MARKUP.sub("", text))
        text = _BOLD.sub(r"\2", text).strip()
        text = text.rstrip(".,;:").rstrip() if not text.endswith("...") else text
        text = next((found[1] for wrapper in _WRAPPERS if (found := wrapper.fullmatch(text))), text)
    if r"\begin" not in text:
        text = _ESCAPED.sub(r"\1", text)
    return " ".join(text.split())


def _plain(text: str) -> str:
    return re.sub(r"\s*([,;:()<>=])\s*", r"\1", " ".join(_SPACE.sub(" ", _TEXT.sub(r" \1 ", text)).split()))


def _option(text: str) -> tuple[str, ...]:
    """The letter and the value of an answer that is an option of several; or the answer alone."""
    found = _OPTION.fullmatch(_SPACE.sub(" ", _TEXT.sub(r" \1 ", text)).strip())
    if found is None or _NO_OPTION.search(found[3]):
        return (text,)
    return found[1] or found[2], tidied(found[3])


def _is_words(text: str) -> bool:
    """Tell whether an answer is no mathematics."""
    plain = _TEXT.sub(r"\1", text)
    runs = [run for run in _LETTERS.findall(_COMMAND.sub(" ", plain)) if run.lower() not in _FUNCTIONS]
    if any(char.isdigit() for char in plain):
        return _DATE.fullmatch(plain) is not None
    return any(len(run) > 2 for run in runs) or (bool(runs) and not re.search(r"[-+*/^=<>|\\]", plain))


def _measures(text: str) -> list[tuple[str, str]]:
    """The numbers in a text, each with its unit, if it is a known one."""
    found = []
    for one in _MEASURED.finditer(_plain(text)):
        name = (one["sign"] or one["unit"] or "").lower()
        unit = _UNIT_OF.get(name) or _UNIT_OF.get(name.removesuffix("s")) or ""
        power = (one["power"] or "").strip("{}").replace("{", "") if unit else ""
        found.append((one["number"].rstrip(".,"), unit + power))
    return found


@lru_cache(maxsize=1024)
def _gold(gold: str) -> str:
    gold = _western(gold)
    return tidied(_finals(gold)[0]) or tidied(gold)


@lru_cache(maxsize=1024)
def _value(gold: str, package: ModuleType) -> Any:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we limit its time ourselves
    return _parsed(gold, gold, package)


def _parsed(final: str, tidy: str, package: ModuleType) -> Any:
    """Return what math-verify reads in an answer, or finds in a text that holds one."""
    if "\n" not in tidy and not _holds_words(tidy):
        return package.parse(_formula(tidy), parsing_timeout=None)
    return package.parse(_prose(final), parsing_timeout=None)


def _holds_words(text: str) -> bool:
    plain = _COMMAND.sub(" ", _TEXT.sub(" ", text))
    percent = _PERCENT.fullmatch(plain.strip())
    runs = _LETTERS.findall(percent[1] if percent else plain)
    return any(run.lower() not in _FUNCTIONS for run in runs)


def _formula(text: str) -> str:
    """An answer as LaTeX for math-verify: read as a whole, since in a text it would find a number of 3√2 or (3, 4)."""
    percent = _PERCENT.fullmatch(text)
    text = percent[1] if percent else text
    money = _MONEY.fullmatch(text)
    if money is not None:
        text = "".join(part or "" for part in money.groups())
    text = text.replace(" ", "") if _SPACED.fullmatch(text) else text
    text = _OPEN_END.sub(")", _OPEN_BEGIN.sub("(", text))
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text.translate(_SIGNS))
    text = _POWER.sub(r"\1 \\times 10^{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", _GROUPED.sub("", text)))
    if r"\begin" not in text:
        text = re.sub(r"(?<!\\)([%#&$])", r"\\\1", text)
    return f"${text}$%" if percent else f"\\boxed{{{text}}}"


def _prose(text: str) -> str:
    """A text in which math-verify finds a number wherever a person would."""
    text = _CONTRAST.sub("", _BREAK.sub("\n", _MARKUP.sub(" ", _TEXT.sub(r" \1 ", text))))
    text = _QUOTED.sub(" ", _BOLD.sub(r" \2 ", text)).replace("−", "-").replace("\u00a0", " ")
    text = re.sub(r"\\\$(?=\s*\d)", "", re.sub(r"\\([%#&])", r"\1", text))
    text = _ALONE.sub(r" \1 ", _PRICE.sub("", text))
    return _GROUPED.sub("", text)
