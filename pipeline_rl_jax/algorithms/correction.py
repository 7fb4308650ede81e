"""An importance correction beside a policy loss: a detached weight for every token.

Owns what `is_correction` adds to a loss, given the policy under that loss's own ratio (its anchor):

| anchor    | ratio in the loss | truncated       | masked                                |
|-----------|-------------------|-----------------|---------------------------------------|
| behaviour | π / μ             | (counts twice)  | 1 where lowest ≤ r ≤ highest, else 0  |
| current   | π / sg[π], i.e. 1 | min(highest, r) | r where lowest ≤ r ≤ highest, else 0  |

r = sg[π/μ] per token. The weight is the part of π/μ that the loss does not hold itself, bounded;
what `masked` adds to a loss on π/μ is only that tokens out of range leave it.
Sources: truncated, IMPALA (arXiv 1802.01561); a loss anchored elsewhere than at the sampler,
decoupled PPO (arXiv 2110.00641).
"""

import jax.numpy as jnp

from pipeline_rl_jax.algorithms.importance import (
    importance_ratios,
    masked_weights,
    truncated_weights,
    within_range,
)
from pipeline_rl_jax.algorithms.losses import PolicyTokens, TokenLoss
from pipeline_rl_jax.settings import AlgorithmSettings


def correct(result: TokenLoss, tokens: PolicyTokens, *, settings: AlgorithmSettings) -> TokenLoss:
    """The loss with every term weighted as `is_correction` says; unchanged with `none`.

    `tokens` hold the true behaviour logprobs. Of the statistics, `weights` are multiplied and
    `clipped` also marks tokens at which the correction's bound took hold.
    """
    if settings.is_correction == "none":
        return result
    lowest, highest = settings.is_lowest, settings.is_highest
    ratios = importance_ratios(tokens.current_logprobs, tokens.behaviour_logprobs, tokens.mask)
    inside = within_range(ratios, lowest=lowest, highest=highest)
    if settings.is_correction == "truncated":
        weights = truncated_weights(ratios, highest)
        inside = ratios <= highest
    elif settings.ratio_anchor == "current":
        weights = masked_weights(ratios, lowest=lowest, highest=highest)
    else:
        weights = inside.astype(jnp.float32)
    statistics = dict(result.statistics)
    statistics["weights"] = statistics["weights"] * weights
    statistics["clipped"] = jnp.where(tokens.mask & ~inside, 1.0, statistics["clipped"])
    return TokenLoss(result.loss * weights, statistics)
