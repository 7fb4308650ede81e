"""A critic with weights of its own: values of whole batches, and the updates that fit them.

Owns the critic's state on its mesh. A critic that is a head on the policy has no part in this: it
is in the policy's state and step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.algorithms.masked import zero_masked
from pipeline_rl_jax.algorithms.metrics import ValueSums, finish_values, value_sums
from pipeline_rl_jax.algorithms.objective import value_terms
from pipeline_rl_jax.meshes import replicated, row_sharding
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.loading import build_model
from pipeline_rl_jax.models.packed_forward import TokenRows, score_batch, score_rows
from pipeline_rl_jax.models.value_head import (
    VALUE_HEAD,
    token_values,
    values_after,
    without_value_head,
)
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.estimation import ValueRows
from pipeline_rl_jax.trainer.gradients import accumulate, apply_update, token_weights
from pipeline_rl_jax.trainer.microbatches import place_batch
from pipeline_rl_jax.trainer.optimizer import num_updates, trainer_schedule
from pipeline_rl_jax.trainer.state import TrainState, state_shardings

Metrics = dict[str, jax.Array]


class Critic:
    """A model with a value head, its optimizer and its mesh. Not thread-safe."""

    def __init__(
        self,
        config: ModelConfig,
        settings: Settings,
        *,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        state: TrainState,
        order: contextlib.AbstractContextManager | None = None,
    ) -> None:
        """Takes `state` over, whose params hold a value head.

        `order` is held while a program is dispatched, where others dispatch to devices of `mesh`.
        """
        self.state = state
        self._order = order or contextlib.nullcontext()
        self._rows_per_micro_batch = settings.trainer.rows_per_micro_batch
        self._mesh = mesh
        self._values = build_value_forward(config, settings, mesh=mesh)
        self._step = _build_step(config, settings, optimizer=optimizer, mesh=mesh)

    def values(self, batch: PackedBatch) -> ValueRows:
        """Of every loss token, on the host; waits for them."""
        with self._order:
            return self._values(self.state.params, batch)

    def train(self, batch: PackedBatch, *, advance: int) -> Metrics:
        """One update towards the batch's `returns`; returns while the devices work."""
        placed = place_batch(
            batch, rows_per_micro_batch=self._rows_per_micro_batch, mesh=self._mesh
        )
        placed_advance = jax.device_put(np.int32(advance), replicated(self._mesh))
        with self._order:
            self.state, metrics = self._step(self.state, placed, placed_advance)
        return metrics


def build_value_forward(
    config: ModelConfig, settings: Settings, *, mesh: Mesh
) -> Callable[[dict, PackedBatch], ValueRows]:
    """`(params with a value head, batch) → values`, in micro-batches of one compiled program."""
    graph, rows_at_once = build_model(config, settings.model), settings.trainer.rows_per_micro_batch

    def forward(params: dict, rows: TokenRows) -> ValueRows:
        scored = score_rows(graph, without_value_head(params), rows, settings=settings, mesh=mesh)
        head, mask = params[VALUE_HEAD], jnp.asarray(rows.loss_mask)
        return ValueRows(
            before=token_values(scored.hidden, head, mask),
            after=values_after(scored.hidden, head, mask),
        )

    run = jax.jit(forward, out_shardings=row_sharding(mesh))
    return lambda params, batch: score_batch(
        lambda rows: run(params, rows), batch, rows_at_once=rows_at_once, mesh=mesh
    )


def _build_step(
    config: ModelConfig,
    settings: Settings,
    *,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> Callable[..., tuple[TrainState, Metrics]]:
    graph, algorithm = build_model(config, settings.model), settings.algorithm
    schedule = trainer_schedule(critic_settings(settings))
    zero = jnp.zeros((), jnp.float32)

    def micro_loss(
        params: dict, batch: PackedBatch, weights: jax.Array, version: jax.Array
    ) -> tuple[jax.Array, tuple[ValueSums, jax.Array]]:
        del version
        rows = TokenRows.of(batch)
        scored = score_rows(graph, without_value_head(params), rows, settings=settings, mesh=mesh)
        mask = jnp.asarray(rows.loss_mask)
        values = token_values(scored.hidden, params[VALUE_HEAD], mask)
        terms, measures = value_terms(algorithm, values, batch)
        tokens = jnp.sum(mask, dtype=jnp.float32)
        return jnp.sum(weights * zero_masked(terms, mask)), (value_sums(measures, batch), tokens)

    def train_step(state: TrainState, batch: PackedBatch, advance: jax.Array):
        _, gradients, (sums, tokens) = accumulate(
            micro_loss,
            state,
            batch,
            token_weights(batch, algorithm),
            sums=(ValueSums(*[zero] * len(ValueSums._fields)), zero),
            combine=lambda left, right: jax.tree.map(jnp.add, left, right),
        )
        updated, norm = apply_update(optimizer, state, gradients, advance=advance)
        return updated, finish_values(sums, tokens) | {
            "value/gradient_norm": norm,
            "value/learning_rate": schedule(num_updates(state.opt_state)),
        }

    shardings = state_shardings(optimizer, config=config, mesh=mesh, value_head=True)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def critic_settings(settings: Settings) -> Settings:
    """The settings with the critic's learning rate in the place of the policy's."""
    trainer = settings.trainer
    rate = settings.algorithm.critic_learning_rate or trainer.learning_rate
    return dataclasses.replace(settings, trainer=dataclasses.replace(trainer, learning_rate=rate))
