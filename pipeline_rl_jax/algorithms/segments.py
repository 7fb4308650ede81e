"""Reductions over the rollouts inside packed rows.

Owns sums and means per segment. A rollout never crosses rows, so every reduction stays in its row:
nothing here changes with the packing, the micro-batch or the device a row lies on.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.masked import zero_masked


def segment_sums(
    values: Float[Array, "R T"], mask: Bool[Array, "R T"], *, segment_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """Σ m·x over the segment of each token, repeated at each of its tokens.

    `segment_ids` lie in 0..T; id 0 (padding) is a segment like any other.
    """
    num_segments = values.shape[1] + 1

    def sum_row(row: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, ids, num_segments=num_segments)[ids]

    return jax.vmap(sum_row)(zero_masked(values, mask), segment_ids)


def segment_means(
    values: Float[Array, "R T"], mask: Bool[Array, "R T"], *, segment_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """Σ m·x / Σ m over the segment of each token; 0 in a segment without a valid token."""
    sums = segment_sums(values, mask, segment_ids=segment_ids)
    counts = segment_sums(jnp.ones_like(values), mask, segment_ids=segment_ids)
    return sums / jnp.maximum(counts, 1.0)
