"""Statistics over the valid entries of an array.

Owns sum, mean, variance and whitening under a mask. All are defined for zero and for one valid
entry, and what stands at a masked position (NaN and infinity included) reaches neither the value
nor the gradient: it is replaced before the arithmetic, never multiplied by zero afterwards.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def zero_masked(values: Float[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, "*N"]:
    """`values` in float32 with 0 at masked positions; their gradient there is 0 too."""
    return jnp.where(mask, values, 0.0).astype(jnp.float32)


def masked_sum(values: Float[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """Σ m·x, 0 when nothing is valid."""
    return jnp.sum(zero_masked(values, mask))


def masked_mean(values: Float[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """Σ m·x / Σ m, 0 when nothing is valid."""
    return masked_sum(values, mask) / jnp.maximum(jnp.sum(mask), 1)


def masked_variance(values: Float[Array, "*N"], mask: Bool[Array, "*N"]) -> Float[Array, ""]:
    """Population variance Σ m·(x − x̄)² / Σ m; 0 for zero and for one valid entry."""
    centred = zero_masked(values, mask) - masked_mean(values, mask)
    return masked_mean(jnp.square(centred), mask)


def masked_whiten(
    values: Float[Array, "*N"], mask: Bool[Array, "*N"], *, std_floor: float
) -> Float[Array, "*N"]:
    """(x − x̄) / std over the valid entries, 0 elsewhere.

    All zero when the standard deviation is not above `std_floor` (same unit as `values`): entries
    that differ by rounding only carry no signal, and dividing by their spread would make one up.
    The statistics are constants to the gradient.
    """
    mean = jax.lax.stop_gradient(masked_mean(values, mask))
    variance = jax.lax.stop_gradient(masked_variance(values, mask))
    spread_out = variance > std_floor**2
    # The square root sees 1 instead of 0 where its result is not used.
    scale = jnp.where(spread_out, jax.lax.rsqrt(jnp.where(spread_out, variance, 1.0)), 0.0)
    return zero_masked((zero_masked(values, mask) - mean) * scale, mask)
