"""The KL penalty in the reward of every token, and what its coefficient is.

Owns the fixed and the adaptive coefficient (on the host, with state) and the rewards per token that
PPO learns from. A KL term in the loss is `kl.py` and the objective's.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.algorithms.successors import last_tokens

_MAX_ERROR = 0.2


class FixedKl:
    """A coefficient that never changes."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        """β, reward per nat."""
        return self._coefficient

    def observe(self, kl_nats: float, *, num_rollouts: int) -> None:
        """Nothing follows from it."""

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """The coefficient is the setting's."""


class AdaptiveKl:
    """A coefficient that steers the divergence per completion towards a target.

        e = clip(KL / KL_target − 1, −0.2, 0.2)        β ← β · (1 + e · n / horizon)

    KL in nats per completion (sum over its tokens), mean over the n rollouts of a step; the horizon
    in rollouts. Source: Ziegler et al., arXiv 1909.08593, section 2.2 (there n / horizon is K_β).
    """

    def __init__(self, *, coefficient: float, target_nats: float, horizon_rollouts: int) -> None:
        """Raises ValueError unless all are positive: from 0 the coefficient could not move."""
        if min(coefficient, target_nats, horizon_rollouts) <= 0:
            raise ValueError(
                f"adaptive KL: coefficient ({coefficient}), target_nats ({target_nats}) and "
                f"horizon_rollouts ({horizon_rollouts}) must be positive; for none use a fixed 0"
            )
        self._coefficient = coefficient
        self._target_nats = target_nats
        self._horizon_rollouts = horizon_rollouts

    @property
    def coefficient(self) -> float:
        """β, reward per nat."""
        return self._coefficient

    def observe(self, kl_nats: float, *, num_rollouts: int) -> None:
        """Takes in the divergence of a step. Raises ValueError when it is not finite."""
        if not math.isfinite(kl_nats):
            raise ValueError(f"adaptive KL: divergence ({kl_nats}) must be finite")
        error = kl_nats / self._target_nats - 1.0
        error = min(_MAX_ERROR, max(-_MAX_ERROR, error))
        # More than a horizon of rollouts in one step must not turn the sign of the coefficient.
        share = min(1.0, num_rollouts / self._horizon_rollouts)
        self._coefficient *= 1.0 + error * share

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as plain values that JSON can hold."""
        return {"coefficient": self._coefficient}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._coefficient = snapshot["coefficient"]


def shape_rewards(
    kl: Float[Array, "R T"],
    scores: Float[Array, "R T"],
    *,
    mask: Bool[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    coefficient: Float[Array, ""] | float,
) -> Float[Array, "R T"]:
    """r_t = −β·kl_t, and the score of the completion added at its last token; 0 where masked.

    `kl` is the k1 estimate log π(y_t) − log π_ref(y_t) in nats (`kl.kl_estimates`), of either sign.
    `scores` hold the score of a completion at each of its tokens, or at the last in `mask` at
    least. Detached. Sources: Ziegler et al., arXiv 1909.08593, eq. 2; Ouyang et al., arXiv
    2203.02155.
    """
    ends = last_tokens(mask, segment_ids)
    rewards = zero_masked(scores, ends) - coefficient * zero_masked(kl, mask)
    return jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
