"""How entries of a KV cache lie in memory, for the decode loop and for streamed scoring.

Owns the storage dtype and the number of positions of one array; the caches are the caller's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_storage(dtype: str) -> jnp.dtype:
    """bfloat16 is stored as its bits: XLA's CPU scatter would widen the whole array."""
    return jnp.dtype(jnp.uint16) if dtype == "bfloat16" else jnp.dtype(dtype)


def store(x: jax.Array, dtype: str) -> jax.Array:
    """Casts to the cache dtype and to its storage."""
    return jax.lax.bitcast_convert_type(x.astype(dtype), cache_storage(dtype))


def load(x: jax.Array, dtype: str) -> jax.Array:
    """The inverse of `store`."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))


def resized(array: jax.Array, cache_tokens: int) -> jax.Array:
    """One cache array [R, K, S, H] with `cache_tokens` positions: padded with zeros or cut."""
    grow = max(0, cache_tokens - array.shape[2])
    return jnp.pad(array[:, :, :cache_tokens], ((0, 0), (0, 0), (0, grow), (0, 0)))
