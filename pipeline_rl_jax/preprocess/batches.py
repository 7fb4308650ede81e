"""Groups of rollouts become one optimizer batch.

Owns which rollouts are trained on and the account of those that are not. The arithmetic is in
`algorithms/`, the measures in `statistics.py`; when a batch is full is the schedule's to say. Host
only, numpy only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipeline_rl_jax.algorithms.advantages import compute_advantages, zero_variance
from pipeline_rl_jax.algorithms.dpo import choose_pairs
from pipeline_rl_jax.algorithms.kl import host_kl_estimates
from pipeline_rl_jax.algorithms.packing import (
    TrainingSequence,
    pack,
    with_signals,
    with_truncated,
)
from pipeline_rl_jax.preprocess.statistics import batch_statistics, rollout_statistics
from pipeline_rl_jax.preprocess.streamed_reference import streamed_reference, streamed_values
from pipeline_rl_jax.records import Group, PackedBatch, Rollout, StopReason
from pipeline_rl_jax.settings import AlgorithmSettings, Settings

ReferenceLogprobs = Callable[[PackedBatch], np.ndarray]  # [R, T] of a packed batch


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


def assemble(
    groups: Sequence[Group],
    settings: Settings,
    *,
    refused: Sequence[Group] = (),
    reference_logprobs: ReferenceLogprobs | None = None,
) -> PreprocessResult:
    """The `PackedBatch` of one optimizer step from all its groups.

    Groups may be of any size, also empty (every rollout failed); B is what is kept of them.
    Advantages are taken over the rollouts that have a usable reward and are not masked: a rollout
    without a loss is no part of a baseline either. With `zero_variance = "drop"` the groups it
    drops do not enter the batch-wide statistics. `returns` is the reward at every completion
    token. `refused` are groups turned away since the batch before; they only enter the measures.

    `reference_logprobs` gives those of a packed batch, [R, T], and is called when
    `algorithm.needs_reference`, unless all rollouts came with theirs. With `kl_in = "reward"` the
    reward of a rollout is then less `kl_coefficient` · Σ_t of the estimate of KL(behaviour ‖
    reference), its own tokens' sum, before any baseline; which rewards are equal is decided
    without it. Values that came with all rollouts go along. Raises ValueError when a rollout
    does not fit a row (see `packing.pack`).

    What only the trainer can make is left to it: with the baseline `gae` advantages, and the KL in
    the reward of each token; with the loss `dpo` the weight of a rollout, where `advantages` hold
    ± the number of its pair (from 1, + is the better one) and 0 for rollouts of no pair.
    """
    algorithm, measured = settings.algorithm, [*groups, *refused]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    all_reasons, equal = _group_reasons(measured, algorithm)
    reasons = all_reasons[: len(rollouts)]
    group_index = _group_index(groups)
    kept = np.asarray([reason is None for reason in reasons], bool)
    batch, penalties = _pack_kept(rollouts, kept, settings=settings), np.zeros(0)
    if batch is not None:
        kept_rollouts = [rollouts[index] for index in np.flatnonzero(kept)]
        carried = streamed_reference(kept_rollouts)
        batch = _with_reference(batch, carried or reference_logprobs, algorithm)
        values = streamed_values(kept_rollouts)
        batch = dataclasses.replace(batch, values=values(batch) if values else None)
        penalties = _kl_penalties(batch, algorithm)
        signals = _learning_signals(
            rollouts, group_index, kept=kept, penalties=penalties, algorithm=algorithm
        )
        batch = with_signals(batch, **signals)
        if algorithm.truncated == "bootstrap":
            batch = with_truncated(batch, _cut(rollouts)[kept])
    return PreprocessResult(
        batch=batch,
        num_kept=int(kept.sum()),
        num_dropped={reason: reasons.count(reason) for reason in DropReason},
        statistics={
            **rollout_statistics(measured, zero_variance=equal, group_size=algorithm.group_size),
            **batch_statistics(batch),
            **_drop_statistics(rollouts, reasons),
            **_penalty_statistics(penalties, algorithm),
        },
    )


def find_refusal(group: Group, algorithm: AlgorithmSettings) -> DropReason | None:
    """Why nothing can be learned from a group: no usable rollout, or rewards that are all equal."""
    reasons, equal = _group_reasons([group], algorithm)
    if equal.any():
        return DropReason.ZERO_VARIANCE
    usable = not reasons or any(reason is None for reason in reasons)
    return None if usable else reasons[0]


def learned_rewards(rollouts: Sequence[Rollout], algorithm: AlgorithmSettings) -> np.ndarray:
    """[N] float64: the reward of each rollout, or what a truncated one is given in its place."""
    penalise = algorithm.truncated == "penalise"
    return np.asarray(
        [
            algorithm.truncated_reward
            if penalise and rollout.completion.stop_reason.truncated
            else rollout.reward
            for rollout in rollouts
        ],
        np.float64,
    )


def _group_index(groups: Sequence[Group]) -> np.ndarray:
    """Which group each rollout is of, all groups laid end to end."""
    return np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])


def _group_reasons(
    groups: Sequence[Group], algorithm: AlgorithmSettings
) -> tuple[list[DropReason | None], np.ndarray]:
    """Per rollout: why it is dropped, or None; and whether its group's rewards are all equal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    group_index = _group_index(groups)
    reasons = [_own_reason(rollout, algorithm) for rollout in rollouts]
    valid = np.asarray([reason is None for reason in reasons], bool)
    rewards = learned_rewards(rollouts, algorithm)
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
    rollouts: Sequence[Rollout], kept: np.ndarray, *, settings: Settings
) -> PackedBatch | None:
    """The kept rollouts in rows, in order, their learning signals still 0."""
    sequences = [
        TrainingSequence(completion=rollout.completion, advantages=0.0, returns=0.0)
        for rollout, is_kept in zip(rollouts, kept, strict=True)
        if is_kept
    ]
    if not sequences:
        return None
    return pack(
        sequences,
        tokens_per_row=settings.trainer.tokens_per_row,
        rows_per_micro_batch=settings.trainer.rows_per_micro_batch,
    )


