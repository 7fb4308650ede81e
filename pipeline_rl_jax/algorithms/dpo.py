"""Online DPO: the best and the worst rollout of a group as a pair, and the implicit reward loss.

Owns the choice of pairs (on the host), the log ratios of whole rollouts out of packed rows, the
loss and its form as advantages. How the pairs were sampled is no matter of this module.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.masked import masked_mean, zero_masked


class Pairs(NamedTuple):
    """One pair at most per group, as rollout numbers in the batch (`sequence_index`).

    Arrays have room for `max_pairs`, so that shapes do not change from batch to batch.
    """

    winners: Int[np.ndarray, " P"]
    losers: Int[np.ndarray, " P"]
    valid: Bool[np.ndarray, " P"]
    num_ties: int  # groups whose valid members are all equal
    num_single: int  # groups with fewer than two valid members


class DpoLoss(NamedTuple):
    """Per pair, 0 where not valid."""

    loss: Float[Array, " P"]
    margins: Float[Array, " P"]  # implicit reward of the winner minus that of the loser


def choose_pairs(
    rewards: Float[np.ndarray, " N"],
    group_index: Int[np.ndarray, " N"],
    *,
    valid: Bool[np.ndarray, " N"],
    max_pairs: int,
    reward_floor: float = 0.0,
) -> Pairs:
    """Best against worst valid member of each group; of equals the first.

    A group whose best and worst differ by no more than `reward_floor` is a tie and gives no pair.
    Raises ValueError when there are more groups with a pair than `max_pairs`.
    Source: Guo et al., arXiv 2402.04792 (pairs sampled on policy), best and worst as in
    Dong et al., arXiv 2405.07863.
    """
    found: list[tuple[int, int]] = []
    num_ties = num_single = 0
    for group in np.unique(group_index):
        members = np.flatnonzero((group_index == group) & valid)
        if members.size < 2:
            num_single += 1
            continue
        best = members[np.argmax(rewards[members])]
        worst = members[np.argmin(rewards[members])]
        if rewards[best] - rewards[worst] <= reward_floor:
            num_ties += 1
        else:
            found.append((int(best), int(worst)))
    if len(found) > max_pairs:
        raise ValueError(f"max_pairs ({max_pairs}) must hold all pairs of the batch ({len(found)})")
    winners, losers = np.zeros((2, max_pairs), np.int32)
    for row, pair in enumerate(found):
        winners[row], losers[row] = pair
    return Pairs(winners, losers, np.arange(max_pairs) < len(found), num_ties, num_single)


def sequence_log_ratios(
    logprobs: Float[Array, "R T"],
    reference_logprobs: Float[Array, "R T"],
    *,
    mask: Bool[Array, "R T"],
    sequence_index: Int[Array, "R T"],
    num_sequences: int,
) -> Float[Array, " N"]:
    """log π(y|x) − log π_ref(y|x) in nats for rollouts 0..N−1, N = `num_sequences` (static).

    Sums over the tokens in `mask`, wherever in the rows they stand; 0 for a rollout without any.
    Differentiable in `logprobs`; the reference is a constant.
    """
    reference = jax.lax.stop_gradient(zero_masked(reference_logprobs, mask))
    differences = zero_masked(logprobs, mask) - reference
    buckets = jnp.where(mask, sequence_index, num_sequences).ravel()
    sums = jax.ops.segment_sum(differences.ravel(), buckets, num_segments=num_sequences + 1)
    return sums[:num_sequences]


def dpo_loss(
    log_ratios: Float[Array, " N"],
    *,
    winners: Int[Array | np.ndarray, " P"],
    losers: Int[Array | np.ndarray, " P"],
    valid: Bool[Array | np.ndarray, " P"],
    beta: float,
) -> DpoLoss:
    """−log σ(m), m = β·(h_w − h_l), h the log ratios of whole rollouts; not aggregated.

    The mean over valid pairs of the whole batch is the objective; with no pair it is 0. log 2 at
    the reference itself. Source: Rafailov et al., arXiv 2305.18290, eq. 7.
    """
    margins = zero_masked(beta * (log_ratios[winners] - log_ratios[losers]), jnp.asarray(valid))
    return DpoLoss(loss=zero_masked(jax.nn.softplus(-margins), jnp.asarray(valid)), margins=margins)


def dpo_advantages(
    log_ratios: Float[Array, " N"],
    *,
    winners: Int[Array | np.ndarray, " P"],
    losers: Int[Array | np.ndarray, " P"],
    valid: Bool[Array | np.ndarray, " P"],
    beta: float,
) -> Float[Array, " N"]:
    """A_i with ∇ mean loss = −Σ_i A_i · ∇ log π(y_i|x_i), detached.

    A winner has β·σ(−m) / pairs, a loser the negative, everybody else 0. Taken once over the whole
    batch it lets a pair be split over micro-batches: −Σ_t A·log π(y_t) has the gradient of the
    loss at the weights that `log_ratios` are of.
    """

    def mean_loss(ratios: Float[Array, " N"]) -> Float[Array, ""]:
        pairs = dpo_loss(ratios, winners=winners, losers=losers, valid=valid, beta=beta)
        return masked_mean(pairs.loss, jnp.asarray(valid))

    return -jax.lax.stop_gradient(jax.grad(mean_loss)(log_ratios))


def dpo_metrics(
    pairs: DpoLoss, valid: Bool[Array | np.ndarray, " P"]
) -> dict[str, Float[Array, ""]]:
    """Means over valid pairs. Accuracy: the winner's implicit reward is the larger one."""
    mask = jnp.asarray(valid)
    right = (pairs.margins > 0).astype(jnp.float32)
    return {
        "dpo/loss_nats": masked_mean(pairs.loss, mask),
        "dpo/margin_nats": masked_mean(pairs.margins, mask),
        "dpo/accuracy_share": masked_mean(right, mask),
        "dpo/pairs": jnp.sum(mask).astype(jnp.float32),
    }
