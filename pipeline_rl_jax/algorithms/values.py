"""A learned baseline: advantages from value predictions, and the loss that fits them.

Owns what is done with values per token; the head that predicts them belongs to `models/`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.algorithms.masked import zero_masked


def value_advantages(
    returns: Float[Array, "R T"], values: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """R − v(x, y_≤t) with v detached, 0 where masked. Source: PipelineRL, eq. 5."""
    return zero_masked(returns, mask) - jax.lax.stop_gradient(zero_masked(values, mask))


def value_loss(
    values: Float[Array, "R T"], returns: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """(v − R)² per token, not aggregated, 0 where masked. Source: PipelineRL, section 2."""
    return jnp.square(zero_masked(values, mask) - zero_masked(returns, mask))