def _with_reference(
    batch: PackedBatch, score: ReferenceLogprobs | None, algorithm: AlgorithmSettings
) -> PackedBatch:
    if not algorithm.needs_reference:
        return batch
    if score is None:
        raise ValueError(
            "algorithm.kl_coefficient and algorithm.loss (dpo) need the logprobs of a reference "
            "policy"
        )
    return dataclasses.replace(batch, reference_logprobs=score(batch))


def _kl_penalties(batch: PackedBatch, algorithm: AlgorithmSettings) -> np.ndarray:
    """What the KL takes off the reward of each rollout of the batch, [B]."""
    num_sequences, mask = int(batch.num_sequences), np.asarray(batch.loss_mask)
    per_token = algorithm.baseline == "gae"  # the trainer takes it off, token by token
    if not algorithm.kl_coefficient or algorithm.kl_in != "reward" or per_token:
        return np.zeros(num_sequences)
    estimates = host_kl_estimates(
        np.asarray(batch.behaviour_logprobs)[mask],
        np.asarray(batch.reference_logprobs)[mask],
        estimator=algorithm.kl_estimator,
    )
    sequence_index = np.asarray(batch.sequence_index)[mask]
    sums = np.bincount(sequence_index, weights=estimates, minlength=num_sequences)
    return algorithm.kl_coefficient * sums


def _learning_signals(
    rollouts: Sequence[Rollout],
    group_index: np.ndarray,
    *,
    kept: np.ndarray,
    penalties: np.ndarray,
    algorithm: AlgorithmSettings,
) -> dict[str, np.ndarray]:
    """Advantage and return of each kept rollout, [B]; `penalties` [B] come off the rewards."""
    rewards, taken_off = learned_rewards(rollouts, algorithm), np.zeros(len(rollouts))
    if algorithm.loss == "dpo":
        numbers = _pair_numbers(rewards, group_index, kept=kept, algorithm=algorithm)
        return {"advantages": numbers[kept], "returns": rewards[kept]}
    taken_off[kept] = penalties
    advantages = compute_advantages(
        algorithm, rewards=rewards, group_index=group_index, valid=kept, penalties=taken_off
    )
    return {"advantages": advantages[kept], "returns": (rewards - taken_off)[kept]}


def _pair_numbers(
    rewards: np.ndarray, group_index: np.ndarray, *, kept: np.ndarray, algorithm: AlgorithmSettings
) -> np.ndarray:
    """[N]: +p at the better rollout of pair p = 1, 2 .., −p at the worse one, 0 at all others."""
    pairs = choose_pairs(
        rewards,
        group_index,
        valid=kept,
        max_pairs=len(rewards),
        reward_floor=algorithm.std_floor,
    )
    numbers = np.zeros(len(rewards))
    order = 1.0 + np.arange(np.count_nonzero(pairs.valid))
    numbers[pairs.winners[pairs.valid]] = order
    numbers[pairs.losers[pairs.valid]] = -order
    return numbers


def _cut(rollouts: Sequence[Rollout]) -> np.ndarray:
    """[N] bool: completions that a limit ended."""
    return np.asarray([rollout.completion.stop_reason.truncated for rollout in rollouts], bool)


def _penalty_statistics(penalties: np.ndarray, algorithm: AlgorithmSettings) -> dict[str, float]:
    if not (algorithm.kl_coefficient and algorithm.kl_in == "reward" and penalties.size):
        return {}
    return {"reward/kl_penalty_mean": float(penalties.mean())}


def _drop_statistics(
    rollouts: Sequence[Rollout], reasons: Sequence[DropReason | None]
) -> dict[str, float]:
    dropped_tokens = sum(
        rollout.completion.num_tokens
        for rollout, reason in zip(rollouts, reasons, strict=True)
        if reason is not None
    )
    statistics = {
        f"drops/{reason.value}_rollouts": float(reasons.count(reason)) for reason in DropReason
    }
    return {**statistics, "drops/completion_tokens": float(dropped_tokens)}
