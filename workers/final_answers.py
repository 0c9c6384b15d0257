"""Final answers in mathematics: where a response has its own, and whether it is the gold one. Imports no torch.

    response ─distflow.data.answers_in_text─▶ tidied ─▶ the same text, or math-verify

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

from distflow.data.answers_in_text import BOLD, BREAK, MARKUP, TEXT, final_answers, tidied, western

_SPACE = re.compile(r"~|\\q?quad\b|\\[ ,;:!]")
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
_ONE_NUMBER = r"[-−]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?"
_SEVERAL = re.compile(
    rf"(?:(?:either|one of|maybe|perhaps|probably|possibly)\s+)?{_ONE_NUMBER}"
    rf"(?:(?:\s*(?:,|;|\?|\bor\b|\band\b))+\s*{_ONE_NUMBER})+\s*[.?!]*",
    re.I,
)
"""Numbers among which a response leaves the choice to its reader."""

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


def is_answer(response: str, gold: str, package: ModuleType, *, cut_off: bool = False) -> bool:
    """Tell whether the final answer of a response is the gold one. `package`: math_verify. It may take forever.

    `cut_off`: the response was not ended by the model, so that only what it says to be its answer is one.
    """
    wanted = _gold(gold)
    finals = final_answers(western(response), cut_off=cut_off)
    if re.fullmatch(_ONE_NUMBER, wanted) and any(_offers_several(one) for one in finals):
        return False
    # What math-verify would find in the rest of a line is not always its answer.
    found = [(tidied(text), text, package if place == 0 else None) for place, text in enumerate(finals)]
    return any(_agrees(wanted, given, text, how) for given, text, how in found if given)


def _offers_several(final: str) -> bool:
    """Tell whether a final answer is nothing but several different numbers, of which the reader is to choose."""
    text = final.strip().strip("*$: ")
    return _SEVERAL.fullmatch(text) is not None and len(set(re.findall(_ONE_NUMBER, text))) > 1


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
    bases = [found[-1] for text in (wanted, given) if (found := _BASE.findall(TEXT.sub(r"\1", text)))]
    if package is None or (len(bases) == 2 and bases[0] != bases[1]) or _takes_long(given, wanted):
        return False
    if measures and others and "" != measures[-1][1] != others[-1][1] != "":
        return False
    # Its own time limit is an alarm signal, which works in main threads alone.
    found = _parsed(final, given, package)
    return bool(package.verify(_value(wanted, package), found, allow_set_relation_comp=True, timeout_seconds=None))


def _takes_long(given: str, wanted: str) -> bool:
    """Tell whether math-verify would read an answer for minutes, as it does some that no gold answer is like: its time
    doubles with each bracket in another one, and grows with the square of a formula's length."""
    if _deepest(given) > max(8, _deepest(wanted)):
        return True
    return len(given) > max(300, 4 * len(wanted)) and (len(given) > 4000 or not _holds_words(given))


def _deepest(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _plain(text: str) -> str:
    return re.sub(r"\s*([,;:()<>=])\s*", r"\1", " ".join(_SPACE.sub(" ", TEXT.sub(r" \1 ", text)).split()))


def _option(text: str) -> tuple[str, ...]:
    """The letter and the value of an answer that is an option of several; or the answer alone."""
    found = _OPTION.fullmatch(_SPACE.sub(" ", TEXT.sub(r" \1 ", text)).strip())
    if found is None or _NO_OPTION.search(found[3]):
        return (text,)
    return found[1] or found[2], tidied(found[3])


def _is_words(text: str) -> bool:
    """Tell whether an answer is no mathematics."""
    plain = TEXT.sub(r"\1", text)
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
    gold = western(gold)
    return tidied(final_answers(gold)[0]) or tidied(gold)


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
    plain = _COMMAND.sub(" ", TEXT.sub(" ", text))
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
    text = _CONTRAST.sub("", BREAK.sub("\n", MARKUP.sub(" ", TEXT.sub(r" \1 ", text))))
    text = _QUOTED.sub(" ", BOLD.sub(r" \2 ", text)).replace("−", "-").replace("\u00a0", " ")
    text = re.sub(r"\\\$(?=\s*\d)", "", re.sub(r"\\([%#&])", r"\1", text))
    text = _ALONE.sub(r" \1 ", _PRICE.sub("", text))
    return _GROUPED.sub("", text)
