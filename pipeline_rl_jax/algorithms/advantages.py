"""Advantages of whole rollouts from their rewards, on the host.

Owns baselines over a group or a batch and the normalisations. Works on flat arrays of N rollouts
with `group_index` naming the group of each, so groups may differ in size; sums are float64. A
rollout that is not `valid` (no usable reward, or kept out of the loss) enters no statistic and has
advantage 0.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from pipeline_rl_jax.settings import AlgorithmSettings


def compute_advantages(
    settings: AlgorithmSettings,
    *,
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"],
    penalties: Float[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, " N"]:
    """A = R − baseline, float32, 0 where not valid; by setting over the standard deviation.

    R is `rewards` − `penalties` (of a KL in the reward), the baseline is made of R too.
    `normalise_std` divides by the group's population standard deviation of `rewards` (GRPO): where
    these are equal, what is left is the penalty alone, and must not be scaled up to their size.
    `batch_normalise` then whitens over the batch's rollouts (REINFORCE++, arXiv 2501.03262). A
    spread not above `std_floor` gives 0 instead of a quotient: rewards that differ by rounding only
    carry no signal. With a learned baseline (`value`, `gae`) A is R: values are taken off by the
    trainer.
    """
    rewards = np.where(valid, rewards, 0.0)  # float64, and no NaN from here on
    penalised = rewards if penalties is None else np.where(valid, rewards - penalties, 0.0)
    advantages = penalised - _baseline(settings.baseline, penalised, group_index, valid=valid)
    if settings.normalise_std:
        spread = group_std(rewards, group_index, valid=valid)
        advantages = _divide(advantages, spread, floor=settings.std_floor)
    if settings.batch_normalise:
        everyone = np.zeros_like(group_index)
        centred = advantages - group_mean(advantages, everyone, valid=valid)
        spread = group_std(advantages, everyone, valid=valid)
        advantages = _divide(centred, spread, floor=settings.std_floor)
    return np.where(valid, advantages, 0.0).astype(np.float32)


def group_mean(
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    *,
    valid: Bool[np.ndarray, " N"],
) -> Float[np.ndarray, " N"]:
    """Mean reward of the valid members of each rollout's group, 0 without one.

    The group mean holds the rollout itself: in a group of one the advantage is 0. Source: GRPO,
    arXiv 2402.03300; without the division by the standard deviation, Dr. GRPO.
    """
    sums, counts = _group_sums(rewards, group_index, valid=valid)
    return sums / np.maximum(counts, 1)


def leave_one_out(
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    *,
    valid: Bool[np.ndarray, " N"],
) -> Float[np.ndarray, " N"]:
    """Mean reward of the OTHER valid members of each rollout's group (RLOO, arXiv 2402.14740).

    (Σ_j R_j − R_i) / (n − 1). A valid rollout alone in its group has no others to be compared
    with: its baseline is its own reward, so its advantage is 0.
    """
    sums, counts = _group_sums(rewards, group_index, valid=valid)
    own = np.where(valid, rewards, 0.0)
    others = counts - valid
    return np.where(others > 0, (sums - own) / np.maximum(others, 1), own)


def group_std(
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    *,
    valid: Bool[np.ndarray, " N"],
) -> Float[np.ndarray, " N"]:
    """Population standard deviation over the valid members of each rollout's group."""
    mean = group_mean(rewards, group_index, valid=valid)
    deviations = np.square(np.where(valid, rewards, mean) - mean)
    return np.sqrt(group_mean(deviations, group_index, valid=valid))


def zero_variance(
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    *,
    valid: Bool[np.ndarray, " N"],
    std_floor: float,
) -> Bool[np.ndarray, " N"]:
    """True at members of groups with two or more valid members whose rewards are all equal.

    Equal means a standard deviation not above `std_floor`. A group of one has no variance to speak
    of and is never marked.
    """
    _, counts = _group_sums(rewards, group_index, valid=valid)
    return (counts > 1) & (group_std(rewards, group_index, valid=valid) <= std_floor)


def _baseline(
    kind: str, rewards: np.ndarray, group_index: np.ndarray, *, valid: np.ndarray
) -> np.ndarray:
    match kind:
        case "group_mean":
            return group_mean(rewards, group_index, valid=valid)
        case "leave_one_out":
            return leave_one_out(rewards, group_index, valid=valid)
        case "batch_mean":
            return group_mean(rewards, np.zeros_like(group_index), valid=valid)
        case _:  # none; value and gae, which the trainer takes off
            return np.zeros_like(rewards)


def _group_sums(
    values: np.ndarray, group_index: np.ndarray, *, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per rollout: sum over, and number of, the valid members of its group."""
    sums = np.bincount(group_index, weights=np.where(valid, values, 0.0))
    counts = np.bincount(group_index, weights=valid)
    return sums[group_index], counts[group_index]


def _divide(numerator: np.ndarray, spread: np.ndarray, *, floor: float) -> np.ndarray:
    above = spread > floor
    return np.where(above, numerator / np.where(above, spread, 1.0), 0.0)
