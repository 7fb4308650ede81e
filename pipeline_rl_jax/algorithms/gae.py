"""Generalised advantage estimation over the trainable tokens of packed rows.

Owns advantages and value targets from rewards and values per token. Rewards are made in
`kl_control.py` or given; whitening is `masked.masked_whiten`, over the whole batch and never over a
part of it; values come from the policy that is about to be trained, once per batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.algorithms.successors import find_successors


class Discounts(NamedTuple):
    """γ discounts rewards, λ weighs long returns against the values; both within 0..1."""

    gamma: float
    lam: float


class ValueTokens(NamedTuple):
    """What estimation is a function of. Entry t is about token t, before it is sampled."""

    rewards: Float[Array, "R T"]  # earned by token t
    values: Float[Array, "R T"]  # V_t, predicted from what stands before t
    mask: Bool[Array, "R T"]  # trainable tokens
    segment_ids: Int[Array, "R T"]


class Estimates(NamedTuple):
    """Both float32, detached, 0 where masked."""

    advantages: Float[Array, "R T"]  # not whitened
    returns: Float[Array, "R T"]  # target of the value head


def estimate_advantages(
    tokens: ValueTokens,
    discounts: Discounts,
    *,
    bootstrap: Float[Array, "R T"] | None = None,
) -> Estimates:
    """GAE(γ, λ), where t⁺ is the next trainable token of the segment of t.

        δ_t = r_t + γ·V_{t⁺} − V_t        A_t = δ_t + γλ·A_{t⁺}        returns_t = A_t + V_t

    A masked token within a completion is passed over: neither its reward nor its value is seen. At
    the last trainable token of a segment A_{t⁺} is 0 and V_{t⁺} is `bootstrap` at that token: the
    value after it, for completions that were cut, and 0 for those that ended. None: all ended.
    Padding and other segments never enter. λ = 1, γ = 1: reward to go minus value.
    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    mask = tokens.mask
    rewards, values = zero_masked(tokens.rewards, mask), zero_masked(tokens.values, mask)
    successors = find_successors(mask, tokens.segment_ids)
    beyond = jnp.zeros_like(values) if bootstrap is None else zero_masked(bootstrap, mask)
    next_values = jnp.where(
        successors.exists, jnp.take_along_axis(values, successors.column, axis=1), beyond
    )
    deltas = zero_masked(rewards + discounts.gamma * next_values - values, mask)
    # A masked token hands on what it was handed; a last token begins anew.
    decay = jnp.where(mask, discounts.gamma * discounts.lam * successors.exists, 1.0)
    advantages = zero_masked(_accumulate_backwards(deltas, decay), mask)
    return jax.lax.stop_gradient(Estimates(advantages=advantages, returns=advantages + values))


def _accumulate_backwards(
    terms: Float[Array, "R T"], decay: Float[Array, "R T"]
) -> Float[Array, "R T"]:
    """x_t = terms_t + decay_t · x_{t+1}, in a number of steps that grows with log T."""

    def join(later: tuple, earlier: tuple) -> tuple:
        later_decay, later_sum = later
        decay, total = earlier
        return decay * later_decay, total + decay * later_sum

    _, sums = jax.lax.associative_scan(join, (decay, terms), reverse=True, axis=1)
    return sums
