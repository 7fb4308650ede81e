"""The reward of a completion: a weighted sum of components, or the reason why there is none.

Owns which components a run has, their weights and what is counted. The components are in modules of
their own; training and evaluation share one scorer, so they cannot disagree.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import importlib.util
import logging
import threading
from collections.abc import Mapping

from pipeline_rl_jax.records import Completion
from pipeline_rl_jax.rewards.boxed import BoxedAnswer
from pipeline_rl_jax.rewards.code_tests import CodeLimits, CodeTests
from pipeline_rl_jax.rewards.exact_number import ExactNumber
from pipeline_rl_jax.rewards.format_reward import FormatReward, check_format_pattern
from pipeline_rl_jax.rewards.overlong import Overlong
from pipeline_rl_jax.rewards.score import Score, ScoredCompletion, Scorer, ScoringFailure
from pipeline_rl_jax.rewards.user_function import (
    RewardFunction,
    UserFunction,
    load_user_function,
)
from pipeline_rl_jax.rewards.verifier_pool import Kind, VerifierPool
from pipeline_rl_jax.settings import GenerationSettings, RewardSettings

__all__ = [
    "CompletionScorer",
    "Score",
    "ScoredCompletion",
    "Scorer",
    "ScoringFailure",
    "WeightedScorer",
    "build_scorer",
]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WeightedScorer:
    """One component and its weight in the sum."""

    scorer: Scorer
    weight: float


class CompletionScorer:
    """reward = sum of weight * component; a ScoringFailure when any component has no score.

    Without a component "correctness" nothing is right or wrong, only better or worse. Usable from
    several threads and event loops at once.
    """

    def __init__(
        self, components: Mapping[str, WeightedScorer], *, pool: VerifierPool | None = None
    ) -> None:
        self._components = dict(components)
        self._pool = pool  # owned: closed with the scorer
        self._lock = threading.Lock()
        self._counters: collections.Counter[str] = collections.Counter(
            {"scored": 0, "verifier_deadline": 0, "verifier_crash": 0}
        )

    @property
    def counters(self) -> dict[str, int]:
        """`scored`, `verifier_deadline`, `verifier_crash`, and `failed_<reason>` once seen."""
        with self._lock:
            return dict(self._counters)

    def add(self, name: str, component: WeightedScorer) -> None:
        """One more component, before the first score: that of a model read after all checks."""
        self._components[name] = component

    async def score(
        self, completion: Completion, *, known: Mapping[str, Score] | None = None
    ) -> ScoredCompletion | ScoringFailure:
        """The reward; components that are `known` already are not asked again."""
        by_name = dict(known or {})
        asked = [name for name in self._components if name not in by_name]
        scores = await asyncio.gather(
            *(self._components[name].scorer.score(completion) for name in asked)
        )
        by_name |= dict(zip(asked, scores, strict=True))
        scores = [by_name[name] for name in self._components]
        self._count(*(score.event for score in scores if score.event))
        failed = next((score for score in scores if score.error), None)
        if failed is not None:
            return self._failure(failed)
        self._count("scored")
        values = {name: by_name[name].value for name in self._components}
        reward = sum(self._components[name].weight * value for name, value in values.items())
        return ScoredCompletion(reward=reward, components=values, correct=values.get("correctness"))

    async def close(self) -> None:
        """Ends worker processes and threads. Safe to call twice."""
        for component in self._components.values():
            await component.scorer.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    def _failure(self, score: Score) -> ScoringFailure:
        name = f"failed_{score.error}"
        if name not in self.counters:
            _logger.warning(
                "no score (%s): %s; from now on only counted", score.error, score.detail
            )
        self._count(name)
        return ScoringFailure(reason=score.error, detail=score.detail)

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counters.update(names)


def build_scorer(settings: RewardSettings, generation: GenerationSettings) -> CompletionScorer:
    """The scorer of a run; starts the verifier's processes where they are needed.

    Components: "correctness" unless it is none, "format" with a pattern, "overlong" with a buffer;
    "reward_model" is added once its weights are there. Raises ValueError, before anything is
    started, for a pattern, function or package of no use.
    """
    kinds: set[Kind] = set()
    if settings.format_pattern:
        check_format_pattern(settings.format_pattern)
        kinds.add("search")
    if settings.correctness == "boxed":
        _check_math_verify()
        kinds.add("equal")
    function = (
        load_user_function(settings.user_function) if settings.correctness == "user" else None
    )
    pool = None
    if kinds:
        pool = VerifierPool(
            num_workers=settings.num_workers,
            deadline_seconds=settings.deadline_seconds,
            kinds=kinds,
        )
    components = {}
    if settings.correctness != "none":
        correctness = _build_correctness(settings, function, pool)
        components["correctness"] = WeightedScorer(correctness, settings.correctness_weight)
    if pool is not None and settings.format_pattern:
        scorer = FormatReward(settings.format_pattern, pool)
        components["format"] = WeightedScorer(scorer, settings.format_weight)
    if settings.overlong_buffer_tokens:
        scorer = Overlong(
            max_new_tokens=generation.max_new_tokens,
            buffer_tokens=settings.overlong_buffer_tokens,
        )
        components["overlong"] = WeightedScorer(scorer, settings.overlong_weight)
    return CompletionScorer(components, pool=pool)


def _build_correctness(
    settings: RewardSettings, function: RewardFunction | None, pool: VerifierPool | None
) -> Scorer:
    if function is not None:
        return UserFunction(function, deadline_seconds=settings.deadline_seconds)
    if settings.correctness == "boxed" and pool is not None:
        return BoxedAnswer(pool)
    if settings.correctness == "code":
        return _build_code_tests(settings)
    return ExactNumber()


def _build_code_tests(settings: RewardSettings) -> CodeTests:
    limits = CodeLimits(
        wall_seconds=settings.deadline_seconds, memory_bytes=settings.code_memory_bytes
    )
    try:
        return CodeTests(score=settings.code_score, num_workers=settings.num_workers, limits=limits)
    except RuntimeError as error:
        raise ValueError(f"rewards.correctness (code) cannot be used here: {error}") from error


def _check_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "rewards.correctness (boxed) needs the package math-verify, which is not installed; "
            'run "pip install math-verify", or use exact_number'
        )
