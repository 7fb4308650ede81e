"""Format reward: whether a completion contains what a regular expression describes.

Owns the check of the pattern. Matching runs in the verifier's workers: Python's `re` can take
exponential time on a careless pattern, holds the interpreter lock meanwhile and cannot be stopped.
"""

from __future__ import annotations

import re

from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.verifier_pool import VerifierPool, score_by_verifier


class FormatReward:
    r"""1 when `re.search(pattern, completion.text)` finds something, else 0.

    Anchors, `(?s)` and the like belong into the pattern: `(?s)^<think>.*</think>.*\\boxed`. A
    search that runs into the deadline scores 0 (event `verifier_deadline`). The pool is not owned:
    who made it closes it.
    """

    def __init__(self, pattern: str, pool: VerifierPool) -> None:
        self._pattern = pattern
        self._pool = pool

    async def score(self, completion: Completion) -> Score:
        return await score_by_verifier(self._pool, "search", self._pattern, completion.text)

    async def close(self) -> None:
        return None


def check_format_pattern(pattern: str) -> None:
    """Raises ValueError, saying where, when `pattern` is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"rewards.format_pattern ({pattern!r}) must be a regular expression: {error}"
        ) from error
