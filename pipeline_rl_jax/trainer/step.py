"""One optimizer step as one compiled program.

Owns the loop over micro-batches, the gradient, the update and the metrics of a step. Loss terms
and their weights are `algorithms/`, the optimizer is `optimizer.py`. Batches come in as
`microbatches.py` lays them out: arrays [M, r, T], M micro-batches of r rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.aggregation import loss_weights
from pipeline_rl_jax.algorithms.metrics import TokenSums, combine, empty_sums, finish, token_sums
from pipeline_rl_jax.algorithms.objective import learned_baseline, policy_loss
from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.models.value_head import VALUE_HEAD, token_values, without_value_head
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings, Settings
from pipeline_rl_jax.trainer.optimizer import learning_rate_schedule
from pipeline_rl_jax.trainer.state import TrainState, state_shardings

Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, PackedBatch], tuple[TrainState, Metrics]]
MicroLoss = Callable[..., tuple[jax.Array, TokenSums]]


def build_train_step(
    config: ModelConfig,
    settings: Settings,
    *,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> TrainStep:
    """The jitted step `(state, batch [M, r, T]) → (state, metrics)`; it donates `state`.

    loss = Σ_t weight_t · term_t over the whole batch, its gradient added up in float32 over the
    `ceil(num_rows / r)` micro-batches that hold anything. One compilation serves all batches of
    one shape, whatever their `num_rows`. With a learned baseline the advantages are made here, from
    the value head as it was before the step.

    A step whose gradient norm is not finite leaves params and moments as they were, but still
    counts: `step` is the number of batches used up, so that who waits for a version gets it, and
    a repeat of the same batch cannot hang the run. `trainer/skipped_steps` counts such steps.
    """
    micro_loss = _micro_loss(config, settings, mesh=mesh)
    schedule = learning_rate_schedule(settings.trainer, num_steps=settings.schedule.num_steps)

    def train_step(state: TrainState, batch: PackedBatch) -> tuple[TrainState, Metrics]:
        weights = _token_weights(batch, settings)
        start = _empty_sums(settings.algorithm)
        loss, gradients, sums = _accumulate(micro_loss, state, batch, weights, sums=start)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        params, opt_state = _update(optimizer, state, gradients, keep=finite)
        skipped_steps = state.skipped_steps + jnp.where(finite, 0, 1)
        updates = state.step - state.skipped_steps
        metrics = finish(sums) | {
            "trainer/loss": loss,
            "trainer/gradient_norm": norm,
            "trainer/learning_rate": schedule(updates),
            "trainer/skipped_steps": skipped_steps,
        }
        return (
            TrainState(
                params=params,
                opt_state=opt_state,
                step=state.step + 1,
                skipped_steps=skipped_steps,
            ),
            metrics,
        )

    value_head = settings.algorithm.learns_values
    shardings = state_shardings(optimizer, config=config, mesh=mesh, value_head=value_head)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def _micro_loss(config: ModelConfig, settings: Settings, *, mesh: Mesh) -> MicroLoss:
    """`(params, micro-batch [r, T], weights [r, T], version) → (loss, sums)`."""
    graph, algorithm = build_model(config, settings.model), settings.algorithm

    def micro_loss(
        params: dict, batch: PackedBatch, weights: jax.Array, version: jax.Array
    ) -> tuple[jax.Array, TokenSums]:
        rows = TokenRows.of(batch)
        scored = score_rows(graph, without_value_head(params), rows, settings=settings, mesh=mesh)
        values = None
        if algorithm.learns_values:
            values = token_values(scored.hidden, params[VALUE_HEAD], jnp.asarray(rows.loss_mask))
            batch = learned_baseline(batch, values)
        terms, statistics = policy_loss(
            algorithm,
            current_logprobs=scored.logprobs,
            batch=batch,
            entropies=scored.entropies,
            values=values,
        )
        return jnp.sum(weights * terms), token_sums(statistics, batch, trained_version=version)

    return micro_loss


def _token_weights(batch: PackedBatch, settings: Settings) -> jax.Array:
    """Loss weights [M, r, T], with the denominators of the whole optimizer batch."""
    num_micro, num_rows, num_tokens = batch.loss_mask.shape
    weights = loss_weights(
        jnp.reshape(batch.loss_mask, (-1, num_tokens)),
        jnp.reshape(batch.sequence_index, (-1, num_tokens)),
        num_sequences=jnp.asarray(batch.num_sequences),
        mode=settings.algorithm.aggregation,
        constant=settings.algorithm.aggregation_constant,
    )
    return weights.reshape(num_micro, num_rows, num_tokens)


def _empty_sums(algorithm: AlgorithmSettings) -> TokenSums:
    return empty_sums(
        with_entropy=True,
        with_reference=algorithm.needs_reference,
        with_values=algorithm.learns_values,
    )


def _accumulate(
    micro_loss: MicroLoss,
    state: TrainState,
    batch: PackedBatch,
    weights: jax.Array,
    *,
    sums: TokenSums,
) -> tuple[jax.Array, dict, TokenSums]:
    """Loss, float32 gradient and token sums (added to `sums`) over all micro-batches that hold a
    row."""
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


def _update(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: dict, *, keep: jax.Array
) -> tuple[dict, optax.OptState]:
    """Params and moments after the update, or as they were where `keep` is False.

    A branch, not a selection by `where`, which would need the old and the new values at once.
    """

    def apply(params: dict, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def leave(params: dict, opt_state: Any) -> tuple[Any, Any]:
        return params, opt_state

    return jax.lax.cond(keep, apply, leave, state.params, state.opt_state)
