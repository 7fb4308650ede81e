r"""Whether two answers in LaTeX mean the same, by math-verify.

Owns the one call of math-verify. Runs inside verifier workers only: it can take for ever and can
fill the memory. Must stay free of JAX. Only the LaTeX reader of math-verify is used: its other one
hands the model's text to Python's `eval` by way of sympy.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from typing import Any

_WARM_UP = (r"\frac{1}{2}", "-3.5", "(1, 2)", r"x^2+\sqrt{2}", r"\{1,2\}", "x=4", r"\text{east}")
# math-verify drops what may be a unit at the end: t, h, c, ab, ... In a gold answer these are
# symbols (a + b + c, 2h, a^3 - 3ab), and a single letter glued to a number is one anywhere.
_ENDS_IN_SYMBOL = re.compile(r"(?:[0-9}\s]|^)(?:[A-Za-z]|ab|bc)$")
_ENDS_IN_GLUED_SYMBOL = re.compile(r"[0-9}][A-Za-z]$")


def warm_up() -> None:
    """Imports math-verify and fills the parser's caches, before workers are forked."""
    logging.disable(logging.CRITICAL)  # it logs a warning a call about time limits, which are ours
    for latex in _WARM_UP:
        answers_equal(latex, latex + " ")


def answers_equal(gold: str, answer: str) -> bool:
    """True when `answer` means what `gold` means (1/2 and 0.5, x = 4 and 4); not symmetric."""
    from math_verify import verify

    has_symbol = _ENDS_IN_SYMBOL.search(gold) or _ENDS_IN_GLUED_SYMBOL.search(answer)
    drop_units = has_symbol is None
    parsed_gold = _parse_gold(gold, drop_units=drop_units)
    return bool(verify(parsed_gold, _parse(answer, drop_units=drop_units), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _parse_gold(gold: str, *, drop_units: bool) -> list[Any]:
    return _parse(gold, drop_units=drop_units)  # a group grades many answers against one gold


def _parse(answer: str, *, drop_units: bool) -> list[Any]:
    # Seconds of import: paid in the verifier service, never by who imports this module.
    from math_verify import LatexExtractionConfig, parse

    normalisation = dataclasses.replace(
        LatexExtractionConfig().normalization_config, units=drop_units
    )
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalisation)
    # Callers cut the answer out of its box; the parser wants one. Time limits are off because its
    # own use SIGALRM, which the worker needs for itself.
    return parse(rf"\boxed{{{answer}}}", [config], parsing_timeout=None)  # type: ignore[arg-type]
