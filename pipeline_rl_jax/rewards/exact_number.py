r"""Correctness by exact number: arithmetic and GSM8K-like problems, without any process.

Owns which number of a text counts and how two numbers compare. Training and evaluation grade with
this one function. Numbers are read digit by digit into fractions; nothing is ever evaluated.

Which number counts, in this order:
1. the last balanced `\boxed{...}`, which must then hold exactly one number;
2. the line after the last `####`: its first number (after its last `=`);
3. the last number of the text: " 3 + 4 = 7." says 7.

A number is an integer or decimal with optional thousands commas and exponent, `a/b`, `\frac{a}{b}`
or a mixed number. Signs, currency and percent signs may surround it: "-$1,234.50", "5%" (which is
5). "nan", "inf", numbers of more than 300 characters and exponents beyond 300 are not read.
"""

from __future__ import annotations

import collections
import re
from fractions import Fraction

from pipeline_rl_jax.data.answer_text import after_marker, clean_answer, last_box
from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score

_MAX_CHARACTERS = 300
_MAX_EXPONENT = 300
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])"  # "x2" and "H2O" hold no number
    r"(?:(?P<whole>[0-9]+)(?:\ {1,2}(?=[0-9]+/[0-9])|\ ?(?=\\[dt]?frac)))?"
    rf"(?:\\[dt]?frac\s*(?:\{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}"
    r"|(?P<top_digit>[0-9])\s*(?P<bottom_digit>[0-9]))"
    rf"|(?P<value>{_DECIMAL})(?:\s*/\s*(?P<divisor>{_DECIMAL}))?)"
)
_SIGN = re.compile(r"(?P<sign>[-+])(?P<gap>\s*)[$€£¥]?\s*$")
_SIGN_WINDOW = 16  # characters before a number that may hold its sign
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\ufe63": "-"})
_LATEX_SPACING = re.compile(r"\\[,!;: ]")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MORE_MATHEMATICS = re.compile(r"[-0-9\\^_*+/<>{}|±×÷≈≠≤≥√π∞]")


class ExactNumber:
    """1 when the completion's number equals the gold answer's exactly, else 0.

    A gold answer without exactly one number is an error, not a wrong answer: no completion could
    ever be right.
    """

    async def score(self, completion: Completion) -> Score:
        gold = gold_number(completion.prompt.answer)
        if gold is None:
            detail = f"answer {completion.prompt.answer[:80]!r} is not one number"
            return Score(value=0.0, error="gold_not_a_number", detail=detail)
        return Score(value=float(final_number(completion.text) == gold))

    async def close(self) -> None:
        return None


def final_number(text: str) -> Fraction | None:
    """The number a completion answers with (the module docstring says which), None without one."""
    text = _plain(text)
    box = last_box(text)
    if box is not None:
        return _only_number(box)
    marked = after_marker(text)
    if marked is not None:
        right_side = marked.rpartition("=")[2]
        first = _NUMBER.search(right_side)
        return _value(right_side, first) if first else None
    numbers = collections.deque(_NUMBER.finditer(text), maxlen=1)
    return _value(text, numbers[0]) if numbers else None


def gold_number(answer: str) -> Fraction | None:
    """The number of a data set's answer field: boxed, after `####`, or the one number it holds."""
    text = _plain(answer)
    if last_box(text) is not None or after_marker(text) is not None:
        return final_number(text)
    return _only_number(text)


def _plain(text: str) -> str:
    r"""One minus sign, no LaTeX spacing or text commands: `1{,}234\text{ km}` is "1,234 km"."""
    text = text.translate(_MINUS_SIGNS).replace("{,}", ",")
    text = _LATEX_SPACING.sub("", text).replace(r"\$", "$").replace(r"\%", "%")
    return _LATEX_TEXT.sub(r" \1", text)


def _only_number(text: str) -> Fraction | None:
    """The number of a text that says one number and no further mathematics ("n = 4", "9 km")."""
    text = clean_answer(text).rpartition("=")[2]
    number = _NUMBER.search(text)
    if number is None:
        return None
    before, after = text[: number.start()], text[number.end() :]
    if _sign(text, number.start()):
        before = _SIGN.sub("", before)
    is_coefficient = re.match(r"[A-Za-z](?![A-Za-z])", after)  # "2x" is not 2
    if is_coefficient or _MORE_MATHEMATICS.search(before) or _MORE_MATHEMATICS.search(after):
        return None
    return _value(text, number)


def _value(text: str, number: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER` with the sign before it; None beyond the limits."""
    if len(number.group()) > _MAX_CHARACTERS:
        return None
    top = number["top"] or number["top_digit"] or number["value"]
    bottom = number["bottom"] or number["bottom_digit"] or number["divisor"] or "1"
    dividend, divisor = _decimal(top), _decimal(bottom)
    if dividend is None or not divisor:
        return None
    value = int(number["whole"] or 0) + dividend / divisor
    return -value if _sign(text, number.start()) == "-" else value


def _decimal(digits: str) -> Fraction | None:
    digits = digits.replace(",", "").lower()
    exponent = digits.partition("e")[2].lstrip("+-0")
    if len(exponent) > 3 or int(exponent or 0) > _MAX_EXPONENT:
        return None  # 1e999999999 would fill the memory
    return Fraction(digits)


def _sign(text: str, start: int) -> str:
    """The sign before a number, "" when there is none or it is an operator ("5-3", "5 - 3")."""
    window = text[max(0, start - _SIGN_WINDOW) : start]
    sign = _SIGN.search(window)
    if sign is None:
        return ""
    before = window[: sign.start()]
    if sign["gap"]:
        is_operator = bool(before.strip()) and before.rstrip()[-1] not in "=:([{,"
    else:
        is_operator = bool(before) and (before[-1].isalnum() or before[-1] in ")]}")
    return "" if is_operator else sign["sign"]
