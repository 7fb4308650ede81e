"""A learned baseline: advantages from value predictions, and the loss that fits them.

Owns what is done with values per token; the head that predicts them belongs to `models/`. Entry `t`
of the values is the baseline of token `t`: it is predicted from the prompt and the tokens before
`t`, never from `t` itself. (The paper writes v(x, y_≤t), its public code takes the state before the
token, as we do: a baseline that saw the token would bias the gradient.)
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.algorithms.masked import zero_masked


def value_advantages(
    returns: Float[Array, "R T"], values: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """R − v_t with v detached, 0 where masked. Source: PipelineRL, eq. 5."""
    return zero_masked(returns, mask) - jax.lax.stop_gradient(zero_masked(values, mask))


def value_loss(
    values: Float[Array, "R T"], returns: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """½(v − R)² per token, not aggregated, 0 where masked.

    Added up with the weights of the policy loss. Sources: PipelineRL, section 2; its public code
    for the ½, the mask (tokens in the policy loss) and the weights.
    """
    return 0.5 * jnp.square(zero_masked(values, mask) - zero_masked(returns, mask))
