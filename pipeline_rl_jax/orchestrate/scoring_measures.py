"""What the reading models did between two looks: tokens, seconds, and the idle share of their mesh.

Owns the metrics `scoring/…`. Bare names are the reward model's; others have their reader's name in
them. They are enough to cost streamed scoring elsewhere: seconds per token, and how many were left
after a completion's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.orchestrate.frozen_models import FrozenModels
from pipeline_rl_jax.rewards.stream_readers import REWARD_MODEL
from pipeline_rl_jax.rewards.streaming import StreamCounts

_SUMMED = ("streamed_tokens", "final_tokens", "busy_seconds")


class ScoringMeasures:
    """Differences of counts. `idle_share` only where the reward model has devices of its own."""

    def __init__(
        self,
        models: FrozenModels,
        meshes: Meshes,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._has_own_mesh = meshes.scoring is not meshes.trainer
        self._clock = clock
        self._last_seconds = clock()
        self._last: dict[str, StreamCounts] = {}

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; nothing without a model that reads."""
        now, counts = self._clock(), self._counts()
        elapsed, self._last_seconds = now - self._last_seconds, now
        last, self._last = self._last, counts
        metrics: dict[str, float] = {}
        for name, current in counts.items():
            before = last.get(name, StreamCounts())
            grown = {key: getattr(current, key) - getattr(before, key) for key in _SUMMED}
            metrics |= _named(name, grown)
            if name == REWARD_MODEL and self._has_own_mesh and elapsed > 0:
                idle = 1.0 - grown["busy_seconds"] / elapsed
                metrics["scoring/idle_share"] = min(1.0, max(0.0, idle))
        return metrics

    def _counts(self) -> dict[str, StreamCounts]:
        counts = dict(self._models.readers.counts)
        if self._models.whole_texts is not None:
            counts[REWARD_MODEL] = self._models.whole_texts.counts
        return counts


def _named(name: str, grown: dict[str, float]) -> dict[str, float]:
    prefix = "scoring/" if name == REWARD_MODEL else f"scoring/{name}_"
    metrics = {f"{prefix}{key}": float(value) for key, value in grown.items()}
    tokens = grown["streamed_tokens"] + grown["final_tokens"]
    if tokens:
        metrics[f"{prefix}seconds_per_token"] = grown["busy_seconds"] / tokens
    return metrics
