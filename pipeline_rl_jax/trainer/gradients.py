"""The gradient of a loss over micro-batches, and the update made of it.

Owns the loop over micro-batches and what happens to an update that is not finite. The policy's step
(`step.py`) and a critic's (`critic.py`) both go through here. Batches are laid out [M, r, T] by
`microbatches.py`: M micro-batches of r rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipeline_rl_jax.algorithms.aggregation import loss_weights
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings
from pipeline_rl_jax.trainer.state import TrainState

# (params, micro-batch [r, T], weights [r, T], version) → (loss, sums over its tokens)
MicroLoss = Callable[..., tuple[jax.Array, Any]]


def token_weights(batch: PackedBatch, algorithm: AlgorithmSettings) -> jax.Array:
    """Loss weights [M, r, T], with the denominators of the whole optimizer batch."""
    num_micro, num_rows, num_tokens = batch.loss_mask.shape
    weights = loss_weights(
        jnp.reshape(batch.loss_mask, (-1, num_tokens)),
        jnp.reshape(batch.sequence_index, (-1, num_tokens)),
        num_sequences=jnp.asarray(batch.num_sequences),
        mode=algorithm.aggregation,
        constant=algorithm.aggregation_constant,
    )
    return weights.reshape(num_micro, num_rows, num_tokens)


def accumulate(
    micro_loss: MicroLoss,
    state: TrainState,
    batch: PackedBatch,
    weights: jax.Array,
    *,
    sums: Any,
    combine: Callable[[Any, Any], Any],
) -> tuple[jax.Array, dict, Any]:
    """Loss, float32 gradient and token sums over all micro-batches that hold a row.

    `sums` are those of no token, to which each micro-batch's are added by `combine`.
    """
    rows_per_micro = batch.token_ids.shape[1]
    num_micro = (batch.num_rows + rows_per_micro - 1) // rows_per_micro
    gradient = jax.value_and_grad(micro_loss, has_aux=True)

    def add_micro_batch(index: jax.Array, totals: tuple) -> tuple:
        loss, gradients, sums = totals
        micro = jax.tree.map(lambda x: x[index] if x.ndim == 3 else x, batch)
        (micro_loss_value, micro_sums), micro_gradients = gradient(
            state.params, micro, weights[index], state.step
        )
        gradients = jax.tree.map(
            lambda total, part: total + part.astype(jnp.float32), gradients, micro_gradients
        )
        return loss + micro_loss_value, gradients, combine(sums, micro_sums)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state.params)
    start = (jnp.zeros((), jnp.float32), zeros, sums)
    return jax.lax.fori_loop(0, num_micro, add_micro_batch, start)


def apply_update(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: dict,
    *,
    advance: jax.Array | int,
) -> tuple[TrainState, jax.Array]:
    """The state after an update, and the gradient's norm before it was clipped.

    Where the norm is not finite, params and moments stay as they were and `skipped_steps` grows.
    `advance` is what `step` grows by either way.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)

    def apply(params: dict, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def leave(params: dict, opt_state: Any) -> tuple[Any, Any]:
        return params, opt_state

    # A branch, not a selection by `where`, which would need the old and the new values at once.
    params, opt_state = jax.lax.cond(finite, apply, leave, state.params, state.opt_state)
    updated = TrainState(
        params=params,
        opt_state=opt_state,
        step=state.step + advance,
        skipped_steps=state.skipped_steps + jnp.where(finite, 0, 1),
    )
    return updated, norm
