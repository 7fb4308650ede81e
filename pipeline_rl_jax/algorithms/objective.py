"""The loss that the settings ask for.

Owns the choice among `losses.py` by `AlgorithmSettings.loss` and what is added beside it: the
correction, entropy, KL and value terms. The arithmetic of each is in a module of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pipeline_rl_jax.algorithms.clipped_values import clipped_value_loss
from pipeline_rl_jax.algorithms.correction import correct
from pipeline_rl_jax.algorithms.importance import log_ratios
from pipeline_rl_jax.algorithms.kl import kl_estimates
from pipeline_rl_jax.algorithms.losses import (
    ClipRange,
    PolicyTokens,
    TokenLoss,
    cispo,
    entropy_bonus,
    gspo,
    is_reinforce,
    policy_gradient,
    ppo,
)
from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.algorithms.values import value_advantages, value_loss
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings


def policy_loss(
    settings: AlgorithmSettings,
    *,
    current_logprobs: Float[Array, "R T"],
    batch: PackedBatch,
    entropies: Float[Array, "R T"] | None = None,
    values: Float[Array, "R T"] | None = None,
) -> TokenLoss:
    """Per-token loss terms [R, T] and their statistics; unpacks as `(loss, statistics)`.

    `batch` is a whole `PackedBatch` or any slice of its rows; `current_logprobs` are those of its
    tokens under the parameters in training. The scalar loss is Σ `aggregation.loss_weights` · loss,
    so every term below is added up with the same weights. Added to the policy loss, where asked
    for: the entropy bonus and, always reported, the `entropies` (nats); `kl_coefficient` times the
    estimate of KL(current ‖ reference) with `kl_in = "loss"`; `value_coefficient` times the value
    loss of `values`; with the baseline `value` the batch's advantages come from `learned_baseline`.
    ValueError when a setting needs an argument that is missing.
    """
    tokens = PolicyTokens(
        current_logprobs=current_logprobs,
        behaviour_logprobs=jnp.asarray(batch.behaviour_logprobs),
        advantages=jnp.asarray(batch.advantages),
        mask=jnp.asarray(batch.loss_mask),
        segment_ids=jnp.asarray(batch.segment_ids),
    )
    loss, statistics = correct(_anchored_loss(settings, tokens), tokens, settings=settings)
    if entropies is not None:
        statistics["entropy"] = jax.lax.stop_gradient(zero_masked(entropies, tokens.mask))
    if settings.entropy_coefficient:
        if entropies is None:
            raise ValueError("algorithm.entropy_coefficient needs the entropies of the policy")
        loss += entropy_bonus(entropies, tokens.mask, coefficient=settings.entropy_coefficient)
    if settings.needs_reference:
        penalty, measures = _reference_terms(settings, tokens, batch)
        loss, statistics = loss + penalty, statistics | measures
    if settings.learns_values:
        losses, measures = value_terms(settings, values, batch)
        loss, statistics = loss + losses, statistics | measures
    return TokenLoss(loss, statistics)


def learned_baseline(batch: PackedBatch, values: Float[Array, "R T"]) -> PackedBatch:
    """The batch with advantages R − v in place of its own; no gradient flows to `values`."""
    mask = jnp.asarray(batch.loss_mask)
    advantages = value_advantages(jnp.asarray(batch.returns), values, mask)
    return dataclasses.replace(batch, advantages=advantages)


def _anchored_loss(settings: AlgorithmSettings, tokens: PolicyTokens) -> TokenLoss:
    """The loss on the ratio to `ratio_anchor`; its log ratios are reported to the sampler."""
    if settings.ratio_anchor == "behaviour":
        return _selected_loss(settings, tokens)
    anchor = jax.lax.stop_gradient(tokens.current_logprobs)
    loss, statistics = _selected_loss(settings, tokens._replace(behaviour_logprobs=anchor))
    logs = log_ratios(anchor, tokens.behaviour_logprobs, tokens.mask)
    return TokenLoss(loss, statistics | {"log_ratios": logs})


def value_terms(
    settings: AlgorithmSettings, values: Float[Array, "R T"] | None, batch: PackedBatch
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """The weighted value loss per token; the values, and where `value_clip` took hold, as measures.

    The clip holds values near the batch's own `values`, which were made before its updates.
    """
    if values is None:
        raise ValueError(
            f"algorithm.baseline ({settings.baseline}) needs the predictions of the value head"
        )
    mask, returns = jnp.asarray(batch.loss_mask), jnp.asarray(batch.returns)
    measures = {"values": zero_masked(values, mask)}
    if settings.value_clip:
        if batch.values is None:
            raise ValueError("algorithm.value_clip needs the values from before the updates")
        losses, measures["values_clipped"] = clipped_value_loss(
            values,
            old_values=jnp.asarray(batch.values),
            returns=returns,
            mask=mask,
            clip=settings.value_clip,
        )
    else:
        losses = value_loss(values, returns, mask)
    return settings.value_coefficient * losses, jax.lax.stop_gradient(measures)


def _reference_terms(
    settings: AlgorithmSettings, tokens: PolicyTokens, batch: PackedBatch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The penalty per token and, whatever it is made of, k1 and k3 of KL(current ‖ reference)."""
    current, mask = tokens.current_logprobs, tokens.mask
    reference, penalty = jnp.asarray(batch.reference_logprobs), jnp.zeros_like(current)
    if settings.kl_in == "loss" and settings.kl_coefficient:
        estimates = kl_estimates(current, reference, mask, estimator=settings.kl_estimator)
        penalty = settings.kl_coefficient * estimates
    measures = {
        f"reference_{name}": kl_estimates(current, reference, mask, estimator=name)
        for name in ("k1", "k3")
    }
    return penalty, jax.lax.stop_gradient(measures)


def _selected_loss(settings: AlgorithmSettings, tokens: PolicyTokens) -> TokenLoss:
    match settings.loss:
        case "is_reinforce":
            return is_reinforce(tokens, clamp=settings.importance_clamp)
        case "cispo":
            return cispo(tokens, clip_high=settings.clip_high)
        case "ppo":
            clip = ClipRange(settings.clip_low, settings.clip_high, settings.dual_clip)
            return ppo(tokens, clip=clip)
        case "dpo":
            return policy_gradient(tokens)
        case "gspo":
            return gspo(tokens, clip=ClipRange(settings.clip_low, settings.clip_high))
