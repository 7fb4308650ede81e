"""What the rollouts of a batch were like, measured while they are still whole.

Owns rewards, lengths and provenance per rollout and per group, taken over everything that arrived,
before any filter: a filter must not flatter the reward curve. Measures per token of the loss are
in `algorithms/metrics.py`. A mean over nothing is left out, not reported as 0 or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline_rl_jax.records import Group, PackedBatch, Rollout, StopReason


def rollout_statistics(
    groups: Sequence[Group], *, zero_variance: np.ndarray, group_size: int
) -> dict[str, float]:
    """Metrics of the rollouts that were not cancelled; rewards of those with a finite one.

    `zero_variance` [rollouts] marks members of groups whose rewards are all equal; its share is of
    the groups that hold a rollout. `group_size` is the number of rollouts asked for.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    finished = [r for r in rollouts if r.completion.stop_reason is not StopReason.CANCELLED]
    return {
        **_reward_statistics([r for r in finished if math.isfinite(r.reward)]),
        **_completion_statistics(finished),
        **_group_statistics(groups, zero_variance=zero_variance, group_size=group_size),
    }


def batch_statistics(batch: PackedBatch | None) -> dict[str, float]:
    """Size of a packed batch; `batch/fill_share` is of its rows in use, padding rows left out."""
    if batch is None:
        return {"batch/rollouts": 0.0, "batch/rows": 0.0, "batch/tokens": 0.0}
    num_tokens = int(np.count_nonzero(batch.segment_ids))
    num_rows = int(batch.num_rows)
    return {
        "batch/rollouts": float(batch.num_sequences),
        "batch/rows": float(num_rows),
        "batch/tokens": float(num_tokens),
        "batch/fill_share": num_tokens / (num_rows * batch.token_ids.shape[1]),
    }


def _reward_statistics(scored: Sequence[Rollout]) -> dict[str, float]:
    if not scored:
        return {}
    rewards = np.asarray([rollout.reward for rollout in scored], np.float64)
    parts: dict[str, list[float]] = {}
    for rollout in scored:
        for name, value in rollout.reward_components.items():
            parts.setdefault(f"reward/{name}_mean", []).append(value)
        if task := rollout.completion.prompt.task:
            parts.setdefault(f"reward/task_{task}_mean", []).append(rollout.reward)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{name: float(np.mean(values)) for name, values in sorted(parts.items())},
    }


def _completion_statistics(finished: Sequence[Rollout]) -> dict[str, float]:
    if not finished:
        return {}
    completions = [rollout.completion for rollout in finished]
    lengths = [completion.num_tokens for completion in completions]
    return {
        "completion/mean_tokens": float(np.mean(lengths)),
        "completion/max_tokens": float(max(lengths)),
        "completion/truncated_share": float(
            np.mean([c.stop_reason.truncated for c in completions])
        ),
        "completion/mixed_version_share": float(np.mean([c.mixes_versions for c in completions])),
    }


def _group_statistics(
    groups: Sequence[Group], *, zero_variance: np.ndarray, group_size: int
) -> dict[str, float]:
    sizes = [len(group.rollouts) for group in groups]
    statistics = {
        "group/incomplete_groups": float(sum(size < group_size for size in sizes)),
        "group/empty_groups": float(sum(size == 0 for size in sizes)),
    }
    if num_filled := sum(size > 0 for size in sizes):
        of_group = np.repeat(np.arange(len(groups)), sizes)
        num_equal = len(np.unique(of_group[zero_variance]))
        statistics["group/zero_variance_share"] = num_equal / num_filled
    return statistics
