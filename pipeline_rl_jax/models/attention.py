"""Causal attention within segments of packed rows, for training and whole-sequence scoring.

Owns the blockwise computation: queries are taken `block_tokens` at a time and each block is
rematerialised in the backward pass, so that scores never exceed [B, N, block_tokens, T] at once and
keys after the block are not read. Decoding has its own attention over the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    *,
    block_tokens: int,
) -> Float[Array, "B T N H"]:
    """`softmax(q·kᵀ/√H)·v` over keys at or before the query, in its segment. Softmax in float32.

    Padding (segment 0) attends to padding, so that no row of the softmax is empty.
    """
    num_tokens = query.shape[1]
    blocks = []
    for start in range(0, num_tokens, block_tokens):
        stop = min(start + block_tokens, num_tokens)
        block = _attend if num_tokens <= block_tokens else jax.checkpoint(_attend)
        blocks.append(
            block(
                query[:, start:stop],
                key[:, :stop],
                value[:, :stop],
                segment_ids[:, start:stop],
                segment_ids[:, :stop],
            )
        )
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
) -> jax.Array:
    """The last block of queries against all keys up to its end."""
    batch, num_queries, num_heads, head_width = query.shape
    num_keys, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, num_queries, kv_heads, num_heads // kv_heads, head_width)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    key_index = jnp.arange(num_keys)
    causal = key_index[None, :] <= key_index[num_keys - num_queries :, None]  # [t, s]
    same = query_segments[:, :, None] == key_segments[:, None, :]  # [B, t, s]
    visible = (same & causal)[:, None, None]
    scores = jnp.where(visible, scores * head_width**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    attended = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    return attended.reshape(batch, num_queries, num_heads, head_width)
