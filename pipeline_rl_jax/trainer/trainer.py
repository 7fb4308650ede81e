"""The trainer as the schedules see it: a state that outlives calls and a step that does not block.

Owns the current `TrainState` and the order of steps. Who calls it, when weights are published and
when a checkpoint is taken is decided in `orchestrate/`.
"""

from __future__ import annotations

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.records import PackedBatch
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.trainer.microbatches import place_batch
from pipeline_rl_jax.trainer.state import TrainState
from pipeline_rl_jax.trainer.step import Metrics, build_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step leaves behind; its metrics may still be in the making."""

    version: int  # weight version after the step
    metrics: Metrics  # scalars on the trainer mesh

    def fetch(self) -> dict[str, float]:
        """The metrics as numbers, waiting for the step to end. Fetch those of step k - 1 after
        step k is dispatched, so that the devices never wait for the host."""
        return {name: float(value) for name, value in jax.device_get(self.metrics).items()}


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
    ):
        """Takes `state` over: its buffers are given up at the first step."""
        self._step = build_train_step(config, settings, optimizer=optimizer, mesh=mesh)
        self._rows_per_micro_batch = settings.trainer.rows_per_micro_batch
        self._mesh = mesh
        self._state = state
        self._version = int(jax.device_get(state.step))

    @property
    def state(self) -> TrainState:
        """The newest state. Its buffers live until the next `train`: read or copy them before."""
        return self._state

    @property
    def version(self) -> int:
        """Weight version of `state`: optimizer steps taken, known without waiting for them."""
        return self._version

    @property
    def num_compilations(self) -> int:
        """Programs made so far: one for each number of padded rows seen."""
        return self._step._cache_size()

    def train(self, batch: PackedBatch) -> StepOutput:
        """Dispatches one step and returns while the devices work."""
        placed = place_batch(
            batch, rows_per_micro_batch=self._rows_per_micro_batch, mesh=self._mesh
        )
        self._state, metrics = self._step(self._state, placed)
        self._version += 1
        return StepOutput(version=self._version, metrics=metrics)

    def wait(self) -> None:
        """Returns once every dispatched step has ended."""
        jax.block_until_ready(self._state)
