"""The trainer as the schedules see it: a state that outlives calls and a step that does not block.

Owns the current `TrainState` and the order of what a step consists of: what has to be known before
its updates, and the updates. Who calls it, when weights are published and when a checkpoint is
taken is decided in `orchestrate/`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.meshes import replicated
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.packed_forward import build_logprobs, score_batch
from pipeline_rl_jax.models.value_head import without_value_head
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.critic import Critic, build_value_forward
from pipeline_rl_jax.trainer.estimation import Estimator, ValueRows
from pipeline_rl_jax.trainer.microbatches import place_batch
from pipeline_rl_jax.trainer.minibatches import split_updates
from pipeline_rl_jax.trainer.state import TrainState
from pipeline_rl_jax.trainer.step import Metrics, build_train_step

# What the last of several updates says, or the first; of everything else, the mean.
_OF_THE_LAST = ("trainer/learning_rate", "trainer/skipped_steps", "value/learning_rate")
_OF_THE_FIRST = ("policy/logprob_gap_at_lag_zero_nats",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step leaves behind; its metrics may still be in the making."""

    version: int  # weight version after the step
    metrics: Sequence[Metrics]  # of each update, scalars on the mesh that made it
    measures: Mapping[str, float]  # from before the updates
    epochs: int = 1  # passes over the batch that the updates were

    def fetch(self) -> dict[str, float]:
        """The metrics as numbers, waiting for the step to end. Fetch those of step k - 1 after
        step k is dispatched, so that the devices never wait for the host."""
        updates = [
            {name: float(value) for name, value in update.items()}
            for update in jax.device_get(list(self.metrics))
        ]
        return {**self.measures, **_summarise(updates, epochs=self.epochs)}


class Trainer:
    """Runs optimizer steps. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        config: ModelConfig,
        settings: Settings,
        *,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        state: TrainState,
        critic: Critic | None = None,
    ):
        """Takes `state` over: its buffers are given up at the first step.

        `critic` is needed when `algorithm.has_critic_model`; its state is kept beside this one.
        """
        self._settings = settings
        self._step = build_train_step(config, settings, optimizer=optimizer, mesh=mesh)
        self._mesh = mesh
        self._state = state
        self._critic = critic
        self._version = int(jax.device_get(state.step))
        self._estimator = Estimator(settings.algorithm, mesh=mesh)
        self._values = build_value_forward(config, settings, mesh=mesh)
        self._score = build_logprobs(config, settings, mesh=mesh)

    @property
    def state(self) -> TrainState:
        """The newest state. Its buffers live until the next `train`: read or copy them before."""
        critic = self._critic.state if self._critic else None
        return dataclasses.replace(self._state, critic=critic)

    @property
    def critic_params(self) -> dict:
        """Weights with the value head, of the critic's model or of the policy that carries it."""
        return self._critic.state.params if self._critic else self._state.params

    @property
    def version(self) -> int:
        """Weight version of `state`: optimizer steps taken, known without waiting for them."""
        return self._version

    @property
    def num_compilations(self) -> int:
        """Programs made so far: one for each number of padded rows seen."""
        return self._step._cache_size()

    def snapshot(self) -> dict[str, Any]:
        """What is not in `state` and has to come back with it, as JSON holds it."""
        return {"kl_control": self._estimator.snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Takes back what `snapshot` gave."""
        self._estimator.restore(snapshot.get("kl_control", {}))

    def train(self, batch: PackedBatch) -> StepOutput:
        """Dispatches one step: all updates of a batch. Returns while the devices work.

        Advantages that need a forward pass (GAE, online DPO) are waited for before the updates.
        """
        trainer = self._settings.trainer
        batch, measures = self._prepare(batch)
        updates = list(
            split_updates(batch, trainer, seed=self._settings.seed, version=self._version)
        )
        metrics = [
            self._update(update, advance=int(index == len(updates) - 1))
            for index, update in enumerate(updates)
        ]
        self._version += 1
        return StepOutput(
            version=self._version, metrics=metrics, measures=measures, epochs=trainer.epochs
        )

    def wait(self) -> None:
        """Returns once every dispatched step has ended."""
        jax.block_until_ready(self.state)

    def _prepare(self, batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
        algorithm = self._settings.algorithm
        if not algorithm.prepares_batches:
            return batch, {}
        if batch.values is not None:  # read while the completions were being written
            before = np.asarray(batch.values)
            return self._estimator.from_values(batch, ValueRows(before, np.zeros_like(before)))
        if self._critic is not None:
            return self._estimator.from_values(batch, self._critic.values(batch))
        if algorithm.loss == "dpo":
            return self._estimator.from_pairs(batch, self._logprobs(batch))
        return self._estimator.from_values(batch, self._values(self._state.params, batch))

    def _logprobs(self, batch: PackedBatch) -> np.ndarray:
        """Of the policy as it is, [R, T] on the host."""
        params = without_value_head(self._state.params)
        rows_at_once = self._settings.trainer.rows_per_micro_batch
        score = functools.partial(self._score, params)
        found = score_batch(score, batch, rows_at_once=rows_at_once, mesh=self._mesh)
        return np.asarray(found)

    def _update(self, batch: PackedBatch, *, advance: int) -> Metrics:
        placed = place_batch(
            batch,
            rows_per_micro_batch=self._settings.trainer.rows_per_micro_batch,
            mesh=self._mesh,
        )
        placed_advance = jax.device_put(np.int32(advance), replicated(self._mesh))
        self._state, metrics = self._step(self._state, placed, placed_advance)
        if self._critic is not None:
            metrics |= self._critic.train(batch, advance=advance)
        return metrics


def _summarise(updates: Sequence[Mapping[str, float]], *, epochs: int) -> dict[str, float]:
    """One number for each metric of the updates of a step."""

    def pick(name: str) -> float:
        values = [update[name] for update in updates]
        if name in _OF_THE_LAST:
            return values[-1]
        if name in _OF_THE_FIRST:
            return values[0]
        if name == "batch/loss_tokens":
            return sum(values) / epochs
        if name.endswith(("_max", "/max_steps")):
            return max(values)
        return sum(values) / len(values)

    return {name: pick(name) for name in updates[0]}
