"""Estimators of a Kullback-Leibler divergence from the sampled tokens alone.

Owns k1, k2 and k3, on the device with gradient and on the host without. The logprobs of the policy
in training carry the gradient whichever side they stand on; nothing is clamped flat, so the pull
never vanishes.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pipeline_rl_jax.algorithms.masked import zero_masked

Estimator = Literal["k1", "k2", "k3"]

# Beyond this exponent k3 follows its tangent: finite in float32, and the gradient stays.
_MAX_EXPONENT = 20.0


def kl_estimates(
    logprobs: Float[Array, "R T"],
    other_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
    *,
    estimator: Estimator,
) -> Float[Array, "R T"]:
    """Per-token estimates of KL(p ‖ q) in nats, 0 where masked; tokens sampled from p.

    With d = log q − log p (p: `logprobs`, q: `other_logprobs`):
    k1 = −d, unbiased, of either sign; as a loss its expected gradient is zero, so use it in the
    reward or as a measure. k2 = d²/2, biased, its gradient is that of the divergence on policy.
    k3 = e^d − d − 1 ≥ 0, unbiased; linear beyond d = 20 instead of clamped.
    Source: Schulman, "Approximating KL divergence" (2020).
    """
    difference = zero_masked(other_logprobs, mask) - zero_masked(logprobs, mask)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    return _exponential(difference) - difference - 1.0


def host_kl_estimates(
    logprobs: Float[np.ndarray, "*N"],
    other_logprobs: Float[np.ndarray, "*N"],
    *,
    estimator: Estimator,
) -> Float[np.ndarray, "*N"]:
    """The same numbers as `kl_estimates` without mask, in float64 on the host."""
    difference = np.asarray(other_logprobs, np.float64) - np.asarray(logprobs, np.float64)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * np.square(difference)
    bounded = np.minimum(difference, _MAX_EXPONENT)
    return np.exp(bounded) * (1.0 + difference - bounded) - difference - 1.0


def _exponential(exponent: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """e^x up to _MAX_EXPONENT, its tangent there beyond."""
    bounded = jnp.minimum(exponent, _MAX_EXPONENT)
    excess = jnp.maximum(exponent - _MAX_EXPONENT, 0.0)
    return jnp.exp(bounded) + jnp.exp(_MAX_EXPONENT) * excess
