"""The loss that the settings ask for.

Owns the choice among `losses.py` by `AlgorithmSettings.loss`; holds no arithmetic.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pipeline_rl_jax.algorithms.losses import (
    ClipRange,
    PolicyTokens,
    TokenLoss,
    cispo,
    entropy_bonus,
    gspo,
    is_reinforce,
    ppo,
)
from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings


def policy_loss(
    settings: AlgorithmSettings,
    *,
    current_logprobs: Float[Array, "R T"],
    batch: PackedBatch,
    entropies: Float[Array, "R T"] | None = None,
) -> TokenLoss:
    """Per-token loss terms [R, T] and their statistics; unpacks as `(loss, statistics)`.

    `batch` is a whole `PackedBatch` or any slice of its rows; `current_logprobs` are those of its
    tokens under the parameters in training. `entropies` (nats) add the statistic `entropy` and,
    with `entropy_coefficient`, the bonus; asking for it without them is a ValueError. The scalar
    loss is Σ `aggregation.loss_weights` · loss.
    """
    tokens = PolicyTokens(
        current_logprobs=current_logprobs,
        behaviour_logprobs=jnp.asarray(batch.behaviour_logprobs),
        advantages=jnp.asarray(batch.advantages),
        mask=jnp.asarray(batch.loss_mask),
        segment_ids=jnp.asarray(batch.segment_ids),
    )
    loss, statistics = _selected_loss(settings, tokens)
    if entropies is not None:
        statistics["entropy"] = jax.lax.stop_gradient(zero_masked(entropies, tokens.mask))
    if settings.entropy_coefficient:
        if entropies is None:
            raise ValueError("algorithm.entropy_coefficient needs the entropies of the policy")
        loss += entropy_bonus(entropies, tokens.mask, coefficient=settings.entropy_coefficient)
    return TokenLoss(loss, statistics)


def _selected_loss(settings: AlgorithmSettings, tokens: PolicyTokens) -> TokenLoss:
    match settings.loss:
        case "is_reinforce":
            return is_reinforce(tokens, clamp=settings.importance_clamp)
        case "cispo":
            return cispo(tokens, clip_high=settings.clip_high)
        case "ppo":
            clip = ClipRange(settings.clip_low, settings.clip_high, settings.dual_clip)
            return ppo(tokens, clip=clip)
        case "gspo":
            return gspo(tokens, clip=ClipRange(settings.clip_low, settings.clip_high))
