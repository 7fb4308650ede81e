"""A forward pass in pieces: rows of text are extended by chunks against a cache of their own.

Owns the cache of the rows and the pass; what is read off its hidden states is
`chunk_readouts.py`, which text is in which row the caller's to know.

    keys[l], values[l]  [R, K, S, H]    row 0 |prompt|chunk|chunk|  free          |
                                        row 1 |prompt|chunk| free                 |
                                                     ^ start of the next chunk

A chunk goes where its `starts` say, and its tokens see every position up to their own. What lies
beyond, left by an earlier owner of the row, is never seen: it is overwritten first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pipeline_rl_jax.models.cache_storage import cache_storage, load, resized, store
from pipeline_rl_jax.models.config import ModelConfig
from pipeline_rl_jax.models.layers import (
    gated_mlp,
    last_states,
    project_qkv,
    rms_norm,
    rope_frequencies,
    rope_tables,
)
from pipeline_rl_jax.models.partition import mesh_axis


class RowChunks(NamedTuple):
    """The next tokens of n rows; what lies beyond a length is padding, whatever its id."""

    rows: Int[Array, " n"]  # row numbers, each once; the number of rows means none
    token_ids: Int[Array, "n C"]
    lengths: Int[Array, " n"]  # real tokens, 0 .. C
    starts: Int[Array, " n"]  # tokens of the row that came before
    prompt_lengths: Int[Array, " n"]  # quantities per token are wanted from this position on


class ChunkStates(NamedTuple):
    """Final hidden states of the tokens of some chunks, after the last norm."""

    hidden: Float[Array, "n C D"]
    before: Float[Array, "n D"]  # of the token before the chunk; 0 where there is none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCache:
    """All that is kept of the rows between chunks, L arrays each for keys and values."""

    keys: tuple[jax.Array, ...]  # [R, K, S, H], in the storage dtype
    values: tuple[jax.Array, ...]  # [R, K, S, H]
    last_hidden: jax.Array  # [R, D] final hidden state of each row's last token

    @property
    def num_rows(self) -> int:
        return self.last_hidden.shape[0]

    @property
    def num_positions(self) -> int:
        return self.keys[0].shape[2]


def empty_rows(
    config: ModelConfig, *, rows: int, cache_tokens: int, cache_dtype: str, compute_dtype: str
) -> RowCache:
    """Rows with nothing in them."""
    shape = (rows, config.num_kv_heads, cache_tokens, config.head_width)

    def arrays() -> tuple[jax.Array, ...]:
        storage = cache_storage(cache_dtype)
        return tuple(jnp.zeros(shape, storage) for _ in range(config.num_layers))

    last_hidden = jnp.zeros((rows, config.width), compute_dtype)
    return RowCache(keys=arrays(), values=arrays(), last_hidden=last_hidden)


def resized_rows(cache: RowCache, cache_tokens: int) -> RowCache:
    """The same rows with `cache_tokens` positions: padded with zeros or cut."""
    keys, values = jax.tree.map(lambda x: resized(x, cache_tokens), (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def cache_shardings(config: ModelConfig, mesh: Mesh) -> RowCache:
    """A sharding at every leaf: KV heads over `tensor` where they divide, all else replicated."""
    heads = NamedSharding(mesh, PartitionSpec(None, mesh_axis("kv_heads", config, mesh)))
    layers = (heads,) * config.num_layers
    last_hidden: Any = NamedSharding(mesh, PartitionSpec())
    return RowCache(keys=layers, values=layers, last_hidden=last_hidden)  # type: ignore[arg-type]


def unstack_layers(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The tree with a tuple of layers in place of stacked ones. Pure; once per set of weights.

    A stacked weight would be copied out of its stack at every chunk.
    """
    layers = params["layers"]
    unstacked = tuple(
        {name: value[layer] for name, value in layers.items()} for layer in range(config.num_layers)
    )
    return {**params, "layers": unstacked}


