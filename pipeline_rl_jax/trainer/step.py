"""One update of the policy as one compiled program.

Owns how the loss, its gradient, the update and the metrics of a step are put together. Loss terms
and their weights are `algorithms/`, the loop over micro-batches is `gradients.py`, the optimizer
`optimizer.py`. Batches come in as `microbatches.py` lays them out: arrays [M, r, T], M
micro-batches of r rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.metrics import TokenSums, combine, empty_sums, finish, token_sums
from pipeline_rl_jax.algorithms.objective import learned_baseline, policy_loss
from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.packed_forward import TokenRows, score_rows
from pipeline_rl_jax.models.value_head import VALUE_HEAD, token_values, without_value_head
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import AlgorithmSettings, Settings
from pipeline_rl_jax.trainer.gradients import MicroLoss, accumulate, apply_update, token_weights
from pipeline_rl_jax.trainer.optimizer import num_updates, trainer_schedule
from pipeline_rl_jax.trainer.state import TrainState, state_shardings

Metrics = dict[str, jax.Array]
TrainStep = Callable[..., tuple[TrainState, Metrics]]


def build_train_step(
    config: ModelConfig,
    settings: Settings,
    *,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> TrainStep:
    """The jitted step `(state, batch [M, r, T], advance=1) → (state, metrics)`; it donates `state`.

    loss = Σ_t weight_t · term_t over the whole batch, its gradient added up in float32 over the
    `ceil(num_rows / r)` micro-batches that hold anything. One compilation serves all batches of
    one shape, whatever their `num_rows`. With the baseline `value` the advantages are made here,
    from the value head as it was before the step. `advance` is what the weight version grows by:
    0 for all but the last of several updates on one batch.

    A step whose gradient norm is not finite leaves params and moments as they were, but still
    counts: `step` is the number of batches used up, so that who waits for a version gets it, and
    a repeat of the same batch cannot hang the run. `trainer/skipped_steps` counts such steps.
    """
    algorithm = settings.algorithm
    micro_loss = _micro_loss(config, settings, mesh=mesh)
    schedule = trainer_schedule(settings)

    def train_step(
        state: TrainState, batch: PackedBatch, advance: jax.Array | int = 1
    ) -> tuple[TrainState, Metrics]:
        loss, gradients, sums = accumulate(
            micro_loss,
            state,
            batch,
            token_weights(batch, algorithm),
            sums=_empty_sums(algorithm),
            combine=combine,
        )
        updated, norm = apply_update(optimizer, state, gradients, advance=advance)
        metrics = finish(sums) | {
            "trainer/loss": loss,
            "trainer/gradient_norm": norm,
            "trainer/learning_rate": schedule(num_updates(state.opt_state)),
            "trainer/skipped_steps": updated.skipped_steps,
        }
        return updated, metrics

    shardings = state_shardings(
        optimizer, config=config, mesh=mesh, value_head=algorithm.learns_values
    )
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
        if values is not None and algorithm.baseline == "value":
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


def _empty_sums(algorithm: AlgorithmSettings) -> TokenSums:
    return empty_sums(
        with_entropy=True,
        with_reference=algorithm.needs_reference,
        with_values=algorithm.learns_values,
    )
