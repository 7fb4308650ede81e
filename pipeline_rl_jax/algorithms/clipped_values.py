"""The value loss of PPO: predictions are kept near those the advantages were made of.

Owns the clipped loss and where the clip took hold; the plain loss is in `values.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.algorithms.masked import zero_masked


class ClippedValueLoss(NamedTuple):
    """Both 0 where masked; `clipped` is float32 and detached, 1 where the clip took hold."""

    loss: Float[Array, "R T"]
    clipped: Float[Array, "R T"]


def clipped_value_loss(
    values: Float[Array, "R T"],
    *,
    old_values: Float[Array, "R T"],
    returns: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    clip: float,
) -> ClippedValueLoss:
    """½·max((v − R)², (v_old + clip(v − v_old, −ε, ε) − R)²) per token, not aggregated.

    `clip` is ε in the unit of a value; `old_values` are those of the policy before the batch. Where
    the clipped error is the larger one the token has no gradient: its value has moved by ε towards
    its target. ε → ∞ gives `values.value_loss`. Source: the PPO baselines, analysed as detail 9 of
    Huang et al., "The 37 implementation details of PPO" (2022).
    """
    values, returns = zero_masked(values, mask), zero_masked(returns, mask)
    old_values = jax.lax.stop_gradient(zero_masked(old_values, mask))
    bounded = old_values + jnp.clip(values - old_values, -clip, clip)
    plain, clipped = jnp.square(values - returns), jnp.square(bounded - returns)
    took_hold = jax.lax.stop_gradient((clipped > plain).astype(jnp.float32))
    return ClippedValueLoss(loss=0.5 * jnp.maximum(plain, clipped), clipped=took_hold)
