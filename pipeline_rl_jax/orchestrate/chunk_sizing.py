"""The decode loop's chunk size over a run: fixed, or tried out and chosen.

Owns how `rollouts/chunk_size_control.py` meets the batcher: it is told of every optimizer step, and
what it asks for is used from the next chunk on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline_rl_jax.generation.batcher import ContinuousBatcher
from pipeline_rl_jax.rollouts.chunk_size_control import ChunkSizeController
from pipeline_rl_jax.settings import GenerationSettings


class ChunkSizing:
    """Sets `ContinuousBatcher.chunk_tokens`; without candidates it does nothing."""

    def __init__(self, batcher: ContinuousBatcher, settings: GenerationSettings) -> None:
        self._batcher = batcher
        self._controller = None
        if settings.chunk_candidates:
            self._controller = ChunkSizeController(
                candidates=settings.chunk_candidates,
                period_steps=settings.chunk_period_steps,
                trial_steps=settings.chunk_trial_steps,
            )
            batcher.chunk_tokens = self._controller.tokens

    def after_step(self, *, seconds: float, num_tokens: int) -> Mapping[str, float]:
        """The metrics of a step that took so long and decoded so many tokens."""
        if self._controller is None:
            return {}
        metrics = self._controller.metrics()  # before the step is taken in: what it was run with
        self._controller.observe(seconds=seconds, num_tokens=num_tokens)
        self._batcher.chunk_tokens = self._controller.tokens
        return metrics

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as JSON holds it."""
        return self._controller.snapshot() if self._controller else {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Goes on from a snapshot, if there is one and sizes are still chosen."""
        if self._controller and snapshot:
            self._controller.restore(snapshot)
            self._batcher.chunk_tokens = self._controller.tokens
