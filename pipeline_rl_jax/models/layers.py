"""The arithmetic of one transformer layer, as pure functions of arrays.

Owns norms, rotary positions, projections and the gated MLP, shared by the trainer's forward pass
(`transformer.py`) and by the decode loop of `generation/`, so that both compute the same numbers.
A layer is a mapping from weight name to array; the names are those of `transformer.LayerStack`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pipeline_rl_jax.models.config import ModelConfig, RopeScaling

LayerWeights = Mapping[str, jax.Array]


def last_states(hidden: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The hidden state of each row's last token, at `lengths − 1`; of a length of 0 the first."""
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)[:, 0]


def rms_norm(
    x: Float[Array, "... D"], scale: Float[Array, " D"], *, epsilon: float
) -> Float[Array, "... D"]:
    """`x / sqrt(mean(x²) + ε) · scale`, the mean in float32, the result in x's dtype."""
    x32 = x.astype(jnp.float32)
    normalised = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return normalised.astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular frequencies `θ^(-2i/H)` of the rotary embedding, [H/2] float32.

    With `rope_scaling` (Llama 3): wavelengths longer than the original context are stretched by
    `factor`, short ones kept, those between interpolated.
    """
    exponents = np.arange(0, config.head_width, 2, dtype=np.float32) / config.head_width
    frequencies = (1.0 / (config.rope_theta**exponents)).astype(np.float32)
    if config.rope_scaling is None:
        return frequencies
    return _scale_frequencies(frequencies, config.rope_scaling)


def _scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    smooth = (turns - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: stretched in full, 1: kept
    scaled = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return scaled.astype(np.float32)


def rope_tables(
    positions: Int[Array, "*shape"], frequencies: Float[Array, " half"]
) -> tuple[Float[Array, "*shape half"], Float[Array, "*shape half"]]:
    """cos and sin of `position · frequency`, float32."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "... N H"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... N H"]:
    """Rotates the pairs (i, i + H/2) of every head: the half-split layout of Hugging Face."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]  # one angle for all heads
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def project_qkv(
    x: Float[Array, "... D"],
    layer: LayerWeights,
    config: ModelConfig,
    *,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[Float[Array, "... N H"], Float[Array, "... K H"], Float[Array, "... K H"]]:
    """Queries, keys and values of the normed input, rotated, in x's dtype."""
    query, key, value = (_project(x, layer, name) for name in ("query", "key", "value"))
    return finish_qkv(query, key, value, layer, config, rope=rope)


def finish_qkv(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: LayerWeights,
    config: ModelConfig,
    *,
    rope: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits projected `[..., heads * H]` into heads, then head norms (Qwen3) and rotation."""
    query, key, value = (
        y.reshape(*y.shape[:-1], -1, config.head_width) for y in (query, key, value)
    )
    if config.qk_norm:
        query = rms_norm(query, layer["query_norm"], epsilon=config.norm_epsilon)
        key = rms_norm(key, layer["key_norm"], epsilon=config.norm_epsilon)
    cos, sin = rope
    return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value


def _project(x: jax.Array, layer: LayerWeights, name: str) -> jax.Array:
    y = x @ layer[name].astype(x.dtype)
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(x.dtype)


def gated_mlp(x: Float[Array, "... D"], layer: LayerWeights) -> Float[Array, "... D"]:
    """`(silu(x·W_gate) ⊙ x·W_up) · W_down`."""
    gate = jax.nn.silu(x @ layer["gate"].astype(x.dtype))
    return (gate * (x @ layer["up"].astype(x.dtype))) @ layer["down"].astype(x.dtype)