def extend_rows(
    params: Mapping[str, Any],
    cache: RowCache,
    chunks: RowChunks,
    *,
    config: ModelConfig,
    cache_dtype: str,
    block_tokens: int = 256,
) -> tuple[ChunkStates, RowCache]:
    """Hidden states of the chunks' tokens, and the cache that holds them too.

    Equal to those of the whole sequence at once, up to rounding. `params` as of `unstack_layers`.
    The caller sees to `starts + lengths <= num_positions`: what lies beyond would not be kept.
    `block_tokens` queries of a row have scores [n, N, block, S] at once.
    """
    index = jnp.arange(chunks.token_ids.shape[1])
    positions = chunks.starts[:, None] + index  # [n, C]
    is_token = index < chunks.lengths[:, None]
    slots = jnp.where(is_token, positions, cache.num_positions)  # out of bounds: not written
    rope = rope_tables(positions, jnp.asarray(rope_frequencies(config)))
    hidden = params["embedding"].at[chunks.token_ids].get(mode="clip")
    hidden = hidden.astype(cache.last_hidden.dtype)
    keys, values = [], []
    for weights, key_cache, value_cache in zip(
        params["layers"], cache.keys, cache.values, strict=True
    ):
        x = rms_norm(hidden, weights["attention_norm"], epsilon=config.norm_epsilon)
        query, key, value = project_qkv(x, weights, config, rope=rope)
        keys.append(_write(key_cache, store(key, cache_dtype), chunks.rows, slots))
        values.append(_write(value_cache, store(value, cache_dtype), chunks.rows, slots))
        own_keys, own_values = (
            load(layer[-1].at[chunks.rows].get(mode="clip"), cache_dtype)
            for layer in (keys, values)
        )
        attended = _attention(
            query, own_keys, own_values, positions=positions, block_tokens=block_tokens
        )
        flat = attended.reshape(*attended.shape[:2], -1)
        hidden = hidden + flat @ weights["output"].astype(flat.dtype)
        x = rms_norm(hidden, weights["mlp_norm"], epsilon=config.norm_epsilon)
        hidden = hidden + gated_mlp(x, weights)
    hidden = rms_norm(hidden, params["final_norm"], epsilon=config.norm_epsilon)
    states = ChunkStates(hidden, _state_before(cache, chunks))
    last_hidden = _with_last(cache.last_hidden, hidden, chunks)
    return states, RowCache(keys=tuple(keys), values=tuple(values), last_hidden=last_hidden)


def _write(
    cache: Float[Array, "R K S H"],
    new: Float[Array, "n C K H"],
    rows: Int[Array, " n"],
    slots: Int[Array, "n C"],
) -> Float[Array, "R K S H"]:
    return cache.at[rows[:, None], :, slots].set(new, mode="drop")


def _attention(
    query: Float[Array, "n C N H"],
    keys: Float[Array, "n K S H"],
    values: Float[Array, "n K S H"],
    *,
    positions: Int[Array, "n C"],
    block_tokens: int,
) -> Float[Array, "n C N H"]:
    """`softmax(q·kᵀ/√H)·v` over positions up to the query's own; softmax in float32."""
    index = jnp.arange(keys.shape[2])
    blocks = []
    for start in range(0, query.shape[1], block_tokens):
        part = slice(start, start + block_tokens)
        visible = index <= positions[:, part, None]  # [n, c, S], never an empty row
        blocks.append(_attend(query[:, part], keys, values, visible))
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _attend(
    query: Float[Array, "n c N H"],
    keys: Float[Array, "n K S H"],
    values: Float[Array, "n K S H"],
    visible: Bool[Array, "n c S"],
) -> Float[Array, "n c N H"]:
    num_rows, num_queries, num_heads, head_width = query.shape
    grouped = query.reshape(num_rows, num_queries, keys.shape[1], -1, head_width)
    scores = jnp.einsum(
        "nckgh,nksh->nkgcs", grouped.astype(keys.dtype), keys, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None, None], scores * head_width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    # In the order the product comes in: XLA's CPU cannot write bfloat16 products in another one.
    attended = jnp.einsum("nkgcs,nksh->nkgch", weights, values, preferred_element_type=jnp.float32)
    attended = attended.transpose(0, 3, 1, 2, 4)
    return attended.reshape(num_rows, num_queries, num_heads, head_width).astype(query.dtype)


def _state_before(cache: RowCache, chunks: RowChunks) -> Float[Array, "n D"]:
    before = cache.last_hidden.at[chunks.rows].get(mode="clip")
    return jnp.where(chunks.starts[:, None] > 0, before, 0)


def _with_last(
    last_hidden: Float[Array, "R D"], hidden: Float[Array, "n C D"], chunks: RowChunks
) -> Float[Array, "R D"]:
    rows = jnp.where(chunks.lengths > 0, chunks.rows, last_hidden.shape[0])
    return last_hidden.at[rows].set(last_states(hidden, chunks.lengths), mode="drop")
