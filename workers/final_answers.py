"""Final answers in mathematics: where a response has its own, and whether it is the gold one. Imports no torch.

    response ─behind the thinking─▶ <answer>…</answer> ─▶ \\boxed{…}, #### … ─▶ tidied ─▶ the same text, or math-verify

Both sides go this way. What is around an answer is taken away (bold, code, quotes, brackets, a full stop, the signs of
a currency), what LaTeX would take for a command is escaped, and a text that is no mathematics, such as Tuesday, is only
ever compared as text: as mathematics it would be a product of letters, and any anagram would be equal.
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
_LEAD = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)
_HASHES = re.compile(r"^\s*####[ \t]*(\S.*)$", re.MULTILINE)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_JOINT = re.compile(r"[\s,;$&.]*(?:\\text\{)?\s*(?:and|or|,)?\s*\}?[\s,;$&]*")
"""What may stand between boxes that are one answer together."""

_MARKUP = re.compile(
    r"</?(?:b|i|u|em|strong|code|p|span|div|mark|kbd|tt|font|big|pre|li|ul|ol|h[1-6])(?:\s[^<>]*)?>", re.I
)
_BREAK = re.compile(r"<br\s*/?>", re.I)
_BOLD = re.compile(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1", re.DOTALL)
_WRAPPERS = (
    re.compile(r"\$\$(.*)\$\$", re.DOTALL),
    re.compile(r"\$([^$]*)\$", re.DOTALL),
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}"),
    re.compile(r"[\"'“”‘’«»„]([^\"'“”‘’«»„]*)[\"'“”‘’«»„]"),
    re.compile(r"`+([^`]*)`+"),
    re.compile(r"\*([^*]+)\*"),
    re.compile(r"_([^_]+)_"),
    # One number, letter or word in brackets; (3, 4) is a point.
    re.compile(r"\(([^(),;\[\]]*)\)"),
    re.compile(r"\[([^(),;\[\]]*)\]"),
    re.compile(r"\{([^{},;]*)\}"),
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
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
_QUOTED = re.compile(r"[\"“”«»`]|(?<!\w)['‘’]|['‘’](?!\w)")

_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\[a-zA-Z]+")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
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
    rf"(?P<sign>{_CURRENCY})?\s*\d[\d.,]*\s*(?P<unit>{_CURRENCY}|[a-zA-Z]+(?:/[a-z]+)?)?(?P<power>\^\{{?[23]\}}?)?"
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


def is_answer(response: str, gold: str, package: ModuleType) -> bool:
    """Tell whether the final answer of a response is the gold one. `package`: math_verify. It may take forever."""
    wanted = _gold(gold)
    final, given = _final(response), tidied(_final(response))
    if not given:
        return False
    led = tidied(find_answer(response))
    if wanted in (given, led):
        return True
    if _is_words(wanted):
        return _folded(wanted) in (_folded(given), _folded(led))
    units = _unit(wanted), _unit(given)
    if all(units) and units[0] != units[1]:
        return False
    # Its own time limit is an alarm signal, which works in main threads alone.
    return bool(package.verify(_value(wanted, package), _parsed(final, given, package), timeout_seconds=None))


def behind_thinking(response: str) -> str:
    """A response without its thinking, which may have begun in the prompt, or not have ended."""
    return _STILL_THINKING.sub("", _THOUGHT.sub("", response)).strip()


def _tagged(text: str) -> str | None:
    """Return what stands in the last answer tags; where one of the two is missing, up to the other one."""
    whole = _TAG.findall(text)
    if whole:
        return str(whole[-1]).strip()
    open_end = _TAG_END.search(text) or _TAG_BEGIN.search(text)
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


def _final(text: str) -> str:
    """The part of a text that is its final answer, or as much as is known to hold it."""
    text = behind_thinking(text)
    tagged = _tagged(text)
    text = text if tagged is None else tagged
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    hashes = _HASHES.findall(text)
    return str(hashes[-1]) if hashes else text


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


def _folded(text: str) -> str:
    return " ".join(_TEXT.sub(r"\1", text).casefold().split())


def _is_words(text: str) -> bool:
    """Tell whether an answer is no mathematics."""
    plain = _TEXT.sub(r"\1", text)
    runs = [run for run in _LETTERS.findall(_COMMAND.sub(" ", plain)) if run.lower() not in _FUNCTIONS]
    if any(char.isdigit() for char in plain):
        return _DATE.fullmatch(plain) is not None
    return any(len(run) > 2 for run in runs) or (bool(runs) and not re.search(r"[-+*/^=<>|\\]", plain))


def _unit(text: str) -> str:
    """The unit of the last number in a text, if it is a known one."""
    found = list(_MEASURED.finditer(_TEXT.sub(r" \1", text)))
    if not found:
        return ""
    last = found[-1]
    name = (last["sign"] or last["unit"] or "").lower()
    unit = _UNIT_OF.get(name) or _UNIT_OF.get(name.removesuffix("s")) or ""
    return unit + (last["power"] or "").strip("{}").replace("{", "") if unit else ""


@lru_cache(maxsize=1024)
def _gold(gold: str) -> str:
    return tidied(_final(gold)) or tidied(gold)


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
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text.translate(_SIGNS))
    text = _POWER.sub(r"\1 \\times 10^{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", _GROUPED.sub("", text)))
    if r"\begin" not in text:
        text = re.sub(r"(?<!\\)([%#&$])", r"\\\1", text)
    return f"${text}$%" if percent else f"\\boxed{{{text}}}"


def _prose(text: str) -> str:
    """A text in which math-verify finds a number wherever a person would."""
    text = _BREAK.sub("\n", _MARKUP.sub(" ", text))
    text = _QUOTED.sub(" ", _BOLD.sub(r" \2 ", text)).replace("−", "-").replace("\u00a0", " ")
    text = re.sub(r"\\\$(?=\s*\d)", "", re.sub(r"\\([%#&])", r"\1", text))
    text = _ALONE.sub(r" \1 ", _PRICE.sub("", text))
    return _GROUPED.sub("", text)
