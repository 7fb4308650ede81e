"""Model FLOPs utilisation of both meshes, against a peak measured at the start of the run.

Owns which tokens count for which side. The counting is in `throughput/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from pipeline_rl_jax.meshes import Meshes
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.records import Completion, Group
from pipeline_rl_jax.settings import Settings
from pipeline_rl_jax.throughput.flops import ModelShape, causal_attended
from pipeline_rl_jax.throughput.peak import measure_peak_flops


class Utilisation:
    """Shares of the measured peak while at work; waiting is in the idle shares."""

    def __init__(self, config: ModelConfig, *, trainer_peak: float, generation_peak: float) -> None:
        """Peaks in FLOP/s of whole meshes."""
        self._shape = model_shape(config)
        self._trainer_peak = trainer_peak
        self._generation_peak = generation_peak

    def trainer(self, groups: Sequence[Group], busy_seconds: float) -> float:
        """Of one optimizer step on the rollouts of `groups`, its forward and backward pass."""
        lengths = [_length(r.completion) for group in groups for r in group.rollouts]
        attended = sum(causal_attended(length) for length in lengths)
        flops = self._shape.training_flops(sum(lengths), attended)
        return flops / max(busy_seconds, 1e-9) / self._trainer_peak

    def generation(self, num_tokens: int, busy_seconds: float) -> float:
        """Of prefilling and decoding `num_tokens`; attention, a small part, is left out."""
        flops = self._shape.forward_flops(num_tokens, 0.0)
        return flops / max(busy_seconds, 1e-9) / self._generation_peak


def measure_utilisation(config: ModelConfig, settings: Settings, meshes: Meshes) -> Utilisation:
    """Measures the peaks; takes a second or so on a CPU. Nothing else should run meanwhile."""
    return Utilisation(
        config,
        trainer_peak=_mesh_peak(meshes.trainer, settings.model.compute_dtype),
        generation_peak=_mesh_peak(meshes.generation, settings.generation.compute_dtype),
    )


def model_shape(config: ModelConfig) -> ModelShape:
    """Of a transformer: every matrix of its layers, and the unembedding."""
    looked_up = 0 if config.tied_embeddings else config.vocabulary_size * config.width
    return ModelShape(
        matrix_parameters=config.num_parameters - looked_up,
        attention_width=config.num_layers * config.num_query_heads * config.head_width,
    )


def _mesh_peak(mesh: Mesh, dtype: str) -> float:
    device = mesh.devices.flat[0]
    count = 1 if device.platform == "cpu" else mesh.devices.size
    return count * measure_peak_flops(device, dtype)


def _length(completion: Completion) -> int:
    return int(completion.prompt.token_ids.size) + completion.num_tokens
