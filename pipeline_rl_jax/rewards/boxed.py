r"""Correctness by boxed answer: the last `\boxed{...}` must mean what the gold answer means.

Owns what goes to the verifier and what is settled without it. Training and evaluation grade with
this one scorer.
"""

from __future__ import annotations

import re

from pipeline_rl_jax.data.answer_text import clean_answer, gold_answer, last_box
from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.score import Score
from pipeline_rl_jax.rewards.verifier_pool import VerifierPool, score_by_verifier

_MAX_ANSWER_CHARACTERS = 2000  # longer than any gold answer of the usual data sets by far
_INTEGER = re.compile(r"[+-]?[0-9]{1,300}")
_SPACE = re.compile(r"\s+")


class BoxedAnswer:
    """1 when the last balanced box equals the gold answer by math-verify, else 0.

    No box is a wrong answer; so is one that the verifier cannot judge within its deadline (event
    `verifier_deadline`) or that kills its worker twice (event `verifier_crash`). An empty gold
    answer is an error. The pool is not owned: who made it closes it.
    """

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool

    async def score(self, completion: Completion) -> Score:
        gold = gold_answer(completion.prompt.answer)
        if not gold:
            return Score(value=0.0, error="gold_empty", detail="the data set's answer is empty")
        box = last_box(completion.text)
        answer = clean_answer(box[: _MAX_ANSWER_CHARACTERS + 1]) if box is not None else ""
        certain = _compare_simply(gold, answer)
        if certain is not None:
            return Score(value=float(certain))
        return await score_by_verifier(self._pool, "equal", gold, answer)

    async def close(self) -> None:
        return None


def _compare_simply(gold: str, answer: str) -> bool | None:
    """The verdict where it needs no algebra, None where it does."""
    if _SPACE.sub("", gold) == _SPACE.sub("", answer):
        return True
    if not answer or len(answer) > _MAX_ANSWER_CHARACTERS:
        return False
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold) == int(answer)
    return None
