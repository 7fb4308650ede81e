r"""The gold answer inside a worked solution.

Owns reading `\boxed{...}` in data files, which are well formed. What a model wrote is searched by
the scorers in `rewards/`.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?s)\\.|[{}]")  # an escaped character, so not a brace, or a brace
_BARE = re.compile(r"[^\s$.,;{}]+")


def last_box(solution: str) -> str | None:
    r"""Content of the last box whose braces balance, or None when there is none.

    `\boxed 9` without braces holds the next word.

    >>> last_box(r"$\boxed{1}$, rather $\boxed{\frac{1}{3}}$.")
    '\\frac{1}{3}'
    """
    for box in reversed(list(_BOX.finditer(solution))):
        if solution.startswith("{", box.end()):
            content = _balanced(solution, box.end())
        else:
            bare = _BARE.match(solution, box.end())
            content = bare.group() if bare else None
        if content is not None:
            return content.strip()
    return None


def _balanced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner."""
    depth = 0
    for token in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[start + 1 : token.start()]
    return None
