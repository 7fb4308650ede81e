"""Importance ratios between the policy in training and the one that sampled, and their quality.

Owns ratios per token and per sequence, the ways to bound them, and the effective sample size.
Does not own a loss: which ratio a loss uses is its own matter.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.algorithms.segments import segment_means

# e^20 ≈ 4.9e8: far outside every trust region, yet sums of its square stay finite in float32.
MAX_LOG_RATIO = 20.0


def log_ratios(
    current_logprobs: Float[Array, "R T"],
    behaviour_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
    """log π(y_t|·) − log μ(y_t|·) in nats, 0 at masked positions."""
    return zero_masked(current_logprobs, mask) - zero_masked(behaviour_logprobs, mask)


def importance_ratios(
    current_logprobs: Float[Array, "R T"],
    behaviour_logprobs: Float[Array, "R T"],
    mask: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
    """π(y_t|·) / μ(y_t|·) per token, 0 at masked positions.

    Differentiable in `current_logprobs`. The log ratio is bounded to ±MAX_LOG_RATIO,
    beyond which the ratio is constant.
    """
    logs = log_ratios(current_logprobs, behaviour_logprobs, mask)
    return zero_masked(jnp.exp(jnp.clip(logs, -MAX_LOG_RATIO, MAX_LOG_RATIO)), mask)


def sequence_ratios(
    current_logprobs: Float[Array, "R T"],
    behaviour_logprobs: Float[Array, "R T"],
    *,
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """Length-normalised ratio of the whole completion at each of its tokens, 0 where masked.

    s = (π(y|x) / μ(y|x))^(1/|y|) = exp(mean_t log ratio_t), the geometric mean of token ratios.
    Value s, gradient s·∇log π(y_t|·): the form sg[s]·π_t/sg[π_t] (GSPO-token), which has the
    gradient of s when advantage and token weight are equal within a completion, and also allows
    advantages that are not. Source: GSPO, arXiv 2507.18071, sections 4.1 and 4.3.
    """
    logs = log_ratios(current_logprobs, behaviour_logprobs, mask)
    means = segment_means(logs, mask, segment_ids=segment_ids)
    ratios = jnp.exp(jnp.clip(means, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    current = zero_masked(current_logprobs, mask)
    unit = jnp.exp(current - jax.lax.stop_gradient(current))  # 1, with the gradient of log π
    return zero_masked(jax.lax.stop_gradient(ratios) * unit, mask)


def within_range(
    ratios: Float[Array, "R T"], *, lowest: float, highest: float
) -> Bool[Array, "R T"]:
    """True where lowest ≤ ratio ≤ highest: the tokens on which the two policies agree enough."""
    return (ratios >= lowest) & (ratios <= highest)


def truncated_weights(ratios: Float[Array, "R T"], ceiling: float) -> Float[Array, "R T"]:
    """min(c, ratio), detached: bounded from above only. Source: IMPALA; PipelineRL, eq. 5."""
    return jax.lax.stop_gradient(jnp.minimum(ratios, ceiling))


def masked_weights(
    ratios: Float[Array, "R T"], *, lowest: float, highest: float
) -> Float[Array, "R T"]:
    """The ratio where lowest ≤ ratio ≤ highest, else 0, detached.

    A token the two policies disagree on too much is left out instead of bounded.
    """
    ratios = jax.lax.stop_gradient(ratios)
    return jnp.where(within_range(ratios, lowest=lowest, highest=highest), ratios, 0.0)


def effective_sample_share(
    weight_sum: Float[Array, ""], weight_square_sum: Float[Array, ""], count: Float[Array, ""]
) -> Float[Array, ""]:
    """ESS / N = (Σ w)² / (N Σ w²) in [0, 1], from sums so that parts of a batch can be added.

    1 when all weights are equal, 1/N when one token holds all the weight, 0 for no token at all.
    Source: PipelineRL, section 5 (its public code takes clamped weights; we report both).
    """
    denominator = count * weight_square_sum
    safe = jnp.where(denominator > 0, denominator, 1.0)
    share = jnp.where(denominator > 0, jnp.square(weight_sum) / safe, 0.0)
    return jnp.minimum(share, 1.0)  # rounding may go beyond
