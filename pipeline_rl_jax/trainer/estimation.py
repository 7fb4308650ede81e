"""Advantages that need the models in training: GAE of a critic's values, and online DPO.

Owns what is made of a batch before its updates. The arithmetic is `algorithms/`; the forward passes
are the trainer's and the critic's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.dpo import (
    dpo_advantages,
    dpo_loss,
    dpo_metrics,
    sequence_log_ratios,
)
from pipeline_rl_jax.algorithms.gae import Discounts, ValueTokens, estimate_advantages
from pipeline_rl_jax.algorithms.kl import kl_estimates
from pipeline_rl_jax.algorithms.kl_control import AdaptiveKl, FixedKl, shape_rewards
from pipeline_rl_jax.algorithms.masked import (
    masked_mean,
    masked_sum,
    masked_variance,
    masked_whiten,
)
from pipeline_rl_jax.algorithms.successors import last_tokens
from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings

Measures = dict[str, jax.Array]


class ValueRows(NamedTuple):
    """What a critic says of a packed batch, float32 [R, T], 0 outside the loss mask."""

    before: np.ndarray | jax.Array  # V_t, before token t is known
    after: np.ndarray | jax.Array  # with token t known, of what comes then


def build_kl_control(settings: AlgorithmSettings) -> FixedKl | AdaptiveKl:
    """What the KL in the reward of a token weighs; 0 when it is in the loss, or nowhere."""
    if settings.kl_in != "reward" or not settings.kl_coefficient:
        return FixedKl(0.0)
    if settings.kl_control == "fixed":
        return FixedKl(settings.kl_coefficient)
    return AdaptiveKl(
        coefficient=settings.kl_coefficient,
        target_nats=settings.kl_target_nats,
        horizon_rollouts=settings.kl_horizon_rollouts,
    )


class Estimator:
    """Fills in advantages, value targets and old values of whole batches, on the trainer mesh."""

    def __init__(self, settings: AlgorithmSettings, *, mesh: Mesh) -> None:
        self._settings = settings
        self._control = build_kl_control(settings)
        self._everywhere = replicated(mesh)
        self._gae = jax.jit(self._estimate, out_shardings=self._everywhere)
        self._dpo = jax.jit(self._weigh_pairs, out_shardings=self._everywhere)

    def snapshot(self) -> dict[str, float]:
        """What `restore` needs, as JSON holds it."""
        return self._control.snapshot()

    def restore(self, snapshot: Mapping[str, float]) -> None:
        """A snapshot of another kind of control says nothing about this one."""
        if "coefficient" in snapshot:
            self._control.restore(snapshot)

    def from_values(
        self, batch: PackedBatch, values: ValueRows
    ) -> tuple[PackedBatch, dict[str, float]]:
        """GAE: the batch with advantages, returns and old values, and what was measured.

        Rewards per token are −β·KL to the reference (`kl_in = "reward"`) plus the rollout's reward
        at its last trainable token. The KL control takes the batch in afterwards.
        """
        coefficient = np.float32(self._control.coefficient)
        arrays = jax.device_put((batch, values, coefficient), self._everywhere)
        signals, measures = jax.device_get(self._gae(*arrays))
        numbers = {name: float(value) for name, value in measures.items()}
        if "kl_control/completion_nats" in numbers:
            numbers["kl_control/coefficient"] = float(coefficient)
            self._control.observe(
                numbers["kl_control/completion_nats"], num_rollouts=int(batch.num_sequences)
            )
        return dataclasses.replace(batch, **signals), numbers

    def from_pairs(
        self, batch: PackedBatch, logprobs: np.ndarray
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Online DPO: the weight of every rollout in the gradient of the mean loss over pairs.

        `logprobs` are those of the policy before the update. The batch comes with pair numbers in
        place of advantages (`preprocess/batches.py`): +p at the better rollout of pair p = 1, 2 ..,
        −p at the worse one, 0 at rollouts of no pair.
        """
        pairs = _find_pairs(batch)
        advantages, measures = self._dpo(
            *jax.device_put((batch, logprobs, *pairs), self._everywhere)
        )
        numbers = {name: float(value) for name, value in jax.device_get(measures).items()}
        return dataclasses.replace(batch, advantages=jax.device_get(advantages)), numbers

    def _estimate(
        self, batch: PackedBatch, values: ValueRows, coefficient: jax.Array
    ) -> tuple[Measures, Measures]:
        settings = self._settings
        mask, segment_ids = jnp.asarray(batch.loss_mask), jnp.asarray(batch.segment_ids)
        scores, before = jnp.asarray(batch.returns), jnp.asarray(values.before)
        kl, measures = jnp.zeros_like(scores), {}
        if settings.needs_reference and settings.kl_in == "reward":
            sampled = jnp.asarray(batch.behaviour_logprobs)
            reference = jnp.asarray(batch.reference_logprobs)
            kl = kl_estimates(sampled, reference, mask, estimator=settings.kl_estimator)
            divergence = kl_estimates(sampled, reference, mask, estimator="k1")
            measures = {
                "reward/kl_penalty_mean": _per_rollout(coefficient * kl, batch),
                "kl_control/completion_nats": _per_rollout(divergence, batch),
            }
        rewards = shape_rewards(
            kl, scores, mask=mask, segment_ids=segment_ids, coefficient=coefficient
        )
        bootstrap = None
        if batch.truncated is not None:
            cut = last_tokens(mask, segment_ids) & jnp.asarray(batch.truncated)
            bootstrap = jnp.where(cut, values.after, 0.0)
        advantages, returns = estimate_advantages(
            ValueTokens(rewards, before, mask, segment_ids),
            Discounts(settings.gae_gamma, settings.gae_lambda),
            bootstrap=bootstrap,
        )
        measures["advantage/std"] = jnp.sqrt(masked_variance(advantages, mask))
        measures["value/mean"] = masked_mean(before, mask)
        if settings.batch_normalise:
            advantages = masked_whiten(advantages, mask, std_floor=settings.std_floor)
        return {"advantages": advantages, "returns": returns, "values": before}, measures

    def _weigh_pairs(
        self,
        batch: PackedBatch,
        logprobs: jax.Array,
        winners: jax.Array,
        losers: jax.Array,
        valid: jax.Array,
    ) -> tuple[jax.Array, Measures]:
        mask, beta = jnp.asarray(batch.loss_mask), self._settings.dpo_beta
        sequence_index = jnp.asarray(batch.sequence_index)
        log_ratios = sequence_log_ratios(
            logprobs,
            jnp.asarray(batch.reference_logprobs),
            mask=mask,
            sequence_index=sequence_index,
            num_sequences=winners.shape[0],
        )
        chosen = {"winners": winners, "losers": losers, "valid": valid, "beta": beta}
        weights = dpo_advantages(log_ratios, **chosen)
        # The loss is summed with weights 1 / B (`sequence_sum`).
        weights *= jnp.asarray(batch.num_sequences, jnp.float32)
        advantages = jnp.where(mask, weights[sequence_index], 0.0)
        return advantages, dpo_metrics(dpo_loss(log_ratios, **chosen), valid)


def _find_pairs(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Winners, losers and which of them count, as rollout numbers; room for a pair per rollout.

    The room is a power of two: few sizes, few compilations. A pair whose other half is not in the
    loss any more does not count.
    """
    mask = np.asarray(batch.loss_mask)
    size = 1 << max(int(batch.num_sequences) - 1, 1).bit_length()
    winners, losers = np.full((2, size), -1, np.int32)
    numbers = np.asarray(batch.advantages)[mask].astype(np.int32)
    sequences = np.asarray(batch.sequence_index)[mask]
    winners[numbers[numbers > 0] - 1] = sequences[numbers > 0]
    losers[-numbers[numbers < 0] - 1] = sequences[numbers < 0]
    valid = (winners >= 0) & (losers >= 0)
    return np.where(valid, winners, 0), np.where(valid, losers, 0), valid


def _per_rollout(values: jax.Array, batch: PackedBatch) -> jax.Array:
    """Sum over the tokens of a rollout, mean over rollouts."""
    rollouts = jnp.maximum(jnp.asarray(batch.num_sequences, jnp.float32), 1.0)
    return masked_sum(values, jnp.asarray(batch.loss_mask)) / rollouts
