"""The Bradley–Terry model of preferences: how reward models are fitted to pairs.

Owns loss and accuracy as functions of scores. Where scores come from is `models/reward_model.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.algorithms.masked import masked_mean, zero_masked


def bradley_terry_loss(
    chosen: Float[Array, " P"], rejected: Float[Array, " P"], *, valid: Bool[Array, " P"]
) -> Float[Array, ""]:
    """Mean over valid pairs of −log σ(r_chosen − r_rejected), in nats; 0 without any.

    log 2 for scores that tell nothing apart. Source: Bradley and Terry 1952; Ouyang et al.,
    arXiv 2203.02155, eq. 1.
    """
    margins = zero_masked(chosen - rejected, valid)
    return masked_mean(jax.nn.softplus(-margins), valid)


def num_right(
    chosen: Float[Array, " P"], rejected: Float[Array, " P"], *, valid: Bool[Array, " P"]
) -> Float[Array, ""]:
    """How many valid pairs have the chosen text above the other; a tie is half a pair."""
    right = (jnp.sign(zero_masked(chosen - rejected, valid)) + 1) / 2
    return jnp.sum(zero_masked(right, valid))
