"""The transformer as the decode loop wants it: weights unstacked, fused, and laid out `[out, in]`.

Owns the engine's weight layout and two forward passes over it: a prompt's (prefill) and one
token's per slot (decode). Arithmetic comes from `models/`. A stacked weight would be copied layer
by layer at every step, and a dot that contracts both minor axes is the fastest on CPU; on GPU the
layout makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.generation.decode_state import Cache
from pipeline_rl_jax.models.attention import segment_attention
from pipeline_rl_jax.models.cache_storage import load, store
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.layers import finish_qkv, rms_norm, rope_frequencies, rope_tables
from pipeline_rl_jax.models.partition import LOGICAL_AXES, mesh_axis

EngineParams = Mapping[str, Any]
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
FUSED = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}


def engine_params(
    params: Mapping[str, Any], config: ModelConfig, *, fused: bool, matrix_dtype: str
) -> EngineParams:
    """Trainer layout (stacked, `[in, out]`) → engine layout. Pure; runs under jit.

    Matrices take `matrix_dtype`, all else stays. With `fused`, projections of the same input are
    one matrix. Not for a mesh that splits `tensor`, where the parts of a fused matrix would have to
    be sorted back to their heads.
    """
    stacked = params["layers"]

    def layer(index: int) -> dict[str, jax.Array]:
        weights = {
            name: value[index].T.astype(matrix_dtype) if name in MATRICES else value[index]
            for name, value in stacked.items()
        }
        if not fused:
            return weights
        for whole, parts in FUSED.items():
            weights[whole] = jnp.concatenate([weights.pop(part) for part in parts])
        if config.qkv_bias:
            biases = [weights.pop(f"{part}_bias") for part in FUSED["qkv"]]
            weights["qkv_bias"] = jnp.concatenate(biases)
        return weights

    top = {
        name: value.astype(matrix_dtype) if name.endswith("embedding") else value
        for name, value in params.items()
        if name != "layers"
    }
    return {**top, "layers": tuple(layer(i) for i in range(config.num_layers))}


def engine_shardings(abstract: EngineParams, config: ModelConfig, mesh: Mesh):
    """A `NamedSharding` for every leaf of the engine layout on the generation mesh."""

    def sharding(path, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = path[-1].key
        axes = LOGICAL_AXES.get(name)
        if axes is None:  # fused: only where tensor is 1
            return NamedSharding(mesh, PartitionSpec())
        names = [mesh_axis(axis, config, mesh) for axis in axes]
        if path[0].key == "layers":
            names = names[1:]
        if name in MATRICES:
            names = names[::-1]
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def prefill_forward(
    params: EngineParams,
    token_ids: Int[Array, "P T"],
    true_lengths: Int[Array, " P"],
    *,
    config: ModelConfig,
    compute_dtype: str,
    cache_dtype: str,
) -> Cache:
    """Keys and values `[P, K, T, H]` of every prompt token. Entries past a length are junk."""
    num_tokens = token_ids.shape[1]
    index = jnp.arange(num_tokens)
    segment_ids = (index[None] < true_lengths[:, None]).astype(jnp.int32)
    rope = rope_tables(index[None], jnp.asarray(rope_frequencies(config)))
    hidden = _embed(params, token_ids, compute_dtype)
    keys, values = [], []
    layers = params["layers"]
    for number, weights in enumerate(layers):
        query, key, value = _attention_inputs(hidden, weights, config, rope)
        keys.append(store(key.swapaxes(1, 2), cache_dtype))
        values.append(store(value.swapaxes(1, 2), cache_dtype))
        if number + 1 < len(layers):  # nothing reads the last layer's output
            attended = segment_attention(query, key, value, segment_ids, block_tokens=512)
            hidden = _finish_layer(hidden, attended, weights, config)
    return Cache(keys=tuple(keys), values=tuple(values))


def decode_forward(
    params: EngineParams,
    cache: Cache,
    tokens: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    config: ModelConfig,
    compute_dtype: str,
    cache_dtype: str,
) -> tuple[Float[Array, "B V"], Cache]:
    """Feeds one token per slot: float32 logits of the next one, and the cache with its entry."""
    rope = rope_tables(lengths, jnp.asarray(rope_frequencies(config)))
    hidden = _embed(params, tokens, compute_dtype)
    visible = jnp.arange(cache.num_positions)[None] <= lengths[:, None]  # [B, S]
    keys, values = [], []
    for weights, key_cache, value_cache in zip(
        params["layers"], cache.keys, cache.values, strict=True
    ):
        query, key, value = _attention_inputs(hidden, weights, config, rope)
        key_cache = _write(key_cache, store(key, cache_dtype), lengths)
        value_cache = _write(value_cache, store(value, cache_dtype), lengths)
        attended = cache_attention(
            query, load(key_cache, cache_dtype), load(value_cache, cache_dtype), visible
        )
        hidden = _finish_layer(hidden, attended, weights, config)
        keys.append(key_cache)
        values.append(value_cache)
    hidden = rms_norm(hidden, params["final_norm"], epsilon=config.norm_epsilon)
    table = params["embedding" if config.tied_embeddings else "unembedding"]
    return product_float32(hidden, table), Cache(keys=tuple(keys), values=tuple(values))


def cache_attention(
    query: Float[Array, "B N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B N H"]:
    """One query per slot against its cache; scores and softmax in float32."""
    batch, num_heads, head_width = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, head_width).astype(keys.dtype)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores * head_width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    attended = jnp.einsum("bkgs,bksh->bkgh", weights, values, preferred_element_type=jnp.float32)
    return attended.reshape(batch, num_heads, head_width).astype(query.dtype)


def _write(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Puts `new` [B, K, H] at `positions` [B] of `cache` [B, K, S, H], slot by slot."""

    def put(rows: jax.Array, entry: jax.Array, position: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(rows, entry[:, None], (0, position, 0))

    return jax.vmap(put)(cache, new, positions)


def _attention_inputs(
    hidden: jax.Array, weights: Mapping[str, jax.Array], config: ModelConfig, rope
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = rms_norm(hidden, weights["attention_norm"], epsilon=config.norm_epsilon)
    if "qkv" in weights:
        query_width = config.num_query_heads * config.head_width
        borders = [query_width, query_width + config.num_kv_heads * config.head_width]
        query, key, value = jnp.split(_dense(x, weights, "qkv"), borders, axis=-1)
    else:
        query, key, value = (_dense(x, weights, name) for name in FUSED["qkv"])
    return finish_qkv(query, key, value, weights, config, rope=rope)


def _finish_layer(
    hidden: jax.Array, attended: jax.Array, weights: Mapping[str, jax.Array], config: ModelConfig
) -> jax.Array:
    flat = attended.reshape(*attended.shape[:-2], -1)
    hidden = hidden + _dense(flat, weights, "output")
    x = rms_norm(hidden, weights["mlp_norm"], epsilon=config.norm_epsilon)
    if "gate_up" in weights:
        gate, up = jnp.split(_dense(x, weights, "gate_up"), 2, axis=-1)
    else:
        gate, up = (_dense(x, weights, name) for name in FUSED["gate_up"])
    return hidden + _dense(jax.nn.silu(gate) * up, weights, "down")


def _dense(x: jax.Array, weights: Mapping[str, jax.Array], name: str) -> jax.Array:
    """`x·Wᵀ + b`, accumulated in float32, in x's dtype."""
    y = product_float32(x, weights[name])
    bias = weights.get(f"{name}_bias")
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


def product_float32(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """`x·Wᵀ` in float32. For a single token per slot it is computed as `(W·xᵀ)ᵀ`.

    With few rows XLA's CPU product is up to 1.5 times as fast with the weight on the left; the
    barrier keeps the compiler from swapping the sides back. Elsewhere nothing is lost by it.
    """
    if x.ndim > 2:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    x = x.astype(weight.dtype)
    y = jnp.einsum("oi,bi->ob", weight, x, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T


def _embed(params: EngineParams, token_ids: jax.Array, dtype: str) -> jax.Array:
    return params["embedding"].at[token_ids].get(mode="clip").astype(dtype)
