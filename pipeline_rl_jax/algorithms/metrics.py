"""Measures of on-policyness, taken over the tokens that are trained on.

Owns the sums that micro-batches add up and the metrics made of them once per optimizer batch, so
that every metric is token-weighted over the whole batch, whatever its packing or split. Rewards
and lengths are measured where rollouts are still whole, in `preprocess/`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pipeline_rl_jax.algorithms.importance import MAX_LOG_RATIO, effective_sample_share
from pipeline_rl_jax.algorithms.kl import kl_estimates
from pipeline_rl_jax.algorithms.masked import masked_sum, zero_masked
from pipeline_rl_jax.algorithms.values import value_loss
from pipeline_rl_jax.records import PackedBatch


class ValueSums(NamedTuple):
    """What explained variance is made of."""

    loss: jax.Array
    returns: jax.Array
    return_squares: jax.Array
    errors: jax.Array  # R − v
    error_squares: jax.Array
    clipped: jax.Array  # values at which algorithm.value_clip took hold


class TokenSums(NamedTuple):
    """Float32 scalars; `*_max` combine by maximum, all others by addition."""

    tokens: jax.Array
    ratio: jax.Array  # raw importance ratio
    ratio_square: jax.Array
    ratio_max: jax.Array
    weight: jax.Array  # the bounded ratio in the loss
    weight_square: jax.Array
    clipped: jax.Array  # tokens at which a bound took hold
    positive: jax.Array  # tokens with advantage > 0
    positive_clipped: jax.Array
    negative: jax.Array  # tokens with advantage < 0
    negative_clipped: jax.Array
    lag: jax.Array  # optimizer steps
    lag_max: jax.Array
    lag_zero: jax.Array  # tokens sampled by the very weights in training
    gap_at_lag_zero: jax.Array  # |log π − log μ| summed over those tokens
    kl_k1: jax.Array  # estimates of KL(behaviour ‖ current)
    kl_k3: jax.Array
    surprisal: jax.Array  # −log π
    entropy: jax.Array | None = None  # exact entropies, where the model was asked for them
    reference_k1: jax.Array | None = None  # estimates of KL(current ‖ reference)
    reference_k3: jax.Array | None = None
    values: ValueSums | None = None


def empty_sums(
    *, with_entropy: bool = False, with_reference: bool = False, with_values: bool = False
) -> TokenSums:
    """The sums of no token: what an accumulation starts from."""
    zero = jnp.zeros((), jnp.float32)
    required = dict.fromkeys(TokenSums._fields[: -len(TokenSums._field_defaults)], zero)
    return TokenSums(
        **required,
        entropy=zero if with_entropy else None,
        reference_k1=zero if with_reference else None,
        reference_k3=zero if with_reference else None,
        values=ValueSums(*[zero] * len(ValueSums._fields)) if with_values else None,
    )


def token_sums(
    statistics: Mapping[str, Float[Array, "R T"]],
    batch: PackedBatch,
    *,
    trained_version: Int[Array, ""] | int,
) -> TokenSums:
    """Sums over the `loss_mask` tokens of a batch or of any slice of its rows.

    `statistics` as `losses.TokenLoss` has them, plus those that are to be reported of `entropy`
    (nats), `reference_k1` and `reference_k3` (nats), `values` and `values_clipped`.
    `trained_version` is the number of optimizer steps in the parameters that gave the logprobs
    (before this batch's update); the lag of a token is that minus its weight version.
    """
    mask = jnp.asarray(batch.loss_mask)
    logs = zero_masked(statistics["log_ratios"], mask)
    ratios = zero_masked(jnp.exp(jnp.clip(logs, -MAX_LOG_RATIO, MAX_LOG_RATIO)), mask)
    weights, clipped = statistics["weights"], statistics["clipped"]
    positive = mask & (jnp.asarray(batch.advantages) > 0)
    negative = mask & (jnp.asarray(batch.advantages) < 0)
    steps = (trained_version - jnp.asarray(batch.weight_versions)).astype(jnp.float32)
    lags = zero_masked(steps, mask)
    fresh = mask & (lags == 0)
    # The tokens were sampled by the behaviour policy, so it stands on the left of the divergence.
    behaviour, current = jnp.zeros_like(logs), logs

    def total(name: str) -> jax.Array | None:
        return masked_sum(statistics[name], mask) if name in statistics else None

    return TokenSums(
        tokens=jnp.sum(mask, dtype=jnp.float32),
        ratio=jnp.sum(ratios),
        ratio_square=jnp.sum(jnp.square(ratios)),
        ratio_max=jnp.max(ratios),
        weight=masked_sum(weights, mask),
        weight_square=masked_sum(jnp.square(weights), mask),
        clipped=masked_sum(clipped, mask),
        positive=jnp.sum(positive, dtype=jnp.float32),
        positive_clipped=masked_sum(clipped, positive),
        negative=jnp.sum(negative, dtype=jnp.float32),
        negative_clipped=masked_sum(clipped, negative),
        lag=jnp.sum(lags),
        lag_max=jnp.max(lags),
        lag_zero=jnp.sum(fresh, dtype=jnp.float32),
        gap_at_lag_zero=masked_sum(jnp.abs(logs), fresh),
        kl_k1=jnp.sum(kl_estimates(behaviour, current, mask, estimator="k1")),
        kl_k3=jnp.sum(kl_estimates(behaviour, current, mask, estimator="k3")),
        surprisal=masked_sum(statistics["surprisal"], mask),
        entropy=total("entropy"),
        reference_k1=total("reference_k1"),
        reference_k3=total("reference_k3"),
        values=value_sums(statistics, batch) if "values" in statistics else None,
    )


def combine(left: TokenSums, right: TokenSums) -> TokenSums:
    """The sums of two disjoint parts taken together; associative and commutative."""

    def join(name: str, mine: Any, others: Any) -> Any:
        return jax.tree.map(jnp.maximum if name.endswith("_max") else jnp.add, mine, others)

    pairs = zip(left._asdict().items(), right, strict=True)
    return TokenSums(**{name: join(name, mine, others) for (name, mine), others in pairs})


def finish(sums: TokenSums) -> dict[str, Float[Array, ""]]:
    """Metrics by name from the sums of a whole optimizer batch; a share of nothing is 0."""

    def share(part: jax.Array, whole: jax.Array) -> jax.Array:
        return part / jnp.maximum(whole, 1.0)

    tokens = sums.tokens
    metrics = {
        "batch/loss_tokens": tokens,
        "importance/ratio_mean": share(sums.ratio, tokens),
        "importance/ratio_max": sums.ratio_max,
        "importance/ess_raw_share": effective_sample_share(sums.ratio, sums.ratio_square, tokens),
        "importance/ess_clamped_share": effective_sample_share(
            sums.weight, sums.weight_square, tokens
        ),
        "importance/clip_share": share(sums.clipped, tokens),
        "importance/clip_positive_share": share(sums.positive_clipped, sums.positive),
        "importance/clip_negative_share": share(sums.negative_clipped, sums.negative),
        "lag/mean_steps": share(sums.lag, tokens),
        "lag/max_steps": sums.lag_max,
        "lag/zero_share": share(sums.lag_zero, tokens),
        "policy/logprob_gap_at_lag_zero_nats": share(sums.gap_at_lag_zero, sums.lag_zero),
        "policy/kl_to_behaviour_nats": share(sums.kl_k1, tokens),
        "policy/kl_to_behaviour_k3_nats": share(sums.kl_k3, tokens),
        "policy/surprisal_nats": share(sums.surprisal, tokens),
    }
    if sums.entropy is not None:
        metrics["policy/entropy_nats"] = share(sums.entropy, tokens)
    if sums.reference_k1 is not None and sums.reference_k3 is not None:
        metrics["policy/kl_to_reference_nats"] = share(sums.reference_k1, tokens)
        metrics["policy/kl_to_reference_k3_nats"] = share(sums.reference_k3, tokens)
    if sums.values is not None:
        metrics |= finish_values(sums.values, tokens)
    return metrics


def finish_values(sums: ValueSums, tokens: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    """The metrics of a value function from its sums over `tokens` loss tokens."""
    count = jnp.maximum(tokens, 1.0)
    return {
        "value/loss": sums.loss / count,
        "value/explained_variance": _explained_variance(sums, tokens),
        "value/clip_share": sums.clipped / count,
    }


def value_sums(statistics: Mapping[str, Float[Array, "R T"]], batch: PackedBatch) -> ValueSums:
    """Sums over the loss tokens of `values` and, if they are there, `values_clipped`."""
    mask, returns = jnp.asarray(batch.loss_mask), jnp.asarray(batch.returns)
    values = statistics["values"]
    errors = zero_masked(returns - values, mask)
    return ValueSums(
        loss=jnp.sum(value_loss(values, returns, mask)),
        returns=masked_sum(returns, mask),
        return_squares=masked_sum(jnp.square(returns), mask),
        errors=jnp.sum(errors),
        error_squares=jnp.sum(jnp.square(errors)),
        clipped=masked_sum(statistics.get("values_clipped", jnp.zeros_like(values)), mask),
    )


def _explained_variance(sums: ValueSums, tokens: jax.Array) -> jax.Array:
    """1 − Var(R − v) / Var(R) over the tokens; 0 where the returns do not vary."""
    count = jnp.maximum(tokens, 1.0)

    def variance(total: jax.Array, squares: jax.Array) -> jax.Array:
        return squares / count - jnp.square(total / count)

    spread = variance(sums.returns, sums.return_squares)
    varies = spread > 1e-6 * sums.return_squares / count  # what rounding leaves is no spread
    unexplained = variance(sums.errors, sums.error_squares) / jnp.where(varies, spread, 1.0)
    return jnp.where(varies, 1.0 - unexplained, 0.0)
