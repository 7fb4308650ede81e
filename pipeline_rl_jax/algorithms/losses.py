"""Policy losses, one pure function each, per token and not yet aggregated.

Every loss returns `TokenLoss`: terms to be minimised, 0 where masked, and what `metrics.py` needs
to know of each token. How terms are added up is `aggregation.py`'s matter, so the published
algorithms are combinations of settings:

| algorithm   | loss         | baseline      | divided by     | aggregation   | and           |
|-------------|--------------|---------------|----------------|---------------|---------------|
| PipelineRL  | is_reinforce | group_mean    |                | sequence_sum  | clamp 5       |
| RLOO        | is_reinforce | leave_one_out |                | sequence_sum  |               |
| GRPO        | ppo          | group_mean    | group std      | sequence_mean | clip 0.2      |
| Dr. GRPO    | ppo          | group_mean    |                | constant      | max tokens    |
| DAPO        | ppo          | group_mean    | group std      | token_mean    | 1, below      |
| REINFORCE++ | ppo          | none          | batch std      | token_mean    |               |
| CISPO       | cispo        | group_mean    | group std      | token_mean    | clip_high     |
| GSPO        | gspo         | group_mean    | group std      | sequence_mean | 3e-4 and 4e-4 |

Divided by: `normalise_std` (group), `batch_normalise` (batch). 1: clip 0.2 below, 0.28 above,
`zero_variance = refill`, overlong penalty in the reward. The same as flags: docs/losses.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.importance import (
    importance_ratios,
    log_ratios,
    sequence_ratios,
    truncated_weights,
)
from pipeline_rl_jax.algorithms.masked import zero_masked


class PolicyTokens(NamedTuple):
    """What a policy loss is a function of; the gradient flows through `current_logprobs` only."""

    current_logprobs: Float[Array, "R T"]  # log π, the policy in training
    behaviour_logprobs: Float[Array, "R T"]  # log μ, the policy that sampled, or another anchor
    advantages: Float[Array, "R T"]
    mask: Bool[Array, "R T"]  # True at tokens to train on
    segment_ids: Int[Array, "R T"]


class TokenLoss(NamedTuple):
    """Loss terms and per-token statistics.

    `statistics`, all float32 [R, T], detached, 0 where masked: `log_ratios` (token level, raw),
    `weights` (the bounded ratio in the loss), `clipped` (1 where a bound took hold),
    `surprisal` (−log π, nats).
    """

    loss: Float[Array, "R T"]
    statistics: dict[str, Float[Array, "R T"]]


class ClipRange(NamedTuple):
    """Trust region 1 − low ≤ ratio ≤ 1 + high; `dual` > 1 bounds negative terms, 0 = off."""

    low: float
    high: float
    dual: float = 0.0


def is_reinforce(tokens: PolicyTokens, *, clamp: float) -> TokenLoss:
    """REINFORCE with a clamped importance weight.

    −sg[min(c, π/μ)] · A · log π. The weight carries no gradient and is bounded from above only.
    At π = μ it is the plain policy gradient. Source: PipelineRL, arXiv 2509.19128, eq. 5, c = 5.
    """
    ratios = importance_ratios(tokens.current_logprobs, tokens.behaviour_logprobs, tokens.mask)
    weights = truncated_weights(ratios, clamp)
    current = zero_masked(tokens.current_logprobs, tokens.mask)
    advantages = zero_masked(tokens.advantages, tokens.mask)
    loss = -weights * advantages * current
    return TokenLoss(loss, _statistics(tokens, weights=weights, clipped=ratios > clamp))


def policy_gradient(tokens: PolicyTokens) -> TokenLoss:
    """−A · log π, whoever sampled: for advantages that hold all weights (online DPO)."""
    advantages = zero_masked(tokens.advantages, tokens.mask)
    loss = -advantages * zero_masked(tokens.current_logprobs, tokens.mask)
    weights = tokens.mask.astype(jnp.float32)
    return TokenLoss(loss, _statistics(tokens, weights=weights, clipped=jnp.zeros_like(weights)))


def cispo(tokens: PolicyTokens, *, clip_high: float) -> TokenLoss:
    """REINFORCE with the importance weight clipped at 1 + ε_high; every token keeps a gradient.

    −sg[min(1 + ε_high, π/μ)] · A · log π: `is_reinforce` with a trust-region bound. The lower
    bound of the paper is left out, as in its own runs. Source: MiniMax-M1, arXiv 2506.13585.
    """
    return is_reinforce(tokens, clamp=1.0 + clip_high)


def ppo(tokens: PolicyTokens, *, clip: ClipRange) -> TokenLoss:
    """Clipped surrogate on token ratios r = π/μ.

    −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A); with `clip.dual` = c, for A < 0 the term inside
    is also bounded from below by c·A. ε → ∞ gives the unclipped −r·A.
    Sources: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729; asymmetric ε (clip-higher),
    DAPO, arXiv 2503.14476.
    """
    ratios = importance_ratios(tokens.current_logprobs, tokens.behaviour_logprobs, tokens.mask)
    return _clipped_surrogate(tokens, ratios=ratios, clip=clip)


def gspo(tokens: PolicyTokens, *, clip: ClipRange) -> TokenLoss:
    """Clipped surrogate on the length-normalised ratio s of the whole completion.

    −min(s·A, clip(s, 1 − ε_low, 1 + ε_high)·A) at each token, so `aggregation = sequence_mean`
    gives the published objective; clip widths are near 3e-4 and 4e-4, since s averages over the
    tokens. A completion is clipped as a whole. Source: GSPO, arXiv 2507.18071.
    """
    ratios = sequence_ratios(
        tokens.current_logprobs,
        tokens.behaviour_logprobs,
        mask=tokens.mask,
        segment_ids=tokens.segment_ids,
    )
    return _clipped_surrogate(tokens, ratios=ratios, clip=clip)


def entropy_bonus(
    entropies: Float[Array, "R T"], mask: Bool[Array, "R T"], *, coefficient: float
) -> Float[Array, "R T"]:
    """−coefficient · H(π(·|y_<t)), a loss term per token; entropies in nats, 0 where masked."""
    return -coefficient * zero_masked(entropies, mask)


def _clipped_surrogate(tokens: PolicyTokens, *, ratios: jax.Array, clip: ClipRange) -> TokenLoss:
    advantages = zero_masked(tokens.advantages, tokens.mask)
    bounded = jnp.clip(ratios, 1.0 - clip.low, 1.0 + clip.high)
    surrogate = jnp.minimum(ratios * advantages, bounded * advantages)
    # A bound takes hold only on the side to which the advantage pushes.
    clipped = jnp.where(advantages > 0, ratios > 1.0 + clip.high, ratios < 1.0 - clip.low)
    if clip.dual:
        surrogate = jnp.where(
            advantages < 0, jnp.maximum(surrogate, clip.dual * advantages), surrogate
        )
        clipped |= (advantages < 0) & (ratios > clip.dual)
    clipped &= advantages != 0
    return TokenLoss(-surrogate, _statistics(tokens, weights=bounded, clipped=clipped))


def _statistics(
    tokens: PolicyTokens, *, weights: jax.Array, clipped: jax.Array
) -> dict[str, jax.Array]:
    logs = log_ratios(tokens.current_logprobs, tokens.behaviour_logprobs, tokens.mask)
    statistics = {
        "log_ratios": logs,
        "weights": zero_masked(weights, tokens.mask),
        "clipped": zero_masked(clipped.astype(jnp.float32), tokens.mask),
        "surprisal": -zero_masked(tokens.current_logprobs, tokens.mask),
    }
    return jax.lax.stop_gradient(statistics)
