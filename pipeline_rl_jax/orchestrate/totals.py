"""Figures of a run that add up from step to step, and the summary they end in.

Owns what is carried over a resume. Measures of a single step belong to `observing.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline_rl_jax.evaluation.greedy import Evaluation
from pipeline_rl_jax.generation.batcher import BatcherCounts
from pipeline_rl_jax.records import Group
from pipeline_rl_jax.telemetry.summary import RunSummary


@dataclasses.dataclass(kw_only=True)
class RunTotals:
    """Since the first step of the run, interrupted attempts included."""

    samples: int = 0  # completions trained on
    mixed_samples: int = 0  # of those, written by more than one weight version
    loss_tokens: float = 0.0
    lag_token_steps: float = 0.0  # lag summed over loss tokens
    lag_max_steps: float = 0.0
    trained_tokens: float = 0.0  # prompt and completion tokens in optimizer batches
    train_busy_seconds: float = 0.0  # in train steps
    decoded_tokens: int = 0
    generation_busy_seconds: float = 0.0  # in prefill and decode
    inflight_updates: int = 0
    train_seconds: float = 0.0  # wall time of training, evaluation and compilation included
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    reward_before: float | None = None  # of the same evaluations
    reward_after: float | None = None
    evaluation_prompts: int = 0

    @classmethod
    def restore(cls, values: Mapping[str, Any]) -> RunTotals:
        return cls(**values)

    def add_step(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Counts one optimizer step from its groups and metrics."""
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        self.samples += int(metrics.get("batch/rollouts", 0))
        self.mixed_samples += sum(c.mixes_versions for c in completions)
        tokens = metrics.get("batch/loss_tokens", 0.0)
        self.loss_tokens += tokens
        self.lag_token_steps += tokens * metrics.get("lag/mean_steps", 0.0)
        self.lag_max_steps = max(self.lag_max_steps, metrics.get("lag/max_steps", 0.0))
        self.trained_tokens += metrics.get("batch/tokens", 0.0)
        self.train_busy_seconds += metrics.get("trainer/busy_seconds", 0.0)

    def add_evaluation(self, evaluation: Evaluation, *, is_first: bool) -> None:
        """Remembers the first one of all, and the newest."""
        self.evaluation_prompts = evaluation.num_prompts
        self.accuracy_after = evaluation.accuracy
        self.reward_after = evaluation.mean_reward
        if is_first:
            self.accuracy_before = evaluation.accuracy
            self.reward_before = evaluation.mean_reward

    def add_generation(self, before: BatcherCounts, now: BatcherCounts, *, seconds: float) -> None:
        """Counts what the decode loop did between two looks at its counts, `seconds` apart."""
        self.decoded_tokens += now.decoded_tokens - before.decoded_tokens
        self.generation_busy_seconds += now.busy_seconds - before.busy_seconds
        self.inflight_updates += now.inflight_updates - before.inflight_updates
        self.train_seconds += seconds

    def summary(self, *, version: int, finished: bool) -> RunSummary:
        return RunSummary(
            accuracy_before=self.accuracy_before,
            accuracy_after=self.accuracy_after,
            reward_before=self.reward_before,
            reward_after=self.reward_after,
            evaluation_prompts=self.evaluation_prompts,
            finished=finished,
            optimizer_steps=version,
            inflight_updates=self.inflight_updates,
            mixed_version_share=_ratio(self.mixed_samples, self.samples),
            lag_mean_steps=_ratio(self.lag_token_steps, self.loss_tokens),
            lag_max_steps=self.lag_max_steps if self.loss_tokens else None,
            samples=self.samples,
            samples_per_second=_ratio(self.samples, self.train_seconds),
            decode_tokens_per_second=_ratio(self.decoded_tokens, self.generation_busy_seconds),
            train_tokens_per_second=_ratio(self.trained_tokens, self.train_busy_seconds),
            train_seconds=self.train_seconds,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
