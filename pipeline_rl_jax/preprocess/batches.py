"""Groups of rollouts become one optimizer batch.

Owns which rollouts are trained on and the account of those that are not. The arithmetic is in
`algorithms/`, the measures in `statistics.py`; when a batch is full is the schedule's to say. Host
only, numpy only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline_rl_jax.algorithms.advantages import compute_advantages, zero_variance
from pipeline_rl_jax.algorithms.packing import TrainingSequence, pack
from pipeline_rl_jax.preprocess.statistics import batch_statistics, rollout_statistics
from pipeline_rl_jax.records import Group, PackedBatch, Rollout, StopReason
from pipeline_rl_jax.settings import AlgorithmSettings, Settings


class DropReason(enum.Enum):
    """Why a rollout is not trained on: the first that applies. It enters no baseline either."""

    CANCELLED = "cancelled"  # the schedule gave it up
    NON_FINITE_REWARD = "non_finite_reward"  # NaN or infinite: no score to learn from
    TRUNCATED = "truncated"  # cut by a limit, with algorithm.truncated = "mask"
    ZERO_VARIANCE = (
        "zero_variance"  # a group of equal rewards, with algorithm.zero_variance = "drop"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreprocessResult:
    """A batch and the account of what went into it."""

    batch: PackedBatch | None  # numpy arrays; None when no rollout is left to train on
    num_kept: int  # rollouts in the batch, its `num_sequences`
    num_dropped: Mapping[DropReason, int]  # rollouts, every reason present
    statistics: Mapping[str, float]  # metrics by name, drops included


def assemble(groups: Sequence[Group], settings: Settings) -> PreprocessResult:
    """The `PackedBatch` of one optimizer step from all its groups.

    Groups may be of any size, also empty (every rollout failed); B is what is kept of them.
    Advantages are taken over the rollouts that have a usable reward and are not masked: a rollout
    without a loss is no part of a baseline either. With `zero_variance = "drop"` the groups it
    drops do not enter the batch-wide statistics. `returns` is the reward at every completion
    token. Raises ValueError when a rollout does not fit a row (see `packing.pack`).
    """
    algorithm = settings.algorithm
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = [len(group.rollouts) for group in groups]
    group_index = np.repeat(np.arange(len(groups)), sizes)
    rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
    reasons, equal = _drop_reasons(rollouts, group_index, algorithm=algorithm)
    kept = np.asarray([reason is None for reason in reasons], bool)
    advantages = compute_advantages(algorithm, rewards=rewards, group_index=group_index, valid=kept)
    batch = _pack_kept(rollouts, advantages, kept=kept, settings=settings)
    num_dropped = {reason: reasons.count(reason) for reason in DropReason}
    statistics = {
        **rollout_statistics(groups, zero_variance=equal, group_size=algorithm.group_size),
        **batch_statistics(batch),
        **_drop_statistics(rollouts, kept=kept, num_dropped=num_dropped),
    }
    return PreprocessResult(
        batch=batch, num_kept=int(kept.sum()), num_dropped=num_dropped, statistics=statistics
    )


def _drop_reasons(
    rollouts: Sequence[Rollout], group_index: np.ndarray, *, algorithm: AlgorithmSettings
) -> tuple[list[DropReason | None], np.ndarray]:
    """Per rollout: why it is dropped, or None; and whether its group's rewards are all equal."""
    reasons = [_own_reason(rollout, algorithm) for rollout in rollouts]
    valid = np.asarray([reason is None for reason in reasons], bool)
    rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
    equal = valid & zero_variance(rewards, group_index, valid=valid, std_floor=algorithm.std_floor)
    if algorithm.zero_variance == "drop":
        reasons = [
            DropReason.ZERO_VARIANCE if is_equal else reason
            for reason, is_equal in zip(reasons, equal, strict=True)
        ]
    return reasons, equal


def _own_reason(rollout: Rollout, algorithm: AlgorithmSettings) -> DropReason | None:
    """What is wrong with a rollout regardless of its group."""
    stop_reason = rollout.completion.stop_reason
    if stop_reason is StopReason.CANCELLED:
        return DropReason.CANCELLED
    if not np.isfinite(rollout.reward):
        return DropReason.NON_FINITE_REWARD
    if stop_reason.truncated and algorithm.truncated == "mask":
        return DropReason.TRUNCATED
    return None


def _pack_kept(
    rollouts: Sequence[Rollout], advantages: np.ndarray, *, kept: np.ndarray, settings: Settings
) -> PackedBatch | None:
    sequences = [
        TrainingSequence(
            completion=rollout.completion, advantages=float(advantage), returns=rollout.reward
        )
        for rollout, advantage, is_kept in zip(rollouts, advantages, kept, strict=True)
        if is_kept
    ]
    if not sequences:
        return None
    return pack(
        sequences,
        tokens_per_row=settings.trainer.tokens_per_row,
        rows_per_micro_batch=settings.trainer.rows_per_micro_batch,
    )


def _drop_statistics(
    rollouts: Sequence[Rollout], *, kept: np.ndarray, num_dropped: Mapping[DropReason, int]
) -> dict[str, float]:
    dropped_tokens = sum(
        rollout.completion.num_tokens
        for rollout, is_kept in zip(rollouts, kept, strict=True)
        if not is_kept
    )
    statistics = {
        f"drops/{reason.value}_rollouts": float(count) for reason, count in num_dropped.items()
    }
    return {**statistics, "drops/completion_tokens": float(dropped_tokens)}
