"""Greedy accuracy and reward on a fixed set of prompts, with training's engine, stop rules, grader.

Owns the loop over the evaluation set. Decoding happens in the caller's thread, scoring where the
scorer does it; the decode state is of its own and gone afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence

from pipeline_rl_jax.generation.batcher import ContinuousBatcher, VersionedParams
from pipeline_rl_jax.records import Completion, Prompt
from pipeline_rl_jax.rewards.score import ScoredCompletion
from pipeline_rl_jax.rewards.scorer import CompletionScorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one pass over the evaluation set found."""

    num_prompts: int
    # Share answered right; a completion that could not be scored counts as wrong. None where the
    # reward has no component "correctness", and nothing is right or wrong.
    accuracy: float | None
    mean_reward: float  # of those that could be scored; NaN when none could
    mean_tokens: float
    truncated_share: float

    def metrics(self) -> dict[str, float]:
        accuracy = {} if self.accuracy is None else {"evaluation/accuracy_share": self.accuracy}
        return {
            **accuracy,
            "evaluation/mean_reward": self.mean_reward,
            "evaluation/mean_tokens": self.mean_tokens,
            "evaluation/truncated_share": self.truncated_share,
        }


def complete_all(
    batcher: ContinuousBatcher, prompts: Sequence[Prompt], weights: VersionedParams
) -> list[Completion]:
    """One completion of each prompt, all with the same weights. Blocks."""
    for prompt in prompts:
        batcher.admit(prompt, 1)
    done: list[Completion] = []
    while batcher.num_live:
        done += batcher.advance(weights)
    return done


async def score_all(completions: Sequence[Completion], scorer: CompletionScorer) -> Evaluation:
    """Grades completions as training does. ValueError when there are none."""
    if not completions:
        raise ValueError("evaluation.num_prompts: there is no prompt to evaluate on")
    scores = await asyncio.gather(*(scorer.score(completion) for completion in completions))
    scored = [score for score in scores if isinstance(score, ScoredCompletion)]
    rewards = [score.reward for score in scored]
    judged = [score.correct for score in scored if score.correct is not None]
    return Evaluation(
        num_prompts=len(completions),
        accuracy=None if len(judged) < len(scored) else sum(judged) / len(completions),
        mean_reward=sum(rewards) / len(rewards) if rewards else math.nan,
        mean_tokens=sum(c.num_tokens for c in completions) / len(completions),
        truncated_share=sum(c.stop_reason.truncated for c in completions) / len(completions),
    )


class GreedyEvaluator:
    """The evaluation set and what it takes to run it.

    `make_batcher` returns a batcher with temperature 0 over the engine training uses.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        make_batcher: Callable[[], ContinuousBatcher],
        scorer: CompletionScorer,
    ) -> None:
        self._prompts = prompts
        self._make_batcher = make_batcher
        self._scorer = scorer

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def decode(self, weights: VersionedParams) -> list[Completion]:
        """The greedy completions; for the thread that owns the generation mesh."""
        return complete_all(self._make_batcher(), self._prompts, weights)

    async def grade(self, completions: Sequence[Completion]) -> Evaluation:
        return await score_all(completions, self._scorer)
